"""Parameters as the bytes of a quantised checkpoint: none is decoded and encoded again on the way to the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from widemesh.model.checkpoint import Checkpoint, tensor_table, write_checkpoint
from widemesh.model.loading import load_parameters, place_parameters, quantising, split_model
from widemesh.model.numerics import NUMERICS
from widemesh.model.params import BlockScaled, packed
from widemesh.model.presets import FLASH, PRESETS
from widemesh.model.random_weights import random_tensors
from widemesh.pallas_kernels.formats import decode_fp8_blocks, encode_fp8_blocks
from widemesh.pallas_kernels.grouped_moe import PackedMatrix
from widemesh.sharding import make_mesh

CONFIG, PACKED = PRESETS["tiny-structure"], NUMERICS["serving"]
OWNER = np.array([2, 0, -1, 3, 2])  # expert of each slot


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same random weights in both forms."""
    folders = {form: tmp_path_factory.mktemp(form) for form in ("quantized", "plain")}
    for form, folder in folders.items():
        write_checkpoint(folder, CONFIG, random_tensors(CONFIG, 0), form=form)
    return {form: Checkpoint.open(folder) for form, folder in folders.items()}


@pytest.fixture(scope="module")
def state(checkpoints):
    checkpoint = checkpoints["quantized"]
    return load_parameters(CONFIG, PACKED, OWNER, checkpoint.read, checkpoint.stored)


def flat(state):
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def raw_bytes(checkpoint, name):
    return np.asarray(checkpoint.raw(name)).view(np.uint8)


def test_quantised_tensors_are_the_bytes_on_disk(checkpoints, state):
    checkpoint, seen = checkpoints["quantized"], set()
    for name, variable in flat(state).items():
        value = variable.get_value()
        seen.add(variable.stored)
        if isinstance(value, PackedMatrix):
            for slot, expert in enumerate(OWNER):
                part = name.replace(".experts.", f".experts.{expert}.")
                for array, ending in ((value.codes, ".weight"), (value.scales, ".scale")):
                    wanted = raw_bytes(checkpoint, part + ending) if expert >= 0 else 0
                    assert np.array_equal(array[slot], np.broadcast_to(wanted, array[slot].shape))
        elif isinstance(value, BlockScaled):
            assert np.array_equal(value.codes, raw_bytes(checkpoint, name))
            assert np.array_equal(value.scales, raw_bytes(checkpoint, name.removesuffix("weight") + "scale"))
        elif variable.stored == "fp8_rows":
            parts = [raw_bytes(checkpoint, name), raw_bytes(checkpoint, name.removesuffix("weight") + "scale")]
            assert np.array_equal(value, np.concatenate(parts, axis=1))
        else:
            assert value.dtype == (ml_dtypes.bfloat16 if variable.stored == "bf16" else np.float32)
            assert np.array_equal(value.astype(np.float32), checkpoint.read(name))
    assert seen == {"f32", "bf16", "fp8", "fp8_rows", "fp4"}


def test_structure_is_that_of_the_packed_model(state):
    _, abstract = split_model(CONFIG, PACKED)
    wanted, found = (jax.tree.flatten(tree) for tree in (abstract, state))
    assert found[1] == wanted[1]
    for own, described in zip(found[0], wanted[0], strict=True):
        assert own.dtype == described.dtype
        assert own.shape == described.shape or own.shape == (len(OWNER), *described.shape[1:])


def test_a_plain_checkpoint_is_quantised_at_load(checkpoints, state):
    """With the encoders that write the quantised form.

    bfloat16 on disk has rounded the values before: some fall to a neighbour, and a few blocks get another scale.
    """
    plain = checkpoints["plain"]
    found = load_parameters(CONFIG, PACKED, OWNER, plain.read, plain.stored)
    again = load_parameters(CONFIG, PACKED, OWNER, plain.read)  # from values alone
    same = total = 0
    for own, other, wanted in zip(*map(jax.tree.leaves, (found, again, state)), strict=True):
        assert np.array_equal(own, other)
        assert own.dtype == wanted.dtype
        same, total = same + np.sum(own == wanted), total + own.size
    assert same > 0.9 * total


def test_values_of_a_quantised_checkpoint_survive(checkpoints, state):
    """Decoded and quantised once more: equal values, so an update of some tensors leaves the others as they were."""
    again = flat(load_parameters(CONFIG, PACKED, OWNER, checkpoints["quantized"].read))
    for name, variable in flat(state).items():
        values = [x.get_value() for x in (variable, again[name])]
        if hasattr(values[0], "decode"):
            values = [jax.tree.map(jnp.asarray, value).decode() for value in values]
        elif variable.stored != "fp8_rows":
            assert np.array_equal(*values)
            continue
        assert np.array_equal(*(np.asarray(value, np.float32) for value in values)) or variable.stored == "fp8_rows"


@pytest.mark.parametrize("config", [CONFIG, FLASH])
def test_forms_are_those_of_the_checkpoint(config):
    """The model says how it holds a parameter, the table how a checkpoint stores it."""
    table, vectors = tensor_table(config), 0
    for name, variable in flat(split_model(config)[1]).items():
        kind = table[name.replace(".experts.", ".experts.0.") + ".weight" if ".experts." in name else name].kind
        if kind == "bf16" and variable.stored == "f32":  # norms, and what an op takes in f32
            vectors += 1
            assert "norm" in name or name.endswith(("engram.q_weight", "engram.k_weight"))
            continue
        assert variable.stored == {"engram": "fp8_rows"}.get(kind, kind), name
    assert vectors


@pytest.mark.parametrize("shape", [(64, 96), (40, 72), (1, 33)])
def test_block_scaled_values_are_exact_in_bfloat16(shape):
    """Partial blocks at the edges too."""
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 10
    codes, scales = encode_fp8_blocks(weight)
    found = BlockScaled(jnp.asarray(codes), jnp.asarray(scales)).decode()
    assert found.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(found, np.float32), decode_fp8_blocks(codes, scales))
    described = packed(jax.ShapeDtypeStruct(shape, jnp.float32), "fp8")
    assert (described.codes.shape, described.scales.shape) == (codes.shape, scales.shape)


def test_odd_columns_cannot_be_fp4():
    with pytest.raises(ValueError, match="a matrix of 7 columns cannot be packed two to a byte"):
        packed(jax.ShapeDtypeStruct((2, 4, 7), jnp.float32), "fp4")


def test_placing_spreads_the_bytes_of_experts_and_tables(checkpoints, state):
    mesh = make_mesh(jax.devices()[:5])
    placed = place_parameters(state, mesh)
    for name, variable in flat(placed).items():
        for array, host in zip(*map(jax.tree.leaves, (variable, flat(state)[name])), strict=True):
            shard = array.addressable_shards[0].data.shape
            in_parts = variable.stored in ("fp4", "fp8_rows")
            assert shard == ((-(-host.shape[0] // 5), *host.shape[1:]) if in_parts else host.shape)
            assert np.array_equal(np.asarray(array)[: host.shape[0]], host)


def test_quantising_takes_values_by_name():
    values = {name: np.ones(spec.shape, np.float32) for name, spec in tensor_table(CONFIG).items()}
    stored = quantising(CONFIG, values.__getitem__)
    weight, scales = stored("layers.0.attn.wkv.weight")
    assert weight.dtype == ml_dtypes.float8_e4m3fn and scales is not None and scales.shape == (1, 2)
    assert stored("norm.weight")[1] is None
