"""Attention over packed bytes: the reference against the formula, one row and head at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.sparse_attention.packed_cases import PackedCase
from widemesh.pallas_kernels.sparse_attention import attend_packed
from widemesh.pallas_kernels.sparse_attention.reference import attend_gathered


def expected(case, args, window_keys, entry_keys):
    """The formula in float64, from the decoded vectors."""
    q, _, _, start, first, _, _, indices, sink = (np.asarray(x) for x in args)
    out = np.zeros(q.shape)
    for b, s in np.ndindex(q.shape[:2]):
        p = start[b] + s
        own = window_keys[b, max(first[b], p - case.window + 1, 0) : p + 1]
        chosen = entry_keys[b, indices[b, s][indices[b, s] >= 0]]
        keys = np.concatenate([own, chosen]).astype(np.float64)
        for n in range(q.shape[2]):
            e = np.exp(keys @ q[b, s, n].astype(np.float64) * q.shape[-1] ** -0.5)
            out[b, s, n] = e @ keys / (e.sum() + np.exp(np.float64(sink[n])))
    return out


CASES = {
    "ring": PackedCase(),
    "chunk": PackedCase(ring=None, rows=11),
    "none selected": PackedCase(selected=0.0),
    "all selected": PackedCase(selected=1.0, k=24),
    "other source": PackedCase(ratios=(2, 1), source=1, page_size=4),
    "f32 records": PackedCase(record="f32"),
    "a run that begins late": PackedCase(first=(0, 6, 38)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference_is_the_formula(case):
    args, window_keys, entry_keys = case.build()
    found = jax.jit(functools.partial(attend_packed, **case.static, implementation="reference"))(*args)
    np.testing.assert_allclose(found, expected(case, args, window_keys, entry_keys), rtol=2e-4, atol=2e-5)


def test_reference_is_the_attention_over_decoded_vectors():
    """The same numbers, bit for bit, as the attention that takes gathered f32 vectors."""
    case = PackedCase()
    args, window_keys, entry_keys = case.build()
    q, _, _, start, first, _, _, indices, sink = args
    position = np.asarray(start)[:, None] - (case.window - 1) + np.arange(case.rows + case.window - 1)
    seen = position >= np.asarray(first)[:, None]
    requests = np.arange(len(position))[:, None]
    near = np.where(seen[..., None], window_keys[requests, np.maximum(position, 0)], 0)
    entries = np.where((indices >= 0)[..., None], entry_keys[requests[..., None], np.maximum(indices, 0)], 0)
    wanted = attend_gathered(q, jnp.asarray(near), start, first, jnp.asarray(entries), indices >= 0, sink,
                             window=case.window)  # fmt: skip
    np.testing.assert_array_equal(attend_packed(*args, **case.static, implementation="reference"), wanted)


def test_layers_without_a_source_see_their_window_alone():
    case = PackedCase(selected=0.0)
    args, window_keys, entry_keys = case.build()
    nothing = jnp.zeros((*args[7].shape[:2], 0), jnp.int32)
    static = {**case.static, "source": None}
    found = attend_packed(*args[:7], nothing, args[8], **static, implementation="reference")
    np.testing.assert_allclose(found, expected(case, args, window_keys, entry_keys), rtol=2e-4, atol=2e-5)


def test_rows_that_see_nothing_give_zeros():
    case = PackedCase(selected=0.0)
    args = list(case.build()[0])
    args[4] = args[3] + case.rows  # every run begins after its rows
    assert not np.asarray(attend_packed(*args, **case.static, implementation="reference")).any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows(shape):
    case = PackedCase(start=(0, 5), first=(0, 0))
    args = list(case.build()[0])
    requests, rows = shape
    args = [x[:requests] if x.ndim and x.shape[0] == 2 else x for x in args]
    args[0], args[7] = args[0][:, :rows], args[7][:, :rows]
    found = attend_packed(*args, **case.static, implementation="reference")
    assert found.shape == (requests, rows, case.heads, case.dim)


def test_shapes_that_do_not_fit_are_refused():
    case = PackedCase()
    args = list(case.build()[0])
    short = [*args]
    short[1] = args[1][:, :9]
    with pytest.raises(ValueError, match=r"M=9 rows, but 3 query rows with window=8 see 10 positions"):
        attend_packed(*short, **case.static)
    with pytest.raises(ValueError, match=r"pass the source they belong to"):
        attend_packed(*args, **{**case.static, "source": None})
    narrow = [args[0][..., :16], *args[1:]]
    with pytest.raises(ValueError, match=r"window_layout.dim=32 must equal the head dim of q, 16"):
        attend_packed(*narrow, **case.static)
    cut = [*args]
    cut[1] = args[1][..., :-1]
    with pytest.raises(ValueError, match=r"records of 32 bytes, window_layout says 33"):
        attend_packed(*cut, **case.static)
