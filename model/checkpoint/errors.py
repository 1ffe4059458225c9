"""The one error of a checkpoint that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be read or written. `problems` holds every one that was found."""

    def __init__(self, folder: str | Path, problems: Sequence[str]) -> None:
        self.folder = Path(folder)
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = f"checkpoint {folder}: {self.problems[0]}"
        else:
            message = f"checkpoint {folder} has {len(self.problems)} problems:" + "".join(
                f"\n  - {problem}" for problem in self.problems
            )
        super().__init__(message)
