"""Page accounts: exact after every operation, tails evicted before heads, equal contents kept once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widemesh.serving.scheduling import PagePool, hash_pages
from widemesh.serving.scheduling.hash_index import HashIndex
from widemesh.serving.scheduling.prefix_cache import count_hits, find_prefix


def chain(pages: int, seed: int = 0) -> np.ndarray:
    """Hashes of a prompt's pages."""
    return hash_pages(np.arange(seed * 1000, seed * 1000 + pages, dtype=np.int32), 1)


def cached(pool: PagePool, hashes: np.ndarray) -> np.ndarray:
    """Put a prompt into the cache; its pages."""
    pages = pool.allocate(len(hashes))
    pool.retire(pages, hashes)
    return pages


def test_all_pages_but_the_null_page_are_given_out_once() -> None:
    pool = PagePool(9)
    pages = np.concatenate([pool.allocate(3), pool.allocate(5)])
    assert sorted(pages.tolist()) == list(range(1, 9)) and pages.dtype == np.int32
    assert pool.allocate(1) is None and pool.allocate(0).size == 0
    pool.check()


def test_released_pages_without_hash_are_free() -> None:
    pool = PagePool(9)
    pages = pool.allocate(8)
    pool.release(pages[:3])
    pool.check()
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 0, 5)


def test_releasing_what_nobody_holds_is_an_error() -> None:
    pool = PagePool(9)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release(pages)
    pool.check()


def test_retired_pages_are_found_and_shared() -> None:
    pool, hashes = PagePool(9), chain(3)
    pages = cached(pool, hashes)
    assert np.array_equal(pool.find(hashes), pages) and pool.num_cached == 3
    for _ in range(2):
        pool.touch(pages)
        pool.check()
    assert pool.num_used == 3
    pool.release(pages)
    assert pool.num_used == 3
    pool.release(pages)
    pool.check()
    assert (pool.num_cached, pool.num_free) == (3, 5)


def test_free_pages_go_before_cached_ones_and_the_least_recently_used_prompt_first() -> None:
    pool = PagePool(9)
    old, new = chain(3, 1), chain(3, 2)
    cached(pool, old)
    cached(pool, new)
    pool.touch(pool.find(old))
    pool.release(pool.find(old))  # used again: `new` is the older one now
    assert pool.allocate(2) is not None and pool.num_evicted == 0
    assert pool.allocate(3) is not None
    assert (count_hits(pool, old), count_hits(pool, new)) == (3, 0)
    pool.check()


def test_tails_are_evicted_before_heads() -> None:
    pool, hashes = PagePool(6), chain(5)
    cached(pool, hashes)
    for left in (4, 3, 2, 1, 0):
        pool.allocate(1)
        assert (pool.find(hashes) > 0).tolist() == [True] * left + [False] * (5 - left)
        pool.check()


def test_a_second_copy_stays_without_hash_and_frees_only_itself() -> None:
    pool, hashes = PagePool(9), chain(3)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.retire(first, hashes)
    pool.touch(first)  # somebody reads the first copy while the second is retired
    pool.retire(second, hashes)
    pool.check()
    assert np.array_equal(pool.find(hashes), first)
    assert (pool.num_used, pool.num_free, pool.num_cached) == (3, 5, 0)
    pool.release(first)
    pool.check()
    assert pool.num_cached == 3


def test_a_chain_held_by_two_copies_is_evicted_from_its_end() -> None:
    pool, hashes = PagePool(9), chain(4)
    second = pool.allocate(4)
    cached(pool, hashes[:2])
    pool.retire(second, hashes)  # pages 0 and 1 stay with the first copy, which is older
    for left in (3, 2, 1, 0):
        pool.allocate(pool.num_free + 1)
        assert (pool.find(hashes) > 0).tolist() == [True] * left + [False] * (4 - left)
        pool.check()


def test_flush_keeps_pages_with_their_holders() -> None:
    pool, hashes = PagePool(9), chain(4)
    pages = cached(pool, hashes)
    pool.touch(pages[:2])
    pool.flush()
    pool.check()
    assert count_hits(pool, hashes) == 0 and (pool.num_used, pool.num_free) == (2, 6)
    pool.release(pages[:2])
    pool.check()
    assert pool.num_free == 8


