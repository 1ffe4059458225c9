"""How 128 threads share a vector."""

import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.thread_rows import pieces, row_width


@pytest.mark.parametrize(("values", "dtype", "width"), [
    (5120, jnp.bfloat16, 8), (5120, jnp.float32, 4), (384, jnp.float32, 1), (256, jnp.bfloat16, 2),
])  # fmt: skip
def test_a_thread_takes_up_to_16_bytes(values, dtype, width):
    assert row_width(values, dtype, name="hidden") == width
    assert pieces(jnp.zeros((3, values)), width).shape == (3, values // (128 * width), 128, width)


@pytest.mark.parametrize(("values", "near"), [(100, 128), (300, 256), (0, 128)])
def test_other_numbers_name_the_nearest(values, near):
    with pytest.raises(ValueError, match=f"hidden={values} .* nearest is {near}$"):
        row_width(values, jnp.float32, name="hidden")


def test_a_row_of_a_piece_is_contiguous():
    cut = np.asarray(pieces(jnp.arange(1024), 4))
    assert cut[1, 3].tolist() == [524, 525, 526, 527]
