"""What is said when the compiler is missing, and which assembler is taken."""

import pytest

from widemesh.pallas_kernels.gpu import processes, toolchain
from widemesh.pallas_kernels.gpu.toolchain import ToolchainError


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No plugin, no wheel, no ptxas anywhere."""
    monkeypatch.setattr(toolchain, "_PLUGINS", ())
    monkeypatch.setattr(toolchain, "_WHEELS", ())
    monkeypatch.setattr(toolchain, "_CUDA_HOME", tmp_path / "cuda")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def _ptxas(folder):
    folder.mkdir(parents=True)
    ptxas = folder / "ptxas"
    ptxas.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
    ptxas.chmod(0o755)
    return ptxas


@pytest.mark.parametrize("ask", [toolchain.prepare, lambda: list(processes.run_targets(["H200"]))])
def test_without_the_plugin(bare, ask):
    with pytest.raises(ToolchainError, match=r"^compiling for a GPU needs .*; run pip install 'widemesh\[aot\]'$"):
        ask()


def test_without_ptxas(bare):
    with pytest.raises(ToolchainError, match=r"^ptxas is neither .*; run pip install 'widemesh\[aot\]'$"):
        toolchain.find_ptxas()


def test_the_wheel_goes_before_path_and_path_before_the_usual_home(bare, monkeypatch):
    at_home = _ptxas(bare / "cuda" / "bin")
    assert toolchain.find_ptxas() == at_home
    on_path = _ptxas(bare / "bin")
    assert toolchain.find_ptxas() == on_path
    in_wheel = _ptxas(bare / "site" / "fake_nvidia" / "fake_nvcc" / "bin")
    monkeypatch.syspath_prepend(bare / "site")
    monkeypatch.setattr(toolchain, "_WHEELS", ("fake_nvidia.fake_nvcc",))
    assert toolchain.find_ptxas() == in_wheel


def test_the_one_taken_comes_first_on_path(bare, monkeypatch):
    at_home = _ptxas(bare / "cuda" / "bin")
    monkeypatch.setattr(toolchain, "_PLUGINS", ("json",))
    for _ in range(2):
        tools = toolchain.prepare()
        assert (tools.ptxas, tools.ptxas_version) == (str(at_home), "12.9.86")
        assert toolchain.os.environ["PATH"] == f"{bare / 'cuda' / 'bin'}:{bare / 'bin'}"
