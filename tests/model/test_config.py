"""The configuration: roles of the layers, and what is refused."""

import dataclasses
import json
import re

import pytest

from widemesh.model.config import ConfigError, ModelConfig, RopeScaling
from widemesh.model.presets import PRESETS

TINY = PRESETS["tiny-structure"]


def raw(**text):
    """The released layout of a tiny configuration with some text fields changed (None = left out)."""
    config = TINY.to_json()
    config["text_config"] = {k: v for k, v in {**config["text_config"], **text}.items() if v is not None}
    return config


def test_sources_are_the_last_at_or_below():
    roles = TINY.roles
    assert [r.kv_source for r in roles] == [None, None, 2, 2, 4, 5, 5, 5, 5]
    assert [r.index_source for r in roles] == [None, None, 2, 2, 4, 5, 5, 7, 7]
    assert [r.layer for r in roles if r.owns_kv] == [2, 4, 5]
    assert [r.layer for r in roles if r.owns_index] == [2, 4, 5, 7]
    assert [r.layer for r in roles if r.writes_candidates] == [5]
    assert [r.layer for r in roles if r.reads_candidates] == [7]
    assert [r.layer for r in roles if r.has_engram] == [1, 4]
    assert (TINY.replay_cut, TINY.max_ratio, TINY.num_engram_columns) == (5, 2, 6)


def test_index_source_before_the_candidates_does_not_read_them(golden_folder):
    roles = ModelConfig.from_dir(golden_folder / "B").roles
    assert roles[3].owns_index and not roles[3].owns_kv and not roles[3].reads_candidates
    assert roles[7].reads_candidates


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_either_key_of_the_rope_type(key):
    config = ModelConfig.from_json(raw(rope_scaling={key: "yarn", "factor": 8}))
    assert config.rope_scaling == RopeScaling(factor=8.0)


def test_defaults_of_keys_that_released_files_lack():
    config = ModelConfig.from_json(raw(gate_temp=None, norm_topk_prob=None))
    assert config.gate_temp == 1.0 and config.norm_topk_prob


