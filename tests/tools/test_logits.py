"""`widemesh logits`: whole output or none, every mode the same, mistakes in one sentence."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from widemesh.model.checkpoint import tensor_file
from widemesh.tools.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "A"


def run(tmp_path: Path, tokens: object, *flags: str, model: Path = GOLDEN) -> tuple[int, Path]:
    (tmp_path / "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")
    out = tmp_path / "out.safetensors"
    return main(["logits", str(model), "--tokens", str(tmp_path / "tokens.json"), "--out", str(out), *flags]), out


def test_lists_of_different_lengths_match_golden(tmp_path: Path) -> None:
    """The two golden inputs of different length, and a prefix of one, in one call."""
    inputs, wanted = load_file(GOLDEN / "inputs.safetensors"), load_file(GOLDEN / "outputs_other.safetensors")
    long = load_file(GOLDEN / "outputs_plain_long.safetensors")["logits"][0]
    lists = [inputs["short"][0].tolist(), inputs["long"][0].tolist(), inputs["long"][0, :2].tolist()]
    status, out = run(tmp_path, lists)
    assert status == 0
    logits = load_file(out)
    assert set(logits) == {"logits.0", "logits.1", "logits.2"}
    for name, reference in zip(sorted(logits), (wanted["plain.short.logits"][0], long, long[:2]), strict=True):
        assert logits[name].dtype == np.float32
        error = np.linalg.norm(logits[name] - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
        assert error.max() < 2e-5, name


@pytest.mark.parametrize(
    ("tokens", "flags", "sentence"),
    [
        ([[5, 160]], (), "tokens[0][1]=160 is outside the vocabulary; use 0 to 159"),
        ([[5], []], (), "tokens[1]=[] is empty"),
        ([[5, 159]], (), "tokens[0] holds 159, the image placeholder"),
        ([[5, 1.5]], (), "tokens[0] must be one flat list of integers"),
        ([[[5], [6, 7]]], (), "tokens[0] must be one flat list of integers"),
        ({"a": 1}, (), "must hold a non-empty list of lists of token ids"),
        ([], (), "must hold a non-empty list of lists of token ids"),
        ([[5]], ("--mode", "chunked:0"), "mode='chunked:0' is unknown; use full, incremental or chunked:N"),
    ],
)
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: object, flags: tuple, sentence: str
) -> None:
    status, out = run(tmp_path, tokens, *flags)
    assert (status, out.exists()) == (2, False)
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_nested_too_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[" * 100_000)
    assert main(["logits", str(GOLDEN), "--tokens", str(tokens), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"widemesh: {tokens} is not valid JSON (maximum recursion depth exceeded")


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.EIO, "I/O error: No space left on device (os error 28)", str(path))

    monkeypatch.setattr(tensor_file, "write_tensor_file", fail)
    status, out = run(tmp_path, [[5]])
    assert status == 2 and [path.name for path in tmp_path.iterdir()] == ["tokens.json"]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"widemesh: out={str(out)!r}: writing failed (I/O error: No space left on device (os error 28)); free space or "
        "name a file elsewhere")  # fmt: skip


def test_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run(tmp_path, [[5]], model=tmp_path / "nothing")
    assert status == 2
    assert "does not exist" in capsys.readouterr().err
