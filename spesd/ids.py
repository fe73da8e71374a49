"""Names of the things that travel: parts and bundles, in their one text form.

A *part* is the unit of exchange: the shared parameters, or one expert (the FFN with one index in
every layer). A *digest* names a bundle's bytes.
"""

import re

SHARED = "shared"
_EXPERT = re.compile(r"expert-(0|[1-9][0-9]{0,4})\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def expert_part(index: int) -> str:
    """Name the part that holds expert `index`."""
    return f"expert-{index}"


def part_expert(part: str) -> int | None:
    """Return the expert index that `part` names; None for the shared parameters.

    Raises ValueError for any other text.
    """
    if part == SHARED:
        return None
    match = _EXPERT.match(part)
    if match is None:
        raise ValueError(f"{part!r} names no part")
    return int(match.group(1))


def all_parts(n_experts: int) -> list[str]:
    """Return every part of a model with `n_experts` experts, shared parameters first."""
    return [SHARED, *(expert_part(e) for e in range(n_experts))]


def is_digest(text: str) -> bool:
    """Tell whether `text` has the form of a bundle's name (64 lower-case hex digits)."""
    return _DIGEST.match(text) is not None