def test_finding_a_prompt_again_and_again_costs_no_memory() -> None:
    pool, hashes = PagePool(9), chain(4)
    cached(pool, hashes)
    for _ in range(100):
        pages = pool.find(hashes)
        pool.touch(pages)
        pool.retire(pages, hashes)
        pool.check()  # bounds the entries of the eviction list
    assert pool.num_cached == 4


@pytest.mark.parametrize("held", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 199, 200])
def test_hits_are_counted_exactly(held: int) -> None:
    pool, hashes = PagePool(400), chain(200)
    cached(pool, hashes[:held])
    assert count_hits(pool, hashes) == held
    assert np.array_equal(find_prefix(pool, hashes), pool.find(hashes[:held]))
    assert count_hits(pool, hashes[: held // 2]) == held // 2


def test_hits_are_counted_in_few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, hashes = PagePool(20000), chain(13359)
    cached(pool, hashes[:12001])
    asked: list[int] = []
    monkeypatch.setattr(pool, "find", lambda h: (asked.append(len(h)), PagePool.find(pool, h))[1])
    assert count_hits(pool, hashes) == 12001
    assert len(asked) <= 4 and sum(asked) <= 130


def test_index_after_much_coming_and_going_still_walks_shortly() -> None:
    rng = np.random.default_rng(0)
    index, names = HashIndex(257), {}
    for turn in range(300):
        gone = rng.permutation(list(names))[: len(names) // 2].astype(np.int32)
        index.remove(gone)
        for page in gone.tolist():
            del names[page]
        fresh = np.setdiff1d(np.arange(1, 257, dtype=np.int32), list(names))
        fresh = rng.permutation(fresh)[: rng.integers(0, len(fresh) + 1)]
        hashes = rng.integers(0, 256, (len(fresh), 16), dtype=np.uint8)
        hashes[:, 0] %= 4  # crowd the home cells
        index.insert(fresh, hashes)
        names.update(zip(fresh.tolist(), hashes, strict=True))
        if names:
            assert np.array_equal(index.find(np.stack(list(names.values()))), np.array(list(names)))
        assert (index.find(rng.integers(0, 256, (16, 16), dtype=np.uint8)) == -1).all(), turn
    index.remove(np.array(list(names), np.int32))
    assert (index._cells == 0).all(), "marks are left that nothing needs"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 12)), max_size=60))
def test_random_operations(steps: list[tuple[int, int, int]]) -> None:
    pool = PagePool(20)
    prompts = [chain(12, seed) for seed in range(3)] + [chain(6, 0), chain(9, 1), chain(3, 2)]
    held: list[tuple[int, np.ndarray]] = []
    for kind, which, value in steps:
        if kind <= 1:  # a request comes, hits what there is and takes new pages
            hashes = prompts[which][:value]
            hit = find_prefix(pool, hashes[: count_hits(pool, hashes)])
            if len(hashes) - len(hit) <= pool.num_available - pool.count_idle(hit):
                pool.touch(hit)
                held.append((which, np.concatenate([hit, pool.allocate(len(hashes) - len(hit))])))
        elif kind == 2 and held:  # leaves, its pages stay
            which, pages = held.pop(value % len(held))
            full = value % (len(pages) + 1) if value % 2 else len(pages)
            pool.release(pages[full:])
            pool.retire(pages[:full], prompts[which][:full])
        elif kind == 3 and held:  # leaves without trace
            pool.release(held.pop(value % len(held))[1])
        elif kind == 4 and value == 0:
            pool.flush()
            held = []
            pool = PagePool(20)
        pool.check()
        references = np.bincount(np.concatenate([np.zeros(0, int), *(p for _, p in held)]), minlength=20)
        assert np.array_equal(references, pool.references())
        for hashes in prompts:
            is_held = pool.find(hashes) > 0
            assert np.array_equal(is_held, np.arange(len(hashes)) < count_hits(pool, hashes)), "a prefix has a hole"
