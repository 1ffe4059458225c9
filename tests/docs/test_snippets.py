"""Every snippet of the quick starts is run, document by document, from top to bottom; the README repeats some of them.

How a document is read:

- A `python` block runs in the folder where the document's commands run. Blocks share their names until the next
  `console` block.
- In a `console` block a line `$ COMMAND` is run by bash, lines `> ...` continue it, and what follows is the output that
  must appear (`...` stands for anything). No such lines: the output is not looked at. Every command must succeed.
- A command that ends with `&` is a server: the lines after it are what it must print before the document goes on. When
  the document ends it gets SIGINT and must exit with status 0.
- `widemesh init-tiny tiny` is not run: the folder is there already, with a smaller model.
- The port 50051 is replaced by a free one.
- Blocks of `sh` set a machine up; the README's test line is run by `.ci/run`, and its demo line by hand.
"""

from __future__ import annotations

import dataclasses
import doctest
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
QUICKSTARTS = sorted((ROOT / "docs").glob("quickstart-*.md"))
RUN_KINDS = ("python", "console")
SHOWN_KINDS = ("sh", "text", "json", "mermaid", "")
INIT_COMMAND = "widemesh init-tiny tiny"
DEFAULT_PORT = "50051"
TIMEOUT_S = 180
EXIT_S = 10

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of content."""

    kind: str
    line: int
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a `console` block and the output that must follow it."""

    text: str
    expected: str


def blocks_of(markdown: str) -> list[Block]:
    """Every fenced block of a document, in order."""
    return [
        Block(match[1], markdown.count("\n", 0, match.start(2)) + 1, match[2]) for match in _FENCE.finditer(markdown)
    ]


def commands_of(block: Block) -> list[Command]:
    """The commands of a `console` block. Raises ValueError if it does not begin with one."""
    commands: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], ""))
        elif not commands:
            raise ValueError(f"line {block.line}: a console block must begin with `$ `")
        elif line.startswith("> ") and not commands[-1].expected:
            commands[-1] = dataclasses.replace(commands[-1], text=f"{commands[-1].text}\n{line[2:]}")
        else:
            commands[-1] = dataclasses.replace(commands[-1], expected=f"{commands[-1].expected}{line}\n")
    return commands


class Shell:
    """Runs the blocks of one document in one folder. A context manager that ends the servers it started."""

    def __init__(self, folder: Path):
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers:
            server.kill()
            server.wait()

    def run(self, document: str) -> None:
        """Run a whole document. Raises AssertionError with what was printed where a block does not do as it says."""
        script: list[Block] = []
        for block in blocks_of(document):
            if block.kind == "python":
                script.append(block)
            elif block.kind == "console":
                self._run_python(script)
                script = []
                for command in commands_of(block):
                    self._run_command(command)
        self._run_python(script)
        self._stop_servers()

    def _run_python(self, blocks: list[Block]) -> None:
        """One process for all of them, laid out so that a traceback names the lines of the document."""
        if not blocks:
            return
        lines: list[str] = []
        for block in blocks:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
        script = self._folder / "snippet.py"
        script.write_text(self._localise("\n".join(lines)), encoding="utf-8")
        self._finish([sys.executable, str(script)], "python", "")

    def _run_command(self, command: Command) -> None:
        text = self._localise(command.text)
        if text == INIT_COMMAND:
            assert (self._folder / "tiny").is_dir()
        elif text.endswith("&"):
            self._start_server(text.removesuffix("&"), self._localise(command.expected))
        else:
            self._finish(["bash", "-euo", "pipefail", "-c", text], text, self._localise(command.expected))

    def _finish(self, args: list[str], name: str, expected: str) -> None:
        done = subprocess.run(
            args, cwd=self._folder, env=self._env, capture_output=True, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        shown = f"{name}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
        assert done.returncode == 0, f"exit status {done.returncode}: {shown}"
        assert not expected or _matches(expected, done.stdout), f"expected {expected!r}: {shown}"

    def _start_server(self, text: str, expected: str) -> None:
        log = self._folder / "server.log"
        with log.open("w") as stderr:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self._folder, env=self._env, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        self._servers.append(server)
        assert server.stdout is not None
        watchdog = threading.Timer(TIMEOUT_S, server.kill)
        watchdog.start()
        try:
            printed = ""
            for line in server.stdout:
                printed += line
                if _matches(expected, printed):
                    return
        finally:
            watchdog.cancel()
        raise AssertionError(f"{text} ended early\n--- stdout\n{printed}\n--- stderr\n{log.read_text()}")

    def _stop_servers(self) -> None:
        for server in self._servers:
            server.send_signal(signal.SIGINT)
        limit_s = time.monotonic() + EXIT_S
        for server in self._servers:
            assert server.wait(timeout=max(0.1, limit_s - time.monotonic())) == 0

    def _localise(self, text: str) -> str:
        return text.replace(DEFAULT_PORT, self._port)


def _matches(expected: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)


@pytest.fixture(scope="session")
def runs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[Path, Future[None]]]:
    """Every quick start being run, two at a time: each waits for processes of its own most of the time."""

    def run(document: Path, folder: Path) -> None:
        shutil.copytree(tiny_checkpoint, folder / "tiny")
        with Shell(folder) as shell:
            shell.run(document.read_text(encoding="utf-8"))

    with ThreadPoolExecutor(2) as pool:
        yield {document: pool.submit(run, document, tmp_path_factory.mktemp(document.stem)) for document in QUICKSTARTS}


