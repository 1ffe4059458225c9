"""The user's cache folder."""

from __future__ import annotations

from pathlib import Path

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
