"""`widemesh logits DIR --tokens TOKENS.json --out OUT.safetensors`: every position's logits, to check the model by."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from widemesh.model.config import ConfigError
from widemesh.tools.settings import check_output, whole_file

NumericsName = Literal["plain", "kvq", "w8a8", "reference", "serving"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """Write the logits of every position of given token ids.

    TOKENS.json is a list of lists of token ids, used as given. OUT.safetensors holds `logits.0`, `logits.1`, ...
    (f32 [ids, vocabulary], one per list). It appears only when it is whole.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]  # checkpoint folder
    tokens: Path  # JSON file with a list of lists of token ids
    out: Path  # safetensors file to write
    numerics: NumericsName = "plain"  # roundings to apply
    mode: str = "full"  # full, incremental (one id at a time) or chunked:N (N ids at a time)
    page_size: int = 64  # tokens per page of the caches that the ids run through; changes no result

    def run(self) -> None:
        check_output(self.out, source=self.tokens)
        lists = self._read_lists()
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from rich.console import Console
        from rich.progress import track

        from widemesh.model.checkpoint.tensor_file import write_tensor_file
        from widemesh.model.forward import ForwardModel, Mode, check_token_ids
        from widemesh.model.numerics import numerics_named

        mode = Mode.parse(self.mode)
        model = ForwardModel.load(self.folder, numerics_named(self.numerics), self.page_size)
        for number, ids in enumerate(lists):
            check_token_ids(ids, model.config, f"tokens[{number}]")
        steps = track(lists, "logits", console=Console(stderr=True), disable=len(lists) < 2)
        tensors = {f"logits.{number}": model.logits(ids, mode) for number, ids in enumerate(steps)}
        try:
            with whole_file(self.out) as scratch:
                write_tensor_file(scratch, tensors)
        except OSError as err:
            raise ConfigError(f"out={str(self.out)!r}: writing failed ({err.strerror or err}); free space or name a "
                              "file elsewhere") from None  # fmt: skip
        print(json.dumps({"lists": len(lists), "positions": sum(map(len, lists)), "out": str(self.out)}))

    def _read_lists(self) -> list[list[Any]]:
        try:
            content = json.loads(self.tokens.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"{self.tokens} is not valid JSON ({err}); write a list of lists of ids") from None
        if not isinstance(content, list) or not content or not all(isinstance(part, list) for part in content):
            raise ConfigError(f"{self.tokens} must hold a non-empty list of lists of token ids")
        return content
