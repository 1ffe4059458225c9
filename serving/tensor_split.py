"""Whether a model's matrices can be cut into `tensor_parallel_size` equal parts."""

from __future__ import annotations

from collections.abc import Iterator

from widemesh.model.config import ConfigError, ModelConfig

_BLOCK = 32  # columns that share a scale, of activations and of FP8 and FP4 matrices
_UNQUANTISED = ("plain", "kvq")  # numerics without scales in front of a matrix that is cut


def check_split(model: ModelConfig, parts: int, numerics: str) -> None:
    """Raise ConfigError that names the first size of the model which so many parts do not divide."""
    for name, size, unit in _cuts(model, numerics) if parts > 1 else ():
        if size % (parts * unit):
            inside = "" if unit == 1 else f" into whole blocks of {unit}, which numerics={numerics!r} needs"
            raise ConfigError(
                f"tensor_parallel_size={parts} does not divide {name}={size}{inside}; use one of "
                f"{', '.join(map(str, possible_parts(model, numerics)))}"
            )


def refuse_packed(parts: int) -> None:
    """Raise ConfigError for packed weights in more than one part."""
    if parts > 1:
        raise ConfigError(
            f"tensor_parallel_size={parts} cannot be used with packed weights (numerics='serving' on a GPU), whose "
            "expert kernel takes widths in multiples of 256; use tensor_parallel_size=1, or numerics='kvq'"
        )


def possible_parts(model: ModelConfig, numerics: str) -> list[int]:
    """Numbers of parts that the model can be cut into, ascending."""
    return [parts for parts in range(1, model.num_attention_heads + 1)
            if parts == 1 or all(size % (parts * unit) == 0 for _, size, unit in _cuts(model, numerics))]  # fmt: skip


def _cuts(model: ModelConfig, numerics: str) -> Iterator[tuple[str, int, int]]:
    """Field, size and the smallest piece of each dimension that lies over `tp`.

    The inputs of w2 and of wo_b are quantised in blocks, each of which needs the largest of its values for its scale.
    """
    block = 1 if numerics in _UNQUANTISED else _BLOCK
    yield "num_attention_heads", model.num_attention_heads, 1
    yield "o_groups", model.o_groups, 1
    yield "o_groups * o_lora_rank", model.o_groups * model.o_lora_rank, block
    yield "moe_intermediate_size", model.moe_intermediate_size, block
    yield "vocab_size", model.vocab_size, 1
    if model.engram_layer_ids:
        yield "engram_head_dim", model.engram_head_dim, 1
        yield "(hc_mult + 1) * hidden_size", (model.hc_mult + 1) * model.hidden_size, 1
