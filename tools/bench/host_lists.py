"""The way that `widemesh bench host` compares admission with: a prompt as a list of Python integers.

It is how engines that grew up with short prompts take one in: the list is copied where it changes hands, hashed page
by page on the engine's thread, each page is an object, every layer group has a list of them, and the groups of a
sliding window hold an entry for each page that they do not keep. Only the bench uses it.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pickle

import numpy as np
from jaxtyping import Int32

WINDOW_PAGE = 32  # tokens of a page of a window group
_FULL_GROUPS, _WINDOW_GROUPS = 1, 1  # page tables of each kind, the fewest that there can be


@dataclasses.dataclass(eq=False)
class _Page:
    page_id: int
    references: int = 0
    page_hash: bytes | None = None


@dataclasses.dataclass(eq=False)
class _Request:
    prompt: list[int]
    tokens: list[int]  # prompt and output
    hashes: list[bytes]
    tables: list[list[_Page]]  # of each group


class ListAdmission:
    """A pool of page objects and the buffers of one slot, for prompts of up to `max_len` tokens."""

    def __init__(self, page_size: int, max_len: int, window: int):
        self._page_size, self._window = page_size, window
        count = -(-max_len // page_size) + -(-window // WINDOW_PAGE) + 2
        self._null = _Page(0)
        self._free = collections.deque(_Page(i) for i in range(1, count))
        self._cached: dict[bytes, _Page] = {}
        self._slot_tokens = np.zeros(max_len, np.int32)
        self._slot_tables = [np.zeros(-(-max_len // size), np.int32) for size in self._page_sizes()]

    def admit(self, prompt: list[int]) -> Int32[np.ndarray, "N"]:
        """All that the engine's thread does before the first dispatch; the slot's tokens. The pages are freed again."""
        request = _Request(prompt=prompt, tokens=list(prompt), hashes=self._hashes(prompt), tables=[])
        hits = self._lookup(request.hashes)
        for size in self._page_sizes()[:_FULL_GROUPS]:
            fresh = [self._free.popleft() for _ in range(-(-len(prompt) // size) - len(hits))]
            request.tables.append([*hits, *fresh])
        for size in self._page_sizes()[_FULL_GROUPS:]:
            skipped = max(0, len(prompt) - self._window) // size
            fresh = [self._free.popleft() for _ in range(-(-len(prompt) // size) - skipped)]
            request.tables.append([*[self._null] * skipped, *fresh])
        for table in request.tables:
            for page in table:
                page.references += 1
        # What the worker is told of a new request: its page ids by group, its prompt, and what is to be prefilled.
        page_ids = [[page.page_id for page in table] for table in request.tables]
        new_prompt, to_prefill = list(request.prompt), list(request.tokens)
        staged: list[int] = []
        staged.extend(to_prefill)
        self._slot_tokens[: len(staged)] = np.array(staged, np.int32)
        assert len(new_prompt) == len(staged)
        for row, ids in zip(self._slot_tables, page_ids, strict=True):
            row[: len(ids)] = np.array(ids, np.int32)
        self._release(request)
        return self._slot_tokens[: len(prompt)]

    def _page_sizes(self) -> list[int]:
        return [self._page_size] * _FULL_GROUPS + [WINDOW_PAGE] * _WINDOW_GROUPS

    def _hashes(self, prompt: list[int]) -> list[bytes]:
        parent, found = b"", []
        for start in range(0, len(prompt) - self._page_size + 1, self._page_size):
            page = tuple(prompt[start : start + self._page_size])
            parent = hashlib.sha256(pickle.dumps((parent, page), pickle.HIGHEST_PROTOCOL)).digest()
            found.append(parent)
        return found

    def _lookup(self, hashes: list[bytes]) -> list[_Page]:
        hits = []
        for one in hashes:
            page = self._cached.get(one)
            if page is None:
                break
            hits.append(page)
        return hits

    def _release(self, request: _Request) -> None:
        for table in request.tables:
            for page in table:
                page.references -= 1
                if page is not self._null and page.references == 0:
                    self._free.append(page)
