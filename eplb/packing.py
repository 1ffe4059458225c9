"""The two greedy steps that a placement is made of, over many rows (layers, or the nodes of layers) at once.

Both are those of DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB). Ties go to the first index, and sums are taken
in the order in which items are placed, so that every host comes to the same result, bit for bit.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32


def pack(load: Float64[np.ndarray, "rows items"], bins: int) -> tuple[Int32[np.ndarray, "rows items"], ...]:
    """Equally many items for every bin, with loads as even as a greedy pass makes them: (bin, place in it) of each.

    Items go in order of falling load to the lightest bin that has a place left. `items` must be a multiple of `bins`.
    One item per bin stays where it is: item i in bin i.
    """
    rows, items = load.shape
    quota = items // bins
    if quota == 1:
        return np.broadcast_to(np.arange(bins, dtype=np.int32), load.shape), np.zeros(load.shape, np.int32)
    order = np.argsort(-load, axis=1, kind="stable")
    falling = np.take_along_axis(load, order, 1)
    every, weight, held = np.arange(rows), np.zeros((rows, bins)), np.zeros((rows, bins), np.int32)
    bin_of, place_of = np.empty((2, items, rows), np.int32)
    for i in range(items):
        lightest = weight.argmin(1)
        place = held[every, lightest]
        bin_of[i], place_of[i] = lightest, place
        # A full bin weighs infinitely much: it is never the lightest while another has a place.
        weight[every, lightest] += np.where(place + 1 == quota, np.inf, falling[:, i])
        held[every, lightest] = place + 1
    found = np.empty((2, rows, items), np.int32)
    found[:, every[:, None], order] = bin_of.T, place_of.T
    return found[0], found[1]


def replicate(load: Float64[np.ndarray, "rows items"], total: int, most: int) -> Int32[np.ndarray, "rows total"]:
    """Which item each of `total` copies is of: first all items in order, then one copy after the other.

    The next copy goes to the item with the greatest load per copy among those with fewer than `most`. No other choice
    of copies has a smaller maximum of load per copy.
    """
    rows, items = load.shape
    owner = np.empty((rows, total), np.int32)
    owner[:, :items] = np.arange(items)
    every, copies, share = np.arange(rows), np.ones(load.shape, np.int32), load.copy()
    if most == 1:
        share[:] = -1
    for i in range(items, total):
        hottest = share.argmax(1)
        owner[:, i] = hottest
        count = copies[every, hottest] + 1
        copies[every, hottest] = count
        share[every, hottest] = np.where(count < most, load[every, hottest] / count, -1.0)
    return owner
