"""How the process's C allocator treats memory, for programs that run JAX on a CPU."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3), and of madvise(2).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MADV_HUGEPAGE = 14

_MAPPED_FROM_BYTES = 1 << 30
_HUGE_PAGE = 1 << 21
_BLOCK_BYTES, _BLOCKS = 1 << 29, 4  # made ready for large pages


def keep_freed_memory() -> bool:
    """Let freed blocks of up to 1 GiB be used again instead of going back to the kernel. False where that is unknown.

    XLA:CPU allocates the temporaries of a program anew for every call. Given back in between, their pages are zeroed
    and mapped again each time: 33,000 page faults, 5 % of the time, for a prefill with 138 MB of temporaries. One arena
    for all threads, because only the main one grows without a mapping per block. The first 2 GiB of it may have large
    pages, which is worth 2 % where the kernel gives them only on request. To be called before threads start.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    # A trim threshold of -1: nothing goes back.
    kept = all([mallopt(_M_ARENA_MAX, 1), mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES),
                mallopt(_M_TRIM_THRESHOLD, -1)])  # fmt: skip
    if kept:
        _ask_for_huge_pages(libc)
    return kept


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Grow the arena and say so of what it has grown by. Nothing is written: it takes addresses, no memory."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [block for block in (libc.malloc(_BLOCK_BYTES) for _ in range(_BLOCKS)) if block]
    for block in blocks:
        begin = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(begin, (block + _BLOCK_BYTES - begin) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    for block in blocks:
        libc.free(block)
