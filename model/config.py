"""The model's configuration: the released `config.json`, read once, checked once, frozen.

Field names are those of the released `text_config`. Everything that can be derived from them (which layer owns a
compressor, which reads whose selection) is a property or a `LayerRole`, so that no other file repeats the rules.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

MODEL_TYPE = "deepseek_v41"

_LARGEST = 2**31 - 1  # sizes are dimensions of arrays, and ids int32
_MOST_EXPERTS = 65536  # every one has names and shapes of its own


class ConfigError(ValueError):
    """A configuration that cannot be run. The message names the field, its value and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN frequency interpolation (docs/model.md, "Rotary positions"). No attention temperature is applied."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRole:
    """What one layer owns and whose state it reads. `None` for a source means: no compressed attention."""

    layer: int
    ratio: int  # tokens per compressed entry; 0 = window only
    kv_source: int | None  # layer whose compressed cache and index keys this layer reads
    index_source: int | None  # layer whose selected entries this layer attends to
    owns_kv: bool  # has a compressor, and index keys of its own
    owns_index: bool  # has index queries of its own
    writes_candidates: bool
    reads_candidates: bool
    has_engram: bool
    feeds_draft: bool  # the draft reads the streams that enter it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one model, text backbone and draft.

    `num_speculative_tokens` is a choice of its user and no part of a checkpoint: 0 leaves the draft out.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    norm_topk_prob: bool = True
    gate_temp: float = 1.0
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = ()
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    pad_token_id: int = 2
    image_token_id: int = -1
    vision_layers: int = 0
    num_speculative_tokens: int = 0  # tokens that the draft proposes in a step, at most dspark_block_size

    def __post_init__(self) -> None:
        layers, ratios = self.num_hidden_layers, self.compress_ratios

        def need(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        for name in ("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "n_routed_experts", "sliding_window",
                     "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings", "index_n_heads", "index_head_dim",
                     "index_topk", "candidate_topk_blocks", "candidate_block_size"):
            need(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1; correct config.json")
        for name in ("n_routed_experts", "dspark_n_routed_experts"):
            need(getattr(self, name) <= _MOST_EXPERTS,
                 f"{name}={getattr(self, name)} must be at most {_MOST_EXPERTS}; correct config.json")
        need(self.num_nextn_predict_layers >= 0,
             f"num_nextn_predict_layers={self.num_nextn_predict_layers} must not be negative; use 0 for no draft")
        yarn = self.rope_scaling
        for name, number in (
            ("gate_temp", self.gate_temp), ("swiglu_limit", self.swiglu_limit),
            ("routed_scaling_factor", self.routed_scaling_factor),
            ("rope_scaling.factor", yarn.factor), ("rope_scaling.beta_fast", yarn.beta_fast),
            ("rope_scaling.beta_slow", yarn.beta_slow),
            ("rope_scaling.original_max_position_embeddings", yarn.original_max_position_embeddings),
        ):  # fmt: skip
            need(0 < number < math.inf, f"{name}={number} must be a positive number; correct config.json")
        for name in ("rope_theta", "compress_rope_theta"):
            need(1 < getattr(self, name) < math.inf,
                 f"{name}={getattr(self, name)} must be a number above 1; correct config.json")
        for name in ("rms_norm_eps", "hc_eps"):
            need(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)} must be small and not negative")
        need(self.image_token_id < self.vocab_size and all(0 <= i < self.vocab_size for i in self.eos_token_ids),
             f"eos_token_id={list(self.eos_token_ids)} and image_token_id={self.image_token_id} must be below "
             f"vocab_size={self.vocab_size}; correct config.json")
        need(len(self.eos_token_ids) >= 1, "eos_token_id=[] is empty; give at least one token id")
        need(self.n_shared_experts == 1, f"n_shared_experts={self.n_shared_experts} is not supported; use 1")
        need(self.num_attention_heads % self.o_groups == 0,
             f"o_groups={self.o_groups} must divide num_attention_heads={self.num_attention_heads}")
        need(self.qk_rope_head_dim % 2 == 0 and 0 < self.qk_rope_head_dim <= self.head_dim,
             f"qk_rope_head_dim={self.qk_rope_head_dim} must be even and at most head_dim={self.head_dim}")
        need(1 <= self.num_experts_per_tok <= self.n_routed_experts,
             f"num_experts_per_tok={self.num_experts_per_tok} must be between 1 and "
             f"n_routed_experts={self.n_routed_experts}")
        need(len(ratios) == layers + self.num_nextn_predict_layers,
             f"compress_ratios has {len(ratios)} entries; give num_hidden_layers + num_nextn_predict_layers = "
             f"{layers + self.num_nextn_predict_layers}")
        need(all(r >= 0 for r in ratios), f"compress_ratios={list(ratios)} must not be negative")
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, name)
            need(list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids),
                 f"{name}={list(ids)} must ascend and stay below num_hidden_layers={layers}")
        need(set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids),
             f"index_source_layer_ids={list(self.index_source_layer_ids)} must contain every entry of "
             f"kv_source_layer_ids={list(self.kv_source_layer_ids)}")
        need(self.candidate_source_layer_id < 0 or self.candidate_source_layer_id in self.index_source_layer_ids,
             f"candidate_source_layer_id={self.candidate_source_layer_id} must be one of index_source_layer_ids="
             f"{list(self.index_source_layer_ids)}, or -1 for none; correct config.json")
        need(self.candidate_source_layer_id < 0 or self.candidate_source_layer_id >= self.replay_cut,
             f"candidate_source_layer_id={self.candidate_source_layer_id} must not come before the last of "
             f"kv_source_layer_ids={list(self.kv_source_layer_ids)}: candidates are entries of that layer")
        self._check_draft(need)
        for layer in range(layers):
            source = _last_at_most(self.kv_source_layer_ids, layer)
            if ratios[layer] == 0:
                need(layer not in self.index_source_layer_ids,
                     f"layer {layer} has compress ratio 0 and cannot be in index_source_layer_ids")
            else:
                need(source is not None and ratios[source] == ratios[layer],
                     f"layer {layer} has compress ratio {ratios[layer]} but no kv source of that ratio at or before "
                     f"it; correct kv_source_layer_ids={list(self.kv_source_layer_ids)}")
        need(len(self.engram_num_embeddings) == len(self.engram_layer_ids),
             f"engram_num_embeddings has {len(self.engram_num_embeddings)} entries; give one per entry of "
             f"engram_layer_ids={list(self.engram_layer_ids)}")
        if self.engram_layer_ids:
            for name in ("engram_head_dim", "engram_n_heads"):
                need(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1; correct config.json")
            columns = max(1, self.num_engram_columns)
            need(0 < self.engram_vocab_size <= max(self.engram_num_embeddings) // columns + 1,
                 f"engram_vocab_size={self.engram_vocab_size} does not fit engram_num_embeddings="
                 f"{list(self.engram_num_embeddings)}, sums of {columns} primes above it; correct config.json")
            need(self.engram_compressed_vocab_size >= 1,
                 f"engram_compressed_vocab_size={self.engram_compressed_vocab_size} must be the size of the "
                 "tokenizer's compressed map")

    def _check_draft(self, need: Callable[[bool, str], None]) -> None:
        """Whether the draft can propose `num_speculative_tokens` tokens."""
        count, ids = self.num_speculative_tokens, self.dspark_target_layer_ids
        need(count >= 0, f"num_speculative_tokens={count} must not be negative; use 0 to leave the draft out")
        if not count:
            return
        need(self.num_nextn_predict_layers >= 1,
             f"num_speculative_tokens={count} needs a draft, and num_nextn_predict_layers=0 says that there is none; "
             "use 0")
        need(count <= self.dspark_block_size,
             f"num_speculative_tokens={count} exceeds dspark_block_size={self.dspark_block_size}, which the draft was "
             f"trained for; use 1 to {self.dspark_block_size}")
        need(1 <= self.dspark_num_experts_per_tok <= self.dspark_n_routed_experts,
             f"dspark_num_experts_per_tok={self.dspark_num_experts_per_tok} must be between 1 and "
             f"dspark_n_routed_experts={self.dspark_n_routed_experts}; correct config.json")
        need(len(ids) >= 1 and list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < self.num_hidden_layers,
             f"dspark_target_layer_ids={list(ids)} must ascend and stay below num_hidden_layers="
             f"{self.num_hidden_layers}; correct config.json")
        need(not any(self.compress_ratios[self.num_hidden_layers :]),
             f"compress_ratios={list(self.compress_ratios)} must end with a 0 for each of the "
             f"{self.num_nextn_predict_layers} draft layers; correct config.json")
        need(0 <= self.dspark_noise_token_id < self.vocab_size and self.dspark_markov_rank >= 1,
             f"dspark_noise_token_id={self.dspark_noise_token_id} must be below vocab_size={self.vocab_size}, and "
             f"dspark_markov_rank={self.dspark_markov_rank} at least 1; correct config.json")

    # --- the layer schedule -------------------------------------------------------------------------------------

    @cached_property
    def roles(self) -> tuple[LayerRole, ...]:
        """One `LayerRole` per backbone layer. A consumer's source is the largest source id at or below it."""
        return tuple(self._role(layer) for layer in range(self.num_hidden_layers))

    def _role(self, layer: int) -> LayerRole:
        ratio = self.compress_ratios[layer]
        compressed = ratio > 0
        owns_index = compressed and layer in self.index_source_layer_ids
        return LayerRole(
            layer=layer,
            ratio=ratio,
            kv_source=_last_at_most(self.kv_source_layer_ids, layer) if compressed else None,
            index_source=_last_at_most(self.index_source_layer_ids, layer) if compressed else None,
            owns_kv=compressed and layer in self.kv_source_layer_ids,
            owns_index=owns_index,
            writes_candidates=owns_index and layer == self.candidate_source_layer_id,
            reads_candidates=owns_index and 0 <= self.candidate_source_layer_id < layer,
            has_engram=layer in self.engram_layer_ids,
            feeds_draft=self.num_speculative_tokens > 0 and layer in self.dspark_target_layer_ids,
        )

    @cached_property
    def draft_roles(self) -> tuple[LayerRole, ...]:
        """One per layer of the draft; none if it is left out. They are counted on from the backbone's."""
        first, count = self.num_hidden_layers, self.num_nextn_predict_layers if self.num_speculative_tokens else 0
        return tuple(
            LayerRole(layer=first + stage, ratio=0, kv_source=None, index_source=None, owns_kv=False, owns_index=False,
                      writes_candidates=False, reads_candidates=False, has_engram=False, feeds_draft=False)
            for stage in range(count)
        )  # fmt: skip

    @cached_property
    def of_draft(self) -> ModelConfig:
        """What a layer of the draft is built from: the same sizes, and experts of its own."""
        return dataclasses.replace(
            self, n_routed_experts=self.dspark_n_routed_experts, num_experts_per_tok=self.dspark_num_experts_per_tok
        )

    def with_draft(self, tokens: int) -> ModelConfig:
        """The same model with a draft that proposes so many tokens; with 0, without its draft. Raises ConfigError."""
        if tokens == self.num_speculative_tokens:
            return self
        return dataclasses.replace(self, num_speculative_tokens=tokens)

    @property
    def replay_cut(self) -> int:
        """First decoder layer: the last layer that owns compressed KV. Later layers only keep window KV."""
        return max(self.kv_source_layer_ids, default=self.num_hidden_layers - 1)

    @cached_property
    def kv_source_layers(self) -> tuple[int, ...]:
        """Layers with a compressor, in order. Their state grows with the context."""
        return tuple(role.layer for role in self.roles if role.owns_kv)

    @property
    def max_ratio(self) -> int:
        """The largest compress ratio: tokens per group, in whole numbers of which state is allocated."""
        return max((r for r in self.compress_ratios), default=1) or 1

    @property
    def num_engram_columns(self) -> int:
        """Table rows read per token and Engram layer: one per n-gram size (2..max) and hash head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    # --- reading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_dir(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder. Raises ConfigError with the path when it cannot be used."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; give a checkpoint folder that holds config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as err:  # the last: nested too deeply
            raise ConfigError(f"{path} is not valid JSON ({err}); write the released config.json there") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold a JSON object, not {type(raw).__name__}")
        return cls.from_json(raw)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ModelConfig:
        """Build from the parsed released layout (top level plus nested `text_config`)."""
        model_type = raw.get("model_type")
        if model_type != MODEL_TYPE:
            raise ConfigError(f"model_type={model_type!r} is not supported; use a checkpoint of type {MODEL_TYPE!r}")
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError("text_config is missing from config.json; use the released nested layout")
        for key, wanted in _FIXED.items():
            if text.get(key, wanted) != wanted:
                raise ConfigError(f"text_config.{key}={text[key]!r} is not supported; only {wanted!r} is")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name not in text or field.name in _TOP_LEVEL:
                continue
            values[field.name] = _coerce(f"text_config.{field.name}", text[field.name], str(field.type))
        missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in values]
        if missing:
            raise ConfigError(f"text_config lacks {', '.join(missing)}; use a complete released config.json")
        eos = raw.get("eos_token_id", 1)
        vision = raw.get("vision_config") or {}
        if not isinstance(vision, dict):
            raise ConfigError(f"vision_config={vision!r} must be an object; correct config.json")
        values.update(
            bos_token_id=_coerce("bos_token_id", raw.get("bos_token_id", 0), "int"),
            eos_token_ids=_coerce("eos_token_id", eos if isinstance(eos, list) else [eos], "tuple[int, ...]"),
            pad_token_id=_coerce("pad_token_id", raw.get("pad_token_id", 2), "int"),
            image_token_id=_coerce("image_token_id", raw.get("image_token_id", -1), "int"),
            vision_layers=_coerce("vision_config.num_hidden_layers", vision.get("num_hidden_layers", 0), "int"),
        )
        config = cls(**values)
        if config.engram_layer_ids and config.engram_max_ngram_size < 2:
            raise ConfigError(f"engram_max_ngram_size={config.engram_max_ngram_size} must be at least 2; correct "
                              "config.json")  # fmt: skip
        for name in ("bos_token_id", "pad_token_id"):
            token_id = getattr(config, name)
            if name in raw and not 0 <= token_id < config.vocab_size:
                raise ConfigError(f"{name}={token_id} must be a token id below vocab_size={config.vocab_size}; correct "
                                  "config.json")  # fmt: skip
        return config

    def to_json(self) -> dict[str, Any]:
        """The released nested layout, such that `from_json(c.to_json()) == c` for a model without its draft."""
        text: dict[str, Any] = {"model_type": "deepseek_v41_text", **_FIXED}
        for field in dataclasses.fields(self):
            if field.name not in _TOP_LEVEL:
                value = getattr(self, field.name)
                text[field.name] = list(value) if isinstance(value, tuple) else value
        text["rope_scaling"] = {"rope_type": "yarn", **dataclasses.asdict(self.rope_scaling)}
        eos = list(self.eos_token_ids)
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": MODEL_TYPE,
            "dtype": "bfloat16",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos,
            "pad_token_id": self.pad_token_id,
            "image_token_id": self.image_token_id,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                "weight_block_size": [32, 32], "expert_dtype": "fp4",
            },
            "text_config": text,
            "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": self.vision_layers},
        }


# Settings of the released file that change the arithmetic and that we implement in one form only.
_FIXED = {"num_key_value_heads": 1, "hidden_act": "silu", "attention_bias": False, "scoring_func": "sqrtsoftplus",
          "topk_method": "noaux_tc"}  # fmt: skip
_TOP_LEVEL = {"bos_token_id", "eos_token_ids", "pad_token_id", "image_token_id", "vision_layers",
              "num_speculative_tokens"}  # fmt: skip


def _last_at_most(ids: tuple[int, ...], layer: int) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _coerce(name: str, value: Any, kind: str) -> Any:
    """Check one JSON value against the field's declared type. Integers are accepted where floats are declared."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if kind == "int" and is_int:
        if abs(value) > _LARGEST:
            raise ConfigError(f"{name}={value} must be between -{_LARGEST} and {_LARGEST}; correct config.json")
        return value
    if kind == "float" and (is_int or isinstance(value, float)):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name}={value} is too large for a float; correct config.json") from None
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "tuple[int, ...]" and isinstance(value, list):
        return tuple(_coerce(f"{name}[{i}]", item, "int") for i, item in enumerate(value))
    if kind == "RopeScaling" and isinstance(value, dict):
        scaling_type = value.get("rope_type", value.get("type", "yarn"))
        if scaling_type != "yarn":
            raise ConfigError(f"{name}.rope_type={scaling_type!r} is not supported; only 'yarn' is")
        known = {f.name: str(f.type) for f in dataclasses.fields(RopeScaling)}
        return RopeScaling(**{k: _coerce(f"{name}.{k}", value[k], t) for k, t in known.items() if k in value})
    raise ConfigError(f"{name}={value!r} must be of type {kind}; correct config.json")
