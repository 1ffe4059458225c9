"""The arithmetic of the cases that are compiled ahead of time; compiling them is tested for all ops together."""

from widemesh.pallas_kernels.sparse_attention.aot import KERNELS, floor_bytes, floor_flops, moved_bytes
from widemesh.pallas_kernels.sparse_attention.shapes import DECODE, PREFILL, RELEASED


def test_floor_of_the_released_sizes():
    """128 window rows of 528 bytes, 512 entries of 288, 64 x 512 values in and out, 512 indices."""
    assert floor_bytes(DECODE) == 64 * (67_584 + 147_456 + 2 * 65_536 + 2_048)
    assert floor_flops(DECODE) == 64 * 4 * 64 * 512 * 640
    assert len(KERNELS) == len(RELEASED)


def test_only_splits_move_much_more_than_the_floor():
    """Prefill: q once more as float16, the lists, and 16 bytes per window row."""
    per_row = 2 * 65_536 + 2 * 2_560 + 2_048
    assert moved_bytes(PREFILL) - floor_bytes(PREFILL) == 2048 * per_row
    parts = 2 * 4 * 2 * (64 * 512 + 2 * 64)
    assert moved_bytes(DECODE) - floor_bytes(DECODE) == 64 * (per_row + parts)
