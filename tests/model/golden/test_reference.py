"""`reference` numerics: bfloat16 wherever the released engine rounds to it, and nowhere else.

Golden logits of it do not exist, and bfloat16 decorrelates those of random models. Each layer is judged alone, fed
golden values.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from widemesh.model import moe
from widemesh.model.indexer import Indexer
from widemesh.model.numerics import NUMERICS
from widemesh.pallas_kernels.sparse_attention import SelectedIndices

# The rounding to bfloat16 by itself. FP8 and FP4 would hide most of it: their steps are 16 to 64 times larger.
ROUNDING = dataclasses.replace(NUMERICS["reference"], cache_quant=False, act_quant=False)

ON_GRID = ("engram.value", "engram.output", "attn.input", "attn.compressed_kv", "attn.index_keys",
           "attn.indexer_scores", "attn.output", "ffn.input", "ffn.output", "streams_out")  # fmt: skip
OFF_GRID = ("attn_hc.pre", "attn_hc.post", "attn_hc.comb", "ffn_hc.pre", "ffn_hc.post", "ffn_hc.comb", "pre_out",
            "engram.gate", "ffn.router_logits", "ffn.topk_weights")  # fmt: skip


LAYERS = (4, 6)  # of A: source of ratio 2 with Engram; source of ratio 1 and candidates


@functools.cache
def rounded(golden, settings):
    """One forward with the roundings alone, for all tests of a checkpoint."""
    return golden.run(golden.inputs["long"][0], settings(ROUNDING, "indices"), forced="plain")


@functools.cache
def reference_layer(golden, settings, layer):
    """One layer with everything on."""
    return golden.run_layer(layer, settings("reference", "indices"), mode="kvq", jit=True)


def share_on_grid(x: np.ndarray) -> float:
    """Share of the finite, nonzero values that bfloat16 holds exactly."""
    x = x[np.isfinite(x) & (x != 0)]
    return float(np.mean(x.astype(ml_dtypes.bfloat16).astype(np.float32) == x))


def within(layer: int, name: str) -> str:
    """Full name of an intermediate."""
    return f"layers.{layer}.{name}"


@functools.cache
def rounded_with_golden_choices(golden, settings):
    """The same with the golden entries and experts, whatever a layer would choose: no row is another for a near tie."""
    plain = golden.outputs["plain"]
    experts = iter([plain[within(layer, "ffn.topk_ids")] for layer in range(golden.depth)])  # as gates are traced
    call = Indexer.__call__

    def choose(self, x, q_latent, shared, step):
        shared = call(self, x, q_latent, shared, step)
        selected = plain[within(self.role.layer, "attn.topk_indices")]
        return dataclasses.replace(shared, selection=SelectedIndices(jnp.asarray(np.sort(selected, axis=-1))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "__call__", choose)
        patch.setattr(moe, "lax", SimpleNamespace(top_k=lambda scores, k: (None, jnp.asarray(next(experts)))))
        found = golden.run(golden.inputs["long"][0], settings(ROUNDING, "indices"), forced="plain", as_it_is=True)
    assert next(experts, None) is None
    return found


def test_close_to_plain(golden, settings):
    """Every tensor of every layer within 1e-2 of the golden `plain` one, over all rows."""
    found, seen = rounded_with_golden_choices(golden, settings), set()
    for layer in range(golden.depth):
        for name, wanted in golden.layer_outputs(layer).items():
            if name.endswith(("topk_indices", "topk_ids", "candidates")):
                continue
            own = found[name if name in found else within(layer, name)]
            if name.endswith(("compressed_kv", "index_keys", "indexer_scores")):  # with room for more entries
                axis = -1 if name.endswith("indexer_scores") else 1
                own = np.take(own, np.arange(wanted.shape[axis]), axis=axis)
            own, wanted = (np.where(np.isinf(x), 0, x) for x in (own, wanted))  # scores of what is out of sight
            assert own.shape == wanted.shape
            assert np.linalg.norm(own - wanted) < 1e-2 * np.linalg.norm(wanted), (layer, name)
            seen.add(name)
    assert seen > {*ON_GRID, *OFF_GRID}


def test_few_choices_change(golden, settings):
    """Left to itself, a layer chooses other entries or experts only for the few rows with near ties."""
    found, wanted = rounded(golden, settings), golden.outputs["plain"]
    for layer in range(golden.depth):
        names = [name for name in wanted if name.startswith(within(layer, "")) and "topk_i" in name]
        for name, errors in golden.errors(found, {name: wanted[name] for name in names}).items():
            assert np.mean(errors == 0) >= (0.95 if name.endswith("topk_ids") else 0.85), name


def test_rounded_values_are_on_the_grid(load_golden, settings):
    """`plain` has next to nothing on the grid, so this is no accident."""
    golden, seen = load_golden("A"), set()
    for layer in LAYERS:
        found, plain = reference_layer(golden, settings, layer), golden.layer_outputs(layer)
        for name in set(ON_GRID) & set(plain):
            assert share_on_grid(found[name]) == 1.0, (layer, name)
            assert share_on_grid(plain[name]) < 0.05, (layer, name)
            seen.add(name)
    assert seen == set(ON_GRID)


def test_end_of_the_network(golden, settings):
    """The collapsed and the normed state are rounded; the logits are f32 products of rounded values."""
    found, plain = rounded(golden, settings), golden.outputs["plain"]
    for name in ("final.collapsed", "final.normed"):
        assert share_on_grid(found[name]) == 1.0 and share_on_grid(plain[name]) < 0.05
    exact = found["final.normed"].astype(np.float64) @ golden.read("head.weight").T.astype(np.float64)
    assert np.abs(found["logits"] - exact).max() < 1e-5
    assert share_on_grid(found["logits"]) < 0.05


def test_f32_values_are_not_rounded(golden, settings):
    """Mixes, gates and router stay in f32."""
    found = rounded(golden, settings)
    for layer in range(golden.depth):
        for name in OFF_GRID:
            if within(layer, name) in found:
                assert share_on_grid(found[within(layer, name)]) < 0.05, (layer, name)


def agreement(golden, found, layer, numerics, mode, skip=None) -> dict[str, float]:
    """Share of values of one layer that equal the oracle's to the last bit. `found` has names within the layer."""
    shares = {}
    for name, wanted in golden.oracle_layer(layer, numerics, mode, skip).items():
        shares[name] = float(np.mean(found[name][0][: len(wanted), : wanted.shape[1]] == wanted))
    return shares


