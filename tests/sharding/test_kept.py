"""Programs that serve stay compiled, whatever else a process compiles or drops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.serving.compile_counter import CompileCounter
from widemesh.sharding.kept import Kept, once


def test_what_falls_out_of_the_caches_of_jax_is_not_compiled_again(compiles: CompileCounter) -> None:
    jitted = jax.jit(lambda x, y: x * 2 + y, donate_argnums=0)
    kept, y = Kept(jitted, has_collectives=False), np.arange(3, dtype=np.int32)
    x = kept(jnp.ones(3, jnp.int32), y)
    heard = compiles.total
    for _ in range(2):
        jax.clear_caches()  # all of them at once
        before, x = x, kept(x, y)
        assert before.is_deleted()
    assert x.tolist() == [8, 15, 22]
    assert compiles.total == heard
    jitted(jnp.asarray(x), y)
    assert compiles.total > heard  # as the function itself is


def test_another_form_is_refused_instead_of_compiled(compiles: CompileCounter) -> None:
    kept = Kept(jax.jit(lambda x: x + 1), has_collectives=False)
    kept(np.zeros(3, np.float32))
    heard = compiles.total
    for other in (np.zeros(4, np.float32), np.zeros(3, np.int32)):
        with pytest.raises(TypeError):
            kept(other)
    assert compiles.total == heard


def test_once_answers_the_same_arguments_with_the_same_object() -> None:
    class Made:
        def __init__(self) -> None:
            self._made: dict[object, object] = {}

        @once
        def one(self, size: int) -> list[int]:
            return [size]

        @once
        def other(self, size: int) -> list[int]:
            return [size]

    made = Made()
    assert made.one(1) is made.one(1) == [1]
    assert made.one(2) == [2] and made.other(1) is not made.one(1)
    assert Made().one(1) is not made.one(1)