def test_several_end_tokens():
    assert ModelConfig.from_json({**raw(), "eos_token_id": [1, 5]}).eos_token_ids == (1, 5)
    assert ModelConfig.from_json({**raw(), "eos_token_id": 1}).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_act": "gelu"}, "text_config.hidden_act='gelu' is not supported; only 'silu' is"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' is not supported; only 'yarn' is"),
        ({"hidden_size": None, "head_dim": None}, "text_config lacks hidden_size, head_dim"),
        ({"hidden_size": "64"}, "text_config.hidden_size='64' must be of type int"),
        ({"hidden_size": True}, "hidden_size=True must be of type int"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' must be of type float"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1.5, 0, 0]}, r"compress_ratios\[8\]=1.5 must be of type int"),
        ({"num_key_value_heads": 2}, "text_config.num_key_value_heads=2 is not supported; only 1 is"),
        ({"rms_norm_eps": 10**400}, "text_config.rms_norm_eps=10+ is too large for a float; correct config.json"),
        ({"rope_scaling": {"factor": -(10**400)}}, "text_config.rope_scaling.factor=-10+ is too large for a float"),
        ({"vocab_size": 10**30}, "vocab_size=10+ must be between -2147483647 and 2147483647; correct config.json"),
        ({"vocab_size": 2**31}, "text_config.vocab_size=2147483648 must be between"),
        ({"candidate_source_layer_id": -(2**31)}, "candidate_source_layer_id=-2147483648 must be between"),
        ({"engram_num_embeddings": [156, 2**40]}, r"engram_num_embeddings\[1\]=1099511627776 must be between"),
        ({"rope_scaling": {"original_max_position_embeddings": 2**31}}, "max_position_embeddings=2147483648 must be"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1 must be at least 2; correct config.json"),
    ],
)
def test_bad_values_in_the_file(text, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(raw(**text))


@pytest.mark.parametrize("name", ["bos_token_id", "pad_token_id"])
def test_token_ids_beyond_the_vocabulary(name):
    for token_id in (-1, 128):
        with pytest.raises(ConfigError, match=f"{name}={token_id} must be a token id below vocab_size=128; correct"):
            ModelConfig.from_json({**raw(), name: token_id})
    assert getattr(ModelConfig.from_json({**raw(), name: 127}), name) == 127
    left_out = {key: value for key, value in raw().items() if key != name}
    assert ModelConfig.from_json(left_out) == TINY


def test_key_value_heads_may_be_left_out():
    assert TINY.to_json()["text_config"]["num_key_value_heads"] == 1
    assert ModelConfig.from_json(raw(num_key_value_heads=None)) == TINY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"o_groups": 3}, "o_groups=3 must divide num_attention_heads=4"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even"),
        ({"qk_rope_head_dim": 64}, "at most head_dim=32"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be between 1 and n_routed_experts=4"),
        ({"compress_ratios": (0, 0, 2)}, "compress_ratios has 3 entries; give .* 11"),
        ({"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, -1, 0, 0)}, "must not be negative"),
        ({"kv_source_layer_ids": (4, 2, 5)}, "must ascend and stay below num_hidden_layers=9"),
        ({"index_source_layer_ids": (2, 5, 7)}, "must contain every entry of kv_source_layer_ids"),
        ({"kv_source_layer_ids": (4, 5)}, "layer 2 has compress ratio 2 but no kv source of that ratio"),
        ({"kv_source_layer_ids": (2, 4)}, "layer 5 has compress ratio 1 but no kv source of that ratio"),
        ({"index_source_layer_ids": (0, 2, 4, 5, 7)}, "layer 0 has compress ratio 0 and cannot be in index_source"),
        ({"engram_num_embeddings": (156,)}, "engram_num_embeddings has 1 entries; give one per entry"),
        ({"engram_layer_ids": (1, 9)}, "engram_layer_ids=.*stay below"),
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported; use 1"),
        ({"n_routed_experts": 10**9}, "n_routed_experts=1000000000 must be at most 65536; correct config.json"),
        ({"dspark_n_routed_experts": 65537}, "dspark_n_routed_experts=65537 must be at most 65536"),
        ({"num_nextn_predict_layers": -1, "compress_ratios": TINY.compress_ratios[:8]},
         "num_nextn_predict_layers=-1 must not be negative; use 0 for no draft"),
        ({"eos_token_ids": ()}, r"eos_token_id=\[\] is empty; give at least one token id"),
    ],
)
def test_impossible_combinations(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give a checkpoint folder that holds config.json"),
        ("{", "is not valid JSON"),
        pytest.param("[" * 100_000, "is not valid JSON", id="deep"),
        ("[]", "must hold a JSON object, not list"),
        ('{"model_type": "llama"}', "model_type='llama' is not supported"),
        ("{}", "model_type=None is not supported"),
        ('{"model_type": "deepseek_v41"}', "text_config is missing"),
    ],
)
def test_bad_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(tmp_path)


