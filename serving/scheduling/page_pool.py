"""The pages of one rank: which are free, which are in use and by how many, which are kept for their contents."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
from jaxtyping import Bool, Int32, UInt8

from widemesh.serving.scheduling.hash_index import HashIndex


@dataclasses.dataclass(eq=False)
class _Segment:
    """Pages that became idle together, first to be evicted first. An entry whose stamp is out of date is void."""

    stamp: int
    pages: Int32[np.ndarray, "n"]
    next: int = 0  # entries before it are used up


class PagePool:
    """Reference counts, a free list and a least-recently-used list of cached pages.

    Every page but the null page 0 is free, used (referenced) or cached (not referenced, but found by its hash).
    All operations take many pages at once and cost O(1) numpy work per page, amortised. A list of pages names no
    page twice. Only pages whose contents are final may be retired with a hash.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.version = 0  # changes whenever `find` may answer differently
        self.num_evicted = 0  # cached pages given to somebody else, since start
        self._refs = np.zeros(num_pages, np.int32)
        self._is_hashed = np.zeros(num_pages, bool)
        self._index = HashIndex(num_pages)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack of `num_free` entries, low ids on top
        self._num_free = num_pages - 1
        self._idle: collections.deque[_Segment] = collections.deque()
        self._idle_entries = 0  # void ones included
        self._stamp = np.zeros(num_pages, np.int64)  # of the page's entry in `_idle`; 0 = none
        self._last_stamp = 0
        self._num_cached = 0

    @property
    def num_usable(self) -> int:
        """Pages that can be given out at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages with no contents."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Pages kept for their contents only."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_usable - self._num_free - self._num_cached

    @property
    def num_available(self) -> int:
        """Most pages that `allocate` can give now."""
        return self._num_free + self._num_cached

    def allocate(self, count: int) -> Int32[np.ndarray, "count"] | None:
        """So many pages, each with one reference, or None when there are not enough. Evicts only when none is free."""
        if count > self.num_available:
            return None
        fresh = min(count, self._num_free)
        self._num_free -= fresh
        pages = self._free[self._num_free : self._num_free + fresh][::-1].copy()
        if count > fresh:
            pages = np.concatenate([pages, self._evict(count - fresh)])
        self._refs[pages] = 1
        return pages

    def find(self, hashes: UInt8[np.ndarray, "n 16"]) -> Int32[np.ndarray, "n"]:
        """The page that holds each hash's tokens, -1 where none does. Takes no reference."""
        return self._index.find(hashes)

    def count_idle(self, pages: Int32[np.ndarray, "n"]) -> int:
        """How many of these pages nobody holds."""
        return int(np.count_nonzero(self._refs[pages] == 0))

    def touch(self, pages: Int32[np.ndarray, "n"]) -> None:
        """One more reference to pages that `find` gave."""
        self._num_cached -= self.count_idle(pages)
        self._stamp[pages] = 0
        self._refs[pages] += 1

    def release(self, pages: Int32[np.ndarray, "n"]) -> None:
        """One reference less to each page of a request, given in the order of its tokens."""
        idle = self._drop(pages)
        self._set_idle(idle[self._is_hashed[idle]])

    def retire(self, pages: Int32[np.ndarray, "n"], hashes: UInt8[np.ndarray, "n 16"]) -> None:
        """`release` of a request's first pages, which stay findable by their hashes.

        A hash that another page has stays with it: this page is freed when its last holder leaves. The chain of
        pages that `find` answers becomes the most recently used, its head last, so that a page is never evicted
        before the pages that come after it in a prompt.
        """
        chain = pages.copy()
        unnamed = np.flatnonzero(~self._is_hashed[pages])  # a page that has a hash was found by it
        if unnamed.size:
            found = self._index.find(hashes.take(unnamed, axis=0))  # `take` is ten times faster than indexing here
            is_new = found < 0
            added = pages[unnamed[is_new]]
            self._index.insert(added, hashes.take(unnamed[is_new], axis=0))
            self._is_hashed[added] = True
            self.version += 1
            chain[unnamed[~is_new]] = found[~is_new]
        was_cached = int(np.count_nonzero(self._stamp[chain]))
        self._drop(pages)
        self._num_cached -= was_cached  # counted again just below
        self._set_idle(chain[self._refs[chain] == 0])

    def flush(self) -> None:
        """Forget all contents. Pages in use stay with their holders."""
        cached = self._cached_pages()
        self._index.clear()
        self._is_hashed[:] = False
        self._stamp[:] = 0
        self._idle.clear()
        self._idle_entries = self._num_cached = 0
        self._push_free(cached)
        self.version += 1

    def references(self) -> Int32[np.ndarray, "num_pages"]:
        """A copy of the reference counts."""
        return self._refs.copy()

    def _drop(self, pages: Int32[np.ndarray, "n"]) -> Int32[np.ndarray, "m"]:
        """Take one reference from each; free those without holder and hash. Returns all without holder."""
        left = self._refs[pages] - 1
        if left.size and (left.min() < 0 or pages.min() < 1):
            raise ValueError("a page was released that nobody holds")
        self._refs[pages] = left
        idle = pages[left == 0]
        self._push_free(idle[~self._is_hashed[idle]])
        return idle

    def _push_free(self, pages: Int32[np.ndarray, "n"]) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _set_idle(self, chain: Int32[np.ndarray, "n"]) -> None:
        """Make these pages, in token order, the last to be evicted, tail first."""
        if not chain.size:
            return
        self._last_stamp += 1
        self._stamp[chain] = self._last_stamp
        self._idle.append(_Segment(self._last_stamp, chain[::-1].copy()))
        self._num_cached += len(chain)
        self._idle_entries += len(chain)
        if self._idle_entries > 2 * self.num_pages:  # pages that were found again left void entries behind
            self._compact()

    def _compact(self) -> None:
        kept = collections.deque[_Segment]()
        for segment in self._idle:
            pages = segment.pages[segment.next :]
            pages = pages[self._stamp[pages] == segment.stamp]
            if pages.size:
                kept.append(_Segment(segment.stamp, pages))
        self._idle = kept
        self._idle_entries = self._num_cached

    def _evict(self, count: int) -> Int32[np.ndarray, "count"]:
        """Take the `count` least recently used cached pages out of the cache."""
        taken: list[Int32[np.ndarray, "n"]] = []
        left = count
        while left:
            segment = self._idle[0]
            pages = segment.pages[segment.next : segment.next + left]
            segment.next += len(pages)
            self._idle_entries -= len(pages)
            if segment.next == len(segment.pages):
                self._idle.popleft()
            pages = pages[self._stamp[pages] == segment.stamp]
            left -= len(pages)
            taken.append(pages)
        evicted = np.concatenate(taken)
        self._index.remove(evicted)
        self._is_hashed[evicted] = False
        self._stamp[evicted] = 0
        self._num_cached -= count
        self.num_evicted += count
        self.version += 1
        return evicted

    def _cached_pages(self) -> Int32[np.ndarray, "n"]:
        return np.flatnonzero(self._is_hashed & (self._refs == 0)).astype(np.int32)

    def check(self) -> None:
        """Assert every invariant. Costs time of the pool's size; for tests."""
        refs, free = self._refs, self._free[: self._num_free]
        is_free = np.zeros(self.num_pages, bool)
        is_free[free] = True
        assert np.count_nonzero(is_free) == self._num_free, "a page is free twice"
        assert not is_free[0] and refs[0] == 0 and not self._is_hashed[0], "the null page was given out"
        assert refs.min() >= 0
        is_cached: Bool[np.ndarray, "num_pages"] = self._is_hashed & (refs == 0)
        is_used: Bool[np.ndarray, "num_pages"] = refs > 0
        assert np.array_equal(is_free.astype(int) + is_cached + is_used, np.arange(self.num_pages) > 0)
        assert self._num_free + self._num_cached + self.num_used == self.num_usable
        assert np.count_nonzero(is_cached) == self._num_cached and np.count_nonzero(is_used) == self.num_used
        entries = [(s.stamp, p) for s in self._idle for p in s.pages[s.next :].tolist()]
        assert len(entries) == self._idle_entries <= 2 * self.num_pages
        in_order = [page for stamp, page in entries if self._stamp[page] == stamp]
        assert sorted(in_order) == np.flatnonzero(is_cached).tolist(), "the eviction list is not the cached pages"
        assert np.array_equal(self._stamp > 0, is_cached)
        hashed = np.flatnonzero(self._is_hashed).astype(np.int32)
        assert sorted(self._index.pages().tolist()) == hashed.tolist()
        assert np.array_equal(self._index.find(self._index.key_bytes(hashed)), hashed), "two pages have one hash"
