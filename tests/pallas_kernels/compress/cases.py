"""Inputs of compression into pages, and what must come out, token by token in NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from widemesh.pallas_kernels.compress import compress_and_store
from widemesh.pallas_kernels.layout import PageLayout
from widemesh.pallas_kernels.paged_cache import encode_vectors

EPS = 1e-20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Two requests unless the tuples say otherwise."""

    ratio: int
    start: tuple[int, ...]
    length: tuple[int, ...]
    write_from: tuple[int, ...] | None = None
    rows: int = 6
    open_rows: int = 3
    head: int = 64
    index: int = 32
    pairs: int = 8
    page_size: int = 4
    record: str = "packed"
    bf16: bool = False

    @property
    def source(self):
        """The second of two sources, so that its parts do not begin at 0."""
        layout = PageLayout.build(page_size=self.page_size, ratios=(1, self.ratio), head_dim=self.head,
                                  index_dim=self.index, record=self.record)  # fmt: skip
        return layout.sources[1], layout.page_bytes


def make(case: Case, seed: int = 0) -> dict:
    """Arrays by argument name. Pages hold old bytes; tables point at every page but 0, in a shuffled order."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    requests, positions, per_request = len(case.start), 24, 6
    _, page_bytes = case.source
    angle = np.arange(positions)[:, None] * 0.3 ** np.arange(case.pairs)
    return {
        "values": normal(requests, case.rows, case.head),
        "gates": normal(requests, case.rows, case.head) if case.ratio > 1 else None,
        "ring": normal(requests, case.open_rows if case.ratio > 1 else 0, 2, case.head),
        "norm_weight": 1 + 0.1 * normal(case.head),
        "key_weight": normal(case.index, case.head),
        "key_norm_weight": 1 + 0.1 * normal(case.index),
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
        "start": np.asarray(case.start, np.int32),
        "length": np.asarray(case.length, np.int32),
        "write_from": np.asarray(case.write_from or (0,) * requests, np.int32),
        "pages": rng.integers(0, 256, (1 + requests * per_request, page_bytes), dtype=np.uint8),
        "table": 1 + rng.permutation(requests * per_request).reshape(requests, -1).astype(np.int32),
    }


def run(case: Case, data: dict, **keywords):
    """The op on `make`'s arrays."""
    settings = {"source": case.source[0], "eps": EPS, "bf16_rounding": case.bf16, **keywords}
    return jax.jit(functools.partial(compress_and_store, **settings))(**jax.tree.map(jnp.asarray, data))


def expected(case: Case, data: dict) -> tuple[np.ndarray, np.ndarray]:
    """Pages and ring, in float64 but for the roundings that the case asks for."""
    source, _ = case.source
    pages, ring, ratio = data["pages"].copy(), data["ring"].copy(), case.ratio
    kept = (lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)) if case.bf16 else (lambda x: x)
    unit = lambda x, weight: kept(weight * x / np.sqrt((x * x).mean() + EPS))  # noqa: E731
    for b, (start, length) in enumerate(zip(case.start, case.length, strict=True)):
        for i in range(length):
            position = start + i
            if (position + 1) % ratio == 0 and position + 1 - ratio >= data["write_from"][b]:
                tokens = range(position + 1 - ratio, position + 1)
                latent = unit(kept(_pool(data, ring, b, start, tokens)), data["norm_weight"])
                key = unit(kept(data["key_weight"].astype(np.float64) @ latent), data["key_norm_weight"])
                entry, key = (kept(_rotate(x, data, tokens[0])).astype(np.float32) for x in (latent, key))
                _store(pages, data["table"][b], position // ratio, entry, key, source)
    if ratio > 1:
        for b, (start, length) in enumerate(zip(case.start, case.length, strict=True)):
            for i in range(length):
                row = (start + i) % ring.shape[1]
                ring[b, row] = data["values"][b, i], data["gates"][b, i]
    return pages, ring


def _pool(data, ring, b, start, tokens):
    if data["gates"] is None:
        return data["values"][b, tokens[0] - start].astype(np.float64)
    rows = [(data["values"][b, q - start], data["gates"][b, q - start]) if q >= start else ring[b, q % ring.shape[1]]
            for q in tokens]  # fmt: skip
    values, gates = np.asarray([row[0] for row in rows], np.float64), np.asarray([row[1] for row in rows], np.float64)
    share = np.exp(gates - gates.max(0))
    return (share / share.sum(0) * values).sum(0)


def _rotate(x, data, position):
    cos, sin, dims = data["cos"][position], data["sin"][position], 2 * data["cos"].shape[1]
    out, even, odd = x.copy(), x[-dims::2], x[-dims + 1 :: 2]
    out[-dims::2], out[-dims + 1 :: 2] = even * cos - odd * sin, even * sin + odd * cos
    return out


def _store(pages, table, index, entry, key, source):
    page, place = pages[table[index // source.rows]], index % source.rows
    begin = source.row_offset + place * source.row.num_bytes
    page[begin : begin + source.row.num_bytes] = _bytes(entry, source.row)
    record, size = _bytes(key, source.key), source.key.value_bytes
    page[source.key_offset + place * size :][:size] = record[:size]
    scales = source.key.scale_bytes
    page[source.key_scale_offset + place * scales :][:scales] = record[size:]


def _bytes(x, layout):
    return x.view(np.uint8) if layout.code == "f32" else np.asarray(encode_vectors(x, layout))
