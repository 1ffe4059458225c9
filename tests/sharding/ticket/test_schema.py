"""Fields and merges, without a network."""

from __future__ import annotations

import numpy as np
import pytest

from widemesh.sharding.ticket import Field, LocalTicket, Merge, TicketError, TicketMismatch, TicketSchema


def merge(kind: Merge, *values: int, position: tuple[int, ...] | None = None):
    """One field of several ranks, whose rows lie at `position`."""
    schema = TicketSchema((Field("other", "max"), Field("x", kind)))
    size = schema.row_bytes
    rows = memoryview(bytearray(size * len(values)))
    position = position or tuple(range(len(values)))
    for rank, value in enumerate(values):
        start = position[rank] * size
        schema.pack({"x": value, "other": -rank}, rows[start : start + size])
    return schema.merge(rows, position)


@pytest.mark.parametrize(
    ("kind", "values", "merged"),
    [
        ("equal", (7, 7, 7), 7),
        ("max", (-5, 3, -7), 3),
        ("max", (-5, -3, -7), -3),
        ("min", (-5, 3, -7), -7),
        ("sum", (-5, 3, -7), -9),
        ("sum", (2**31 - 1, 2**31 - 1, 1), 2**32 - 1),
        ("any", (0, 0, 0), 0),
        ("any", (0, -4, 0), 1),
        ("all", (3, -4, 1), 1),
        ("all", (3, 0, 1), 0),
    ],
)
def test_merge(kind, values, merged):
    assert merge(kind, *values).value("x") == merged
    assert merge(kind, *values, position=(2, 0, 1)).value("x") == merged


def test_by_rank_is_in_rank_order_wherever_the_rows_lie():
    merged = merge("max", 10, 20, 30, 40, position=(3, 1, 0, 2))
    assert merged.by_rank("x").tolist() == [10, 20, 30, 40] and merged.by_rank("x").dtype == np.int32
    assert merge("any", 0, -4, 1).by_rank("x").tolist() == [0, 1, 1]


def test_the_first_rank_that_differs_is_named():
    with pytest.raises(TicketMismatch, match="x=4 on rank 0 but x=5 on rank 2; all ranks must") as caught:
        merge("equal", 4, 4, 5, 6, position=(3, 2, 1, 0))
    assert caught.value.rank == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((), "at least one"),
        ((("a", "max"), ("a", "min")), "each with a name of its own"),
        ((("a", "mean"),), "field 'a': merge='mean' is unknown; use one of"),
    ],
)
def test_wrong_fields(fields, words):
    with pytest.raises(TicketError, match=words):
        TicketSchema(tuple(Field(*field) for field in fields))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": 1}, r"lack \['b'\]"),
        ({"a": 1, "b": 2, "c": 3}, r"unknown \['c'\]"),
        ({"a": 1, "b": 2**31}, "32 bits"),
        ({"a": 1.5, "b": 2}, "32 bits"),
        (np.zeros(2, np.int64), "int64"),
        (np.zeros(3, np.int32), r"shape \(3,\)"),
    ],
)
def test_wrong_values(values, words):
    ticket = LocalTicket(TicketSchema((Field("a", "max"), Field("b", "max"))))
    with pytest.raises(TicketError, match=words):
        ticket.post(values)
    assert ticket.post({"a": 1, "b": 2}).wait().value("b") == 2  # nothing was begun


def test_a_vector_is_in_the_order_of_the_fields():
    schema = TicketSchema((Field("s", "sum"), Field("e", "equal"), Field("y", "any")))
    merged = LocalTicket(schema).post(np.array([3, 4, 5], np.int32)).wait()
    assert [merged.value(name) for name in "sey"] == [3, 4, 1]


def test_values_may_be_changed_after_post():
    ticket, values = LocalTicket(TicketSchema((Field("a", "max"),))), np.array([1], np.int32)
    pending = ticket.post(values)
    values[0] = 2
    assert pending.wait().value("a") == 1


def test_one_exchange_at_a_time():
    ticket = LocalTicket(TicketSchema((Field("a", "max"),)))
    ticket.post({"a": 1})
    with pytest.raises(TicketError, match="before the last exchange was waited for"):
        ticket.post({"a": 1})
