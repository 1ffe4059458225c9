"""How the process's C allocator treats freed memory, for programs that run JAX on a CPU."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let freed blocks of up to 1 GiB be used again instead of going back to the kernel. False where that is unknown.

    XLA:CPU allocates the temporaries of a program anew for every call. Given back in between, their pages are zeroed
    and mapped again each time: 33,000 page faults, 5 % of the time, for a prefill with 138 MB of temporaries. One arena
    for all threads, because only the main one grows without a mapping per block. To be called before threads start.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return all([mallopt(_M_ARENA_MAX, 1), mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES),
                mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)])  # fmt: skip
