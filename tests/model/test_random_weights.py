"""Random weights: every backbone tensor, reproducible by name, at scales that keep a small model alive."""

import numpy as np
import pytest

from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.presets import PRESETS
from widemesh.model.random_weights import random_tensor, random_tensors

CONFIG = PRESETS["tiny-mesh"]


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return dict(random_tensors(CONFIG, seed=0))


def test_every_tensor_of_the_table_with_its_shape(tensors):
    assert {name: values.shape for name, values in tensors.items()} == {
        name: spec.shape for name, spec in tensor_table(CONFIG).items()}
    assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in tensors.values())


@pytest.mark.parametrize(("name", "count"), [
    ("tiny-structure", 537_458), ("tiny-geometry", 975_920), ("tiny-mesh", 10_052_236)])
def test_parameter_counts(name, count):
    assert sum(np.prod(spec.shape, dtype=int) for spec in tensor_table(PRESETS[name]).values()) == count


def test_a_tensor_depends_on_seed_and_name_alone(tensors):
    name = "layers.3.ffn.experts.5.w2.weight"
    np.testing.assert_array_equal(random_tensor(name, tensors[name].shape, 0), tensors[name])
    other_seed = random_tensor(name, tensors[name].shape, 1)
    other_name = tensors["layers.3.ffn.experts.6.w2.weight"]
    for other in (other_seed, other_name):
        assert abs(np.corrcoef(other.ravel(), tensors[name].ravel())[0, 1]) < 0.05


def test_values_are_the_same_everywhere(tensors):
    """The first values of one tensor; a change here changes every checkpoint made by seed."""
    assert tensors["head.weight"].ravel()[:3].tolist() == pytest.approx([0.3294255, -0.147998, 0.2310292], rel=1e-6)


@pytest.mark.parametrize(("ending", "mean", "std"), [
    ("hc_attn_fn", 0, 0.02),
    ("hc_ffn_base", 0, 1),
    ("hc_ffn_scale", 1, 0.2),
    ("attn_sink", 0, 1),
    ("ffn.gate.bias", 0, 0.3),
    ("ffn.gate.bias_vl", 0, 1),
    ("ffn.gate.weight", 0, 1.5 / 128**0.5),
    ("attn.q_norm.weight", 1, 0.2),
    ("engram.k_weight", 1, 0.3),
    ("engram.embed.weight", 0, 1),
    ("attn.wq_a.weight", 0, 128**-0.5),
    ("attn.wq_b.weight", 0, 1.5 / 8),
    ("indexer.wq_b.weight", 0, 1.5 / 8),
    ("w2.weight", 0, 128**-0.5),
])
def test_scales(tensors, ending, mean, std):
    values = np.concatenate([v.ravel() for name, v in tensors.items() if name.endswith(ending)])
    error = 4 * std / len(values) ** 0.5  # four standard errors
    assert values.mean() == pytest.approx(mean, abs=error) and values.std() == pytest.approx(std, abs=error)


def test_head_gives_logits_of_standard_deviation_two(tensors):
    state = np.random.default_rng(0).standard_normal((64, CONFIG.hidden_size), np.float32)
    assert (state @ tensors["head.weight"].T).std() == pytest.approx(2, rel=0.1)


def test_text_and_image_biases_choose_different_experts(tensors):
    bias = tensors["layers.0.ffn.gate.bias"]
    assert (np.argsort(bias)[-4:] != np.argsort(tensors["layers.0.ffn.gate.bias_vl"])[-4:]).any()
