"""How the tests run JAX: on eight virtual CPU devices, with compiled programs kept between processes and runs.

Compiling costs far more than running at these sizes, so code is generated without LLVM's optimisation passes (half
the time), and every program is stored where the other workers of `pytest -n` and the next run find it.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from widemesh.serving.compile_counter import CompileCounter

_MAX_STORED_BYTES = 1 << 30
# Tracing makes objects by the million, next to none of them in dead cycles: at Python's own thresholds (700, 10, 10)
# a tenth of a run went into looking for some.
gc.set_threshold(20_000, 10, 10)
SEED = "WIDEMESH_TEST_SEED"

os.environ.setdefault(SEED, str(time.time_ns() % 2**31))  # workers inherit it

os.environ["JAX_PLATFORMS"] = "cpu"
for flag, setting in (("--xla_force_host_platform_device_count", 8), ("--xla_backend_optimization_level", 0)):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={setting}".strip()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
_cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
# Subprocesses that tests start (servers, command lines) inherit all of this.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_home / "widemesh" / "test-programs"))


def pytest_report_header(config: pytest.Config) -> str:
    """Random work is drawn from a fixed seed and from this one, which is new for every run."""
    return f"seed of this run: {os.environ[SEED]} (set {SEED} to repeat it)"


def pytest_configure(config: pytest.Config) -> None:
    """Start over when the store has grown too large (once, in the process that starts the workers)."""
    if hasattr(config, "workerinput"):
        return
    store = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    stored = sum(path.stat().st_size for path in store.glob("*")) if store.is_dir() else 0
    if stored > _MAX_STORED_BYTES:
        shutil.rmtree(store, ignore_errors=True)


@pytest.fixture
def compiles() -> Iterator[CompileCounter]:
    """Counts the programs that a test compiles, or loads from the store."""
    from widemesh.serving.compile_counter import CompileCounter

    counter = CompileCounter()
    yield counter
    counter.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of one file on one worker, and those of a golden checkpoint: they share programs."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByProgram(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "model/golden/" not in file:
                return file
            return "golden B" if re.search(r"\[B[-\]]", test) else "golden A"

    return ByProgram(config, log)
