"""What memory there is, and that a plan which needs more is refused with the numbers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from widemesh.model.config import ConfigError
from widemesh.model.presets import FLASH, PRESETS
from widemesh.serving.config import EngineConfig
from widemesh.serving.memory_limit import AvailableMemory, available_memory, host_bytes, refuse_if_too_large
from widemesh.serving.memory_plan import format_bytes, plan_memory

PLAN = plan_memory(PRESETS["tiny-mesh"], EngineConfig(max_model_len=2000, num_pages=5000, num_prefill_pages=70))


def shared(num_bytes):
    return AvailableMemory(num_bytes=num_bytes, is_shared=True)


def each(num_bytes):
    return AvailableMemory(num_bytes=num_bytes, is_shared=False)


def test_what_fits_is_let_through_to_the_byte():
    refuse_if_too_large(PLAN, shared(PLAN.total_bytes))
    refuse_if_too_large(PLAN, each(max(mesh.rank_bytes for mesh in PLAN.meshes)))
    refuse_if_too_large(PLAN, None)


def test_the_ranks_of_a_cpu_share_its_memory():
    with pytest.raises(ConfigError) as caught:
        refuse_if_too_large(PLAN, shared(PLAN.total_bytes - 1))
    said = str(caught.value)
    assert said.startswith(f"the engine needs {format_bytes(PLAN.total_bytes)} of memory and ")
    for mesh in PLAN.meshes:
        assert f"{mesh.name}, {mesh.ranks} x {format_bytes(mesh.rank_bytes)}: " in said
    assert f"page pool {format_bytes(5000 * PLAN.page_bytes)}" in said
    assert said.endswith("; lower num_pages=5000, num_prefill_pages=70, max_num_seqs=8, max_model_len=2000 or "
                         "max_num_batched_tokens=256")  # fmt: skip


def test_a_device_of_its_own_is_compared_with_one_rank():
    with pytest.raises(ConfigError, match="a rank of the prefill mesh needs"):
        refuse_if_too_large(PLAN, each(PLAN.prefill.rank_bytes - 1))
    prefill = dataclasses.replace(PLAN.prefill, parts=())
    with pytest.raises(ConfigError, match="a rank of the decode mesh needs"):
        refuse_if_too_large(dataclasses.replace(PLAN, prefill=prefill), each(PLAN.decode.rank_bytes - 1))


@pytest.mark.parametrize("available", [shared(24 << 30), each(140 << 30)])
def test_lowering_settings_is_not_advised_when_the_parameters_alone_are_too_large(available):
    with pytest.raises(ConfigError) as caught:
        refuse_if_too_large(plan_memory(FLASH, EngineConfig()), available)
    assert "parameters alone are" in str(caught.value) and "lower" not in str(caught.value)


def test_an_index_score_buffer_that_cannot_fit_is_refused():
    """Rows times the longest request: 8192 rows over a million entries is 34 GB of scores, for one rank."""
    config = EngineConfig(max_model_len=1048575, max_num_batched_tokens=8192, prefill_devices=1, num_pages=2000,
                          num_prefill_pages=2000)  # fmt: skip
    wide = dataclasses.replace(PRESETS["tiny-mesh"], max_position_embeddings=1048576)
    with pytest.raises(ConfigError, match=r"index scores 32\.0 GiB"):
        refuse_if_too_large(plan_memory(wide, config), each(24 << 30))


def test_this_machine():
    found = available_memory(jax.devices())
    assert found is not None and found.is_shared and found.num_bytes > 1 << 20
    refuse_if_too_large(plan_memory(PRESETS["tiny-structure"], EngineConfig()), found)


def test_devices_that_report_their_memory():
    def device(**stats):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats or None)

    free = device(bytes_limit=100, bytes_in_use=10), device(bytes_limit=100, bytes_in_use=30)
    assert available_memory(free) == each(70)
    assert available_memory([*free, device()]) is None


def test_host_memory_is_what_the_container_leaves_of_it(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal:  2000 kB\nMemFree:   10 kB\nMemAvailable:   1000 kB\n")
    assert host_bytes(meminfo, cgroup) == 1000 * 1024
    cgroup.mkdir()
    for name, text in (("max", "max"), ("current", "300000"), ("stat", "anon 5\ninactive_file 50000\n")):
        (cgroup / f"memory.{name}").write_text(text)
    assert host_bytes(meminfo, cgroup) == 1000 * 1024
    (cgroup / "memory.max").write_text("700000\n")
    assert host_bytes(meminfo, cgroup) == 700000 - 300000 + 50000
    (cgroup / "memory.max").write_text("9000000\n")
    assert host_bytes(meminfo, cgroup) == 1000 * 1024
    assert host_bytes(tmp_path / "none", tmp_path / "none") > 1 << 20
