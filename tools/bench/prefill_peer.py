"""`widemesh bench prefill-peer DIR`: one prefill of a small model on a CPU, beside its floor and beside a peer.

The same work on both sides: float32 with quantised cache formats, one prompt on a fresh cache, logits of every
position. Weights are drawn alike too: matrices with the inverse root of their width, norms one, the rest zero.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from widemesh.model.config import ConfigError, ModelConfig
from widemesh.tools.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from widemesh.model.forward import ForwardModel

_FIRST_TEXT_ID = 3  # ids below it are special tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPeer:
    """Time one prefill with random weights on a CPU, logits of every position, and say what the time is spent on.

    DIR holds config.json and tokenizer.json. The last line printed is a JSON object: the median `seconds` of a
    prefill, its `gflop`, the time `floor_s` that these would take at the rate of a float32 matrix product measured
    between the prefills, and `fraction` = floor_s / seconds. With a peer also its rate and the `ratio` to it.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]  # model folder without weights
    tokens: int = 1024  # prompt length; the program's rows are this rounded up to a power of two
    repeat: int = 5  # timed prefills per round
    rounds: int = 3  # turns taken with the peer; without one a single round is run
    threads: int = 2  # processor cores to run on, for the peer too
    seed: int = 0  # of weights and prompt
    peer_python: Path | None = None  # interpreter that runs the peer
    peer_script: Path | None = None  # takes DIR --tokens --repeat --threads, prints tokens_per_s in a last line of JSON

    def __post_init__(self) -> None:
        for name in ("tokens", "repeat", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative; use 0")
        if (self.peer_python is None) != (self.peer_script is None):
            raise ConfigError("peer_python and peer_script belong together; give both or neither")

    def run(self) -> None:
        self._prepare_process()
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        config = ModelConfig.from_dir(self.folder)
        console = Console()
        console.print("drawing weights and compiling ...")

        import numpy as np

        from widemesh.tools.bench.prefill_work import PrefillWork
        from widemesh.tools.bench.timing import matmul_flops

        model = self._model(config)
        prompt = np.random.default_rng(self.seed).integers(_FIRST_TEXT_ID, config.vocab_size, self.tokens)
        prompt[prompt == config.image_token_id] = _FIRST_TEXT_ID
        start = time.perf_counter()
        model.logits(prompt)
        compile_s = time.perf_counter() - start

        times: list[float] = []
        rates: list[float] = []
        peer: list[float] = []
        for turn in range(self.rounds if self.peer_script else 1):
            if self.peer_script:
                peer.append(self._peer_tokens_per_s())
            own: list[float] = []
            for _ in range(self.repeat):
                rates.append(matmul_flops())
                start = time.perf_counter()
                model.logits(prompt)
                own.append(time.perf_counter() - start)
            times += own
            line = f"round {turn + 1}: {self.tokens / statistics.median(own):.1f} tokens/s"
            console.print(line + (f", peer {peer[-1]:.1f}" if peer else ""), highlight=False)

        seconds, rate = statistics.median(times), statistics.median(rates)
        work = PrefillWork.count(config, self.tokens)
        floor_s = work.gflop * 1e9 / rate
        console.print(self._table(self._parts(model, prompt), seconds))
        console.print(
            f"{work.gflop:.1f} GFLOP: linears {work.linears / 1e9:.1f}, index scores {work.index_scores / 1e9:.1f}, "
            f"attention {work.attention / 1e9:.1f}; matrix product {rate / 1e9:.0f} GFLOP/s on {self.threads} cores; "
            f"first call {compile_s:.1f} s",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        figures: dict[str, Any] = {
            "tokens": self.tokens, "seconds": round(seconds, 4), "tokens_per_s": round(self.tokens / seconds, 1),
            "gflop": round(work.gflop, 2), "floor_s": round(floor_s, 4), "fraction": round(floor_s / seconds, 3),
        }  # fmt: skip
        if peer:
            theirs = statistics.median(peer)
            figures |= {"peer_tokens_per_s": theirs, "ratio": round(self.tokens / seconds / theirs, 2)}
        print(json.dumps(figures), flush=True)

    def _prepare_process(self) -> None:
        """Before JAX starts: the size of its thread pool is the number of cores it may run on."""
        cores = sorted(os.sched_getaffinity(0))
        if self.threads > len(cores):
            raise ConfigError(f"threads={self.threads} but {len(cores)} cores are there; use {len(cores)} or fewer")
        os.sched_setaffinity(0, cores[: self.threads])
        keep_freed_memory()

    def _model(self, config: ModelConfig) -> ForwardModel:
        import numpy as np

        from widemesh.model.checkpoint.table import tensor_table
        from widemesh.model.forward import ForwardModel, load_engram_hash
        from widemesh.model.loading import read_parameters
        from widemesh.model.numerics import numerics_named

        rng = np.random.default_rng(self.seed)
        table = tensor_table(config)

        def draw(name: str) -> np.ndarray:
            shape = table[name].shape
            if len(shape) > 1:
                return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            return np.full(shape, 1.0 if "norm" in name else 0.0, np.float32)

        parameters = read_parameters(config, draw, np.arange(config.n_routed_experts))
        return ForwardModel(config, parameters, load_engram_hash(config, self.folder), numerics_named("kvq"))

    def _parts(self, model: ForwardModel, prompt: Any) -> dict[str, float]:
        import jax.numpy as jnp
        import numpy as np

        from widemesh.model.step import Rows, StepSettings
        from widemesh.tools.bench.prefill_parts import Parts

        ids = prompt[None].astype(np.int32)
        rows = Rows.of(jnp.asarray(ids), jnp.zeros(1, jnp.int32), jnp.array([self.tokens], jnp.int32),
                    jnp.asarray(model.engram_hash.rows(ids)))  # fmt: skip
        settings = StepSettings(numerics=model.numerics, selection="mask", start_bound=0)
        return Parts(model=model, rows=rows, settings=settings, repeat=self.repeat).seconds()

    def _table(self, parts: dict[str, float], seconds: float) -> Table:
        table = Table(title="one prefill, by part", caption="parts timed alone, as programs of their own; rest = "
                      "whole less parts: norms, rotations, quantisation, Engram, caches")  # fmt: skip
        for name, justify in (("part", "left"), ("ms", "right"), ("share", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for name, part_s in (parts | {"rest": seconds - sum(parts.values()), "whole": seconds}).items():
            table.add_row(name, f"{part_s * 1e3:.1f}", f"{part_s / seconds:.1%}")
        return table

    def _peer_tokens_per_s(self) -> float:
        command = [
            str(self.peer_python), str(self.peer_script), str(self.folder), "--tokens", str(self.tokens),
            "--repeat", str(self.repeat), "--threads", str(self.threads),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])
        except (IndexError, ValueError, KeyError, TypeError):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(f"peer_script={str(self.peer_script)!r} printed no JSON line with tokens_per_s (exit "
                              f"status {done.returncode}: {last}); run it by hand first") from None  # fmt: skip
