"""Packed caches with known contents: random keys written as bytes, the rest of every buffer filled with noise."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from widemesh.pallas_kernels.formats import decode_fp8_rows, decode_nvfp4, encode_fp8_rows, encode_nvfp4
from widemesh.pallas_kernels.layout import PageLayout

ENCODE = {"fp8": encode_fp8_rows, "nvfp4": encode_nvfp4}
DECODE = {"fp8": decode_fp8_rows, "nvfp4": decode_nvfp4}


def records(x, layout):
    """Bytes of f32 vectors, and what they decode to. In NumPy: nothing to compile."""
    if layout.code == "f32":
        return x.view(np.uint8), x
    parts = ENCODE[layout.code](x)
    return np.concatenate(parts, axis=-1), DECODE[layout.code](*parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCase:
    """Requests of different lengths over one page pool; the arguments of `attend_packed` and what they decode to."""

    heads: int = 4
    dim: int = 32
    window: int = 8
    page_size: int = 8
    ratios: tuple[int, ...] = (2,)
    source: int = 0
    rows: int = 3  # query rows per request
    k: int = 12
    start: tuple[int, ...] = (0, 5, 37)
    first: tuple[int, ...] = (0, 2, 0)
    ring: int | None = 16  # None: the rows of the chunk and the window before it
    selected: float = 0.6  # share of the entries each row sees that are selected
    record: str = "packed"
    seed: int = 0

    @property
    def layout(self):
        return PageLayout.build(page_size=self.page_size, ratios=self.ratios, head_dim=self.dim,
                                index_dim=128 if self.dim == 512 else 32, record=self.record)  # fmt: skip

    @property
    def static(self):
        """The keyword arguments."""
        return {"source": self.layout.sources[self.source], "window_layout": self.layout.window, "window": self.window}

    def build(self):
        """(positional arguments, decoded window rows [B, positions, H], decoded entries [B, L, H])."""
        rng = np.random.default_rng(self.seed)
        layout, source, b = self.layout, self.layout.sources[self.source], len(self.start)
        end = max(self.start) + self.rows
        pages_per_request = -(-end // self.page_size)
        start = np.array(self.start, np.int32)

        keys = rng.standard_normal((b, end, self.dim)).astype(np.float32)
        window_bytes, window_keys = records(keys, layout.window)
        kept, origin = self._window(window_bytes, start, rng)

        latent = rng.standard_normal((b, pages_per_request * source.rows, self.dim)).astype(np.float32)
        entry_bytes, entry_keys = records(latent, source.row)
        num_pages = b * pages_per_request + 2
        table = rng.permutation(num_pages)[: b * pages_per_request].reshape(b, -1).astype(np.int32)
        pages = rng.integers(0, 256, (num_pages, layout.page_bytes), dtype=np.uint8)
        region = slice(source.row_offset, source.row_offset + source.rows * source.row.num_bytes)
        pages[table, region] = entry_bytes.reshape(b, pages_per_request, -1)

        indices = np.full((b, self.rows, self.k), -1, np.int32)
        for i, r in np.ndindex(b, self.rows):
            visible = (self.start[i] + r + 1) // source.ratio
            chosen = np.flatnonzero(rng.random(visible) < self.selected)[: self.k]
            indices[i, r, : len(chosen)] = chosen
        q = rng.standard_normal((b, self.rows, self.heads, self.dim)).astype(np.float32) * 2
        sink = rng.standard_normal(self.heads).astype(np.float32)
        args = (q, kept, origin, start, np.array(self.first, np.int32), pages, table, indices, sink)
        return tuple(jnp.asarray(x) for x in args), window_keys, entry_keys

    def _window(self, rows, start, rng):
        """The window rows as they are kept, noise where no row of a seen position lies, and their origin."""
        b, size = len(start), self.ring or self.window - 1 + self.rows
        kept = rng.integers(0, 256, (b, size, rows.shape[-1]), dtype=np.uint8)
        origin = np.zeros(b, np.int32) if self.ring else (start - (self.window - 1)).astype(np.int32)
        for i in range(b):
            for p in range(max(0, self.first[i], start[i] - self.window + 1), start[i] + self.rows):
                kept[i, (p - origin[i]) % size] = rows[i, p]
        return kept, origin
