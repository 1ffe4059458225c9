"""`python -m widemesh.tools.config_docs`: docs/configuration.md, made from the dataclasses that hold the settings.

What a field means is the comment after it, or the comment lines above it, or the string below it: the places where
the command line's help finds it too.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from widemesh.eplb.config import EplbConfig
from widemesh.serving.config import EngineConfig
from widemesh.serving.grpc.server import ServerConfig
from widemesh.serving.metrics_endpoint import MetricsConfig
from widemesh.serving.process_config import ProcessConfig
from widemesh.serving.request import SamplingParams
from widemesh.tools.cli import COMMANDS, Command

# The settings that have a section of their own, with where they are set.
SETTINGS: Mapping[type, str] = {
    EngineConfig: (
        "Flags of `widemesh serve`, where `model` is the folder `DIR` that is given without a name. For "
        "`widemesh generate --file` they begin with `--engine.`, except `--model`. In Python: `EngineConfig(...)`."
    ),
    EplbConfig: (
        "Flags of `widemesh serve` that begin with `--eplb.`, as `--eplb.window-size 500`, or one JSON object, "
        "`--eplb-config '{\"window_size\": 500}'`. For `widemesh generate --file` they begin with `--engine.eplb.`, "
        "and the object is `--engine.eplb-config`. In a YAML file a mapping under the key `eplb`. In Python: "
        "`EngineConfig(enable_eplb=True, eplb=EplbConfig(...))`."
    ),
    ServerConfig: "Flags of `widemesh serve`. In Python: `ServerConfig(...)`.",
    MetricsConfig: "Flags of `widemesh serve`. In Python: a `MetricsEndpoint`, with `engine.metrics` added.",
    ProcessConfig: "Flags of `widemesh serve`. In Python: `Engine(EngineConfig(...), ProcessConfig(...))`.",
    SamplingParams: (
        "Flags of `widemesh generate`, fields of a line of its `--file`, and fields of the protocol's "
        "`SamplingParams`. In Python: `SamplingParams(...)`."
    ),
}

_HEADER = """\
# Configuration

<!-- Made by `python -m widemesh.tools.config_docs > docs/configuration.md`; do not edit. -->

Every setting, made from the dataclasses that hold it. A field `max_model_len` is the flag `--max-model-len` on the
command line and the key `max_model_len` (or `max-model-len`) in a YAML file that is given with `--config FILE`. A flag
wins over the file, the file over the default. A value that cannot be used is refused at once, by a sentence that names
the field, the value and the remedy.

The sizes of the model are not settings: they are read from the checkpoint's `config.json` (see [model.md](model.md)).
"""


class UndocumentedFieldError(ValueError):
    """A field without a meaning. The message names the class and the field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One line of a table."""

    name: str
    type: str
    default: str
    meaning: str


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole of docs/configuration.md."""
    sections = [_HEADER]
    for cls, where in SETTINGS.items():
        sections.append(f"## {cls.__name__}\n\n{_summary(cls)}\n\n{where}\n\n{_table(fields_of(cls))}")
    sections.append("## Commands\n\nThe flags of each command's own; `widemesh COMMAND --help` shows them too.\n")
    sections += [_command_section(name, command) for name, command in _commands(COMMANDS)]
    return "\n".join(sections)


def fields_of(cls: type, *, skip: frozenset[str] = frozenset()) -> list[Field]:
    """The fields of a dataclass in order, those of its bases included. Raises UndocumentedFieldError."""
    meanings, hints = _meanings(cls), get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        meaning = meanings.get(field.name)
        if not meaning:
            raise UndocumentedFieldError(f"{cls.__name__}.{field.name} has no meaning; write a comment after the field")
        found.append(
            Field(
                name=field.name,
                type=_type_text(hints[field.name]),
                default=_default_text(field),
                meaning=meaning,
            )
        )
    return found


# --- commands -------------------------------------------------------------------------------------------------------


def _commands(level: Mapping[str, Any], prefix: str = "widemesh") -> Iterator[tuple[str, Command]]:
    for name, entry in level.items():
        if isinstance(entry, Command):
            yield f"{prefix} {name}", entry
        else:
            yield from _commands(entry, f"{prefix} {name}")


