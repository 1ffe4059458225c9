"""`widemesh demo`: the whole road on one machine: small model, two meshes, gRPC server, several clients, a table."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from widemesh.model.config import ConfigError
from widemesh.serving.config import EngineConfig
from widemesh.serving.grpc.client import Client, ServerError
from widemesh.serving.grpc.server import GrpcServer, ServerConfig
from widemesh.serving.request import RequestError, SamplingParams
from widemesh.serving.tokens import BROKEN
from widemesh.tools.embedded import embedded_checkpoint
from widemesh.tools.logs import log_to_stderr

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine

PREFILL_DEVICES = 2
DECODE_DEVICES = 4

PROMPTS = (
    "The lighthouse keeper counted the ships",
    "What should happen when there are more requests than there is room for?",
    "def answer(question, tokens=16):",
    "In the morning the wind came from the west, and",
    "One, two, three, ten, twenty",
    "你好，世界。",
)


@dataclasses.dataclass(kw_only=True)
class Progress:
    """What has come back for one prompt so far. Times are seconds since it was sent."""

    prompt: str
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token."""
        return (self.tokens - 1) / (self.last_token_s - self.first_token_s) if self.tokens > 1 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Serve a small embedded model with random weights on virtual devices and stream several prompts through gRPC."""

    requests: int = len(PROMPTS)  # prompts sent at the same time
    max_tokens: int = 48  # tokens generated for each
    temperature: float = 0.8  # 0: greedy

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"requests={self.requests} must be at least 1; use {len(PROMPTS)}")
        if not 1 <= self.max_tokens <= 256:
            raise ConfigError(f"max_tokens={self.max_tokens} must be between 1 and 256; use 48")
        self._sampling(0)  # checks its own fields

    def run(self) -> None:
        console = Console()
        log_to_stderr()
        start_s = time.monotonic()
        folder = embedded_checkpoint()
        console.print(f"loading {folder} and compiling (faster the second time) ...", highlight=False, soft_wrap=True)

        from widemesh.serving.engine import Engine  # imports jax

        config = EngineConfig(
            model=str(folder), served_model_name="tiny-mesh", max_num_seqs=8,  # as `serve`, which then compiles nothing
            prefill_devices=PREFILL_DEVICES, decode_devices=DECODE_DEVICES,
        )
        with Engine(config) as engine:
            load_s = time.monotonic() - start_s
            logging.getLogger("widemesh").setLevel(logging.WARNING)  # the view has the terminal now
            rows, wall_s = asyncio.run(self._serve_and_ask(engine, console))
            moved_bytes = engine.transfer_bytes
        console.print(_table(rows))
        tokens = sum(row.tokens for row in rows)
        console.print(
            f"total: {len(rows)} requests, {sum(row.prompt_tokens for row in rows)} prompt tokens, {tokens} tokens in "
            f"{wall_s:.2f} s ({tokens / wall_s:.1f} tokens/s), {moved_bytes:,} bytes moved from the prefill mesh "
            f"({PREFILL_DEVICES} devices) to the decode mesh ({DECODE_DEVICES} devices); loaded in {load_s:.1f} s",
            highlight=False, soft_wrap=True,
        )
        print(json.dumps(_figures(rows, load_s=load_s, wall_s=wall_s, moved_bytes=moved_bytes)), flush=True)

    async def _serve_and_ask(self, engine: Engine, console: Console) -> tuple[list[Progress], float]:
        """Serve on a free port, send every prompt at once, return what came back and the seconds from first to last."""
        server = GrpcServer(ServerConfig(port=0))
        await server.start()
        try:
            await server.set_engine(engine)
            console.print(f"serving on 127.0.0.1:{server.port}; sending {self.requests} prompts")
            rows = [Progress(prompt=PROMPTS[i % len(PROMPTS)]) for i in range(self.requests)]
            refusal: Exception | None = None
            async with Client(port=server.port) as client:
                await client.fetch_tokenizer()
                start_s = time.monotonic()
                try:
                    with _View(rows, console) as view:
                        async with asyncio.TaskGroup() as group:
                            for i, row in enumerate(rows):
                                group.create_task(self._ask(client, i, row, view.show))
                except* (ServerError, RequestError, OSError) as errors:
                    refusal = errors.exceptions[0]
                if refusal is not None:  # out of its group: it is a sentence for the user
                    raise refusal
                return rows, time.monotonic() - start_s
        finally:
            await server.stop()

    def _sampling(self, index: int) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=index, max_tokens=self.max_tokens, ignore_eos=True)

    async def _ask(self, client: Client, index: int, row: Progress, show: Callable[[int], None]) -> None:
        sampling = self._sampling(index)
        start_s = time.monotonic()
        async with contextlib.aclosing(client.generate(row.prompt, sampling, request_id=f"demo-{index}")) as pieces:
            async for piece in pieces:
                now_s = time.monotonic() - start_s
                if piece.token_ids:
                    row.first_token_s = row.first_token_s or now_s
                    row.last_token_s = now_s
                row.text += piece.text
                row.tokens += len(piece.token_ids)
                row.prompt_tokens = piece.prompt_tokens
                row.finish_reason = piece.finish_reason or ""
                show(index)


class _View:
    """Shows the answers as they grow: in place on a terminal, else one line at the first token and one at the end."""

    def __init__(self, rows: list[Progress], console: Console):
        self._rows = rows
        self._console = console
        self._live = Live(console=console, refresh_per_second=12) if console.is_terminal else None
        self._started: set[int] = set()

    def __enter__(self) -> _View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, index: int) -> None:
        row = self._rows[index]
        if self._live is not None:
            self._live.update(self._grid())
        elif row.finish_reason:
            print(f"[{index}] {row.prompt} -> {_printable(row.text)} ({row.finish_reason})", flush=True)
        elif index not in self._started:
            self._started.add(index)
            print(f"[{index}] first token after {row.first_token_s:.3f} s", flush=True)

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for i, row in enumerate(self._rows):
            text = Text(row.prompt, style="bold")
            text.append(_printable(row.text), style="not bold green")
            grid.add_row(Text(f"[{i}]"), text)
        return grid


def _printable(text: str) -> str:
    """Text of a random model on one line: a dot for control characters and for bytes that are no character."""
    return "".join(c if c.isprintable() and c != BROKEN else "·" for c in text)


def _table(rows: list[Progress]) -> Table:
    table = Table(title="widemesh demo")
    table.add_column("#", justify="right")
    table.add_column("prompt", max_width=20, no_wrap=True)
    for name in ("tokens in", "tokens out", "first token", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(str(i), Text(row.prompt), str(row.prompt_tokens), str(row.tokens), f"{row.first_token_s:.3f} s",
                      f"{row.tokens_per_s:.1f}")
    return table


def _figures(rows: list[Progress], *, load_s: float, wall_s: float, moved_bytes: int) -> dict[str, object]:
    """The figures of the table as plain data."""
    tokens = sum(row.tokens for row in rows)
    return {
        "requests": len(rows),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "tokens": tokens,
        "load_s": round(load_s, 3),
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 1),
        "first_token_s": [round(row.first_token_s, 4) for row in rows],
        "request_tokens_per_s": [round(row.tokens_per_s, 1) for row in rows],
        "transferred_bytes": moved_bytes,
        "prefill_devices": PREFILL_DEVICES,
        "decode_devices": DECODE_DEVICES,
    }
