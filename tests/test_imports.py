"""The rule that keeps the rooms apart: a room imports only itself and rooms below it, by the names `widemesh.*`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("tools", "serving", "eplb", "model", "sharding", "pallas_kernels")  # from the top down


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported anywhere in a file; relative imports start with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from widemesh import model` names the room only in the alias.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "widemesh" else [module]
            yield from ((node.lineno, name) for name in names)


def violations(room: str, source: str) -> list[str]:
    """What a file of `room` imports against the rule."""
    allowed = ROOMS[ROOMS.index(room) :]
    found = []
    for line, name in imports(source):
        head, *rest = name.split(".")
        if name.startswith("."):
            found.append(f"{line}: relative import {name}; write widemesh.{room}...")
        elif head in ROOMS:
            found.append(f"{line}: import of {name} by its bare name; write widemesh.{name}")
        elif head == "widemesh" and rest and rest[0] in ROOMS and rest[0] not in allowed:
            found.append(f"{line}: {room} imports {rest[0]}, which is above it")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_downwards(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): violations(room, path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("model", "from widemesh.serving.engine import Engine"),
        ("model", "import widemesh.tools.cli"),
        ("model", "from widemesh import eplb"),
        ("sharding", "def f():\n    from widemesh.model import config"),
        ("pallas_kernels", "from widemesh.sharding.axes import EP_AXIS"),
        ("model", "from model.config import ModelConfig"),
        ("model", "import pallas_kernels.mhc"),
        ("model", "from .config import ModelConfig"),
        ("model", "from . import config"),
    ],
)
def test_rule_catches(room, line):
    assert len(violations(room, line)) == 1


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("tools", "from widemesh.serving.engine import Engine"),
        ("model", "from widemesh.model.config import ModelConfig\nfrom widemesh.pallas_kernels import mhc"),
        ("pallas_kernels", "import jax\nfrom tools_of_someone import x"),
        ("serving", "import widemesh"),
    ],
)
def test_rule_allows(room, line):
    assert violations(room, line) == []
