"""Settings from a YAML file, read as if they were flags, so that the dataclasses alone say what is allowed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
    and is filled in from the file if the flags leave it empty. Raises ConfigError; exits with status 2 on wrong flags.
    """
    path = find_config(args)
    settings = {} if path is None else read_settings(path, classes)
    model = settings.pop("model", None)
    parsed = parse_flags(cls, prog, [*args, *as_flags(settings, args, prefix)])
    if model is not None and not parsed.engine.model:
        parsed = dataclasses.replace(parsed, engine=dataclasses.replace(parsed.engine, model=str(model)))  # type: ignore[type-var]
    return parsed


def check_output(out: Path) -> None:
    """Refuse an output file that could not be written in the end. Raises ConfigError; called before the work."""
    if out.is_dir():
        raise ConfigError(f"out={str(out)!r} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise ConfigError(f"out={str(out)!r}: its folder does not exist; make it first")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"out={str(out)!r}: its folder cannot be written to; name a file elsewhere")


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
    known = {field.name for cls in classes for field in dataclasses.fields(cls)}
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(f"{path}: {', '.join(unknown)} is no setting; known are {', '.join(sorted(known))}")
    for key, value in settings.items():
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict | list) for v in value)):
            raise ConfigError(f"{path}: {key} must be one value or a list of values")
    return settings


def as_flags(settings: Mapping[str, Any], given: Sequence[str], prefix: str = "") -> list[str]:
    """Flags that say the same as `settings`, to follow `given`; those that `given` holds already are left out."""
    said = {arg.split("=", 1)[0].replace("_", "-") for arg in given if arg.startswith("--")}
    flags: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        yes, no = f"--{prefix}{name}", f"--{prefix}no-{name}"
        if yes in said or no in said:
            continue
        if isinstance(value, bool):
            flags.append(yes if value else no)
        else:
            flags += [yes, *map(str, value if isinstance(value, list) else [value])]
    return flags
