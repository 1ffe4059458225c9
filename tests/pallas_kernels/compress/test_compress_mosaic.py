"""The compression kernel in the interpreter, with race detection, against its reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.compress.cases import EPS, Case, make
from tests.pallas_kernels.thread_rows_options import QUICK
from widemesh.pallas_kernels.compress import compress_and_store
from widemesh.pallas_kernels.gpu import interpreted

GATED = Case(ratio=2, start=(0, 0, 0), length=(0, 0, 0), rows=5, head=256, index=128, pairs=32)
SINGLE = Case(ratio=1, start=(0, 0, 0), length=(0, 0, 0), rows=3, head=512, index=128, pairs=16, bf16=True)


@functools.cache
def compiled(case):
    """The kernel and the reference of a case's shapes; where requests start and end are arguments."""
    source, _ = case.source
    call = functools.partial(compress_and_store, source=source, eps=EPS, bf16_rounding=case.bf16)
    data = jax.tree.map(jnp.asarray, make(case))
    with interpreted():
        kernel = jax.jit(lambda d: call(**d, implementation="mosaic"), compiler_options=QUICK).lower(data).compile()
    return kernel, jax.jit(lambda d: call(**d, implementation="reference")), data


def check(case, **changes):
    kernel, reference, data = compiled(case)
    data = data | {name: jnp.asarray(value, jnp.int32) for name, value in changes.items()}
    (pages, ring), (wanted_pages, wanted_ring) = kernel(data), reference(data)
    np.testing.assert_array_equal(ring, wanted_ring)
    changed, wanted_changed = (np.asarray(x != data["pages"]) for x in (pages, wanted_pages))
    assert (np.asarray(pages) == np.asarray(wanted_pages))[~wanted_changed].mean() > 0.9999
    # A code may differ where the two round differently just beside the middle between two codes.
    assert (np.asarray(pages) != np.asarray(wanted_pages)).sum() <= 0.002 * wanted_changed.sum()
    return changed


@pytest.mark.parametrize("changes", [
    # Groups across the edge of a step; of the second request tokens 0 .. 3 are cached; a ring that wraps around.
    {"start": (3, 1, 9), "length": (5, 5, 2), "write_from": (0, 4, 0)},
    # Whole groups and an incomplete one; one token that completes its group; an idle slot.
    {"start": (0, 5, 9), "length": (3, 1, 0)},
])  # fmt: skip
def test_ratio_two(changes):
    assert check(GATED, **changes).any()


def test_nothing_to_store():
    """No complete group; entries past the six pages of four tokens; entries that are cached already."""
    assert not check(GATED, start=(4, 24, 2), length=(1, 5, 5), write_from=(0, 0, 8)).any()


def test_ratio_one_rounds_to_bfloat16():
    assert check(SINGLE, start=(0, 20, 7), length=(3, 0, 2), write_from=(0, 0, 8)).any()


def test_no_rows():
    case = Case(ratio=2, start=(0,), length=(0,), rows=0, head=256, index=128, pairs=32)
    data = jax.tree.map(jnp.asarray, make(case))
    with interpreted():
        pages, ring = compress_and_store(**data, source=case.source[0], eps=EPS, implementation="mosaic")
    assert np.array_equal(pages, data["pages"]) and np.array_equal(ring, data["ring"])


@pytest.mark.parametrize(("change", "message"), [
    ({"head": 192}, "head_dim=192 .* nearest is 256"),
    ({"index": 64}, "index_dim=64 must be 128"),
    ({"pairs": 8}, "pairs=8"),
    ({"record": "f32"}, "use packed records"),
])  # fmt: skip
def test_sizes_that_the_kernel_cannot_take(change, message):
    case = Case(**{"ratio": 2, "start": (0,), "length": (1,), "head": 256, "index": 128, "pairs": 32} | change)
    data = jax.tree.map(jnp.asarray, make(case))
    with interpreted(), pytest.raises(ValueError, match=message):
        compress_and_store(**data, source=case.source[0], eps=EPS, implementation="mosaic")
