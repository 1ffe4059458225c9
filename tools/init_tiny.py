"""`widemesh init-tiny DIR`: a small checkpoint with random weights in the released layout, tokenizer included."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from widemesh.model.config import ConfigError
from widemesh.model.presets import DEFAULT_PRESET, PRESETS

Form = Literal["plain", "quantized"]
TINY_PRESETS = tuple(name for name in PRESETS if name.startswith("tiny-"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitTiny:
    """Write a small checkpoint with random weights, in the layout of the released one."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]  # new or empty folder
    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(TINY_PRESETS) + "}")] = DEFAULT_PRESET  # model sizes
    seed: int = 0  # of the weights; the same seed gives the same files
    form: Form = "quantized"  # as released (FP8 and FP4 with scales), or plain bfloat16

    def __post_init__(self) -> None:
        if self.preset not in TINY_PRESETS:
            raise ConfigError(f"preset={self.preset!r} is unknown; use one of {', '.join(TINY_PRESETS)}")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative; use 0")

    def run(self) -> None:
        folder = self.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already and is not an empty folder; give another one")
        was_there = folder.exists()
        try:
            write_tiny(folder, preset=self.preset, seed=self.seed, form=self.form)
        except BaseException:  # or what was written would be in the way of another try
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    path.unlink()
                if not was_there:
                    folder.rmdir()
            raise
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"wrote {self.preset} ({self.form}, seed {self.seed}, {size / 1e6:.1f} MB) to {folder}")


def write_tiny(folder: Path, *, preset: str, seed: int, form: Form) -> None:
    """Write the checkpoint and its tokenizer into `folder`, which is made if need be. Same arguments, same bytes."""
    from widemesh.model.checkpoint import write_checkpoint  # imports jax: not for --help
    from widemesh.model.random_weights import random_tensors
    from widemesh.model.tiny_tokenizer import tiny_tokenizer

    config = PRESETS[preset].with_draft(PRESETS[preset].dspark_block_size)  # the draft belongs to a released checkpoint
    tokenizer, tokenizer_config = tiny_tokenizer(config)
    folder.mkdir(parents=True, exist_ok=True)
    # Not `tokenizer.save`, which raises no OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    text = json.dumps(tokenizer_config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    write_checkpoint(folder, config, random_tensors(config, seed), form=form)  # config.json last: then it is whole
