"""The package's one page of names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import widemesh


def test_every_public_name_is_there() -> None:
    for name in widemesh.__all__:
        assert getattr(widemesh, name) is not None
    assert set(widemesh.__all__) <= set(dir(widemesh))
    assert widemesh.Engine is __import__("widemesh.serving.engine", fromlist=["Engine"]).Engine


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        widemesh.Motor  # noqa: B018


def test_importing_the_package_does_not_import_jax() -> None:
    code = "import widemesh, sys; widemesh.EngineConfig, widemesh.SamplingParams; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
