"""Moving a different number of rows between every two ranks, without gaps on either side.

`counts` [R, R] says how many rows each rank (first axis) sends to each (second axis); every rank knows all of it. A
rank's rows lie in order of the rank they go to, and arrive in order of the rank they come from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def send_rows(
    rows: Shaped[Array, "N W"], counts: Int32[Array, "R R"], *, axis: str, room: int, is_native: bool
) -> Shaped[Array, "room W"]:
    """This rank's rows to where they go, and what arrives here; zeros past it. `room` must hold what arrives.

    `is_native=False` is the stand-in for platforms without the collective, as CPUs: the same result from an all-gather.
    """
    me = jax.lax.axis_index(axis)
    begins_here = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts  # [from, to], among the rows of `from`
    begins_there = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts  # [from, to], among what arrives at `to`
    output = jnp.zeros((room, *rows.shape[1:]), rows.dtype)
    if is_native:
        return jax.lax.ragged_all_to_all(
            rows, output, begins_here[me], counts[me], begins_there[me], counts[:, me], axis_name=axis
        )
    return _stand_in(rows, output, begins_here, counts, begins_there, axis)


def _stand_in(
    rows: Shaped[Array, "N W"], output: Shaped[Array, "room W"], begins_here: Int32[Array, "R R"],
    counts: Int32[Array, "R R"], begins_there: Int32[Array, "R R"], axis: str,
) -> Shaped[Array, "room W"]:  # fmt: skip
    """`ragged_all_to_all` for offsets and sizes that every rank knows, of slices that do not overlap."""
    me = jax.lax.axis_index(axis)
    everywhere = jax.lax.all_gather(rows, axis)  # [R, N, W]
    place = jnp.arange(output.shape[0], dtype=jnp.int32)[:, None]
    past = place - begins_there[:, me]  # [room, R] into the slice of each rank
    arrives = (past >= 0) & (past < counts[:, me])
    source = jnp.argmax(arrives, axis=1)
    index = begins_here[source, me] + jnp.take_along_axis(past, source[:, None], axis=1)[:, 0]
    return jnp.where(arrives.any(axis=1)[:, None], everywhere[source, index], output)
