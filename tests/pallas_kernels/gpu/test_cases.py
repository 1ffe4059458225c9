"""Finding the cases of the op folders."""

import sys

import pytest

import widemesh.pallas_kernels as room
from widemesh.pallas_kernels.gpu import cases, interpret
from widemesh.pallas_kernels.gpu.interpret import Swap

_CASES = "from types import SimpleNamespace as Case\nKERNELS = (Case(name='decode'), Case(name='prefill'))"


@pytest.fixture
def ops(monkeypatch, tmp_path):
    """Three op folders: one with a case, one that does not import, one without kernels."""
    swap = "from widemesh.pallas_kernels.gpu import swap\nswap(kernel='k', missing='m', staged='s')"
    for op, files in {
        "good_op": {"aot.py": _CASES, "mosaic_hopper.py": swap},
        "bad_op": {"aot.py": "raise KeyError('gone')"},
        "plain_op": {"op.py": ""},
    }.items():
        (tmp_path / op).mkdir()
        for name, text in (files | {"__init__.py": ""}).items():
            (tmp_path / op / name).write_text(text)
    monkeypatch.setattr(room, "__path__", [str(tmp_path)])
    monkeypatch.setattr(interpret, "_swaps", [])
    yield
    for name in [name for name in sys.modules if name.split(".")[-1] in ("good_op", "bad_op", "plain_op")]:
        for module in [module for module in sys.modules if module == name or module.startswith(name + ".")]:
            del sys.modules[module]


def test_one_op_that_does_not_import_hides_no_other(ops):
    found, broken = cases.find_cases()
    assert [case.name for case in found] == ["decode", "prefill"]
    assert broken == {"bad_op": "KeyError: 'gone'"}


def test_ops_and_cases_by_name(ops):
    for names, expected in ((["good_op"], ["decode", "prefill"]), (["good_op/prefill"], ["prefill"])):
        found, broken = cases.find_cases(names)
        assert [case.name for case in found] == expected and broken == {}
    with pytest.raises(ValueError, match="op='good_op/verify' names no case; the cases are decode, prefill"):
        cases.find_cases(["good_op/verify"])


@pytest.mark.parametrize("op", ["cube", "plain_op"])
def test_an_op_without_cases_is_an_error(ops, op):
    with pytest.raises(ValueError, match=f"op='{op}' must be one of bad_op, good_op"):
        cases.find_cases([op])


def test_swaps_are_found_beside_the_kernels(ops):
    assert cases.declared_swaps() == (Swap(kernel="k", missing="m", staged="s"),)
