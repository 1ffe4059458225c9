"""The bit arithmetic that widens E2M1 codes in registers, on plain numbers: the interpreter does not run it."""

import numpy as np

from widemesh.pallas_kernels.formats import E2M1, unpack_nibbles
from widemesh.pallas_kernels.sparse_attention.dequantise import half_pair


def test_every_pair_of_bytes_becomes_its_four_values():
    two = np.arange(1 << 16, dtype=np.uint32)
    words = [half_pair(byte, np.left_shift, lambda word, mask: word & np.uint32(mask)) for byte in (two, two >> 8)]
    found = np.stack(words, axis=-1).view(np.float16)
    wanted = E2M1.decode(unpack_nibbles(two.astype("<u2")[:, None].view(np.uint8)))
    np.testing.assert_array_equal(np.float32(found) * 2.0**14, wanted)
    assert (np.signbit(found) == np.signbit(wanted)).all()
