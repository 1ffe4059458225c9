"""When jax is kept to the CPU."""

import os

import pytest

from widemesh.tools import aot_only


@pytest.fixture
def machine(monkeypatch):
    """A machine with or without plugin, libraries and driver; gives JAX_PLATFORMS afterwards."""

    def keep(*, plugin: bool, runtime: bool, driver: bool, platforms: str | None = None) -> str | None:
        monkeypatch.setattr(aot_only, "_PLUGINS", ("json",) if plugin else ("no_such_package.plugin",))
        monkeypatch.setattr(aot_only, "_RUNTIME", ("json",) if runtime else ("no_such_package.cudnn",))
        monkeypatch.setattr(aot_only, "_DRIVER", None if driver else "libno-such-driver.so.1")  # None: this program
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if platforms is not None:
            monkeypatch.setenv("JAX_PLATFORMS", platforms)
        aot_only.keep_to_cpu()
        return os.environ.get("JAX_PLATFORMS")

    return keep


def test_a_machine_that_only_compiles_is_kept_to_its_cpu(machine):
    assert machine(plugin=True, runtime=False, driver=False) == "cpu"


@pytest.mark.parametrize(
    "has",
    [
        {"plugin": False, "runtime": False, "driver": False},
        {"plugin": True, "runtime": True, "driver": False},
        {"plugin": True, "runtime": False, "driver": True},
    ],
)
def test_any_other_machine_is_left_alone(machine, has):
    assert machine(**has) is None


def test_what_is_set_stays(machine):
    assert machine(plugin=True, runtime=False, driver=False, platforms="tpu") == "tpu"
