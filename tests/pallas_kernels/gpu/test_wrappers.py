"""Operations of Pallas that kernels reach only through this package."""

import re
from pathlib import Path

import pytest

import widemesh.pallas_kernels as room

ROOT = Path(room.__path__[0])


@pytest.mark.parametrize(("operation", "wrapper"), [
    ("store", "gpu/store.py"),  # does not exist in jax 0.11
    ("sum", "thread_rows.py"),  # neither does this
    ("wgmma", "gpu/wgmma.py"),  # the interpreter checks no operand
])  # fmt: skip
def test_called_in_its_wrapper_alone(operation, wrapper):
    call = re.compile(rf"(?<!`)plgpu\.{operation}\(")
    callers = [file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if call.search(file.read_text())]
    assert callers == [wrapper]
