"""Compressed rows and keys through pages: byte for byte, at any page size, through any table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import encode_mxfp4, encode_nvfp4
from widemesh.pallas_kernels.layout import PageLayout, VectorLayout
from widemesh.pallas_kernels.paged_cache import (
    decode_vectors,
    encode_vectors,
    fake_quant,
    gather_rows,
    read_keys,
    read_rows,
    write_source,
)

H, J, RATIOS = 48, 40, (2, 4, 1)  # short last groups of 16 and of 32
RNG = np.random.default_rng(0)


def layout_of(page_size, record):
    return PageLayout.build(page_size=page_size, ratios=RATIOS, head_dim=H, index_dim=J, record=record)


def random_pages(layout, pages):
    """Bytes of earlier owners, any of them."""
    return jnp.asarray(RNG.integers(0, 256, (pages, layout.page_bytes), dtype=np.uint8))


@pytest.mark.parametrize("code", ["f32", "fp8", "nvfp4", "mxfp4"])
def test_records_round_trip_to_what_a_step_sees(code):
    layout = VectorLayout(code=code, dim=H)
    x = jnp.asarray(RNG.standard_normal((3, 5, H)) * 10.0 ** RNG.integers(-3, 3, (3, 5, 1)), jnp.float32)
    record = encode_vectors(x, layout)
    assert record.shape == (3, 5, layout.num_bytes) and record.dtype == jnp.uint8
    assert np.array_equal(decode_vectors(record, layout), fake_quant(x, layout))


@pytest.mark.parametrize("record", ["packed", "f32"])
@pytest.mark.parametrize("page_size", [4, 8, 64])
def test_written_rows_and_keys_come_back(page_size, record):
    """Two requests with interleaved pages, one row written at a time or all at once; everything else stays."""
    layout = layout_of(page_size, record)
    table = jnp.array([[5, 2, 7], [1, 6, 3]], jnp.int32)
    for source in layout.sources:
        pages = random_pages(layout, 9)
        room = 3 * source.rows
        rows = jnp.asarray(RNG.standard_normal((2, room, H)), jnp.float32)
        keys = jnp.asarray(RNG.standard_normal((2, room, J)), jnp.float32)
        index = jnp.broadcast_to(jnp.arange(room, dtype=jnp.int32), (2, room))
        valid = index < jnp.array([[room], [room - 2]])
        write = jax.jit(write_source, static_argnames="layout")
        new = write(pages, table, index, valid, rows, keys, source)
        one_by_one = pages
        for j in range(room):
            part = (index[:, j : j + 1], valid[:, j : j + 1], rows[:, j : j + 1], keys[:, j : j + 1])
            one_by_one = write(one_by_one, table, *part, source)
        assert np.array_equal(new, one_by_one)
        for read, wanted, kind in ((read_rows, rows, source.row), (read_keys, keys, source.key)):
            read, stored = jax.jit(read, static_argnums=2), jax.jit(fake_quant, static_argnums=1)(wanted, kind)
            found, old = read(new, table, source), read(pages, table, source)
            seen = np.asarray(valid)[..., None]
            assert np.array_equal(np.where(seen, found, 0), np.where(seen, stored, 0))
            assert np.array_equal(np.where(seen, 0, found), np.where(seen, 0, old), equal_nan=True)
        assert np.array_equal(new[jnp.array([0, 4, 8])], pages[jnp.array([0, 4, 8])])  # pages in no table


def test_bytes_of_a_page():
    """Rows are values and then scales; keys are planar: all values of the page, then all scales."""
    layout = layout_of(4, "packed")
    source = layout.sources[0]
    rows, keys = (jnp.asarray(RNG.standard_normal((1, source.rows, n)), jnp.float32) for n in (H, J))
    index = jnp.arange(source.rows, dtype=jnp.int32)[None]
    pages = write_source(jnp.zeros((2, layout.page_bytes), jnp.uint8), jnp.array([[1]]), index, index >= 0, rows, keys,
                         source)  # fmt: skip
    page = np.asarray(pages[1])
    values, scales = encode_nvfp4(np.asarray(rows[0]))
    size = H // 2 + H // 16
    for j in range(source.rows):
        record = page[source.row_offset + j * size : source.row_offset + (j + 1) * size]
        assert np.array_equal(record, np.concatenate([values[j], scales[j]]))
    values, scales = encode_mxfp4(np.asarray(keys[0]))
    begin = source.key_offset
    assert np.array_equal(page[begin : begin + values.size], values.ravel())
    assert np.array_equal(page[begin + values.size : begin + values.size + scales.size], scales.ravel())
    assert not np.asarray(pages[0]).any()


@pytest.mark.parametrize("record", ["packed", "f32"])
def test_gathered_rows_are_those_of_the_whole(record):
    """Any order, any repetition; -1 gives zeros, even where the first row is NaN."""
    layout = layout_of(8, record)
    table = jnp.array([[3, 1], [2, 4]], jnp.int32)
    for source in layout.sources:
        room = 2 * source.rows
        rows = RNG.standard_normal((2, room, H)).astype(np.float32)
        rows[:, 0] = np.nan
        index = jnp.broadcast_to(jnp.arange(room, dtype=jnp.int32), (2, room))
        pages = write_source(random_pages(layout, 5), table, index, index >= 0, rows, jnp.zeros((2, room, J)), source)
        wanted = np.asarray(read_rows(pages, table, source))
        pick = RNG.integers(-1, room, (2, 3, 6)).astype(np.int32)
        pick[0, 0] = -1
        found = np.asarray(gather_rows(pages, table, pick, source))
        expected = np.where(pick[..., None] < 0, 0, wanted[np.arange(2)[:, None, None], pick])
        assert np.array_equal(found, expected, equal_nan=True)
        assert not found[0, 0].any()


def test_rows_out_of_room_are_dropped():
    layout = layout_of(4, "f32")
    source = layout.sources[2]
    pages = random_pages(layout, 3)
    index = jnp.array([[-1, 4, 100]], jnp.int32)
    new = write_source(pages, jnp.array([[1]]), index, index > -9, jnp.ones((1, 3, H)), jnp.ones((1, 3, J)), source)
    assert np.array_equal(new, pages)
