"""The deltas of one request, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from widemesh.serving.request import Delta
from widemesh.serving.samples import Samples


class DeltaStream(AsyncIterator[Delta]):
    """Deltas of one request. Leaving the iteration early, by `aclose` or by cancellation, aborts the request."""

    def __init__(
        self, samples: Samples, arrived: asyncio.Queue[Delta], abort: Callable[[], None], drop: Callable[[], None]
    ):
        """`drop` aborts too; it is for the destructor, and takes no lock."""
        self.request_id = samples.request_id
        self._samples, self._arrived, self._abort, self._drop = samples, arrived, abort, drop
        self._is_done = False

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_done:
            raise StopAsyncIteration
        delta = None
        while delta is None:  # one that comes after its sample's end is nobody's
            try:
                delta = self._samples.take(await self._arrived.get())
            except asyncio.CancelledError:
                await self.aclose()
                raise
        self._is_done = self._samples.is_done
        return delta

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._is_done:
            self._is_done = True
            self._abort()

    def __del__(self) -> None:
        if not self._is_done:
            self._drop()