def _command_section(name: str, command: Command) -> str:
    module, _, cls_name = command.target.partition(":")
    cls = getattr(importlib.import_module(module), cls_name)
    hints = get_type_hints(cls, include_extras=True)
    groups = {field: group for field, hint in hints.items() if (group := _settings_of(hint))}
    text = f"### {name}\n\n{_summary(cls)}\n"
    if groups:
        links = " and ".join(f"[{group.__name__}](#{group.__name__.lower()})" for group in groups.values())
        text += f"\nTakes the fields of {links}.{_other_defaults(cls, groups)}\n"
    rows = fields_of(cls, skip=frozenset(groups) | _hidden(hints))
    flags = [dataclasses.replace(row, name=_flag(row.name, hints[row.name])) for row in rows]
    return f"{text}\n{_table(flags)}" if flags else text


def _other_defaults(cls: type, groups: Mapping[str, type]) -> str:
    """What the command's own defaults of such fields are, where they differ from those of the fields' class."""
    changed = [
        f"`{field.name}` is {_default_text(field, getattr(given.default, field.name))}"
        for given in dataclasses.fields(cls)
        if given.name in groups and dataclasses.is_dataclass(given.default)
        for field in dataclasses.fields(groups[given.name])
        if getattr(given.default, field.name) != field.default
    ]
    return f" Here the default of {' and of '.join(changed)}." if changed else ""


def _hidden(hints: Mapping[str, Any]) -> frozenset[str]:
    """The fields that are no flags."""
    return frozenset(name for name, hint in hints.items() if tyro.conf.Suppress in get_args(hint)[1:])


def _settings_of(hint: Any) -> type | None:
    """The class of SETTINGS that a field's type is, or derives from."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    bases = inspect.getmro(hint) if inspect.isclass(hint) else ()
    return next((cls for cls in SETTINGS if cls in bases), None)


def _flag(name: str, hint: Any) -> str:
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    if tyro.conf.Positional in extras:
        return next((extra.metavar for extra in extras if getattr(extra, "metavar", None)), name.upper())
    return f"--{name.replace('_', '-')}"


# --- what a table shows ---------------------------------------------------------------------------------------------


def _table(fields: list[Field]) -> str:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        cells = (f"`{field.name}`", f"`{field.type}`", field.default, field.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _summary(cls: type) -> str:
    """The first paragraph of a class's docstring, on one line."""
    paragraph = (inspect.getdoc(cls) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _type_text(hint: Any) -> str:
    """A type as a reader writes it: `int`, `str | none`, one of several words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _type_text(args[0])
    if origin in (Union, types.UnionType):
        return " | ".join(_type_text(arg) for arg in args)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"{_type_text(args[0])}, ..."
    if origin is Mapping:
        return f"{_type_text(args[0])}: {_type_text(args[1])}, ..."
    if hint is type(None):
        return "none"
    return {"str": "text", "Path": "path"}.get(hint.__name__, hint.__name__)


def _default_text(field: dataclasses.Field[Any], value: Any = dataclasses.MISSING) -> str:
    """The field's default, or `value` as a default is written."""
    if value is dataclasses.MISSING:
        value = field.default
        if callable(field.default_factory):
            value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == () or value == "":
        return "none"
    if type(value) in SETTINGS:
        return f"[{type(value).__name__}](#{type(value).__name__.lower()})"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- what a field means ---------------------------------------------------------------------------------------------


def _meanings(cls: type) -> dict[str, str]:
    """Meaning of every field of a class and its bases; the class's own words win."""
    found: dict[str, str] = {}
    for base in reversed(inspect.getmro(cls)):
        if dataclasses.is_dataclass(base):
            found.update(_own_meanings(base))
    return found


def _own_meanings(cls: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    comments, alone = _comments(source)
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        last = statement.end_lineno or statement.lineno
        above: list[str] = []
        while (line := statement.lineno - len(above) - 1) in alone:
            above.append(comments[line])
        text = comments.get(last) or " ".join(reversed(above)) or _string(following)
        if text:
            found[statement.target.id] = text
    return found


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Comments by line, without tool directives, and the lines that hold nothing else."""
    comments: dict[int, str] = {}
    alone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = re.split(r"#\s*(?:noqa|fmt:|type:|pragma)", token.string)[0].lstrip("# ").strip()
            if text:
                comments[token.start[0]] = text
                if token.line.lstrip().startswith("#"):
                    alone.add(token.start[0])
    return comments, alone


def _string(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


if __name__ == "__main__":
    main()
