"""How attention reaches its keys: one interface, and a way for each form that a step reads its caches in.

`decoded_keys` decodes to f32 and hands values to its ops, on a CPU as masks or gathered entries; `packed_keys` hands
the bytes to ops that read them. The layers are the same for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from jaxtyping import Array, Float, UInt8

from widemesh.model import decoded_keys, packed_keys
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext

if TYPE_CHECKING:
    from widemesh.model.attention import Attention
    from widemesh.model.indexer import Indexer


class WindowKeys(Protocol):
    """Writing window rows and attending. The first gives what each form makes of the window rows of a step."""

    def write_window(
        self, attention: Attention, kv: Float[Array, "B S H"], ring: UInt8[Array, "B ring row_bytes"], shared: Shared,
        step: StepContext,
    ) -> tuple[Any, UInt8[Array, "B ring row_bytes"]]:
        """The window rows that this step's rows see, and the ring with this step's rows in it."""
        ...

    def attend(
        self, attention: Attention, q: Float[Array, "B S N H"], near: Any, shared: Shared, step: StepContext
    ) -> Float[Array, "B S N H"]:
        """Attention over the window rows and the selected entries."""
        ...


class Keys(WindowKeys, Protocol):
    """Also of layers with compressed entries: writing, viewing and choosing them."""

    def extend_source(
        self, attention: Attention, x: Float[Array, "B S D"], ring: Float[Array, "B open 2 H"], shared: Shared,
        step: StepContext,
    ) -> tuple[Shared, Float[Array, "B open 2 H"]]:
        """Compress this step's groups into the pages and put this source in view."""
        ...

    def view(self, attention: Attention, shared: Shared, step: StepContext) -> Shared:
        """Put this layer's source in view as its pages are now."""
        ...

    def select(
        self, indexer: Indexer, queries: Float[Array, "B S I J"], weights: Float[Array, "B S I"], shared: Shared,
        step: StepContext,
    ) -> Shared:
        """`shared` with this layer's selection (and candidates, if it is their source)."""
        ...


def keys_of(step: StepContext) -> Keys:
    """The way of this step's numerics."""
    return packed_keys if step.numerics.packed_weights else decoded_keys
