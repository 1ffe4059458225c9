"""Byte offsets of pages and rows."""

import pytest

from widemesh.pallas_kernels.layout import PageLayout, VectorLayout

RELEASED = {"ratios": (2, 2, 2, 1), "head_dim": 512, "index_dim": 128}


def test_released_page():
    """Four sources; parts lie back to back and begin at multiples of 16 bytes."""
    layout = PageLayout.build(page_size=64, record="packed", **RELEASED)
    assert (layout.page_bytes, layout.page_bytes // 64) == (56_960, 890)
    assert [s.row_offset for s in layout.sources] == [0, 9216, 18432, 27648]
    assert [s.key_offset for s in layout.sources] == [46080, 48256, 50432, 52608]
    assert [s.key_scale_offset - s.key_offset for s in layout.sources] == [2048, 2048, 2048, 4096]
    assert {s.row.num_bytes for s in layout.sources} == {288} and {s.key.num_bytes for s in layout.sources} == {68}
    assert layout.window.num_bytes == 528
    assert all(offset % 16 == 0 for s in layout.sources for offset in (s.row_offset, s.key_offset))


def test_f32_records_have_four_bytes_per_value_and_no_scales():
    layout = PageLayout.build(page_size=64, record="f32", **RELEASED)
    assert layout.page_bytes == 64 * 4 * (512 + 128) * 5 // 2
    assert layout.window == VectorLayout(code="f32", dim=512) and layout.window.scale_bytes == 0


@pytest.mark.parametrize("page_size", [2, 4, 16, 64, 128, 256])
@pytest.mark.parametrize("record", ["packed", "f32"])
def test_parts_fill_a_page_without_overlap(page_size, record):
    layout = PageLayout.build(page_size=page_size, record=record, **RELEASED)
    spans = []
    for source in layout.sources:
        assert source.rows * source.ratio == page_size
        spans.append((source.row_offset, source.rows * source.row.num_bytes))
        spans.append((source.key_offset, source.rows * source.key.value_bytes))
        spans.append((source.key_scale_offset, source.rows * source.key.scale_bytes))
    end = 0
    for offset, size in sorted(span for span in spans if span[1]):
        assert offset == end
        end += size
    assert end == layout.page_bytes


@pytest.mark.parametrize("page_size", [0, 3, -2])
def test_pages_hold_whole_groups(page_size):
    with pytest.raises(ValueError, match=f"page_size={page_size} must be a multiple of the compress ratio 2"):
        PageLayout.build(page_size=page_size, record="packed", **RELEASED)
