"""The `widemesh` command: finds the subcommand, lets tyro make its flags, and turns errors into one sentence.

Nothing heavy is imported here, and a subcommand's module only when it is called, so that help comes at once and a
command can still set JAX's environment.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from widemesh.tools.aot_only import keep_to_cpu

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class Runnable(Protocol):
    """A subcommand: a frozen dataclass, whose fields are its flags, that runs. None counts as exit status 0."""

    def run(self) -> int | None: ...


@dataclasses.dataclass(frozen=True)
class Command:
    """Where a subcommand is and what help says about it."""

    target: str  # module:class
    summary: str


COMMANDS: Mapping[str, Command | Mapping[str, Command]] = {
    "serve": Command("widemesh.tools.serve:Serve", "serve a checkpoint over gRPC"),
    "launch": Command("widemesh.tools.launch:Launch", "serve with several processes on this machine"),
    "top": Command("widemesh.tools.top:Top", "show what running servers do, from their metrics"),
    "generate": Command("widemesh.tools.generate:Generate", "send a prompt to a server, or decode a file without one"),
    "demo": Command("widemesh.tools.demo:Demo", "serve a small embedded model and send prompts to it"),
    "init-tiny": Command("widemesh.tools.init_tiny:InitTiny", "write a small checkpoint with random weights"),
    "logits": Command("widemesh.tools.logits:Logits", "write the logits of every position of given token ids"),
    "memory": Command("widemesh.tools.memory:Memory", "print how much memory an engine will hold"),
    "check": Command("widemesh.tools.check:Check", "compile the step programs for GPUs that need not be there"),
    "experts": {
        "show": Command("widemesh.tools.experts:Show", "show where a server's experts lie and how busy they are"),
        "rebalance": Command("widemesh.tools.experts:Rebalance", "make a server plan a placement soon"),
        "pause": Command("widemesh.tools.experts:Pause", "let a server make no new placement"),
        "resume": Command("widemesh.tools.experts:Resume", "go on after a pause, or after too many failures"),
        "export": Command("widemesh.tools.experts:Export", "write a server's placement to a file"),
        "import": Command("widemesh.tools.experts:Import", "make a server move to the placement in a file"),
    },
    "bench": {
        "eplb": Command("widemesh.tools.bench.eplb:EplbBench", "simulate expert rebalancing and time its planner"),
        "exchange": Command("widemesh.tools.bench.exchange:ExchangeBench", "spread experts over ranks, count bytes"),
        "host": Command("widemesh.tools.bench.host:HostBench", "time the engine's own thread at a full batch"),
        "prefill-peer": Command("widemesh.tools.bench.prefill_peer:PrefillPeer", "time one prefill and its floor"),
        "replay": Command("widemesh.tools.bench.replay:Replay", "time a prefill with and without the bounded tail"),
        "reshuffle": Command("widemesh.tools.bench.reshuffle:ReshuffleBench", "time decode steps while experts move"),
        "ticket": Command("widemesh.tools.bench.ticket:TicketBench", "time what ranks agree on, beside jax's gloo"),
    },
}

# Errors whose message is written for the user. Named, not imported: one can only be raised once its module is loaded.
USER_ERRORS = (
    "widemesh.model.config:ConfigError",
    "widemesh.model.checkpoint:CheckpointError",
    "widemesh.sharding.mesh:MeshError",
    "widemesh.sharding.ticket.errors:TicketError",
    "widemesh.serving.request:RequestError",
    "widemesh.serving.engine_calls:EngineError",
    "widemesh.serving.grpc.client:ServerError",
    "widemesh.pallas_kernels.gpu.toolchain:ToolchainError",
)
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a write, which names no file


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status: 0, or 2 after an error of the user's making."""
    keep_to_cpu()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # generated text must not fail on a narrow locale
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        command, prog, rest = _find(args)
        status = _parse(command, prog, rest).run() or 0
        sys.stdout.flush()  # while an error of it can still be told
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has had enough
        _empty_stdout()
        return 1
    except Exception as err:
        sentence = _sentence(err)
        if sentence is None:
            raise
        print(f"widemesh: {sentence}", file=sys.stderr)
        _empty_stdout()
        return EXIT_USER_ERROR


def _empty_stdout() -> None:
    """Write or drop what standard output still holds, which Python would write, and complain about, as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _find(args: list[str]) -> tuple[Command, str, list[str]]:
    """The command that leading words name, the words, and what is left. Exits for help and unknown words."""
    level: Mapping[str, Command | Mapping[str, Command]] = COMMANDS
    prog = "widemesh"
    while True:
        word = args.pop(0) if args else "--help"
        if word in ("-h", "--help"):
            print(_help(prog, level), flush=True)
            raise SystemExit(0)
        if word == "--version":
            from widemesh import __version__

            print(f"widemesh {__version__}", flush=True)
            raise SystemExit(0)
        found = level.get(word)
        if found is None:
            print(f"{prog}: unknown command {word!r}; use one of {', '.join(level)}", file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR)
        prog = f"{prog} {word}"
        if isinstance(found, Command):
            return found, prog, args
        level = found


def _help(prog: str, level: Mapping[str, Command | Mapping[str, Command]]) -> str:
    lines = [f"usage: {prog} COMMAND ...", "", "commands:"]
    for name, entry in level.items():
        summary = entry.summary if isinstance(entry, Command) else f"one of: {', '.join(entry)}"
        lines.append(f"  {name:<14}{summary}")
    lines += ["", f"`{prog} COMMAND --help` lists the flags of a command."]
    return "\n".join(lines)


def _parse(command: Command, prog: str, args: list[str]) -> Runnable:
    module, name = command.target.split(":")
    cls = getattr(importlib.import_module(module), name)
    if hasattr(cls, "parse"):  # for what flags alone cannot say, such as a file of settings
        return cls.parse(prog, args)
    from widemesh.tools.flags import parse_flags

    return parse_flags(cls, prog, args)


def _sentence(err: Exception) -> str | None:
    """What to tell the user about an error of their making; None for a defect of ours, which keeps its traceback."""
    if isinstance(err, OSError) and err.filename is not None:
        return f"{err.filename}: {err.strerror}; check the path and its permissions"
    if isinstance(err, OSError) and err.errno in _CANNOT_WRITE:
        return f"writing failed ({err.strerror}); free space or write elsewhere"
    for name in USER_ERRORS:
        module, cls = name.split(":")
        known = getattr(sys.modules.get(module), cls, None)
        if known is not None and isinstance(err, known):
            return str(err)
    return None


def run_and_exit() -> NoReturn:
    """Entry point of `python -m widemesh.tools.cli`."""
    raise SystemExit(main())


if __name__ == "__main__":
    run_and_exit()
