"""docs/configuration.md is what the dataclasses say, and the generator finds a meaning wherever one may stand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import pytest

from widemesh.tools import config_docs
from widemesh.tools.generate import Generate
from widemesh.tools.serve import Serve

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A base."""

    after: int = 1  # comment after
    inherited: str | None = None  # from the base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Base):
    """Summary on
    two lines.

    More.
    """

    # comment above
    # on two lines
    above: float = 0.5
    below: Literal["a", "b"] = "a"
    """String below."""
    directive: tuple[int, ...] = ()  # before the directive  # fmt: skip
    marked: Annotated[bool, "extra"] = True  # a | b
    needed: Path  # no default
    after: int = 2  # the subclass's own words


def test_page_is_up_to_date() -> None:
    is_current = PAGE.read_text(encoding="utf-8") == config_docs.page()
    assert is_current, "run `python -m widemesh.tools.config_docs > docs/configuration.md`"


def test_every_field_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for cls in config_docs.SETTINGS:
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` |" in page


def test_flags_of_a_group_are_named_as_each_command_takes_them() -> None:
    """Parsed as they stand in the page; a word that is no flag would end the process."""
    where = config_docs.SETTINGS[config_docs.EplbConfig]
    flags = (("--eplb.", "--eplb-config", Serve, ["tiny"]),
             ("--engine.eplb.", "--engine.eplb-config", Generate,
              ["--file", "in.jsonl", "--out", "out.jsonl", "--model", "tiny"]))  # fmt: skip
    for prefix, whole, command, needed in flags:
        assert f"`{prefix}`" in where and f"`{whole}" in where
        for given in ([f"{prefix}window-size", "500"], [whole, '{"window_size": 500}']):
            assert command.parse("widemesh", [*needed, *given]).engine.eplb.window_size == 500


def test_meanings_are_found_where_they_may_stand() -> None:
    rows = {row.name: row for row in config_docs.fields_of(Sample)}
    assert {name: row.meaning for name, row in rows.items()} == {
        "after": "the subclass's own words",
        "inherited": "from the base",
        "above": "comment above on two lines",
        "below": "String below.",
        "directive": "before the directive",
        "marked": "a | b",
        "needed": "no default",
    }
    assert {name: (row.type, row.default) for name, row in rows.items()} == {
        "after": ("int", "`2`"),
        "inherited": ("text | none", "none"),
        "above": ("float", "`0.5`"),
        "below": ("a | b", "`a`"),
        "directive": ("int, ...", "none"),
        "marked": ("bool", "`true`"),
        "needed": ("path", "required"),
    }


def test_a_field_that_is_no_flag_is_left_out() -> None:
    command = config_docs.Command("widemesh.tools.launch:Launch", "")
    section = config_docs._command_section("widemesh launch", command)
    assert "| `--num-processes` |" in section and "handed" not in section


def test_a_field_without_meaning_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent:
        """No words."""

        field: int = 0

    with pytest.raises(config_docs.UndocumentedFieldError, match=r"Silent\.field has no meaning"):
        config_docs.fields_of(Silent)