def rounded_layer(golden, settings, layer):
    """What one layer recorded with the roundings alone."""
    prefix = within(layer, "")
    found = rounded(golden, settings)
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


def test_equal_to_the_oracle(golden, settings):
    """Bit for bit, but where f32 sums fall on the other side of a boundary than f64 ones."""
    shares = [
        share for layer in range(golden.depth)
        for share in agreement(golden, rounded_layer(golden, settings, layer), layer, ROUNDING, "plain").values()
    ]  # fmt: skip
    assert min(shares) > 0.9
    assert np.mean(shares) > 0.985


def test_equal_to_the_oracle_with_quantisation(load_golden, settings):
    """Every rounding comes before the quantisation of the same value."""
    golden, numerics = load_golden("A"), NUMERICS["reference"]
    for layer in LAYERS:
        shares = agreement(golden, reference_layer(golden, settings, layer), layer, numerics, "kvq")
        assert min(shares.values()) > 0.9
        assert np.mean(list(shares.values())) > 0.985


def test_every_rounding_point(load_golden, settings, group, point):
    """Without it, some tensor of the layer would be another in many values."""
    golden, layer = load_golden("A"), 6 if group == "compressor, ratio 1" else 4
    found = rounded_layer(golden, settings, layer)
    with_it = agreement(golden, found, layer, ROUNDING, "plain")
    without = agreement(golden, found, layer, ROUNDING, "plain", skip=point)
    assert max(with_it[name] - without[name] for name in with_it) > 0.1
