"""The test kernels of `square.py`, which also runs as a script."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def square() -> ModuleType:
    """The module of that file."""
    spec = importlib.util.spec_from_file_location("square", Path(__file__).with_name("square.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
