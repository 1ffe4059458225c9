"""`widemesh generate`: print what a server answers to a prompt as it comes, or decode a file of prompts without one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from widemesh.model.config import ConfigError
from widemesh.serving.config import EngineConfig
from widemesh.serving.grpc.client import Client, ServerError
from widemesh.serving.request import SamplingParams
from widemesh.tools.settings import check_output, parse_with_file, whole_file

_DEFAULT_SAMPLING = SamplingParams(max_tokens=256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineEngine(EngineConfig):
    """Engine settings for decoding a file without a server."""

    model: Annotated[str, tyro.conf.arg(prefix_name=False, metavar="DIR")] = ""  # checkpoint folder, for --file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Send a prompt to a server and print its answer as it comes, or decode a file of prompts without a server."""

    prompt: str | None = None  # text to send to the server at --host and --port
    host: str = "127.0.0.1"  # the server's address
    port: int = 50051  # the server's port
    file: Path | None = None  # instead of --prompt: JSON lines with "prompt" or "prompt_token_ids"
    out: Path | None = None  # for --file: JSON lines with "id", "text", "token_ids", "finish_reason", or "error"
    config: Path | None = None  # YAML file of engine settings, for --file
    sampling: tyro.conf.OmitArgPrefixes[SamplingParams] = _DEFAULT_SAMPLING
    engine: OfflineEngine

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> Generate:
        """Read flags and the file of `--config`. Raises ConfigError; exits with status 2 on wrong flags."""
        parsed = parse_with_file(cls, prog, args, (OfflineEngine,), "engine.")
        parsed.check()
        return parsed

    def check(self) -> None:
        """Raise ConfigError for flags that do not go together."""
        if (self.prompt is None) == (self.file is None):
            raise ConfigError("give --prompt TEXT to ask a server, or --file PROMPTS.jsonl to decode without one")
        if self.sampling.n > 1:
            raise ConfigError(f"--n={self.sampling.n}: this command prints one sample; run it again with other seeds")
        if self.prompt is not None:
            for flag, count in (("--logprobs", self.sampling.logprobs),
                                ("--prompt-logprobs", self.sampling.prompt_logprobs)):  # fmt: skip
                if count is not None:
                    raise ConfigError(f"{flag}={count} goes with --file; leave it out with --prompt")
            for flag, value in (("--model", self.engine.model), ("--out", self.out)):
                if value:
                    raise ConfigError(f"{flag}={str(value)!r} goes with --file; leave it out when you ask a server")
            for field in dataclasses.fields(self.engine):
                if getattr(self.engine, field.name) != field.default:
                    flag = f"--engine.{field.name.replace('_', '-')}"
                    raise ConfigError(f"{flag} goes with --file; leave it out when you ask a server")
        elif not self.engine.model or self.out is None:
            raise ConfigError("--file needs --model DIR and --out OUT.jsonl")

    def run(self) -> int:
        if self.prompt is not None:
            return asyncio.run(self._ask(self.prompt))
        assert self.file is not None and self.out is not None  # by `check`
        return self._decode(self.file, self.out)

    async def _ask(self, prompt: str) -> int:
        finish_reason = None
        async with (
            Client(self.host, self.port) as client,
            contextlib.aclosing(client.generate(prompt, self.sampling)) as pieces,
        ):
            async for piece in pieces:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                finish_reason = piece.finish_reason
        print()
        if finish_reason not in ("stop", "length"):
            raise ServerError(f"the server ended the request early (finish_reason {finish_reason}); try again")
        return 0

    def _decode(self, file: Path, out: Path) -> int:
        from rich.console import Console
        from rich.progress import Progress

        from widemesh.tools.batch_decode import decode_file, read_lines

        check_output(out, source=file)
        lines = read_lines(file)
        console = Console(stderr=True)
        # Opened before loading: a wrong path shows at once.
        with whole_file(out) as scratch, scratch.open("x", encoding="utf-8") as stream:
            from widemesh.serving.engine import Engine

            with Engine(self.engine) as engine, Progress(console=console) as progress:
                bar = progress.add_task("decoding", total=len(lines))
                outcome = decode_file(engine, lines, stream, self.sampling, on_line=lambda: progress.advance(bar))
        if outcome.failed:
            print(f"widemesh: {outcome.failed} of {outcome.lines} lines have an \"error\" in {out}", file=sys.stderr)
        if outcome.fatal:
            print(f"widemesh: {outcome.fatal}; the lines decoded before are in {out}", file=sys.stderr)
            return 2
        return 0
