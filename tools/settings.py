"""Settings from a YAML file, read as if they were flags, so that the dataclasses alone say what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

import yaml

from widemesh.model.config import ConfigError
from widemesh.tools.flags import parse_flags


class _HasEngine(Protocol):
    """A command whose `engine` field is an EngineConfig."""

    @property
    def engine(self) -> Any: ...


def parse_with_file[T: _HasEngine](
    cls: type[T], prog: str, args: Sequence[str], classes: Sequence[type], prefix: str = ""
) -> T:
    """A command from its flags and from the file of `--config`, whose keys are fields of `classes`; flags win.

    `prefix` is what the flags of those fields begin with. The checkpoint folder, `model`, may be a positional argument
    and is filled in from the file if the flags leave it empty. A group of settings, `eplb`, may also be given as one
    JSON object, `--eplb-config {...}`, which wins over the file. Raises ConfigError; exits with status 2 on wrong
    flags.
    """
    path = find_config(args)
    settings = {} if path is None else read_settings(path, classes)
    args, groups = _take_groups(args, classes, prefix)
    settings |= {name: settings.get(name, {}) | group for name, group in groups.items()}
    model = settings.pop("model", None)
    if not isinstance(model, str | None):
        raise ConfigError(f"{path}: model={model!r} must be text; write it in quotes")
    parsed = parse_flags(cls, prog, [*args, *as_flags(settings, args, prefix)])
    if model is not None and not parsed.engine.model:
        parsed = dataclasses.replace(parsed, engine=dataclasses.replace(parsed.engine, model=model))  # type: ignore[type-var]
    return parsed


def check_output(path: Path, name: str = "out", source: Path | None = None) -> None:
    """Refuse an output file that could not be written in the end. Raises ConfigError; called before the work.

    `name` is that of the setting, which the error gives; `source` is the input file, which must not be overwritten.
    """
    if path.is_dir():
        raise ConfigError(f"{name}={str(path)!r} is a folder; name a file in it")
    if path.exists() and not path.is_file():  # a device or a pipe, which a file would take the place of
        raise ConfigError(f"{name}={str(path)!r} is no regular file; name one")
    target = _followed(path)
    if not target.parent.is_dir():
        raise ConfigError(f"{name}={str(path)!r}: its folder does not exist; make it first")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{name}={str(path)!r}: its folder cannot be written to; name a file elsewhere")
    if source is not None and target == _followed(source):
        raise ConfigError(f"{name}={str(path)!r} is the input file, which it would overwrite; name another one")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path of a file to write, which takes the place of `path` once the block has ended, and goes if it raises."""
    target = _followed(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _followed(path: Path) -> Path:
    """Where links lead."""
    return Path(os.path.realpath(path))  # `Path.resolve` raises RuntimeError for a link to itself


def find_config(args: Sequence[str]) -> Path | None:
    """The file named by `--config FILE` or `--config=FILE`; the last one counts."""
    found = None
    for i, arg in enumerate(args):
        if arg == "--config" and i + 1 < len(args):
            found = args[i + 1]
        elif arg.startswith("--config="):
            found = arg.removeprefix("--config=")
    return None if found is None else Path(found)


def read_settings(path: Path, classes: Sequence[type]) -> dict[str, Any]:
    """The file's mapping, keys with underscores. Raises ConfigError for a key that is no field of `classes`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as err:  # ValueError: a date or a number that cannot be
        reason = " ".join(str(err).split())
        raise ConfigError(f"{path} is not valid YAML ({reason}); correct it") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings, not {type(content).__name__}; write lines of `name: value`")
    return _known_settings(content, classes, str(path))


def _known_settings(
    content: Mapping[Any, Any], classes: Sequence[type], source: str, group: str = ""
) -> dict[str, Any]:
    """The mapping with underscores in its keys, and likewise the groups in it. Raises ConfigError, with `source`."""
    known = {field.name for cls in classes for field in dataclasses.fields(cls)}
    groups, hints = _groups(classes), _hints(classes)
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(settings.keys() - known)
    if unknown:
        words = ", ".join(group + name for name in unknown)
        raise ConfigError(f"{source}: {words} is no setting; known are {', '.join(sorted(known))}")
    for key, value in settings.items():
        if key in groups:
            if not isinstance(value, Mapping | None):
                raise ConfigError(f"{source}: {group}{key} must hold settings, not {type(value).__name__}; write lines "
                                  "of `name: value` below it")  # fmt: skip
            settings[key] = _known_settings(value or {}, [groups[key]], source, f"{group}{key}.")
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
            raise ConfigError(f"{source}: {group}{key} must be one value or a list of values")
        elif remedy := _remedy(value, hints[key]):
            raise ConfigError(f"{source}: {group}{key}={value!r} {remedy}")
    return settings


def _remedy(value: Any, hint: Any) -> str:
    """What to do about a value that would be another flag than the field's; empty where flags tell wrong values."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, list):
        if all(get_origin(kind) is not tuple for kind in kinds):
            return "must be one value; write no list"
        return 'must not hold "--"; leave it out' if any(str(item).startswith("--") for item in value) else ""
    if bool in kinds and not isinstance(value, bool):
        return "must be true or false; write one of them, without quotes"
    return "must not be true or false; write text in quotes" if isinstance(value, bool) and bool not in kinds else ""


def _groups(classes: Sequence[type]) -> dict[str, type]:
    """The fields of `classes` that are dataclasses themselves."""
    hints = _hints(classes).items()
    return {name: hint for name, hint in hints if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


def _hints(classes: Sequence[type]) -> dict[str, Any]:
    return {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}


def _take_groups(
    args: Sequence[str], classes: Sequence[type], prefix: str
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """`args` without flags that give a group as a JSON object, and those groups by name. Raises ConfigError."""
    flags = {f"--{prefix}{name}-config".replace("_", "-"): (name, cls) for name, cls in _groups(classes).items()}
    rest, found, left = [], {}, iter(args)
    for arg in left:
        flag, equals, text = arg.partition("=")
        if flag.replace("_", "-") not in flags:
            rest.append(arg)
            continue
        name, cls = flags[flag.replace("_", "-")]
        text = text if equals else next(left, "")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"{flag}={text[:200]!r} is not JSON ({err}); write {{\"name\": value, ...}}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{flag}={text!r} must be an object; write {{\"name\": value, ...}}")
        found[name] = _known_settings(content, [cls], flag)
    return rest, found


def as_flags(settings: Mapping[str, Any], given: Sequence[str], prefix: str = "") -> list[str]:
    """Flags that say the same as `settings`, to follow `given`; those that `given` holds already are left out."""
    said = {arg.split("=", 1)[0].replace("_", "-") for arg in given if arg.startswith("--")}
    flags: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, Mapping):
            flags += as_flags(value, given, f"{prefix}{name}.")
            continue
        yes, no = f"--{prefix}{name}", f"--{prefix}no-{name}"
        if yes in said or no in said:
            continue
        if isinstance(value, bool):
            flags.append(yes if value else no)
        elif isinstance(value, list):
            flags += [yes, *map(str, value)]
        else:
            flags.append(f"{yes}={value}")  # one word, so that the value may begin with a dash
    return flags
