"""The user's cache folder."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from widemesh.serving.user_cache import user_cache_folder


def test_the_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache_folder() == tmp_path / ".cache" / "widemesh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == tmp_path / ".cache" / "widemesh"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache_folder() == Path("/elsewhere/widemesh")


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user without a home, and a folder for temporary files."""
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_has_a_folder_of_their_own(homeless):
    for _ in range(2):
        assert user_cache_folder() == homeless / f"widemesh-{os.getuid()}"
        assert user_cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_not_taken(homeless, monkeypatch):
    folder = user_cache_folder()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    folder.rename(homeless / f"widemesh-{own + 1}")
    with pytest.raises(PermissionError, match="belongs to another user") as raised:
        user_cache_folder()
    assert raised.value.filename == str(homeless / f"widemesh-{own + 1}")
