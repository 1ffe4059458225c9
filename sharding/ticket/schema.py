"""The named fields of a ticket and how the values of all ranks become one.

F fields, N ranks. A rank's part is a row of F int32. Rows are merged as Python integers: at the sizes that occur (12
fields, 16 ranks) that takes about half the time of numpy's calls.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Int32

from widemesh.sharding.ticket.errors import TicketError, TicketMismatch

Merge = Literal["equal", "max", "min", "sum", "all", "any"]

# A column of all ranks' values to one. Truth values are 0 or 1 by then, and equal ones have been compared.
_MERGES: dict[Merge, Callable[[list[int]], int]] = {
    "equal": max, "max": max, "min": min, "sum": sum, "all": min, "any": max,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Field:
    """One int32 of the ticket. `equal` refuses ranks that differ; `any` and `all` take 0 as false, the rest as true."""

    name: str
    merge: Merge

    def __post_init__(self) -> None:
        if self.merge not in _MERGES:
            raise TicketError(f"field {self.name!r}: merge={self.merge!r} is unknown; use one of {get_args(Merge)}")


class Merged:
    """What all ranks agreed on in one exchange; the same on every rank but for `wait_s` and `last_rank`."""

    __slots__ = ("_columns", "_position", "_rows", "_values", "last_rank", "wait_s")

    def __init__(self, columns: dict[str, int], values: list[int], rows: list[int], position: Sequence[int]):
        self._columns, self._values, self._rows, self._position = columns, values, rows, position
        self.wait_s = 0.0  # that `wait` took
        self.last_rank = 0  # whose part came last, as far as this rank can tell

    def value(self, name: str) -> int:
        """The merged value of a field; sums are exact beyond int32."""
        return self._values[self._columns[name]]

    def by_rank(self, name: str) -> Int32[np.ndarray, "N"]:
        """Every rank's own value, in rank order (0 or 1 for `any` and `all`)."""
        column = self._rows[self._columns[name] :: len(self._columns)]
        return np.array([column[place] for place in self._position], np.int32)


class TicketSchema:
    """Fields in the order in which vectors hold them. All ranks must use the same ones."""

    def __init__(self, fields: tuple[Field, ...]):
        self.fields = tuple(fields)
        self._names = [field.name for field in self.fields]
        self._columns = {name: i for i, name in enumerate(self._names)}
        if not self.fields or len(self._columns) < len(self.fields):
            raise TicketError(f"ticket fields {self._names} must be at least one, each with a name of its own")
        self._truths = [i for i, field in enumerate(self.fields) if field.merge in ("all", "any")]
        self._equals = [i for i, field in enumerate(self.fields) if field.merge == "equal"]
        self._merges = [(i, _MERGES[field.merge]) for i, field in enumerate(self.fields)]
        self._row = struct.Struct(f"={len(self.fields)}i")

    @property
    def row_bytes(self) -> int:
        """Size of one rank's part."""
        return self._row.size

    def __str__(self) -> str:
        return ",".join(f"{field.name}:{field.merge}" for field in self.fields)

    def pack(self, values: Mapping[str, int] | Int32[np.ndarray, "F"], row: memoryview) -> None:
        """Write a rank's values into the bytes of its row. Raises TicketError for a missing, unknown or wrong one."""
        if isinstance(values, np.ndarray):
            if values.dtype != np.int32 or values.shape != (len(self.fields),):
                raise TicketError(
                    f"ticket values of type {values.dtype} and shape {values.shape}; use int32 of ({len(self.fields)},)"
                )
            numbers = values.tolist()
        else:
            try:
                numbers = [values[name] for name in self._names]
            except KeyError:
                raise TicketError(self._complaint(values)) from None
            if len(values) != len(numbers):
                raise TicketError(self._complaint(values))
        for i in self._truths:
            numbers[i] = 1 if numbers[i] else 0
        try:
            self._row.pack_into(row, 0, *numbers)
        except struct.error:
            raise TicketError(f"ticket values {values} must all be integers of 32 bits") from None

    def merge(self, rows: memoryview, position: Sequence[int]) -> Merged:
        """The merged ticket of all ranks' rows, of which rank i's is at `position[i]`.

        Raises TicketMismatch, the same on every rank, if a field that must be equal is not.
        """
        numbers: list[int] = rows.cast("i").tolist()
        width = len(self.fields)
        for i in self._equals:
            column = numbers[i::width]
            if column.count(column[0]) < len(column):
                raise self._mismatch(i, [column[place] for place in position])
        values = [merge(numbers[i::width]) for i, merge in self._merges]
        return Merged(self._columns, values, numbers, position)

    def _mismatch(self, field: int, by_rank: list[int]) -> TicketMismatch:
        name, first = self._names[field], by_rank[0]
        rank = next(rank for rank, value in enumerate(by_rank) if value != first)
        return TicketMismatch(
            f"{name}={first} on rank 0 but {name}={by_rank[rank]} on rank {rank}; all ranks must take the same steps, "
            "restart them together",
            rank,
        )

    def _complaint(self, values: Mapping[str, Any]) -> str:
        missing = [name for name in self._names if name not in values]
        unknown = [name for name in values if name not in self._columns]
        return f"ticket values lack {missing} and have unknown {unknown}; give one for each field of {self}"
