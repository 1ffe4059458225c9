"""What layers hand upwards within one forward step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from widemesh.model.cache import Cache
from widemesh.model.config import ModelConfig
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.layout import PageLayout
from widemesh.pallas_kernels.sparse_attention import Selection, empty_selection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """Sources replace their part, consumers read it."""

    pages: UInt8[Array, "pages page_bytes"]
    table: Int32[Array, "B P"]
    # Decoded from the source below; L = 0 where they are read from the pages, as attention by indices does with
    # entries and packed numerics with both.
    entries: Float[Array, "B L H"]
    index_keys: Float[Array, "B L J"]
    selection: Selection
    candidates: Bool[Array, "B S L"] | Int32[Array, "B S C"]  # a mask, or under packed numerics block numbers
    features: tuple[Float[Array, "B S D"], ...]  # for the draft: of each layer that feeds it, so far
    layout: PageLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def start(cls, cache: Cache, config: ModelConfig, step: StepContext) -> Shared:
        """Below the first source: pages, and nothing in view."""
        b, s = step.rows.tokens.shape
        return cls(
            pages=cache.pages,
            table=cache.table,
            entries=jnp.zeros((b, 0, config.head_dim)),
            index_keys=jnp.zeros((b, 0, config.index_head_dim)),
            selection=empty_selection(step.settings.selection, b, s),
            candidates=jnp.zeros((b, s, 0), bool),
            features=(),
            layout=cache.layout,
        )

    def feed(self, streams: Float[Array, "B S C D"], step: StepContext) -> Shared:
        """With the mean of the streams that enter a layer (after Engram) as one more feature."""
        mean = step.numerics.round(jnp.mean(streams.astype(jnp.float32), axis=2))
        return dataclasses.replace(self, features=(*self.features, mean))
