"""The smallest kernels that use the machinery: a product of two squares on tensor cores, and a kernel that is wrong.

Run as a script with the name of a target, it compiles them and a program of eight devices ahead of time and prints
one JSON object: what `test_aot.py` looks at.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16, Float32

from widemesh.pallas_kernels.gpu import choose, device_target, kernel_options
from widemesh.pallas_kernels.gpu.aot import compile_ahead, compile_cases
from widemesh.pallas_kernels.gpu.aot_case import TCGEN05, WGMMA, AotCase
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.pallas_kernels.gpu.toolchain import prepare
from widemesh.pallas_kernels.gpu.topology import topology
from widemesh.pallas_kernels.gpu.wgmma import wgmma

SIDE = 64
_TILED = (plgpu.TilingTransform((8, SIDE)), plgpu.SwizzleTransform(128))


def square(a: BFloat16[Array, "M K"], b: BFloat16[Array, "K N"], *, wait: bool = True) -> Float32[Array, "M N"]:
    """a @ b in one block, 128 x 64 x 64. Without `wait` the product reads what has not arrived."""
    choose("square", "mosaic")
    target = device_target()
    assert target is not None
    rows, side = a.shape

    def load(a_hbm, b_hbm, a_smem, b_smem, arrived):
        plgpu.copy_gmem_to_smem(a_hbm, a_smem, arrived)
        plgpu.copy_gmem_to_smem(b_hbm, b_smem, arrived)
        if wait:
            plgpu.barrier_wait(arrived)

    def give(product, out_smem, out_hbm):
        store(out_smem, product)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_hbm)
        plgpu.wait_smem_to_gmem(0)

    def hopper(a_hbm, b_hbm, out_hbm, a_smem, b_smem, out_smem, arrived):
        load(a_hbm, b_hbm, a_smem, b_smem, arrived)

        def multiply(acc):
            wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            return acc[...]

        give(pl.run_scoped(multiply, plgpu.ACC((rows, side), jnp.float32)), out_smem, out_hbm)

    def blackwell(a_hbm, b_hbm, out_hbm, a_smem, b_smem, out_smem, arrived, acc_tmem, done):
        load(a_hbm, b_hbm, a_smem, b_smem, arrived)
        plgpu.tcgen05_mma(acc_tmem, a_smem, b_smem, done, accumulate=False)
        plgpu.barrier_wait(done)
        give(plgpu.async_load_tmem(acc_tmem), out_smem, out_hbm)

    scratch = [
        plgpu.SMEM((rows, side), a.dtype, transforms=_TILED),
        plgpu.SMEM((side, side), b.dtype, transforms=_TILED),
        plgpu.SMEM((rows, side), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
    ]
    if target.is_blackwell:
        scratch += [plgpu.TMEM((rows, side), jnp.float32), plgpu.Barrier(orders_tensor_core=True)]
    return plgpu.kernel(
        blackwell if target.is_blackwell else hopper,
        out_type=jax.ShapeDtypeStruct((rows, side), jnp.float32),
        scratch_types=scratch,
        grid=(1,),
        grid_names=("block",),
        kernel_name="square",
        **kernel_options(),
    )(a, b)


def hoard(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    """x * x, holding all of x in registers while its shared memory is filled again."""

    def body(x_hbm, out_hbm, smem, arrived):
        def load():
            plgpu.copy_gmem_to_smem(x_hbm, smem, arrived)
            plgpu.barrier_wait(arrived)
            return smem[...]

        held = load()
        smem[...] = held * load()
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_hbm)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()], grid=(1,),
                        grid_names=("block",), kernel_name="square_hoard")(x)  # fmt: skip


A = jax.ShapeDtypeStruct((2 * SIDE, SIDE), jnp.bfloat16)
B = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)
_BYTES = 2 * 2 * SIDE * SIDE + 2 * SIDE * SIDE + 4 * 2 * SIDE * SIDE

GOOD = AotCase(
    name="product",
    op="square",
    shape=f"{2 * SIDE} x {SIDE} x {SIDE}",
    function=square,
    args=(A, B),
    floor_bytes=_BYTES,
    floor_flops=2 * 2 * SIDE**3,
    moved_bytes=_BYTES,
    mma={"sm_90a": WGMMA, "sm_100a": TCGEN05},
)
WRONG = (
    dataclasses.replace(GOOD, name="misnamed", op="cube"),
    dataclasses.replace(GOOD, name="no kernel", function=lambda a, b: a @ b),
    dataclasses.replace(GOOD, name="refused", args=(A, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32))),
    dataclasses.replace(GOOD, name="other cores", mma={"sm_90a": TCGEN05, "sm_100a": WGMMA}),
    # 384 values in each of 128 threads of 255 registers
    dataclasses.replace(
        GOOD, name="hoard", function=hoard, args=(jax.ShapeDtypeStruct((192, 256), jnp.float32),), mma={}
    ),
    # 256 KiB of shared memory of 227
    dataclasses.replace(
        GOOD, name="vast", function=hoard, args=(jax.ShapeDtypeStruct((256, 256), jnp.float32),), mma={}
    ),
)


def compile_program(target: str) -> dict[str, object]:
    """A program of eight devices: five products, three of them in a loop, and collectives."""
    devices = topology(target, 8)
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    spec = partial(NamedSharding, mesh)
    rows = PartitionSpec("ep")

    def turn(a, b):
        return square(a, b).astype(jnp.bfloat16)

    def of_rank(a, b):
        a, _ = jax.lax.scan(lambda a, _: (turn(a, b), None), a, None, length=3)
        everyone = jax.lax.all_gather(turn(a, b), "ep", tiled=True)
        return turn(jax.lax.psum_scatter(everyone, "ep", tiled=True), b)

    program = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows,
                                    check_vma=False), donate_argnums=0)  # fmt: skip
    a = jax.ShapeDtypeStruct((8 * A.shape[0], SIDE), A.dtype, sharding=spec(rows))
    b = jax.ShapeDtypeStruct(B.shape, B.dtype, sharding=spec(PartitionSpec()))
    compiled = compile_ahead(program, (a, b), target)
    return {**dataclasses.asdict(compiled), "hlo": len(compiled.hlo), "spill_bytes": compiled.spill_bytes}


def refusal(target: str) -> str:
    """What compiling for another architecture says, now that this process has compiled for one."""
    other = next(name for name, facts in TARGETS.items() if facts.arch != TARGETS[target].arch)
    try:
        topology(other)
    except RuntimeError as error:
        return str(error)
    return ""


def main(target: str) -> None:
    """Compiles everything for one target."""
    report = {
        "ptxas": prepare().ptxas,
        "cases": compile_cases([GOOD, *WRONG], target),
        "program": compile_program(target),
        "refusal": refusal(target),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
