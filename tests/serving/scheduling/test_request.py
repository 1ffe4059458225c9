"""What a request answers about its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from widemesh.serving.scheduling import ScheduledRequest, hash_pages


def request(prompt: list[int], output: list[int]) -> ScheduledRequest:
    ids = np.array(prompt, np.int32)
    return ScheduledRequest(request_id="r", prompt=ids, page_hashes=hash_pages(ids, 2, salt=b"s"), max_tokens=9,
                            known_output=output, salt=b"s")  # fmt: skip


@pytest.mark.parametrize(("position", "ids"), [(0, [-1, -1, -1]), (1, [-1, -1, 10]), (3, [10, 11, 12]),
                                               (4, [11, 12, 20]), (5, [12, 20, 21]), (6, [20, 21, 22])])  # fmt: skip
def test_recent_ids_cross_from_output_to_prompt(position: int, ids: list[int]) -> None:
    assert request([10, 11, 12], [20, 21, 22]).recent(position, 3).tolist() == ids


@pytest.mark.parametrize("outputs", [0, 1, 2, 5])
def test_rewound_tokens_have_the_hashes_of_a_prompt(outputs: int) -> None:
    one = request([1, 2, 3], list(range(50, 50 + outputs)))
    one.rewind(2)
    assert one.tokens.tolist() == [1, 2, 3, *range(50, 50 + outputs)] and one.tokens.dtype == np.int32
    assert np.array_equal(one.page_hashes, hash_pages(one.tokens, 2, salt=b"s"))
    assert one.prefill_tokens == 2 + outputs and one.most_tokens == 12
