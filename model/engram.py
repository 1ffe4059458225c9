"""The Engram sublayer: n-gram rows from a large table, gated into the residual streams.

Formula: docs/model.md, "Engram". The rows are hashed from token ids outside (`engram_hash`).
"""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float, Int32

from widemesh.model import packed_ops
from widemesh.model.config import ModelConfig
from widemesh.model.linear import Linear
from widemesh.model.params import param, value
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.engram_gate import engram_gate, engram_update


class EngramTable(nnx.Module):
    """Table of one layer, [rows, engram_head_dim]."""

    def __init__(self, rows: int, dim: int):
        self.weight = param((rows, "engram_rows"), (dim, "engram_columns"), stored="fp8_rows")


class Engram(nnx.Module):
    """Lookup, key and value projection, gate and update of one layer."""

    def __init__(self, config: ModelConfig, layer: int):
        self.config = config
        self.which = config.engram_layer_ids.index(layer)
        columns, streams, d = config.num_engram_columns, config.hc_mult, config.hidden_size
        self.embed = EngramTable(config.engram_num_embeddings[self.which], config.engram_head_dim)
        self.wkv = Linear(
            ((streams + 1) * d, "engram_out"), (columns * config.engram_head_dim, None), kind="quantised"
        )
        self.q_weight = param((streams, "streams"), (d, "embed"))
        self.k_weight = param((streams, "streams"), (d, "embed"))

    def __call__(self, streams: Float[Array, "B S C D"], step: StepContext) -> Float[Array, "B S C D"]:
        """Streams with the gated table value added to each."""
        num = step.numerics
        rows: Int32[Array, "B S columns"] = step.rows.engram_rows[:, :, self.which]
        out = (self._packed if num.packed_weights else self._decoded)(streams, rows, step)
        step.record("output", out)
        return out

    def _decoded(
        self, streams: Float[Array, "B S C D"], rows: Int32[Array, "B S columns"], step: StepContext
    ) -> Float[Array, "B S C D"]:
        b, s, c, d = streams.shape
        both = self.project(self._look_up(rows, step, lambda table, ids: table[ids]), step)
        key, val = both[..., : c * d].reshape(b, s, c, d), both[..., c * d :]
        qk = value(self.q_weight) * value(self.k_weight)
        gate = engram_gate(streams, key, qk, eps=self.config.rms_norm_eps)
        step.record("gate", gate)
        step.record("value", val)
        return step.numerics.store(engram_update(streams, gate, val))

    def _packed(
        self, streams: Float[Array, "B S C D"], rows: Int32[Array, "B S columns"], step: StepContext
    ) -> Float[Array, "B S C D"]:
        """The lookup reads bytes; gate and update are one pass over the streams."""
        num, kernels = step.numerics, step.settings.kernels
        flat = streams.reshape(-1, *streams.shape[2:])

        def read(table: Array, ids: Int32[Array, "M columns"]) -> Float[Array, "M columns H"]:
            found = packed_ops.engram_rows(table, ids, dtype=num.compute_dtype, implementation=kernels)
            return found.reshape(*ids.shape, -1)

        key_value = self.project(self._look_up(rows, step, read), step)
        out = packed_ops.engram_apply(
            flat, key_value.reshape(flat.shape[0], -1), value(self.q_weight), value(self.k_weight),
            eps=self.config.rms_norm_eps, implementation=kernels,
        )  # fmt: skip
        return out.reshape(streams.shape)

    def _look_up(
        self, rows: Int32[Array, "B S columns"], step: StepContext,
        read: Callable[[Array, Int32[Array, "M columns"]], Float[Array, "M columns H"]],
    ) -> Float[Array, "B S KH"]:  # fmt: skip
        """Rows of a table that lies in parts over the ranks, and each row over `tp`; those of a token side by side."""
        table, (b, s, columns) = value(self.embed.weight), rows.shape
        found = step.settings.exchange.look_up(
            rows.reshape(-1, columns), table.shape[0], lambda ids: read(table, ids)
        )
        return step.settings.tp.join(found).reshape(b, s, -1)

    def project(self, looked_up: Float[Array, "B S KH"], step: StepContext) -> Float[Array, "B S KV"]:
        """Keys of all streams and the value. Outputs are cut over `tp`, not inputs: joining them moves half the bytes
        of a sum, and changes no order of summation."""
        return step.settings.tp.join(self.wkv(looked_up, step.numerics))
