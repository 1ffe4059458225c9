"""The MoE exchange: rows to the ranks that hold their experts, results back, lookups in tables in parts."""

from widemesh.sharding.exchange.all_gather import AllGatherExchange
from widemesh.sharding.exchange.choose import Form, Wish, choose_form, exchange_traffic, make_exchange
from widemesh.sharding.exchange.in_order import BatchInvariantExchange
from widemesh.sharding.exchange.interface import Dispatched, Exchange
from widemesh.sharding.exchange.local import LocalExchange
from widemesh.sharding.exchange.ragged import RaggedExchange
from widemesh.sharding.exchange.traffic import (
    LayerShape,
    RoutedTraffic,
    Traffic,
    all_gather_traffic,
    expected_ranks,
    look_up_traffic,
    ragged_traffic,
    routed_ragged_traffic,
)

__all__ = [
    "AllGatherExchange",
    "BatchInvariantExchange",
    "Dispatched",
    "Exchange",
    "Form",
    "LayerShape",
    "LocalExchange",
    "RaggedExchange",
    "RoutedTraffic",
    "Traffic",
    "Wish",
    "all_gather_traffic",
    "choose_form",
    "exchange_traffic",
    "expected_ranks",
    "look_up_traffic",
    "make_exchange",
    "ragged_traffic",
    "routed_ragged_traffic",
]  # fmt: skip
