"""Programs are counted when they are made, not when they are called."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from widemesh.serving.compile_counter import CompileCounter


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


def test_a_new_program_counts_and_a_known_one_does_not(counter: CompileCounter) -> None:
    x, y = jax.block_until_ready((jnp.arange(5.0), jnp.arange(6.0)))
    before = counter.total

    def arithmetic(values: jax.Array) -> jax.Array:
        return values * 3.25 - 1

    program = jax.jit(arithmetic)
    program(x)
    assert counter.total == before + 1
    assert counter.after_warm_up == 0
    counter.mark_warm()
    program(x)
    assert (counter.total, counter.after_warm_up) == (before + 1, 0)
    program(y)  # another shape
    assert (counter.total, counter.after_warm_up) == (before + 2, 1)
    # The same program again: from JAX's persistent cache, if there is one. Not by clearing JAX's caches, which hold
    # the programs of engines that other tests share.
    jax.jit(lambda values: arithmetic(values))(y)
    assert counter.after_warm_up == 2


def test_nothing_counts_after_close(counter: CompileCounter) -> None:
    counter.mark_warm()
    counter.close()
    counter.close()
    jax.jit(lambda x: x * 5.5 + 2)(jnp.arange(9.0))
    assert counter.after_warm_up == 0
