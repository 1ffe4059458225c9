"""Where the project keeps what it can make again: compiled programs, the embedded checkpoint."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/widemesh`, or `~/.cache/widemesh` where that is unset or not absolute."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "widemesh"
