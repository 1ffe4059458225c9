"""Compression into pages, against a token-by-token reading of the formulas in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.compress.cases import Case, expected, make, run


@pytest.mark.parametrize("case", [
    Case(ratio=2, start=(0, 3), length=(6, 5)),  # from an even and an odd position: a group across a chunk edge
    Case(ratio=2, start=(5, 4), length=(1, 1), rows=1),  # decode: one completes its group, one does not
    Case(ratio=1, start=(0, 7), length=(6, 2)),
    Case(ratio=4, start=(2, 5), length=(3, 0), open_rows=5),
    Case(ratio=2, start=(4, 2), length=(6, 6), write_from=(7, 20)),  # the entry of tokens 6, 7 is cached
    Case(ratio=2, start=(4, 2), length=(6, 6), record="f32"),
    Case(ratio=2, start=(4, 1), length=(6, 6), bf16=True),
], ids=str)  # fmt: skip
def test_pages_and_ring(case):
    data = make(case)
    pages, ring = run(case, data, implementation="reference")
    wanted_pages, wanted_ring = expected(case, data)
    np.testing.assert_array_equal(ring, wanted_ring)
    pages = np.asarray(pages)
    untouched = wanted_pages == data["pages"]
    assert not untouched.all() and (pages[untouched] == wanted_pages[untouched]).mean() > 0.999
    if case.record == "f32":
        found, wanted = (x[~untouched.all(1)].view(np.float32) for x in (pages, wanted_pages))
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5, equal_nan=True)
    else:
        assert (pages == wanted_pages).mean() > 0.999  # codes may differ at a rounding edge


def test_nothing_is_written_for_idle_slots():
    case = Case(ratio=2, start=(3, 8), length=(0, 0))
    data = make(case)
    pages, ring = run(case, data, implementation="reference")
    assert np.array_equal(pages, data["pages"]) and np.array_equal(ring, data["ring"])


def test_chunks_of_any_size_store_the_same():
    whole = Case(ratio=2, start=(0, 0), length=(7, 6), rows=8)
    data = make(whole)
    wanted, wanted_ring = run(whole, data, implementation="reference")
    pages, ring, cuts = data["pages"], data["ring"], (0, 3, 4, 8)
    for begin, end in itertools.pairwise(cuts):
        length = [np.clip(n - begin, 0, end - begin) for n in whole.length]
        rows = {"values": data["values"][:, begin:end], "gates": data["gates"][:, begin:end]}
        place = {"start": np.full(2, begin, np.int32), "length": np.asarray(length, np.int32)}
        piece = data | rows | place | {"pages": pages, "ring": ring}
        pages, ring = run(whole, piece, implementation="reference")
    assert np.array_equal(ring, wanted_ring)
    assert (np.asarray(pages) == np.asarray(wanted)).mean() > 0.999  # products of other shapes sum in another order


def test_bad_shapes_name_the_remedy():
    case = Case(ratio=2, start=(0, 0), length=(6, 6))
    data = make(case)
    with pytest.raises(ValueError, match="ratio 2 takes gates"):
        run(case, data | {"gates": None}, implementation="reference")
    with pytest.raises(ValueError, match="needs 1"):
        run(case, data | {"ring": data["ring"][:, :0]}, implementation="reference")
    with pytest.raises(ValueError, match="columns"):
        run(case, data | {"values": jnp.zeros((2, 6, 40))}, implementation="reference")
