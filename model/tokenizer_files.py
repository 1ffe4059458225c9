"""The tokenizer files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from widemesh.model.config import ConfigError


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read `tokenizer.json`, with truncation and padding switched off. Raises ConfigError with the path."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a checkpoint folder that holds tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as err:  # the library raises bare Exception
        raise ConfigError(f"{path} is no usable tokenizer ({err}); write the released tokenizer.json there") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokenizer_config(folder: str | Path) -> dict[str, Any]:
    """The parsed `tokenizer_config.json`, or an empty dict where there is none. Raises ConfigError with the path."""
    path = Path(folder) / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:  # the last: nested too deeply
        raise ConfigError(f"{path} is not valid JSON ({err}); correct or remove it") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(config).__name__}; correct or remove it")
    return config
