"""Which implementation runs where."""

import importlib
import logging
from types import SimpleNamespace

import jax
import pytest

from widemesh.pallas_kernels.gpu import choose, device_target, interpreted

choosing = importlib.import_module("widemesh.pallas_kernels.gpu.choose")  # the function has the name of its module


@pytest.fixture
def on_device(monkeypatch):
    """Makes the default device look like a GPU."""
    choosing._log_unsupported.cache_clear()

    def install(kind: str, capability: str) -> None:
        device = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(choosing, "_default_device", lambda: device)

    return install


def test_a_cpu_runs_the_reference_in_silence(caplog):
    with caplog.at_level(logging.DEBUG, logger="widemesh"):
        assert choose("op", None) == "reference"
        assert choose("op", "reference") == "reference"
    assert device_target() is None and not caplog.records


def test_kernels_asked_for_on_a_cpu_are_an_error():
    told = r"'mosaic' of my_op is written for sm_90a \(H100 and H200\), .* is a cpu; leave implementation=None"
    with pytest.raises(ValueError, match=told):
        choose("my_op", "mosaic")


@pytest.mark.parametrize(("name", "capability"), [("H200", "9.0"), ("B300", "10.3")])
def test_a_supported_gpu_runs_kernels(on_device, name, capability):
    on_device(f"NVIDIA {name}", capability)
    assert device_target().name == name
    assert choose("op", None) == choose("op", "mosaic") == "mosaic"
    assert choose("op", "reference") == "reference"


def test_an_unsupported_gpu_falls_back_with_one_line(on_device, caplog):
    on_device("NVIDIA A100", "8.0")
    assert [choose(op, None) for op in ("one", "other", "one")] == ["reference"] * 3
    (record,) = caplog.records
    assert record.getMessage() == (
        "NVIDIA A100 (compute capability 8.0): GPU kernels are written for "
        "sm_90a (H100 and H200), sm_100a (B200), sm_103a (B300); the reference implementations run instead"
    )


def test_an_unsupported_gpu_does_not_fall_back_when_kernels_are_asked_for(on_device, caplog):
    on_device("NVIDIA A100", "8.0")
    with pytest.raises(ValueError, match=r"sm_103a \(B300\), .* NVIDIA A100 \(compute capability 8.0\); leave"):
        choose("op", "mosaic")
    assert not caplog.records


def test_an_unknown_implementation_is_an_error():
    with pytest.raises(ValueError, match=r"implementation='triton' of op must be one of .*'mosaic'"):
        choose("op", "triton")


def test_the_choice_follows_the_state_of_each_trace():
    chosen = []

    @jax.jit
    def traced(x):
        chosen.append((choose("op", None), device_target()))
        return x

    for _ in range(2):  # the second round finds all three programs in jax's cache
        traced(0)
        for target in ("H100", "B200"):
            with interpreted(target):
                traced(0)
    assert [(choice, target and target.name) for choice, target in chosen] == [
        ("reference", None),
        ("mosaic", "H100"),
        ("mosaic", "B200"),
    ]


def test_the_default_device_may_be_a_name():
    with jax.default_device("cpu"):
        assert device_target() is None and choose("op", None) == "reference"
