"""The command itself: help, unknown words, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import subprocess
import sys

import pytest

from widemesh.model.config import ConfigError
from widemesh.tools import cli
from widemesh.tools.cli import COMMANDS, Command, main


def leaves(level=COMMANDS, prefix=""):
    """Every command by the words that call it."""
    for word, entry in level.items():
        yield from [(prefix + word, entry)] if isinstance(entry, Command) else leaves(entry, f"{prefix}{word} ")


LEAVES = dict(leaves())


@pytest.mark.parametrize("command", LEAVES.values(), ids=LEAVES)
def test_every_command_is_a_frozen_dataclass_that_runs(command):
    module, name = command.target.split(":")
    cls = getattr(importlib.import_module(module), name)
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert callable(cls.run) and cls.__doc__


def test_help_lists_the_commands_and_imports_nothing_heavy():
    program = (
        "import sys; from widemesh.tools.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as err: assert err.code == 0\n"
        "assert not {'jax', 'tyro', 'grpc', 'numpy'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in LEAVES:
        assert f"\n  {words.split()[0]} " in done.stdout


def test_commands_import_jax_only_when_they_run():
    program = (
        "import sys; from widemesh.tools import demo, generate, init_tiny, serve\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("args", "words"), [(["frob"], "unknown command 'frob'; use one of serve, "),
                                             (["bench", "frob"], "widemesh bench: unknown command 'frob'")])
def test_unknown_commands(args, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("widemesh 0")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["init-tiny", "x", "--preset", "huge"], "preset='huge' is unknown; use one of tiny-structure, "),
        (["serve"], "the checkpoint folder is missing; use `widemesh serve DIR`"),
        (["serve", "d", "--port", "-1"], "port=-1 must be between 0 and 65535"),
        (["serve", "d", "--max-num-seqs", "3"], "max_num_seqs=3 must be a multiple of decode_devices=4"),
        (["serve", "d", "--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        (["generate", "--prompt", "a", "--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["generate"], "give --prompt TEXT to ask a server, or --file"),
        (["generate", "--prompt", "a", "--file", "b"], "give --prompt TEXT to ask a server, or --file"),
        (["generate", "--prompt", "a", "--model", "d"], "--model='d' goes with --file"),
        (["generate", "--file", "a"], "--file needs --model DIR and --out"),
        (["generate", "--file", "/no/such", "--model", "d", "--out", "o"], "/no/such: No such file or directory"),
        (["generate", "--prompt", "a", "--port", "1"], "no server answers at 127.0.0.1:1; start one"),
        (["generate", "--prompt", "a", "--engine.max-new-kv-loads-per-step", "0"],
         "--engine.max-new-kv-loads-per-step goes with --file; leave it out"),
        (["generate", "--file", "a", "--model", "d", "--out", "./a"], "out='a' is the input file, which it would"),
        (["logits", "d", "--tokens", "a", "--out", "./a"], "out='a' is the input file, which it would overwrite"),
        (["logits", "d", "--tokens", "a", "--out", "/dev/null"], "out='/dev/null' is no regular file; name one"),
        (["generate", "--file", "a", "--model", "d", "--out", "/dev/null"], "out='/dev/null' is no regular file"),
        (["demo", "--requests", "0"], "requests=0 must be at least 1"),
        (["demo", "--temperature", "-1"], "temperature=-1.0 must be "),
        (["demo", "--temperature", "nan"], "temperature=nan must be "),
        (["demo", "--temperature", "101"], "temperature=101.0 must be "),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(args, sentence, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"widemesh: {sentence}")
    assert err.count("\n") == 1 and "Traceback" not in err


def test_unknown_flags_are_named(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "d", "--bogus", "3"])
    assert caught.value.code == 2 and "--bogus" in capsys.readouterr().err


class _Raises:
    def __init__(self, error):
        self.error = error

    def run(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("wrong; repair"), 2), (KeyboardInterrupt(), 130), (PermissionError(13, "no", "f"), 2)],
)
def test_errors_become_a_status(monkeypatch, capsys, error, status):
    monkeypatch.setattr(cli, "_parse", lambda *args: _Raises(error))
    assert main(["demo"]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_an_engine_error_is_the_users_and_a_defect_keeps_its_traceback(monkeypatch, fake_engine, capsys):
    error = fake_engine().EngineError("the engine is closed; start it again")
    monkeypatch.setattr(cli, "_parse", lambda *args: _Raises(error))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "widemesh: the engine is closed; start it again\n"
    monkeypatch.setattr(cli, "_parse", lambda *args: _Raises(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


@pytest.mark.parametrize("args", ["'--help'", "'demo'", "'demo', 'flush'"])
def test_output_that_has_no_room_is_one_sentence(tmp_path, args):
    program = (
        "import resource, sys; from widemesh.tools import cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "class Command:\n"
        f"    def run(self): print('x' * 100, flush='flush' in [{args}])\n"
        "cli._parse = lambda *args: Command()\n"
        f"sys.exit(cli.main([{args}]))"
    )
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run([sys.executable, "-c", program], stdout=out, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "widemesh: writing failed (File too large); free space or write elsewhere\n"


def test_errors_that_name_no_file_are_the_users_if_a_write_has_them(monkeypatch, capsys):
    for number, told in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, True), (errno.ENOTCONN, False)):
        monkeypatch.setattr(cli, "_parse", lambda *args, number=number: _Raises(OSError(number, os.strerror(number))))
        if told:
            assert main(["demo"]) == 2 and capsys.readouterr().err.startswith("widemesh: writing failed (")
        else:
            with pytest.raises(OSError, match="not connected"):
                main(["demo"])


def test_a_reader_that_leaves_a_pipe_is_no_crash():
    program = (
        "import sys; from widemesh.tools import cli\n"
        "class Command:\n"
        "    def run(self):\n"
        "        for _ in range(10**5): print('x' * 100, flush=True)\n"
        "cli._parse = lambda *args: Command()\n"
        "sys.exit(cli.main(['demo']))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=10) == 1 and process.stderr.read() == b""
    process.stderr.close()
