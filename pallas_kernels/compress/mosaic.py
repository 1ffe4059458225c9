"""Compression into pages in one pass. One kernel for Hopper and Blackwell, no tensor core.

    block = E = 2048 / H entries (4 at H = 512), 128 threads

    values, gates (or ring) of an entry ── softmax over the group ──> SMEM latent [E, H / 16, 16]
    thread (e, g) takes the 16 values of quantisation group g of entry e:
        norm (sum over the threads of an entry), back to SMEM for the key, rotate, E2M1 codes, E4M3 scale
    thread j takes key value j of every entry: sum over H of key_weight[j] * latent (128 KiB from L2 per block)
    thread (e, q) takes the 32 key values of group q of entry e: norm, rotate, E2M1 codes, power-of-two scale
    records ── SMEM ──> pages, at their place; the block of a request's first entry then brings its ring up to date

Entry, key and scales are computed for every candidate group and stored for those that are complete and new. The first
group of a request is the only one that reads the ring, so the block that has it may write the ring afterwards.

Floor: values and gates in (8 H bytes a token; 4 H at ratio 1), 356 B a new entry out, a ring row per token that stays.
Bytes bound it; the key product is H * 128 multiply-adds an entry.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.compress import layouts
from widemesh.pallas_kernels.compress.encode import encode_mxfp4_columns, encode_nvfp4_columns, rounded
from widemesh.pallas_kernels.compress.reference import num_groups
from widemesh.pallas_kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.thread_rows import THREADS, sum_rows

_HEADS = (256, 512)  # latent sizes whose groups of 16 the threads of a block can share
_IN_FLIGHT = 4  # pieces of 16 columns of the key weight that a thread waits for together
_PAD = 4  # floats behind each group in SMEM: columns of groups then meet in 8 banks instead of 2


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
    bf16_rounding: bool,
) -> tuple[UInt8[Array, "pages page_bytes"], Float[Array, "B open 2 H"]]:
    """See `op.compress_and_store`. Raises ValueError for sizes that the kernel cannot share out."""
    requests, steps, head = values.shape
    index_dim, pairs = key_weight.shape[0], cos.shape[1]
    _check(head, index_dim, pairs, source)
    if 0 in (requests, steps):
        return pages, ring
    ratio, candidates = source.ratio, num_groups(steps, source.ratio) if gates is not None else steps
    together, groups, key_groups = 2048 // head, head // NVFP4_GROUP, index_dim // MXFP4_GROUP
    half, key_half = NVFP4_GROUP // 2, MXFP4_GROUP // 2
    turned, key_turned = groups - pairs // half, key_groups - pairs // key_half  # groups from here on are rotated
    open_rows, capacity = ring.shape[1], table.shape[1] * source.rows
    by_group, by_key_group = layouts.grid(together, groups), layouts.grid(together, key_groups)
    pooling, by_key = layouts.rows16(groups), layouts.key_rows(key_groups)

    def compress_kernel(  # type: ignore[no-untyped-def]
        pages_ref, ring_ref, values_ref, gates_ref, norm_ref, key_ref, key_norm_ref, cos_ref, sin_ref, key_cos_ref,
        key_sin_ref, start_ref, length_ref, from_ref, table_ref, latent, keys, turn, key_turn, record, scales,
        key_record, key_scales,
    ):  # fmt: skip
        first = lax.axis_index("block") * together
        for n, neutral in enumerate((1.0, 0.0)):
            store(turn.at[n], jnp.full(turn.shape[1:], neutral, jnp.float32))
            store(key_turn.at[n], jnp.full(key_turn.shape[1:], neutral, jnp.float32))
        plgpu.commit_smem()

        def place(e: Array) -> tuple[Array, Array, Array]:
            """Request, entry number, and the request's place among its candidates, of entry e of the block."""
            at = jnp.minimum(first + e, requests * candidates - 1)
            b, m = at // candidates, at % candidates
            return b, start_ref[b] // ratio + m, m

        def gather(e: Array, _: None) -> None:
            b, index, _m = place(e)
            tokens = [_token(b, index * ratio + j - start_ref[b], j) for j in range(ratio)]
            store(latent.at[e, :, pl.ds(0, NVFP4_GROUP)], rounded(_pool(tokens), bf16_rounding), optimized=False)
            position = jnp.clip(index * ratio, 0, cos.shape[0] - 1)
            for n, table_of in enumerate((cos_ref, sin_ref)):
                row = plgpu.load(table_of.at[position], layout=layouts.small(pairs // half, half), optimized=False)
                store(turn.at[n, e, pl.ds(turned, pairs // half)], row, optimized=False)
            for n, table_of in enumerate((key_cos_ref, key_sin_ref)):
                wide = layouts.small(pairs // key_half, key_half)
                row = plgpu.load(table_of.at[position], layout=wide, optimized=False)
                store(key_turn.at[n, e, pl.ds(key_turned, pairs // key_half)], row, optimized=False)

        def _token(b: Array, row: Array, j: int) -> list[Array]:
            """Value (and gate) of a token of a group, from this step or, before it, from the ring."""
            refs = [values_ref] if gates_ref is None else [values_ref, gates_ref]
            inside = jnp.clip(row, 0, steps - 1)

            def now() -> tuple[Array, ...]:
                return tuple(plgpu.load(ref.at[b, inside], layout=pooling, optimized=False) for ref in refs)

            def before() -> tuple[Array, ...]:
                slot = lax.rem(jnp.maximum(row + start_ref[b], 0), open_rows)
                return tuple(plgpu.load(ring_ref.at[b, slot, n], layout=pooling, optimized=False) for n in range(2))

            return list(now() if j == ratio - 1 else lax.cond(row >= 0, now, before))

        lax.fori_loop(0, together, gather, None)
        plgpu.commit_smem()

        def column(ref: Any, c: int, layout: Any) -> Array:
            return plgpu.load(ref.at[:, :, c], layout=layout, optimized=False)

        def across(vector: Array, dim: int, like: Array, layout: Any) -> Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(vector, like.shape, (dim,)), layout)

        def normed(columns: list[Array], weight_ref: Any, layout: Any, size: int) -> list[Array]:
            square = columns[0] * columns[0]
            for value in columns[1:]:
                square += value * value
            inverse = across(lax.rsqrt(jnp.sum(square, axis=1) * (1.0 / size) + eps), 0, square, layout)
            found = []
            for c, value in enumerate(columns):
                weight = plgpu.load(weight_ref.at[:, c], layout=layout.reduce(0), optimized=False)
                found.append(rounded(across(weight, 1, square, layout) * (value * inverse), bf16_rounding))
            return found

        def rotated(columns: list[Array], turn_ref: Any, layout: Any) -> list[Array]:
            found = []
            for i in range(len(columns) // 2):
                cosine, sine = (column(turn_ref.at[n], i, layout) for n in range(2))
                even, odd = columns[2 * i], columns[2 * i + 1]
                found += [even * cosine - odd * sine, even * sine + odd * cosine]
            return [rounded(value, bf16_rounding) for value in found]

        entry = [column(latent, c, by_group) for c in range(NVFP4_GROUP)]
        entry = normed(entry, norm_ref, by_group, head)
        for c, value in enumerate(entry):
            store(latent.at[:, :, c], value, optimized=False)
        plgpu.commit_smem()
        codes, scale = encode_nvfp4_columns(rotated(entry, turn, by_group))
        for i, byte in enumerate(codes):
            store(record.at[:, :, i], byte, optimized=False)
        store(scales, scale, optimized=False)

        def product(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            at = [step * _IN_FLIGHT + n for n in range(_IN_FLIGHT)]
            weights = [plgpu.load(key_ref.at[:, :, g], layout=by_key, optimized=False) for g in at]
            found = list(sums)
            for g, weight in zip(at, weights, strict=True):
                wide = weight.astype(jnp.float32)
                for e in range(together):
                    x = latent.at[e, g, pl.ds(0, NVFP4_GROUP)]
                    x = plgpu.load(x, layout=by_key.reduce((0, 1)), optimized=False)
                    x = plgpu.layout_cast(lax.broadcast_in_dim(x, wide.shape, (2,)), by_key)
                    found[e] += sum_rows(wide * x, axis=2)
            return tuple(found)

        zero = plgpu.layout_cast(jnp.zeros((key_groups, MXFP4_GROUP), jnp.float32), by_key.reduce(2))
        for e, key in enumerate(lax.fori_loop(0, groups // _IN_FLIGHT, product, (zero,) * together)):
            store(keys.at[e, :, pl.ds(0, MXFP4_GROUP)], rounded(key, bf16_rounding), optimized=False)
        plgpu.commit_smem()
        key = [column(keys, c, by_key_group) for c in range(MXFP4_GROUP)]
        key = rotated(normed(key, key_norm_ref, by_key_group, index_dim), key_turn, by_key_group)
        codes, scale = encode_mxfp4_columns(key)
        for i, byte in enumerate(codes):
            store(key_record.at[:, :, i], byte, optimized=False)
        store(key_scales, scale, optimized=False)
        plgpu.commit_smem()

        def put(e: Array, _: None) -> None:
            b, index, m = place(e)
            complete = (index + 1) * ratio <= start_ref[b] + length_ref[b]
            is_new = complete & (index * ratio >= from_ref[b]) & (index < capacity)

            @pl.when((first + e < requests * candidates) & is_new)
            def _store() -> None:
                page, row = table_ref[b, index // source.rows], lax.rem(index, source.rows)
                begin = source.row_offset + row * source.row.num_bytes
                _copy(record.at[e], pages_ref.at[page, pl.ds(begin, source.row.value_bytes)])
                begin += source.row.value_bytes
                _copy(scales.at[e], pages_ref.at[page, pl.ds(begin, source.row.scale_bytes)])
                begin = source.key_offset + row * source.key.value_bytes
                _copy(key_record.at[e], pages_ref.at[page, pl.ds(begin, source.key.value_bytes)])
                begin = source.key_scale_offset + row * source.key.scale_bytes
                _copy(key_scales.at[e], pages_ref.at[page, pl.ds(begin, source.key.scale_bytes)])

            if gates_ref is not None:

                @pl.when((first + e < requests * candidates) & (m == 0))
                def _remember() -> None:
                    lax.fori_loop(
                        0, jnp.minimum(length_ref[b], min(steps, open_rows)), lambda n, _: remember(b, n), None
                    )

        def remember(b: Array, n: Array) -> None:
            """The n-th newest row of a request to its place in the ring."""
            row = length_ref[b] - 1 - n
            slot = lax.rem(start_ref[b] + row, open_rows)
            for i, ref in enumerate((values_ref, gates_ref)):
                kept = plgpu.load(ref.at[b, row], layout=pooling, optimized=False)
                store(ring_ref.at[b, slot, i], kept, optimized=False)

        lax.fori_loop(0, together, put, None)

    def without_gates(pages_ref, values_ref, *refs):  # type: ignore[no-untyped-def]
        compress_kernel(pages_ref, None, values_ref, None, *refs)

    without_gates.__name__ = "compress_kernel"
    kernel = plgpu.kernel(
        compress_kernel if gates is not None else without_gates,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((together, groups, NVFP4_GROUP + _PAD), jnp.float32),
            plgpu.SMEM((together, key_groups, MXFP4_GROUP + _PAD), jnp.float32),
            plgpu.SMEM((2, together, groups, half), jnp.float32),
            plgpu.SMEM((2, together, key_groups, key_half), jnp.float32),
            plgpu.SMEM((together, groups, half), jnp.uint8),
            plgpu.SMEM((together, groups), jnp.uint8),
            plgpu.SMEM((together, key_groups, key_half), jnp.uint8),
            plgpu.SMEM((together, key_groups), jnp.uint8),
        ],
        grid=(-(-requests * candidates // together),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),  # the other semantics' choice of layouts cannot take padded rows of SMEM
        **kernel_options(),
    )

    def cut(x: Array, size: int) -> Array:
        return x.reshape(*x.shape[:-1], -1, size)

    pages_box, values = jax.new_ref(pages), cut(values, NVFP4_GROUP)
    ring_box = None if gates is None else jax.new_ref(cut(ring, NVFP4_GROUP))
    kernel(
        *((pages_box, values) if gates is None else (pages_box, ring_box, values, cut(gates, NVFP4_GROUP))),
        cut(norm_weight, NVFP4_GROUP), key_weight.reshape(key_groups, MXFP4_GROUP, groups, NVFP4_GROUP),
        cut(key_norm_weight, MXFP4_GROUP), cut(cos, half), cut(sin, half), cut(cos, key_half), cut(sin, key_half),
        start, length, write_from, table,
    )  # fmt: skip
    return jax.freeze(pages_box), ring if ring_box is None else jax.freeze(ring_box).reshape(ring.shape)


def _pool(tokens: list[list[Array]]) -> Array:
    """Softmax-weighted sum over the tokens of a group, elementwise; one token is its value."""
    if len(tokens) == 1:
        return tokens[0][0]
    largest = tokens[0][1]
    for _, gate in tokens[1:]:
        largest = jnp.maximum(largest, gate)
    shares = [jnp.exp(gate - largest) for _, gate in tokens]
    total, weighted = shares[0], shares[0] * tokens[0][0]
    for share, (value, _) in zip(shares[1:], tokens[1:], strict=True):
        total, weighted = total + share, weighted + share * value
    return weighted / total


def _copy(record: Any, where: Any) -> None:
    """A record in SMEM, whatever its shape, to the same bytes of a page."""
    store(where, layouts.load_flat(record, where.shape[-1]), optimized=False)


def _check(head: int, index_dim: int, pairs: int, source: SourceLayout) -> None:
    if source.row.code != "nvfp4" or source.key.code != "mxfp4":
        raise ValueError(
            f"rows of code {source.row.code!r} and keys of {source.key.code!r} cannot be written by the GPU kernel; "
            "use packed records, or implementation='reference'"
        )
    if head not in _HEADS:
        near = min(_HEADS, key=lambda size: abs(size - head))
        raise ValueError(f"head_dim={head} must be one of {_HEADS} for the GPU kernel; the nearest is {near}")
    if index_dim != THREADS:
        raise ValueError(f"index_dim={index_dim} must be {THREADS} for the GPU kernel, one key value a thread")
    if pairs % (MXFP4_GROUP // 2) or not 0 < 2 * pairs <= index_dim:
        raise ValueError(f"pairs={pairs} of the rotation must be 16, 32, 48 or 64 for the GPU kernel")
