"""The embedded small checkpoint: made in the user's cache folder on first use, found there afterwards."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from widemesh import __version__
from widemesh.serving.user_cache import user_cache_folder
from widemesh.tools.init_tiny import write_tiny

PRESET = "tiny-mesh"
SEED = 0


def embedded_checkpoint() -> Path:
    """Folder of the embedded checkpoint. Raises OSError if the cache folder cannot be written.

    It is written under another name and renamed when whole, so an interrupted first use leaves nothing that looks like
    a checkpoint, and of several first uses at a time one wins and all find the same files.
    """
    folder = user_cache_folder() / f"{PRESET}-seed{SEED}-{__version__}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_tiny(scratch, preset=PRESET, seed=SEED, form="quantized")
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # anything but losing the race
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
