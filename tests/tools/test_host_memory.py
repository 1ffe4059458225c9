"""Freed memory is used again without the kernel's help."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Prints whether it was kept, and the page faults of writing 64 MiB: the first time, and after they were freed.
SCRIPT = """
import ctypes, json, resource
from widemesh.tools.host_memory import keep_freed_memory

kept = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def write():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([kept, write(), write()]))
"""


def test_pages_are_mapped_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    kept, first, again = json.loads(done.stdout)
    if not kept:
        pytest.skip("another C library than glibc")
    assert first >= 32  # 2 MiB pages where the kernel has some, else 512 times as many
    assert again < 8
