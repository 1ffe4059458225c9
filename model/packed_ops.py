"""The ops that read packed bytes, each behind a `jit` of its own.

A step calls every one of them in many layers with the same shapes. Behind a `jit` the first call is traced and
lowered, and the others are calls of the same function: a step of 40 layers then holds each kernel once, not 40 times.
"""

from __future__ import annotations

import jax

from widemesh.pallas_kernels import compress, engram_gate, grouped_moe, mhc
from widemesh.pallas_kernels import select_entries as selection
from widemesh.pallas_kernels import sparse_attention as attention

attend_packed = jax.jit(
    attention.attend_packed, static_argnames=("source", "window_layout", "window", "implementation")
)
select_entries = jax.jit(
    selection.select_entries, static_argnames=("source", "k", "block", "top_blocks", "implementation")
)
compress_and_store = jax.jit(
    compress.compress_and_store, static_argnames=("source", "eps", "bf16_rounding", "implementation")
)
grouped_moe_packed = jax.jit(grouped_moe.grouped_moe_packed, static_argnames=("math", "implementation"))
mhc_site = jax.jit(mhc.mhc_site, static_argnames=("iterations", "hc_eps", "norm_eps", "implementation"))
mhc_advance = jax.jit(mhc.mhc_advance, static_argnames=("iterations", "hc_eps", "norm_eps", "implementation"))
engram_rows = jax.jit(engram_gate.engram_rows, static_argnames=("dtype", "implementation"))
engram_apply = jax.jit(engram_gate.engram_apply, static_argnames=("eps", "implementation"))
