"""From named tensors to parameters, and onto a mesh."""

import jax
import numpy as np
import pytest

from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.loading import load_parameters, place_parameters, quantising, read_parameters, split_model
from widemesh.model.numerics import NUMERICS
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


@pytest.mark.parametrize("owner", [None, np.array([[0, 1, 1, -1], [1, 0, -1, 0]])])
@pytest.mark.parametrize("numerics", ["plain", "serving"])
def test_slots_of_the_draft_hold_its_own_experts(owner, numerics):
    """Whatever the backbone's slots hold; slot e holds expert e where nothing is said."""
    config = CONFIG.with_draft(3)
    table, is_packed = tensor_table(config), numerics == "serving"

    def read(name):
        return np.full(table[name].shape, sum(name.encode()), np.float32)

    def stacks_of(layer):
        values = (layer["ffn"]["experts"][name].get_value() for name in ("w1", "w3", "w2"))
        return [value.codes if is_packed else value for value in values]

    loaded = load_parameters(config, NUMERICS[numerics], np.array([3, 0, 1]), read, draft_owner=owner)
    stored = quantising(config, read)
    for stage, experts in enumerate([[0, 1]] * 2 if owner is None else owner):
        for name, stack in zip(("w1", "w3", "w2"), stacks_of(loaded["mtp"][stage]), strict=True):
            assert len(stack) == len(experts)
            for slot, expert in zip(stack, experts, strict=True):
                tensor = f"mtp.{stage}.ffn.experts.{max(expert, 0)}.{name}.weight"
                wanted = stored(tensor)[0].view(np.uint8) if is_packed else read(tensor)
                assert np.array_equal(slot, wanted if expert >= 0 else np.zeros_like(wanted))
    assert [len(stack) for stack in stacks_of(loaded["layers"][0])] == [3] * 3
    assert loaded["mtp"][0]["ffn"]["gate"]["weight"].get_value().shape == (2, config.hidden_size)


def test_parameters_of_a_draft_are_read_by_their_released_names():
    """All of them, and with the draft left out, none."""
    for tokens in (0, 3):
        config = CONFIG.with_draft(tokens)
        table, asked = tensor_table(config), []
        zeros = {name: np.zeros(spec.shape, np.float32) for name, spec in table.items()}
        read_parameters(config, lambda name, zeros=zeros, asked=asked: asked.append(name) or zeros[name], np.arange(4))
        assert sorted(asked) == sorted(table)
        assert any(name.startswith("mtp.") for name in asked) == (tokens > 0)


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