def test_round_trip_through_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_json()))
    assert ModelConfig.from_dir(tmp_path) == TINY


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"index_topk": 0}, "index_topk=0 must be at least 1"),
        ({"candidate_block_size": 0}, "candidate_block_size=0 must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be at least 1"),
        ({"gate_temp": 0.0}, "gate_temp=0.0 must be a positive number"),
        *(({"routed_scaling_factor": number}, f"routed_scaling_factor={number} must be a positive number; correct")
          for number in (float("nan"), float("inf"), 0.0, -1.5)),
        ({"engram_head_dim": 0}, "engram_head_dim=0 must be at least 1; correct config.json"),
        ({"engram_n_heads": 0}, "engram_n_heads=0 must be at least 1; correct config.json"),
        ({"rope_theta": 1.0}, "rope_theta=1.0 must be a number above 1"),
        ({"rope_scaling": RopeScaling(original_max_position_embeddings=0)}, "original_max_position_embeddings=0 must"),
        ({"rope_scaling": RopeScaling(beta_fast=0.0)}, "rope_scaling.beta_fast=0.0 must be a positive number"),
        ({"engram_vocab_size": 10**17}, "engram_vocab_size=100000000000000000 does not fit engram_num_embeddings"),
        ({"candidate_source_layer_id": 3}, "candidate_source_layer_id=3 must be one of index_source_layer_ids"),
        ({"candidate_source_layer_id": 2}, "candidate_source_layer_id=2 must not come before the last of kv_source"),
        ({"eos_token_ids": (128,)}, "eos_token_id=[128] and image_token_id=126 must be below vocab_size=128"),
    ],
)
def test_values_that_would_only_fail_later(changed: dict, words: str) -> None:
    """No shape depends on these, so nothing else would notice before the arithmetic does, if ever."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        dataclasses.replace(PRESETS["tiny-structure"], **changed)


# --- the draft -------------------------------------------------------------------------------------------------------


def test_a_draft_is_left_out_unless_asked_for():
    assert TINY.num_speculative_tokens == 0 and TINY.draft_roles == ()
    assert not any(role.feeds_draft for role in TINY.roles)
    assert "num_speculative_tokens" not in TINY.to_json()["text_config"]
    assert ModelConfig.from_json(raw(num_speculative_tokens=2)) == TINY  # no part of a checkpoint
    assert TINY.with_draft(3).with_draft(0) == TINY


def test_layers_of_a_draft():
    """Window layers of its own experts, counted on from the backbone's, which is the same but for what it feeds."""
    config = TINY.with_draft(2)
    assert [role.layer for role in config.draft_roles] == [9, 10]
    assert {dataclasses.replace(role, layer=0) for role in config.draft_roles} == {TINY.roles[0]}
    assert [role.layer for role in config.roles if role.feeds_draft] == [7, 8]
    assert [dataclasses.replace(role, feeds_draft=False) for role in config.roles] == list(TINY.roles)
    own = config.of_draft
    assert (own.n_routed_experts, own.num_experts_per_tok) == (2, 1)
    assert dataclasses.replace(own, n_routed_experts=4, num_experts_per_tok=2) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": -1},
         "num_speculative_tokens=-1 must not be negative; use 0 to leave the draft out"),
        (
            {"num_nextn_predict_layers": 0, "compress_ratios": TINY.compress_ratios[:9]},
            "num_speculative_tokens=3 needs a draft, and num_nextn_predict_layers=0 says that there is none; use 0",
        ),
        (
            {"num_speculative_tokens": 4},
            "num_speculative_tokens=4 exceeds dspark_block_size=3, which the draft was trained for; use 1 to 3",
        ),
        (
            {"dspark_num_experts_per_tok": 3},
            "dspark_num_experts_per_tok=3 must be between 1 and dspark_n_routed_experts=2; correct config.json",
        ),
        (
            {"dspark_num_experts_per_tok": 0},
            "dspark_num_experts_per_tok=0 must be between 1 and dspark_n_routed_experts=2; correct config.json",
        ),
        *(
            (
                {"dspark_target_layer_ids": ids},
                f"dspark_target_layer_ids={list(ids)} must ascend and stay below num_hidden_layers=9; correct "
                "config.json",
            )
            for ids in ((), (8, 7), (7, 7), (-1, 7), (8, 9))
        ),
        (
            {"compress_ratios": (*TINY.compress_ratios[:9], 0, 1)},
            "compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 1] must end with a 0 for each of the 2 draft layers; "
            "correct config.json",
        ),
        (
            {"dspark_noise_token_id": 128},
            "dspark_noise_token_id=128 must be below vocab_size=128, and dspark_markov_rank=8 at least 1; correct "
            "config.json",
        ),
        (
            {"dspark_noise_token_id": -1},
            "dspark_noise_token_id=-1 must be below vocab_size=128, and dspark_markov_rank=8 at least 1; correct "
            "config.json",
        ),
        (
            {"dspark_markov_rank": 0},
            "dspark_noise_token_id=127 must be below vocab_size=128, and dspark_markov_rank=0 at least 1; correct "
            "config.json",
        ),
    ],
)
def test_drafts_that_cannot_be_run(changes, message):
    """What is wrong with the draft alone does not matter while it is left out."""
    changes = {"num_speculative_tokens": 3, **changes}
    with pytest.raises(ConfigError) as raised:
        dataclasses.replace(TINY, **changes)
    assert str(raised.value) == message
    if changes["num_speculative_tokens"] > 0:
        dataclasses.replace(TINY, **{**changes, "num_speculative_tokens": 0})
