"""`widemesh experts`: what it shows of a server's experts, its picture and JSON, files in and out, and mistakes."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from widemesh.eplb import ExpertLayout, hash_text, placement_hash
from widemesh.serving.expert_control import ExpertStatus
from widemesh.serving.grpc.server import GrpcServer, ServerConfig
from widemesh.tools.cli import main
from widemesh.tools.experts_table import print_status

GRPC_TESTS = Path(__file__).parents[1] / "serving" / "grpc"
TIMEOUT_S = 20


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", GRPC_TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


fake = _load("fake_experts")


@pytest.fixture
def serve(byte_folder: Path) -> Iterator[Callable[..., str]]:
    """`serve(experts, draft)` gives the address of a server over these controls, which runs until the test ends."""
    stops: list[Callable[[], None]] = []

    def start(experts: Any, draft: Any = None) -> str:
        loop, ready = asyncio.new_event_loop(), threading.Event()
        found: list[Any] = []

        async def run() -> None:
            server, ended = GrpcServer(ServerConfig(port=0)), asyncio.Event()
            await server.start()
            engine = _load("fake_engine").FakeEngine(byte_folder)
            engine.experts, engine.draft_experts = experts, draft
            await server.set_engine(engine)
            found.extend((server.port, ended))
            ready.set()
            await ended.wait()
            await server.stop()

        thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
        thread.start()
        assert ready.wait(TIMEOUT_S)

        def stop() -> None:
            loop.call_soon_threadsafe(found[1].set)
            thread.join(TIMEOUT_S)
            loop.close()

        stops.append(stop)
        return f"127.0.0.1:{found[0]}"

    yield start
    for stop in stops:
        stop()


def shown(status: ExpertStatus, **options: Any) -> str:
    """What `show` prints on such a terminal."""
    console = Console(record=True, file=open("/dev/null", "w", encoding=options.pop("encoding", "utf-8")),  # noqa: SIM115
                      **options)  # fmt: skip
    print_status(console, status)
    return console.export_text(styles=True)


# --- show --------------------------------------------------------------------------------------------------------


def test_show_prints_tables_json_and_a_picture(serve, capsys, tmp_path) -> None:
    experts = fake.FakeExperts(phase="migrating", layers_done=1, layers_total=3, feasible=0.75,
                               last_failure="rank 3: [a] bad row")  # fmt: skip
    experts.slot_owner[1, 7] = -1
    experts.load[1, 7] = 0
    address, picture = serve(experts), tmp_path / "experts.png"
    assert main(["experts", "show", "--address", address, "--out", str(picture), "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    text = "\n".join(table)
    for words in (
        "3 layers, 6 experts and 2 redundant ones in 8 slots on 4 ranks", "migrating, 1 of 3 layers, next plan in 120",
        "of 750 steps", "0.427, at most 0.750 under the load of the last plan",
        "0 abandoned, 2 committed, 1 skipped", "rank 3: [a] bad row",
        "40 expert rows of at least 38, 3.0 MiB", hash_text(placement_hash(experts.slot_owner)),
    ):  # fmt: skip
        assert words in text, text
    rows = [line.split() for line in table if line.strip().startswith(("0 ", "1 ", "2 ", "all "))]
    # Of 140 rows slot 0 takes 70 and slot 6, the other copy of expert 0, 10; in layer 1 of 130 slot 2 takes 70.
    assert rows == [
        ["0", "0.438", "0", "2.29x", "0", "57.1%", "2", "0", "█▂▂▂"],
        ["1", "0.406", "1", "2.46x", "2", "53.8%", "1", "1", "▂█▂▁"],
        ["2", "0.438", "2", "2.29x", "4", "50.0%", "1", "0", "▂▂█▂"],
        ["all", "0.427", "0", "1.17x", "-", "-", "1", "▅▅▅▂"],
    ]
    found = json.loads(last)
    assert (found["address"], found["model"], found["phase"], found["num_slots"]) == (address, "target", "migrating", 8)
    assert (found["placement_hash"], found["imported_hash"]) == (hash_text(placement_hash(experts.slot_owner)), "")
    assert found["rank_load"] == [[80, 20, 20, 20], [20, 80, 20, 10], [20, 20, 80, 20]]
    assert found["rebalances"] == {"committed": 2, "skipped": 1, "abandoned": 0}
    assert found["layers"][1] == {
        "layer": 1, "balancedness": 130 / 320, "hottest_rank": 1, "hottest_rank_share": 320 / 130, "hottest_expert": 2,
        "hottest_expert_share": 70 / 130, "hottest_expert_copies": 1, "empty_slots": 1,
    }  # fmt: skip
    from matplotlib.image import imread

    pixels = (imread(picture)[..., :3] * 255).astype(np.uint32)
    assert pixels.shape[1] == 1560 and pixels.shape[0] >= 360
    assert len(np.unique(pixels @ np.array([1, 1 << 8, 1 << 16], np.uint32))) > 20  # colours, not an empty page


def test_show_where_rebalancing_is_off_and_nothing_is_known(serve, capsys, tmp_path) -> None:
    layout = ExpertLayout(num_layers=1, num_experts=6, ranks=2)
    experts = fake.FakeExperts(layout, phase="off", load=np.zeros((1, 6), np.int64), steps_to_trigger=0, load_steps=0,
                               rebalances={})  # fmt: skip
    picture = tmp_path / "experts.png"
    assert main(["experts", "show", "--address", serve(experts), "--out", str(picture)]) == 0
    assert picture.stat().st_size > 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for words in (["phase", "off"], ["balancedness", "-"], ["load", "none", "is", "known", "yet"],
                  ["rebalances", "none"], ["0", "-", "-", "-", "-", "0"],
                  ["all", "-", "-", "-", "-", "0"]):  # fmt: skip
        assert words in lines, lines


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"is_paused": True}, "idle, paused"),
        ({"is_disabled": True}, "idle, given up after too many failures; `widemesh experts resume` tries again"),
        ({"is_disabled": True, "model": "draft"},
         "idle, given up after too many failures; `widemesh experts resume --model draft` tries again"),
        ({}, "idle, next plan in 120 steps"),
        ({"phase": "waiting", "imported_hash": -57916389, "steps_to_trigger": 0},
         "waiting, placement fc8c441b is not in every process of the engine yet"),
    ],
)  # fmt: skip
def test_the_phase_is_said_in_words(facts, words) -> None:
    experts = fake.FakeExperts(**facts)
    assert words in shown(experts.status(), width=120)


def test_colours_say_how_far_a_rank_is_from_the_mean() -> None:
    text = shown(fake.FakeExperts().status(), width=100, force_terminal=True, color_system="truecolor")
    assert text.count("\x1b[48;2;178;24;43m ") == 3  # twice the mean or more: one rank in each layer
    # The others have 20 of 35 rows: 43 % of the way from white to blue.
    assert text.count("\x1b[48;2;155;185;215m ") == 9
    assert "blue: none, white: the mean, red: twice the mean" in text


def test_many_ranks_share_cells_and_a_narrow_terminal_has_plain_letters() -> None:
    layout = ExpertLayout(num_layers=1, num_experts=128, ranks=128)
    load = np.full((1, 128), 10)
    load[0, 5] = 1000
    text = shown(fake.FakeExperts(layout, load=load).status(), width=100, encoding="ascii")
    assert "a cell is the load of the busiest of 3 ranks" in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["0"])
    assert "5 56.39x" in row and row.endswith(" :@" + ":" * 41) and len(row) <= 100


# --- steering ----------------------------------------------------------------------------------------------------


def test_commands_reach_the_server(serve, capsys) -> None:
    experts = fake.FakeExperts()
    address = serve(experts)
    for args in (["rebalance"], ["rebalance", "--steps", "9"], ["pause"], ["resume"]):
        assert main(["experts", *args, "--address", address]) == 0
    assert experts.asked == [("rebalance", None), ("rebalance", 9), ("pause",), ("resume",)]
    assert capsys.readouterr().out.splitlines() == [
        f"{address} makes a plan after a few recorded steps", f"{address} makes a plan after 9 recorded steps",
        f"{address} makes no new placement", f"{address} rebalances again",
    ]  # fmt: skip


def test_a_placement_goes_to_a_file_and_back(serve, capsys, tmp_path) -> None:
    experts = fake.FakeExperts()
    address, file = serve(experts), tmp_path / "placement.json"
    assert main(["experts", "export", str(file), "--address", address]) == 0
    content = json.loads(file.read_text())
    assert content["slot_owner"] == experts.slot_owner.tolist()
    del content["hash"]
    content["slot_owner"][2] = [5, 4, 3, 2, 1, 0, 5, 4]
    file.write_text(json.dumps(content))
    assert main(["experts", "import", str(file), "--address", address]) == 0
    assert experts.slot_owner[2].tolist() == [5, 4, 3, 2, 1, 0, 5, 4]
    found = hash_text(placement_hash(experts.slot_owner))
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{address} moves to placement {found} of {file} once every process of its engine has been given it; until "
        "then `widemesh experts show` says waiting, and `widemesh experts pause` withdraws it")  # fmt: skip


def test_a_placement_that_cannot_be_written_leaves_the_old_one(serve, capsys, tmp_path, monkeypatch) -> None:
    write_text = Path.write_text

    def fail(path: Path, text: str, **options: str) -> None:
        write_text(path, text[:9], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    address, file = serve(fake.FakeExperts()), tmp_path / "placement.json"
    file.write_text("old")
    monkeypatch.setattr(Path, "write_text", fail)
    assert main(["experts", "export", str(file), "--address", address]) == 2
    assert capsys.readouterr().err == (
        "widemesh: writing failed (No space left on device); free space or write elsewhere\n")  # fmt: skip
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_every_command_may_mean_the_draft(serve, capsys, tmp_path) -> None:
    target, draft = fake.FakeExperts(), fake.FakeExperts(ExpertLayout(num_layers=1, num_experts=8, ranks=4),
                                                         model="draft")  # fmt: skip
    address, file = serve(target, draft), tmp_path / "placement.json"
    for args in (["rebalance", "--steps", "9"], ["pause"], ["resume"], ["export", str(file)], ["import", str(file)],
                 ["show", "--json"]):  # fmt: skip
        assert main(["experts", *args, "--address", address, "--model", "draft"]) == 0
    assert target.asked == [] and draft.asked == [("rebalance", 9), ("pause",), ("resume",), ("import",)]
    *lines, last = capsys.readouterr().out.splitlines()
    placement = hash_text(placement_hash(draft.slot_owner))
    assert lines[:5] == [
        f"the draft on {address} makes a plan after 9 recorded steps", f"the draft on {address} makes no new placement",
        f"the draft on {address} rebalances again", f"the placement of the draft on {address} is in {file}",
        f"the draft on {address} moves to placement {placement} of {file} once every process of its engine has been "
        "given it; until then `widemesh experts show --model draft` says waiting, and `widemesh experts pause --model "
        "draft` withdraws it",
    ]  # fmt: skip
    assert lines[5].split()[:5] == ["draft", "1", "layers,", "8", "experts"]
    assert (json.loads(last)["model"], json.loads(last)["num_slots"]) == ("draft", 8)


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "{file} is not text; use a file of `widemesh experts export`"),
        (b"no", "{file} is not JSON ("),
        (b"[" * 100_000, "{file} is not JSON (maximum recursion depth exceeded"),
        (b'{"slot_owner": [[0, 1, 2, 3, 4, 4, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1]]}',
         "{file}: no slot of layer 0 holds expert 5; "),
        (b'{"slot_owner": [[0, 1, 2, 3, 4, 5]]}', "{file} has shape (1, 6); it must be (3, 8): "),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(serve, capsys, tmp_path, content, words) -> None:
    experts, file = fake.FakeExperts(), tmp_path / "placement.json"
    file.write_bytes(content)
    assert main(["experts", "import", str(file), "--address", serve(experts)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"widemesh: {words.format(file=file)}") and err.count("\n") == 1
    assert experts.asked == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["show", "--address", "nowhere"], "address='nowhere' names no server; use HOST:PORT, as 127.0.0.1:50051"),
        (["pause", "--address", "a:b"], "address='a:b' names no server; use HOST:PORT, as 127.0.0.1:50051"),
        (["pause", "--address", "a:70000"], "address='a:70000' names no server; use HOST:PORT, as 127.0.0.1:50051"),
        (["show", "--model", "Draft"], "model='Draft' is unknown; use target or draft"),
        (["show", "--address", "127.0.0.1:1"], "no server answers at 127.0.0.1:1; start one with `widemesh serve DIR`, "
         "or correct --address"),
        (["show", "--out", "x.jpg"], "out='x.jpg' must end in .png; use 'x.png'"),
        (["show", "--out", "/no/such/x.png"], "out='/no/such/x.png': its folder does not exist; make it first"),
        (["rebalance", "--steps", "0"], "steps=0 must be at least 1, and at most the server's window_size; leave it"),
        (["export", "/no/such/x.json"], "file='/no/such/x.json': its folder does not exist; make it first"),
        (["import", "/no/such/x.json"], "/no/such/x.json: No such file or directory"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(args, words, capsys) -> None:
    assert main(["experts", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"widemesh: {words}") and err.count("\n") == 1


def test_a_server_without_a_draft_says_so(serve, capsys) -> None:
    address = serve(fake.FakeExperts())
    assert main(["experts", "show", "--address", address, "--model", "draft"]) == 2
    assert capsys.readouterr().err == (
        f"widemesh: {address} answered INVALID_ARGUMENT: model='draft' is not served here; use target\n")  # fmt: skip


def test_what_the_server_refuses_is_passed_on(serve, capsys, tmp_path) -> None:
    off, busy = serve(fake.FakeExperts(phase="off")), serve(fake.FakeExperts(phase="migrating"))
    file = str(tmp_path / "placement.json")
    assert main(["experts", "pause", "--address", off]) == 2
    assert main(["experts", "rebalance", "--steps", "500", "--address", busy]) == 2
    assert main(["experts", "export", file, "--address", busy]) == 0
    assert main(["experts", "import", file, "--address", busy]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"widemesh: {off} answered FAILED_PRECONDITION: enable_eplb=False: experts stay where they are; start the "
        "server with --enable-eplb",
        f"widemesh: {busy} answered INVALID_ARGUMENT: steps=500 must be between 1 and window_size=100; leave it out "
        "for a window",
        f"widemesh: {busy} answered ABORTED: experts are moving already; wait until `widemesh experts show` says idle",
    ]
