"""The programs compiled for GPUs that are not there: what crosses between ranks, and what they hold in between."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from widemesh.pallas_kernels.gpu.aot import compile_ahead
from widemesh.pallas_kernels.gpu.toolchain import has_plugin
from widemesh.pallas_kernels.gpu.topology import topology
from widemesh.pallas_kernels.grouped_moe import PackedMatrix
from widemesh.sharding import make_mesh
from widemesh.sharding.migrate import MigrationPrograms

TARGET, RANKS, HELD, M = "B200", 8, 6, 2
OUT, IN = 2048, 5120
WORDS = 2 * OUT * (IN // 2 + IN // 32) // 4  # of a row of two matrices


@pytest.fixture(autouse=True)
def nothing_stored():
    """A program that was stored can only be read back where its devices are."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # a process that has compiled before does not look at the setting again
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.skipif(not has_plugin(), reason="needs pip install 'widemesh[aot]'")
def test_only_rows_of_a_slice_cross_and_the_staging_area_stays_where_it_is() -> None:
    mesh = make_mesh(topology(TARGET, RANKS))

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def matrix():
        codes, scales = (array((RANKS * HELD, OUT, n), jnp.uint8, "ep") for n in (IN // 2, IN // 32))
        return PackedMatrix(codes=codes, scales=scales)

    programs = MigrationPrograms(layer={"w1": matrix(), "w3": matrix()}, is_native=True)
    layer, staging = programs.layer, programs.abstract_staging
    ends, slots, stamp = (array(shape, jnp.int32) for shape in ((RANKS, M), (RANKS, HELD), ()))
    copy = compile_ahead(programs.copy(M), (layer, staging, ends, ends, stamp), TARGET)
    verify = compile_ahead(programs.verify, (staging, slots, stamp), TARGET)
    commit = compile_ahead(programs.commit, (layer, staging, slots), TARGET)

    assert programs.staging_bytes == HELD * (programs.row_bytes + 4) == HELD * 4 * (WORDS + 1)
    assert {one.kind: one.runs for one in copy.collectives} == {"ragged-all-to-all": 1}
    (line,) = [x for x in copy.hlo.splitlines() if " ragged-all-to-all(" in x]
    assert f"= u32[{M},{WORDS + 1}]" in line  # rows of the slice with their checksums, and no more
    # Two buffers of M rows, and tables of few bytes: the staging area is written in place.
    assert copy.memory.alias_bytes == programs.staging_bytes
    assert copy.memory.temp_bytes < 2 * M * 4 * (WORDS + 1) + 64 * 1024

    assert {one.kind: one.num_bytes for one in verify.collectives} == {"all-reduce": 4}
    assert verify.memory.temp_bytes < programs.row_bytes
    # Nothing crosses in a commit, and its result is all the memory that it takes.
    assert not commit.collectives and commit.memory.temp_bytes < 1024
    assert commit.memory.output_bytes < programs.staging_bytes + 1024
