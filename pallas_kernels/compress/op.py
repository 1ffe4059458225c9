"""Dispatch of compression into pages."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.compress import reference
from widemesh.pallas_kernels.gpu import Implementation, choose
from widemesh.pallas_kernels.layout import SourceLayout


def compress_and_store(
    values: Float[Array, "B S H"],
    gates: Float[Array, "B S H"] | None,
    ring: Float[Array, "B open 2 H"],
    norm_weight: Float[Array, "H"],
    key_weight: Float[Array, "J H"],
    key_norm_weight: Float[Array, "J"],
    cos: Float[Array, "positions pairs"],
    sin: Float[Array, "positions pairs"],
    start: Int32[Array, "B"],
    length: Int32[Array, "B"],
    write_from: Int32[Array, "B"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    *,
    source: SourceLayout,
    eps: float,
    bf16_rounding: bool = False,
    implementation: Implementation | None = None,
) -> tuple[UInt8[Array, "pages page_bytes"], Float[Array, "B open 2 H"]]:
    """Compress this step's tokens into entries and index keys, store those in the pages, and bring the ring up to date.

        pooled = sum over the group of softmax(gates) * values      (the value itself when `gates` is None: ratio 1)
        latent = norm(pooled) * norm_weight
        entry  = rotate(latent)                                     E2M1 codes, an E4M3 scale per 16
        key    = rotate(norm(key_weight latent) * key_norm_weight)  E2M1 codes, a power-of-two scale per 32

    Row i of request b is position start[b] + i; rows from length[b] on are padding. An entry has the position of its
    group's first token. It is stored when its group's last token is a valid row, unless it lies before
    write_from[b] (tokens): those entries are cached already and stay as they are. The ring holds values and gates of
    the newest tokens by position; it gives the tokens of the first group that came in earlier steps.

    `bf16_rounding` rounds to bfloat16 where the released engine holds it: pooled, latent, both key products, and
    the rotated vectors. On a GPU the pages are updated in place when the caller donates them.
    Raises ValueError when the arrays do not fit the source.
    """
    _check(values, gates, ring, source)
    function = reference.compress_and_store
    if choose("compress_and_store", implementation) == "mosaic":
        from widemesh.pallas_kernels.compress.mosaic import compress_and_store as function
    return function(
        values, gates, ring, norm_weight, key_weight, key_norm_weight, cos, sin, start, length, write_from, pages,
        table, source=source, eps=eps, bf16_rounding=bf16_rounding,
    )  # fmt: skip


def _check(values: Array, gates: Array | None, ring: Array, source: SourceLayout) -> None:
    if values.shape[-1] != source.row.dim:
        raise ValueError(f"values have {values.shape[-1]} columns and rows of the source {source.row.dim}; give these")
    if (gates is None) != (source.ratio == 1):
        need = "no gates (None)" if source.ratio == 1 else "gates of the shape of values"
        raise ValueError(f"a source of ratio {source.ratio} takes {need}")
    if ring.shape[1] < source.ratio - 1:
        raise ValueError(f"ring has {ring.shape[1]} rows; a source of ratio {source.ratio} needs {source.ratio - 1}")
