"""The queue: by priority, in it preempted requests first, then by arrival."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from widemesh.serving.scheduling.request import RequestState, ScheduledRequest

_Key = tuple[int, bool, int]


class WaitingQueue[RequestT: ScheduledRequest]:
    """A sorted list. A request's key does not change while it is in."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._requests: list[RequestT] = []
        self.num_tokens = 0  # known tokens of all

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._requests)

    def first(self, count: int) -> list[RequestT]:
        """The first `count`, as a list of its own."""
        return self._requests[:count]

    def add(self, request: RequestT) -> None:
        """Put it in its place."""
        key = _key(request)
        place = bisect.bisect(self._keys, key)
        self._keys.insert(place, key)
        self._requests.insert(place, request)
        self.num_tokens += request.num_tokens

    def remove(self, request: RequestT) -> None:
        """Take it out."""
        place = bisect.bisect_left(self._keys, _key(request))
        if place == len(self._requests) or self._requests[place] is not request:
            raise ValueError(f"request {request.request_id!r} is not waiting")
        del self._keys[place], self._requests[place]
        self.num_tokens -= request.num_tokens


def _key(request: ScheduledRequest) -> _Key:
    return request.priority, request.state is not RequestState.PREEMPTED, request.arrival
