"""Which exchange a program uses: as the settings say, or by bytes and platform."""

from __future__ import annotations

from typing import Literal

from widemesh.sharding.exchange.all_gather import AllGatherExchange
from widemesh.sharding.exchange.in_order import BatchInvariantExchange
from widemesh.sharding.exchange.interface import Exchange
from widemesh.sharding.exchange.local import LocalExchange
from widemesh.sharding.exchange.ragged import RaggedExchange
from widemesh.sharding.exchange.traffic import LayerShape, Traffic, all_gather_traffic, ragged_traffic

Form = Literal["local", "all_gather", "ragged"]
Wish = Literal["auto", "all_gather", "ragged"]

# A ragged exchange packs its rows, tells the counts ahead and waits for them: two collectives more per layer and a copy
# of the rows. What it saves must be worth that: 20 us, in which a link of 400 GB/s moves these bytes.
_MIN_SAVED_BYTES = 8 << 20
# A ring keeps every link busy all the time, and uneven pieces do not: a ragged byte counts a third more.
_MAX_SHARE = 0.75


def choose_form(wish: Wish, shape: LayerShape, platform: str) -> Form:
    """`wish`, or for "auto" the cheaper one; one rank needs none.

    The ragged form is chosen where the platform has the collective (not on a "cpu") and its bytes per rank and layer
    are both at most three quarters of the gathering form's and 8 MiB fewer. The shares are arithmetic, the two bounds
    are estimates that no machine with several GPUs has confirmed.
    """
    if shape.ranks == 1:
        return "local"
    if wish != "auto":
        return wish
    gathered, ragged = all_gather_traffic(shape).total, ragged_traffic(shape).total
    pays = ragged <= _MAX_SHARE * gathered and gathered - ragged >= _MIN_SAVED_BYTES
    return "ragged" if pays and platform != "cpu" else "all_gather"


def make_exchange(form: Form, *, axis: str, platform: str, batch_invariant: bool = False) -> Exchange:
    """The exchange of this form over a mesh axis of devices of `platform`."""
    exchange: Exchange = LocalExchange()
    if form == "all_gather":
        exchange = AllGatherExchange(axis=axis)
    elif form == "ragged":
        exchange = RaggedExchange(axis=axis, is_native=platform != "cpu")
    return BatchInvariantExchange(exchange=exchange) if batch_invariant else exchange


def exchange_traffic(form: Form, shape: LayerShape) -> Traffic:
    """Closed form of what an exchange moves per rank and layer."""
    if form == "local":
        return Traffic(dispatch=0, combine=0)
    return all_gather_traffic(shape) if form == "all_gather" else ragged_traffic(shape)
