"""From named tensors to parameters, and onto a mesh."""

import jax
import numpy as np
import pytest

from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.loading import place_parameters, read_parameters, split_model
from widemesh.model.presets import PRESETS
from widemesh.sharding import make_mesh

CONFIG = PRESETS["tiny-structure"]


def numbered(name):
    """A tensor whose values say which it is."""
    return np.full(tensor_table(CONFIG)[name].shape, sum(name.encode()), np.float32)


@pytest.fixture(scope="module")
def asked():
    return []


@pytest.fixture(scope="module")
def state(asked):
    def read(name):
        asked.append(name)
        return numbered(name)

    return read_parameters(CONFIG, read, np.array([2, 0, -1, 3, 2]))


def test_every_tensor_is_read_by_its_released_name(asked, state):
    """Expert 1 has no slot and is not read; expert 2 has two."""
    wanted = {name for name in tensor_table(CONFIG) if ".experts.1." not in name}
    assert set(asked) == wanted
    assert len(asked) == len(wanted) + 3 * CONFIG.num_hidden_layers  # expert 2 once more


def test_slots_hold_their_experts(state):
    for name in ("w1", "w3", "w2"):
        stack = state["layers"][3]["ffn"]["experts"][name].get_value()
        for slot, expert in enumerate((2, 0, None, 3, 2)):
            wanted = 0 if expert is None else numbered(f"layers.3.ffn.experts.{expert}.{name}.weight")
            assert np.array_equal(stack[slot], np.broadcast_to(wanted, stack[slot].shape))


def test_other_parameters_have_the_shape_of_their_tensor(state):
    for path, variable in state.flat_state():
        name = ".".join(map(str, path))
        if ".experts." not in name:
            assert np.array_equal(variable.get_value(), numbered(name))


def test_structure_is_that_of_the_model(state):
    _, abstract = split_model(CONFIG)
    assert [p for p, _ in state.flat_state()] == [p for p, _ in abstract.flat_state()]


def test_placing_spreads_experts_and_tables_and_copies_the_rest(state):
    mesh = make_mesh(jax.devices()[:5])
    placed = place_parameters(state, mesh)
    for path, variable in placed.flat_state():
        array, host = variable.get_value(), dict(state.flat_state())[path].get_value()
        assert np.array_equal(np.asarray(array)[: host.shape[0]], host) and not np.asarray(array)[host.shape[0] :].any()
        shard = array.addressable_shards[0].data.shape
        in_parts = path[-2:-1] == ("experts",) or path[-3:] == ("engram", "embed", "weight")
        assert shard == ((-(-host.shape[0] // 5), *host.shape[1:]) if in_parts else host.shape)
        assert array.sharding.device_set == set(mesh.devices.flat)
