"""Where the project keeps what it can make again: compiled programs, the embedded checkpoint."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/widemesh`, or `~/.cache/widemesh` where that is unset or not absolute.

    A user without a home has `widemesh-<uid>` in the folder for temporary files. Raises OSError if it is another's.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "widemesh"
    try:
        return Path.home() / ".cache" / "widemesh"
    except RuntimeError:  # HOME is unset and the uid has no passwd entry, as in a container that runs as any user
        folder = Path(tempfile.gettempdir()) / f"widemesh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # its programs would be run here
        raise PermissionError(errno.EACCES, "the folder belongs to another user", str(folder))
    return folder
