"""Reading the compiler's reports."""

import os
import sys

import pytest

from widemesh.pallas_kernels.gpu.facts import KernelFacts
from widemesh.pallas_kernels.gpu.ptx import parse, recorded, smem_bytes

RESOURCES = (
    "Resources(smem_scratch_bytes=4096, tmem_scratch_cols=64, tmem_collective_scratch_cols=0, "
    "barrier_counts=Counter({Barrier(arrival_count=2, num_barriers=4, orders_tensor_core=False): 3, "
    "Barrier(arrival_count=1, num_barriers=2, orders_tensor_core=True): 1}), scoped_gmem_semaphores={})"
)


def _printed(name: str, arch: str, body: str, spilled: tuple[int, int], registers: int) -> str:
    entry = f"{name}_mosaic_gpu_kernel"
    return f"""
.version 8.8
.target {arch}
.visible .entry {entry}(
	.param .align 64 .b8 {entry}_param_0[384]
)
{{
{body}
}}
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{entry}' for '{arch}'
ptxas info    : Function properties for {entry}
    0 bytes stack frame, {spilled[0]} bytes spill stores, {spilled[1]} bytes spill loads
ptxas info    : Used {registers} registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 24.042 ms
"""


def test_facts_of_each_kernel():
    printed = "some line before\n" + _printed(
        "op_one", "sm_90a", "wgmma.mma_async.sync.aligned.m64n64k16;\n" * 3 + "cp.async.bulk.tensor.2d;", (0, 0), 90
    )
    printed += _printed("op_two", "sm_90a", "mma.sync.aligned.m16n8k16;", (40, 24), 255)
    assert parse(printed, {"op_one": RESOURCES, "op_two": RESOURCES.replace("4096", "1")}) == [
        KernelFacts(
            name="op_one", arch="sm_90a", registers=90, spill_bytes=0, smem_bytes=4096 + 8 * 14, tmem_columns=64,
            instructions={"wgmma.mma_async": 3, "tcgen05.mma": 0, "mma.sync": 0, "cp.async.bulk": 1},
        ),
        KernelFacts(
            name="op_two", arch="sm_90a", registers=255, spill_bytes=64, smem_bytes=1 + 8 * 14, tmem_columns=64,
            instructions={"wgmma.mma_async": 0, "tcgen05.mma": 0, "mma.sync": 1, "cp.async.bulk": 0},
        ),
    ]  # fmt: skip


def test_kernels_of_one_name_keep_their_order():
    printed = "".join(
        _printed("op", "sm_100a", "tcgen05.mma.cta_group::1.kind::f16;\n" * products, (0, 0), registers)
        for products, registers in ((1, 40), (2, 50))
    )
    facts = parse(printed, {"op": RESOURCES})
    assert [(kernel.registers, kernel.instructions["tcgen05.mma"]) for kernel in facts] == [(40, 1), (50, 2)]


def test_shared_memory_holds_barriers_too():
    assert smem_bytes("Resources(smem_scratch_bytes=7, tmem_scratch_cols=0, barrier_counts=Counter())") == 7
    with pytest.raises(RuntimeError, match="printed no smem_scratch_bytes"):
        smem_bytes("Resources()")


def test_a_report_without_ptx_is_an_error():
    with pytest.raises(RuntimeError, match="'op' and printed no PTX"):
        parse(_printed("op", "sm_90a", "", (0, 0), 1).replace(".visible", ""), {"op": RESOURCES})


def test_recording_takes_what_other_code_writes_to_the_descriptor(capfd):
    with recorded() as facts:
        # As the compiler does: past Python's own object.
        os.write(1, _printed("op", "sm_90a", "", (0, 0), 1).replace("Used", "").encode())
        assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "1"
    assert facts == [] and "MOSAIC_GPU_DUMP_PTXAS" not in os.environ
    print("after")
    sys.stdout.flush()
    assert capfd.readouterr().out == "after\n"
