"""Programs are counted when they are made, not when they are called."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from widemesh.serving.compile_counter import CompileCounter


def test_a_new_program_counts_and_a_known_one_does_not(compiles: CompileCounter) -> None:
    x, y = jax.block_until_ready((jnp.arange(5.0), jnp.arange(6.0)))
    before = compiles.total

    def arithmetic(values: jax.Array) -> jax.Array:
        return values * 3.25 - 1

    program = jax.jit(arithmetic)
    program(x)
    assert compiles.total == before + 1
    assert compiles.after_warm_up == 0
    compiles.mark_warm()
    program(x)
    assert (compiles.total, compiles.after_warm_up) == (before + 1, 0)
    program(y)  # another shape
    assert (compiles.total, compiles.after_warm_up) == (before + 2, 1)
    # The same program again: from JAX's persistent cache, if there is one.
    jax.jit(lambda values: arithmetic(values))(y)
    assert compiles.after_warm_up == 2


def test_nothing_counts_after_close(compiles: CompileCounter) -> None:
    compiles.mark_warm()
    compiles.close()
    compiles.close()
    jax.jit(lambda x: x * 5.5 + 2)(jnp.arange(9.0))
    assert compiles.after_warm_up == 0
