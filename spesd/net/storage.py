"""What this node keeps of the DHT for others: bounded, whoever asks.

hivemind keeps all that its validators let in, and cannot send a key whose values exceed its message
limit (4 MB, measured: reads of that key then fail everywhere). Bounds belong here and not in the
validator, which also judges what is *read* and would have to refuse a whole key for one entry.
"""

import time
from typing import Any

from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

MAX_KEY_BYTES = 2 * 2**20  # of values under one key
MAX_KEYS = 512
MAX_LIFE_S = 2 * 3600.0  # the longest honest life is an hour; the rest is for clocks that differ


class BoundedStorage(DHTLocalStorage):
    """hivemind's storage, which refuses what would make it or a key too large."""

    def store(
        self, key: Any, value: Any, expiration_time: float, subkey: Any = None
    ) -> bool:  # hivemind's own signature
        """Keep a value, or refuse it."""
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        known = self.get(key)
        size = _size(value) if isinstance(value, DictionaryDHTValue) else len(value)
        if size > MAX_KEY_BYTES or not self._may_stay(key, expiration_time):
            return False
        if known is not None and known.value is not value and _newer(known, expiration_time):
            return False
        return bool(super().store(key, value, expiration_time))

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Keep a value under a subkey, or refuse it."""
        if len(value) > MAX_KEY_BYTES or not self._may_stay(key, expiration_time):
            return False
        known = self.get(key)
        if known is not None and isinstance(known.value, DictionaryDHTValue):
            # hivemind shortens the life of what it has when it refuses something older
            before = known.value.get(subkey)
            if before is not None and _newer(before, expiration_time):
                return False
            held = _size(known.value) - (len(before.value) if before is not None else 0)
            if held + len(value) > MAX_KEY_BYTES:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def _may_stay(self, key: Any, expiration_time: float) -> bool:
        now = time.time()  # as hivemind's own expiry
        return expiration_time <= now + MAX_LIFE_S and (key in self or len(self) < MAX_KEYS)


def _newer(known: Any, expiration_time: float) -> bool:
    return bool(known.expiration_time >= expiration_time)


def _size(values: DictionaryDHTValue) -> int:
    return sum(len(entry.value) for _, entry in values.items())
