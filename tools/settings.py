"""Settings from a YAML file, read as if they were flags, so that the dataclasses alone say what is allowed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, get_type_hints

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
    parsed = parse_flags(cls, prog, [*args, *as_flags(settings, args, prefix)])
    if model is not None and not parsed.engine.model:
        parsed = dataclasses.replace(parsed, engine=dataclasses.replace(parsed.engine, model=str(model)))  # type: ignore[type-var]
    return parsed


def check_output(path: Path, name: str = "out") -> None:
    """Refuse an output file that could not be written in the end. Raises ConfigError; called before the work.

    `name` is that of the setting, which the error gives.
    """
    if path.is_dir():
        raise ConfigError(f"{name}={str(path)!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{name}={str(path)!r}: its folder does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name}={str(path)!r}: its folder cannot be written to; name a file elsewhere")


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
    except (yaml.YAMLError, UnicodeDecodeError) as err:
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
    groups = _groups(classes)
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
    return settings


def _groups(classes: Sequence[type]) -> dict[str, type]:
    """The fields of `classes` that are dataclasses themselves."""
    fields = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
    return {name: hint for name, hint in fields.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


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
        except ValueError as err:
            raise ConfigError(f"{flag}={text!r} is not JSON ({err}); write {{\"name\": value, ...}}") from None
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
        else:
            flags += [yes, *map(str, value if isinstance(value, list) else [value])]
    return flags
