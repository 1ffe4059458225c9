"""The grouped mixture of experts: every implementation against one row and one expert at a time."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from widemesh.pallas_kernels.formats import fake_quant_fp8
from widemesh.pallas_kernels.grouped_moe import ExpertMath, grouped, grouped_moe

T, K, X, D, F = 40, 2, 3, 16, 8
RNG = np.random.default_rng(0)
INPUT = RNG.standard_normal((T, D)).astype(np.float32)
STACKS = tuple(RNG.standard_normal(shape).astype(np.float32) for shape in ((X, F, D), (X, F, D), (X, D, F)))
PLAIN = ExpertMath(limit=1.0)


def expected(x, slots, weights, math):
    """Each selected expert on each row, summed in slot order, in float64 between the roundings."""
    bf = lambda v: np.asarray(v, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)  # noqa: E731
    rounded = bf if math.bf16_rounding else np.asarray
    fp8 = lambda v: np.asarray(fake_quant_fp8(v.astype(np.float32)), np.float64)  # noqa: E731
    quantised = fp8 if math.act_quant else np.asarray
    out = np.zeros(x.shape)
    for row in range(len(x)):
        for slot, weight in sorted(zip(slots[row], weights[row], strict=True)):
            if 0 <= slot < X:
                w1, w3, w2 = (stack[slot].astype(np.float64) for stack in STACKS)
                v = quantised(x[row].astype(np.float64))
                gate, up = np.minimum(rounded(w1 @ v), math.limit), np.clip(rounded(w3 @ v), -math.limit, math.limit)
                hidden = gate / (1 + np.exp(-gate)) * up * weight
                out[row] += rounded(w2 @ quantised(rounded(hidden)))
    return out


@functools.cache
def program(implementation, math, capacity=None):
    """A compiled implementation; a capacity calls the grouped one directly."""
    if capacity is not None:
        run = jax.jit(lambda *arrays: grouped.moe_grouped(*arrays, math, capacity=capacity))
    else:
        run = jax.jit(lambda *arrays: grouped_moe(*arrays, math, implementation=implementation))
    return lambda x, slots, weights: run(x, slots, weights, *STACKS)


@pytest.fixture(autouse=True, scope="module")
def small_overflow_blocks():
    """So that a crowded expert needs several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_OVERFLOW_ROWS", 4)
        yield


def weights_of(slots):
    return np.random.default_rng(1).random(slots.shape, np.float32) + 0.1


# All programs at once: dense; grouped by its own capacity; with nearly everything left to the overflow; with none.
PROGRAMS = {"dense": ("dense", PLAIN), "grouped": ("grouped", PLAIN), "overflow": (None, PLAIN, 1),
            "no overflow": (None, PLAIN, T)}  # fmt: skip

CASES = {
    "all on one expert": np.tile([1, -1], (T, 1)),
    "none at all": np.full((T, K), -1),
    "out of range": np.tile([X, X + 7], (T, 1)),
    "below range": np.tile([-5, -(2**31)], (T, 1)),
    "an empty expert": np.tile([0, 2], (T, 1)),
    "one row": np.array([[2, 0]] + [[-1, -1]] * (T - 1)),
    "last row only": np.array([[-1, -1]] * (T - 1) + [[0, 1]]),
    "one slot each way": np.where(np.arange(T * K).reshape(T, K) % 3 == 0, -1, np.arange(T * K).reshape(T, K) % X),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ragged_cases(name, case):
    slots = CASES[case].astype(np.int32)
    weights = weights_of(slots)
    found = np.asarray(program(*PROGRAMS[name])(INPUT, slots, weights))
    np.testing.assert_allclose(found, expected(INPUT, slots, weights, PLAIN), rtol=1e-4, atol=1e-5)
    if not ((slots >= 0) & (slots < X)).any():
        assert not found.any()


@settings(deadline=None, max_examples=30)
@given(
    slots=hnp.arrays(np.int32, T, elements=st.integers(-1, X)),
    step=st.integers(1, X),
    name=st.sampled_from(sorted(PROGRAMS)),
)
def test_any_routing(slots, step, name):
    """The two slots of a row are different experts, or none."""
    second = np.where((slots + step) % (X + 1) == slots, -1, (slots + step) % (X + 1))
    slots = np.stack([slots, second], axis=1).astype(np.int32)
    weights = weights_of(slots)
    found = program(*PROGRAMS[name])(INPUT, slots, weights)
    np.testing.assert_allclose(found, expected(INPUT, slots, weights, PLAIN), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "grouped"])
@pytest.mark.parametrize("math", [
    ExpertMath(limit=0.5, act_quant=True),
    ExpertMath(limit=2.0, bf16_rounding=True),
    ExpertMath(limit=1.0, act_quant=True, bf16_rounding=True),
], ids=["activations", "rounding", "both"])  # fmt: skip
def test_roundings(implementation, math):
    """The routing weight acts before w2 and its activation rounding. A value on a boundary may fall either way."""
    slots = np.stack([np.arange(T) % X, (np.arange(T) + 1) % X], axis=1).astype(np.int32)
    weights = weights_of(slots)
    found = np.asarray(program(implementation, math)(INPUT, slots, weights))
    errors = np.linalg.norm(found - expected(INPUT, slots, weights, math), axis=-1) / np.linalg.norm(found, axis=-1)
    assert np.mean(errors < 1e-5) >= 0.9
    plain = expected(INPUT, slots, weights, ExpertMath(limit=math.limit))
    assert np.median(np.linalg.norm(found - plain, axis=-1) / np.linalg.norm(found, axis=-1)) > 1e-3


def test_rows_do_not_depend_on_the_others():
    """Whatever the other rows choose, a row's result is the same to rounding."""
    slots = np.stack([np.arange(T) % X, (np.arange(T) + 1) % X], axis=1).astype(np.int32)
    other = slots.copy()
    other[1:] = [2, -1]
    weights = weights_of(slots)
    run = program("grouped", PLAIN)
    np.testing.assert_allclose(run(INPUT, slots, weights)[0], run(INPUT, other, weights)[0], rtol=1e-5, atol=1e-6)


def test_clamp():
    """The gate from above only, up on both sides."""
    gate, up = np.array([5.0, -5.0, 0.5], np.float32), np.array([-5.0, 5.0, 0.5], np.float32)
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    found = np.asarray(ExpertMath(limit=2.0).activate(gate, up))
    np.testing.assert_allclose(found, [silu(2.0) * -2, silu(-5.0) * 2, silu(0.5) * 0.5], rtol=1e-6)


def test_unknown_implementation():
    slots = np.zeros((T, K), np.int32)
    with pytest.raises(ValueError, match="implementation='fast' is unknown; use 'dense', 'grouped' or None"):
        grouped_moe(INPUT, slots, weights_of(slots), *STACKS, PLAIN, implementation="fast")
