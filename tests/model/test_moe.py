"""The gate, and what padding rows do to the experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model.moe import Gate, MoE
from widemesh.model.presets import PRESETS

CONFIG = PRESETS["tiny-structure"]  # 4 experts, 2 per token
RNG = np.random.default_rng(0)


def filled(module, **values):
    """The module with the named parameters set and small random ones elsewhere."""
    graph, state = nnx.split(module)
    flat = []
    for path, p in state.flat_state():
        value = values.get(str(path[-1]))
        if value is None:
            value = 0.2 * RNG.standard_normal(p.get_value().shape)
        flat.append((path, p.replace(jnp.asarray(value, jnp.float32))))
    return nnx.merge(graph, nnx.State.from_flat_path(flat))


def gate_with(logits, bias, config=CONFIG):
    """A gate whose logits of the one-hot row i are `logits[i]`."""
    weight = np.zeros((config.n_routed_experts, config.hidden_size))
    weight[:, : len(logits)] = np.transpose(logits)
    return filled(Gate(config), weight=weight, bias=bias, bias_vl=np.full(config.n_routed_experts, 50.0))


def run_gate(gate, rows, context):
    """Experts and weights of `rows` one-hot rows."""
    step = context(CONFIG, np.zeros((1, rows)))
    return tuple(np.asarray(x) for x in gate(jnp.eye(rows, CONFIG.hidden_size), step))


def score(logit):
    return np.sqrt(np.log1p(np.exp(logit)))


def test_bias_chooses_and_does_not_weigh(context):
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    experts, weights = run_gate(gate_with(logits, [0, 0, 0, 9.0]), 1, context)
    assert experts.tolist() == [[3, 0]]
    wanted = score(np.array([-1.0, 2.0]))
    np.testing.assert_allclose(weights[0], 1.5 * wanted / wanted.sum(), rtol=1e-5)


def test_equal_scores_go_to_the_lower_expert(context):
    experts, weights = run_gate(gate_with(np.zeros((1, 4)), np.zeros(4)), 1, context)
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.75, 0.75]], rtol=1e-6)


@pytest.mark.parametrize(("chosen", "normed"), [(2, False), (1, True)])
def test_weights_as_they_are(context, chosen, normed):
    """Without norm_topk_prob, and with a single expert, nothing is divided."""
    config = dataclasses.replace(CONFIG, num_experts_per_tok=chosen, norm_topk_prob=normed)
    _, weights = run_gate(gate_with(np.array([[2.0, 1.0, 0.0, -1.0]]), np.zeros(4), config), 1, context)
    np.testing.assert_allclose(weights[0], 1.5 * score(np.array([2.0, 1.0])[:chosen]), rtol=1e-5)


def test_hopeless_scores_stay_finite(context):
    """All scores underflow to about 1e-22: the epsilon of the norm keeps the weights finite."""
    _, weights = run_gate(gate_with(np.full((1, 4), -100.0), np.zeros(4)), 1, context)
    assert np.isfinite(weights).all()


def test_temperature_divides_the_logits(context):
    hot = dataclasses.replace(CONFIG, gate_temp=2.0)
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    _, weights = run_gate(gate_with(logits, np.zeros(4), hot), 1, context)
    _, wanted = run_gate(gate_with(logits / 2, np.zeros(4)), 1, context)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["dense", "grouped"])
def test_padding_rows_reach_no_routed_expert(context, implementation):
    """Valid rows are the same whatever the padding holds, and a padding row's output is the shared expert's alone."""
    moe = filled(MoE(CONFIG))
    step = context(CONFIG, np.zeros((2, 20)), length=[20, 3])
    step = dataclasses.replace(step, settings=dataclasses.replace(step.settings, moe_implementation=implementation))
    valid = np.asarray(step.rows.valid)
    x = RNG.standard_normal((2, 20, CONFIG.hidden_size)).astype(np.float32)
    other = np.where(valid[..., None], x, RNG.standard_normal(x.shape)).astype(np.float32)
    run = jax.jit(lambda x: moe(x, step))
    found, found_other = np.asarray(run(x)), np.asarray(run(other))
    assert np.array_equal(found[valid], found_other[valid])
    w1, w3, w2 = (np.asarray(getattr(moe.shared_experts, n).weight[...], np.float64) for n in ("w1", "w3", "w2"))
    gate, up = np.minimum(x @ w1.T, 1.0), np.clip(x @ w3.T, -1.0, 1.0)
    shared = (gate / (1 + np.exp(-gate)) * up) @ w2.T
    np.testing.assert_allclose(found[~valid], shared[~valid], rtol=1e-4, atol=1e-5)
    assert not np.allclose(found[valid], shared[valid], atol=1e-2)
