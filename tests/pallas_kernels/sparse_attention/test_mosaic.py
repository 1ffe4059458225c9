"""The GPU kernels in the interpreter, with race detection, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.sparse_attention.packed_cases import PackedCase
from widemesh.pallas_kernels.gpu import TARGETS, interpreted
from widemesh.pallas_kernels.sparse_attention import attend_packed, mosaic, tiles
from widemesh.pallas_kernels.sparse_attention.tiles import Tiles, choose_tiles

KERNELS = ["H200", "B200"]
RELEASED = functools.partial(PackedCase, heads=64, dim=512, page_size=8)

# Every key tile is used again in "many blocks": one block of window and 3 of entries, in two slots.
CASES = {
    "many blocks, a ring that wraps, a late first": (
        RELEASED(window=16, ring=24, rows=1, k=150, start=(3, 301), first=(0, 290), selected=0.9),
        1,
    ),
    "rows of a chunk, another source, more splits than some rows have blocks": (
        RELEASED(window=70, ring=None, rows=2, k=8, start=(150,), first=(0,), ratios=(2, 1), source=1, page_size=16),
        4,
    ),
}


@functools.cache
def program(implementation, splits, **static):
    """The op, compiled once for all tests of the same shapes and target; a kernel's splits are fixed at its trace."""
    return jax.jit(functools.partial(attend_packed, **static, implementation=implementation))


def kernel(target, monkeypatch, splits, static):
    """The op as a kernel on `target`, every row split into so many parts."""
    monkeypatch.setattr(mosaic, "choose_tiles", lambda *_, **__: Tiles(splits=splits))

    def run(*args):
        with interpreted(target):
            return np.asarray(program("mosaic", splits, **static)(*args))

    return run


def reference(*args, **static):
    return program("reference", None, **static)(*args)


def check(found, wanted):
    """float16 weights and queries: 11 bits."""
    wanted = np.asarray(wanted)
    assert np.linalg.norm(found - wanted) < 5e-4 * np.linalg.norm(wanted)
    np.testing.assert_allclose(found, wanted, atol=3e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_reference(name, target, monkeypatch):
    case, splits = CASES[name]
    args = case.build()[0]
    found = kernel(target, monkeypatch, splits, case.static)(*args)
    check(found, reference(*args, **case.static))


@pytest.mark.parametrize("target", KERNELS)
def test_nothing_seen_and_nothing_selected(target, monkeypatch):
    """Request 0 sees no key at all, request 1 its window alone; every selected place is empty."""
    case, splits = CASES["many blocks, a ring that wraps, a late first"]
    args = list(case.build()[0])
    args[4] = args[4].at[0].set(args[3][0] + 1)
    args[7] = jnp.full_like(args[7], -1)
    found = kernel(target, monkeypatch, splits, case.static)(*args)
    assert not found[0].any()
    check(found, reference(*args, **case.static))


def test_layers_without_a_source(monkeypatch):
    case = RELEASED(window=16, ring=16, rows=1, k=8, start=(21,), first=(0,), selected=0.0)
    args = list(case.build()[0])
    args[7] = args[7][..., :0]
    args[0] = args[0].astype(jnp.bfloat16)
    static = {**case.static, "source": None}
    found = kernel("H200", monkeypatch, 1, static)(*args)
    assert found.dtype == jnp.bfloat16
    wanted = reference(*args, **static)
    np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_no_rows(shape, monkeypatch):
    case = RELEASED(window=16, ring=24, rows=1, k=8, start=(0, 21), first=(0, 0))
    requests, rows = shape
    args = [x[:requests] if i in (0, 1, 2, 3, 4, 6, 7) else x for i, x in enumerate(case.build()[0])]
    args[0], args[7] = args[0][:, :rows], args[7][:, :rows]
    assert kernel("H200", monkeypatch, 1, case.static)(*args).shape == (requests, rows, 64, 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 40}, "N=40 heads, the kernel takes multiples of 64; pad q and sink to 64"),
        ({"dim": 256}, "head dim H=256, the kernel takes 512 alone"),
        ({"record": "f32"}, "window_layout.code='f32' must be 'fp8' for the kernel"),
        ({"page_size": 4}, "page_bytes=.* must be multiples of 16 for the kernel; use a page_size"),
        ({"k": 800}, "window=16 and k=800 take 14 blocks of 64 keys, and the kernel holds 12; select at most 704"),
    ],
)
def test_shapes_of_no_kernel(change, message):
    case = PackedCase(**{"heads": 64, "dim": 512, "window": 16, "rows": 1, "start": (4,), "first": (0,), "ring": 16,
                         "selected": 0.0, "page_size": 8, **change})  # fmt: skip
    args = case.build()[0]
    with interpreted("H200"), pytest.raises(ValueError, match=message):
        attend_packed(*args, **case.static, implementation="mosaic")


def test_rows_are_split_until_every_core_has_one():
    h200 = TARGETS["H200"]
    splits = {rows: choose_tiles(h200, rows=rows, blocks=10).splits for rows in (1, 8, 64, 66, 67, 384, 2048)}
    assert splits == {1: 10, 8: 10, 64: 2, 66: 2, 67: 1, 384: 1, 2048: 1}
    with pytest.raises(ValueError, match="splits=0 must be at least 1"):
        Tiles(splits=0)


def test_tuned_entries_override_the_heuristic(monkeypatch):
    monkeypatch.setattr(tiles, "_tuned", lambda: {"H200": {"rows=64 blocks=10": {"splits": 5}}})
    assert choose_tiles(TARGETS["H200"], rows=64, blocks=10) == Tiles(splits=5)
    assert choose_tiles(TARGETS["H100"], rows=64, blocks=10) == Tiles(splits=2)
