"""How the C library hands freed memory back.

glibc keeps what is freed for the next request, and with the large, short-lived blocks of a training
step that left a third more resident than was in use. Large blocks are mapped and unmapped instead.
"""

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
THRESHOLD = 2**20


def return_memory() -> None:
    """Give blocks from THRESHOLD on back when they are freed; does nothing but on glibc."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, THRESHOLD)
