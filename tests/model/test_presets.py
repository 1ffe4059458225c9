"""The presets: the released values, and the rules that the tiny ones must keep."""

import pytest

from widemesh.model.config import ModelConfig
from widemesh.model.engram_hash import EngramHash, engram_primes
from widemesh.model.presets import DEFAULT_PRESET, PRESETS
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.model.token_map import build_token_map

TINY = [name for name in PRESETS if name.startswith("tiny-")]


def test_names():
    assert list(PRESETS) == ["flash", "tiny-structure", "tiny-geometry", "tiny-mesh"] and DEFAULT_PRESET in TINY


@pytest.mark.parametrize("name", PRESETS)
def test_config_json_round_trip(name):
    assert ModelConfig.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_flash_layer_schedule():
    roles = PRESETS["flash"].roles
    assert [r.layer for r in roles if r.owns_kv] == [2, 8, 14, 20]
    assert [r.layer for r in roles if r.owns_index] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [r.layer for r in roles if r.writes_candidates] == [20]
    assert [r.layer for r in roles if r.reads_candidates] == [24, 28, 32, 36]
    assert [r.ratio for r in roles] == [0] * 2 + [2] * 18 + [1] * 20
    assert (roles[39].kv_source, roles[39].index_source) == (20, 36)
    assert PRESETS["flash"].replay_cut == 20 and len(PRESETS["flash"].compress_ratios) == 43


@pytest.mark.parametrize("name", PRESETS)
def test_engram_rows_are_the_prime_sums(name):
    assert tuple(engram_primes(PRESETS[name]).sum(axis=1)) == PRESETS[name].engram_num_embeddings


@pytest.mark.parametrize("name", TINY)
def test_compressed_vocabulary_is_that_of_the_presets_tokenizer(name):
    config = PRESETS[name]
    token_map = build_token_map(tiny_tokenizer(config)[0])
    assert EngramHash.build(config, token_map).pad_compressed_id == 2
    is_identity = token_map.tolist() == list(range(config.vocab_size))
    assert is_identity == (name == "tiny-structure")


@pytest.mark.parametrize("name", PRESETS)
def test_a_restricted_selection_cannot_run_out(name):
    config = PRESETS[name]
    block = config.candidate_block_size
    assert config.candidate_topk_blocks * block - (block - 1) >= config.index_topk


@pytest.mark.parametrize("name", PRESETS)
def test_quantisation_blocks_are_whole(name):
    c = PRESETS[name]
    widths = (c.hidden_size, c.moe_intermediate_size, c.q_lora_rank, c.head_dim, c.index_head_dim, c.engram_head_dim,
              c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups,
              c.index_n_heads * c.index_head_dim)
    assert [w % 32 for w in widths] == [0] * len(widths)


@pytest.mark.parametrize("name", TINY)
def test_every_kind_of_layer_is_there(name):
    config = PRESETS[name]
    roles = config.roles
    reuses = [r for r in roles if r.ratio and not r.owns_index]
    assert roles[0].ratio == 0
    assert sum(r.owns_kv and r.ratio == 2 for r in roles) == 2  # so that shared state is replaced
    assert sum(r.owns_kv and r.ratio == 1 for r in roles) == 1
    assert reuses and any(r.writes_candidates for r in roles)
    assert any(r.reads_candidates and not r.owns_kv for r in roles)
    assert [r.owns_kv for r in roles if r.has_engram] == [False, True]
    assert max(config.engram_layer_ids) <= config.replay_cut
    assert len(config.dspark_target_layer_ids) >= 2 and config.dspark_target_layer_ids[-1] == len(roles) - 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tiny_mesh_divides_over_ranks(ranks):
    config = PRESETS["tiny-mesh"]
    assert config.n_routed_experts % ranks == 0 and config.dspark_n_routed_experts % ranks == 0


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tiny_mesh_divides_over_tp_in_whole_blocks(tp):
    c = PRESETS["tiny-mesh"]
    for count in (c.num_attention_heads, c.o_groups, c.index_n_heads):
        assert count % tp == 0
    for width in (c.moe_intermediate_size, c.vocab_size, c.o_groups * c.o_lora_rank,
                  c.num_attention_heads * c.head_dim, c.index_n_heads * c.index_head_dim):
        assert width % (tp * 32) == 0
