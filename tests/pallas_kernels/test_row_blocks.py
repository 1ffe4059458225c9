"""Blocks and tiers of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels import row_blocks


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 29, 64, 65, 130])
@pytest.mark.parametrize(("ratio", "start"), [(0, 0), (1, 0), (2, 0), (2, 5), (1, 100)])
def test_every_row_once_with_all_it_can_see(monkeypatch, rows, ratio, start):
    """Tiers of a multiple of 8 rows, eight of them at most, and blocks of 3: each row is written once, and its limit
    covers what it sees and no more than its tier needs."""
    monkeypatch.setattr(row_blocks, "_TIER_ROWS", 8)
    entries, calls = 140, []
    tier = 8 * -(-rows // 64)

    def body(first, count, limit):
        calls.append((count, limit))
        number = first + jnp.arange(count, dtype=jnp.int32)
        return jnp.broadcast_to(number[None, :, None], (2, count, max(limit, 1)))

    out = row_blocks.fill_row_blocks(jnp.full((2, rows, entries), -1, jnp.int32), body, block=3, entries=entries,
                                     ratio=ratio, start_bound=start)  # fmt: skip
    out = np.asarray(out)
    assert out[:, :, 0].tolist() == [list(range(rows))] * 2
    for row in range(rows):
        written = int((out[0, row] == row).sum())
        sees = min(entries, (start + row + 1) // ratio) if ratio else 0
        tier_end = min(rows, (row // tier + 1) * tier)
        assert written >= sees
        assert max(limit for _, limit in calls) == (min(entries, (start + rows) // ratio) if ratio else 0)
        assert written <= max(1, min(entries, (start + tier_end) // ratio) if ratio else 0)
    assert all(count <= 3 for count, _ in calls)
    assert len({limit for _, limit in calls}) <= 8


def test_no_rows():
    """Nothing to write, and no tier to divide them into."""
    out = row_blocks.fill_row_blocks(jnp.zeros((2, 0, 3)), lambda *_: 1 / 0, block=3, entries=3, ratio=1, start_bound=0)
    assert out.shape == (2, 0, 3)
