"""The byte permutations that decode codes on a GPU, with their operations in NumPy."""

import ml_dtypes
import numpy as np

from widemesh.pallas_kernels.formats.small_float import E2M1
from widemesh.pallas_kernels.select_entries.nibbles import decode_word


class NumpyWords:
    """`Words` on uint32 arrays; `prmt` as the PTX manual defines its default mode."""

    def prmt(self, a, b, selector):
        a, b, selector = (np.broadcast_to(np.uint32(x), (1 << 16,)) for x in (a, b, selector))
        table = np.concatenate([x[:, None].copy().view(np.uint8) for x in (a, b)], axis=1)  # [words, 8], lowest first
        picks = np.stack([selector >> (4 * i) & 15 for i in range(4)], axis=1).astype(np.int64)
        assert (picks < 8).all()  # 8 and up would spread a sign
        return np.take_along_axis(table, picks, axis=1).copy().view(np.uint32)[:, 0]

    def bit_and(self, a, b):
        return a & np.uint32(b)

    def bit_or(self, a, b):
        return a | b

    def shift_left(self, a, by):
        return a << np.uint32(by)


def test_all_words_of_two_bytes():
    word = np.arange(1 << 16, dtype=np.uint32)
    even, odd = (half.view(ml_dtypes.bfloat16).reshape(-1, 2) for half in decode_word(word, NumpyWords()))
    for place, byte in enumerate((word & 255, word >> 8)):
        for half, code in ((even, byte & 15), (odd, byte >> 4)):
            wanted = E2M1.table[code]
            assert np.array_equal(half[:, place].astype(np.float32), wanted)
            assert np.array_equal(np.signbit(half[:, place].astype(np.float32)), np.signbit(wanted))