@pytest.mark.parametrize("document", QUICKSTARTS, ids=lambda path: path.name)
def test_quick_start_does_what_it_shows(document: Path, runs: Mapping[Path, Future[None]]) -> None:
    runs[document].result()


@pytest.mark.parametrize("document", [README, *QUICKSTARTS], ids=lambda path: path.name)
def test_document_has_no_block_that_would_not_be_run(document: Path) -> None:
    kinds = {block.kind for block in blocks_of(document.read_text(encoding="utf-8"))}
    assert kinds <= {*RUN_KINDS, *SHOWN_KINDS}
    assert kinds >= {*RUN_KINDS}


def test_readme_shows_only_blocks_of_the_quick_starts() -> None:
    run = {block.text for document in QUICKSTARTS for block in blocks_of(document.read_text(encoding="utf-8"))}
    shown = [block for block in blocks_of(README.read_text(encoding="utf-8")) if block.kind in RUN_KINDS]
    assert [block.line for block in shown if block.text not in run] == []


# --- the runner itself ----------------------------------------------------------------------------------------------


def test_blocks_share_names_files_and_folder(tmp_path: Path) -> None:
    document = """
```console
$ cat > a.txt <<'END'
> one
> two
> END
$ cat a.txt
one
...
```

```python
lines = open("a.txt").read().split()
```

```python
open("b.txt", "w").write(lines[1])
```

```console
$ cat b.txt; echo
two
```
"""
    with Shell(tmp_path) as shell:
        shell.run(document)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("```python\nx = 1\nraise SystemExit('no')\n```\n", "no"),
        ("\n\n```python\nx = 1\n1 / 0\n```\n", "line 5"),
        ("```python\nx = 1\n```\n```console\n$ true\n```\n```python\nprint(x)\n```\n", "NameError"),
        ("```console\n$ false\n```\n", "exit status 1"),
        ("```console\n$ echo one\ntwo\n```\n", "expected 'two"),
        ("```console\n$ echo one &\nready\n```\n", "ended early"),
    ],
)
def test_a_snippet_that_fails_is_noticed(document: str, message: str, tmp_path: Path) -> None:
    with Shell(tmp_path) as shell, pytest.raises(AssertionError, match=message):
        shell.run(document)
