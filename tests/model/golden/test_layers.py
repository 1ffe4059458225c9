"""Every layer, each fed the golden values of what enters it, against the golden values of everything inside it."""

import numpy as np


def test_plain(golden, settings):
    """Within 2e-5 per row (f32 noise is 1e-6), comb within 5e-6, pre and post within 1e-6; every choice equal."""
    found = golden.run(golden.inputs["long"][0], settings("plain", "mask"), forced="plain")
    wrong = {}
    for layer in range(golden.depth):
        errors = golden.errors(layer_records(found, layer), golden.layer_outputs(layer))
        wrong |= {f"layers.{layer}.{name}": e.max() for name, e in errors.items() if not e.max() <= 1}
    assert wrong == {}


def test_quantised_caches(golden, settings):
    """The same on at least 95% of the rows of each: a value on a rounding boundary may fall to the other side."""
    found = golden.run(golden.inputs["long"][0], settings("kvq", "mask"), forced="kvq")
    wrong = {}
    for layer in range(golden.depth):
        errors = golden.errors(layer_records(found, layer), golden.layer_outputs(layer, "kvq"))
        wrong |= {f"layers.{layer}.{name}": e.max() for name, e in errors.items() if np.mean(e <= 1) < 0.95}
    assert wrong == {}


def test_everything_is_compared(golden):
    """The golden files hold what the roles of the layers promise."""
    names = [set(golden.layer_outputs(layer)) for layer in range(golden.depth)]
    for role, found in zip(golden.config.roles, names, strict=True):
        assert {"attn.input", "attn.output", "ffn.output", "ffn.topk_ids", "attn_hc.comb", "ffn_hc.comb"} <= found
        assert ("engram.gate" in found) == role.has_engram
        assert ("attn.compressed_kv" in found) == ("attn.index_keys" in found) == role.owns_kv
        assert ("attn.topk_indices" in found) == ("attn.indexer_scores" in found) == role.owns_index
        assert ("attn.candidates" in found) == role.writes_candidates
    assert {"final.collapsed", "final.normed", "logits"} <= names[-1]


def layer_records(records: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """What one layer recorded, by names within the layer, and what ends the model."""
    prefix = f"layers.{layer}."
    within = {k.removeprefix(prefix): v for k, v in records.items() if k.startswith(prefix)}
    return {**within, **{k: v for k, v in records.items() if not k.startswith("layers.")}}
