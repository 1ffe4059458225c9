"""Whether a picture can be drawn, known before the work that it is to show."""

from __future__ import annotations

from pathlib import Path

from widemesh.model.config import ConfigError


def check_plotting(path: Path, name: str) -> None:
    """Refuse a file that no picture can be drawn into. Raises ConfigError, which gives the setting's `name`."""
    if path.suffix != ".png":
        raise ConfigError(f"{name}={str(path)!r} must end in .png; use {str(path.with_suffix('.png'))!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"{name}={str(path)!r} needs matplotlib; pip install 'widemesh[plots]'") from None
