"""Named shapes of the grouped MoE: the released model on 8 ranks, and small ones for the interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.grouped_moe.packed import PackedExperts, PackedMatrix
from widemesh.pallas_kernels.grouped_moe.tiles import GROUP


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeShape:
    """What a rank's experts get in one step: rows of all ranks, of whose pairs `1 / ranks` choose an expert here."""

    name: str
    rows: int  # T
    per_token: int  # K
    held: int  # X
    hidden: int  # D
    width: int  # F
    ranks: int = 1

    @property
    def pairs(self) -> float:
        """Expected pairs whose expert is held here, all experts being equally likely."""
        return self.rows * self.per_token / self.ranks

    @property
    def touched(self) -> float:
        """Expected experts held here with at least one row."""
        return self.held * (1 - (1 - self.per_token / (self.held * self.ranks)) ** self.rows)

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of one expert's three matrices."""
        return 3 * self.hidden * self.width // 2 + 3 * self.hidden * self.width // GROUP

    @property
    def floor_bytes(self) -> float:
        """Touched experts and bfloat16 rows read once, the f32 result written once."""
        return self.touched * self.expert_bytes + self.rows * self.hidden * (2 + 4)

    @property
    def floor_flops(self) -> float:
        """2 per weight and pair."""
        return 6.0 * self.hidden * self.width * self.pairs

    def moved_bytes(self, block_rows: int) -> float:
        """What crosses HBM with blocks of `block_rows`: matrices once (an expert's further blocks find them in the
        second-level cache), and every intermediate written and read."""
        places = self.pairs + self.touched * (block_rows - 1) / 2  # half of the last block is empty
        quantised = self.rows * self.hidden * (2 + 2 + 2)  # x read twice (group maxima, values), written
        gathered = places * self.hidden * (2 + 2) + places * self.hidden * 2
        inner, partial = places * self.width * (2 + 2), places * self.hidden * 2 + self.pairs * self.hidden * 2
        return self.touched * self.expert_bytes + quantised + gathered + inner + partial + self.rows * self.hidden * 4

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, PackedExperts]:
        """x, slots, weights and experts of `grouped_moe_packed`, as shapes."""
        into, out = (self.held, self.width, self.hidden), (self.held, self.hidden, self.width)
        pairs = (self.rows, self.per_token)
        experts = PackedExperts(w1=_matrix(into), w3=_matrix(into), w2=_matrix(out))
        x = jax.ShapeDtypeStruct((self.rows, self.hidden), jnp.bfloat16)
        return x, jax.ShapeDtypeStruct(pairs, jnp.int32), jax.ShapeDtypeStruct(pairs, jnp.float32), experts


def _matrix(shape: tuple[int, int, int]) -> PackedMatrix:
    held, rows, columns = shape
    codes, scales = (held, rows, columns // 2), (held, rows, columns // GROUP)
    # Shapes stand where arrays will: the dataclass is the tree of both.
    return PackedMatrix(
        codes=jax.ShapeDtypeStruct(codes, jnp.uint8),  # type: ignore[arg-type]
        scales=jax.ShapeDtypeStruct(scales, jnp.uint8),  # type: ignore[arg-type]
    )


_RELEASED = {"per_token": 6, "held": 48, "hidden": 5120, "width": 2304, "ranks": 8}

DECODE = MoeShape(name="decode", rows=512, **_RELEASED)  # 64 slots a rank
VERIFY = MoeShape(name="verify", rows=3072, **_RELEASED)  # 6 rows per slot
PREFILL = MoeShape(name="prefill", rows=16384, **_RELEASED)  # 2048 rows a rank
TINY = MoeShape(name="tiny", rows=11, per_token=2, held=3, hidden=256, width=256)
TINY_BLACKWELL = MoeShape(name="tiny Blackwell", rows=11, per_token=2, held=3, hidden=512, width=256)
