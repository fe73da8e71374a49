"""How long to wait for the others: learned from how long they took.

The deadline is median + SPREAD * MAD of recent waits, within a floor and the run's ceiling. Only
arrivals are learned from, so a peer that left stops stretching rounds as soon as its late
arrivals have left the window.
"""

import statistics
from collections import deque

WINDOW = 16
SPREAD = 4.0
FLOOR_S = 3.0


class AdaptiveDeadline:
    """A deadline for one kind of wait, in seconds."""

    def __init__(self, ceiling_s: float, floor_s: float = FLOOR_S) -> None:
        self._ceiling_s = ceiling_s
        self._floor_s = min(floor_s, ceiling_s)
        self._waits: deque[float] = deque(maxlen=WINDOW)

    def arrived(self, seconds: float) -> None:
        """Learn how long something awaited took to come."""
        self._waits.append(max(seconds, 0.0))

    def seconds(self) -> float:
        """Return how long to wait now; the ceiling as long as nothing was learned."""
        if len(self._waits) < 3:
            return self._ceiling_s
        median = statistics.median(self._waits)
        mad = statistics.median(abs(w - median) for w in self._waits)
        # twice the median as well: equal waits have no spread, and the next is not equal
        learned = max(median + SPREAD * mad, 2 * median, self._floor_s)
        return min(learned, self._ceiling_s)
