"""`widemesh memory`: a table, then the same numbers as one line of JSON, from config.json alone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from widemesh.eplb import EplbConfig
from widemesh.model.presets import FLASH, PRESETS
from widemesh.serving.config import EngineConfig
from widemesh.serving.memory_plan import plan_memory
from widemesh.tools.cli import main


@pytest.fixture
def shown(capsys):
    """`shown(*args)`: the table of a run and its last line, parsed."""

    def run(*args):
        assert main(["memory", *map(str, args)]) == 0
        table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
        return table, json.loads(last)

    return run


def test_the_released_model(shown):
    table, numbers = shown("--preset", "flash")
    wanted = {"bytes_per_token": 890, "page_bytes": 56960, "window_bytes_per_slot": 3379200,
              "window_bytes_needed": 2703360}  # fmt: skip
    assert {name: numbers[name] for name in wanted} == wanted
    assert numbers == plan_memory(FLASH, EngineConfig()).to_json()
    for words in ("prefill", "decode", "page pool", "window rings", "index scores", "890 B per token", "TiB"):
        assert words in table


def test_slots_and_pages_are_short_for_the_engines_names(shown):
    short = shown("--preset", "flash", "--slots", 64, "--pages", 4096)
    assert short == shown("--preset", "flash", "--max-num-seqs", 64, "--num-pages", 4096)
    decode = short[1]["per_rank"]["decode"]
    assert decode["page pool"] == 4096 * 56960 and decode["window rings"] == 16 * 3379200


def test_a_folder_with_config_json_alone_and_every_setting(tmp_path, shown):
    model = dataclasses.replace(PRESETS["tiny-structure"], sliding_window=40)
    (tmp_path / "config.json").write_text(json.dumps(model.to_json()))
    _, numbers = shown(tmp_path, "--numerics", "plain", "--page-size", 16, "--max-model-len", 300,
                       "--num-prefill-pages", 50, "--prefill-devices", 1, "--decode-devices", 2)  # fmt: skip
    config = EngineConfig(numerics="plain", page_size=16, max_model_len=300, num_prefill_pages=50, prefill_devices=1,
                          decode_devices=2)  # fmt: skip
    assert numbers == plan_memory(model, config).to_json()
    assert numbers["window_bytes_needed"] == 9 * 40 * 32 * 4 and numbers["ranks"] == {"prefill": 1, "decode": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give either a folder DIR with a config.json, or --preset NAME"),
        (["d", "--preset", "flash"], "give either a folder DIR with a config.json, or --preset NAME"),
        (["--preset", "huge"], "preset='huge' is unknown; use one of flash, "),
        (["/no/such"], "/no/such/config.json does not exist; give a checkpoint folder that holds config.json"),
        (["--preset", "flash", "--page-size", "3"], "page_size=3 must hold whole groups of every compress ratio; "),
        (["--preset", "flash", "--eplb.window-size", "30000"], "window_size=30000 must be at most step_interval=3000;"),
        (["--preset", "flash", "--enable-eplb", "--eplb.num-redundant-experts", "30"], "num_redundant_experts=30 does"),
        (["--preset", "flash", "--expert-placement", "/no/such"], "expert_placement=/no/such cannot be read (No such "),
        (["--preset", "flash", "--numerics", "fp9"], "numerics='fp9' is unknown; use one of plain, "),
        (["--preset", "flash", "--slots", "3"], "max_num_seqs=3 must be a multiple of decode_devices=4; use 4"),
        (["--preset", "flash", "--pages", "1"], "decode_pages=1 must be at least 2"),
        (["--preset", "flash", "--max-model-len", "9999999"], "max_model_len=9999999 exceeds the model's "),
        (["--preset", "flash", "--prefill-devices", "5"], "prefill_devices=5 must divide the model's "
         "n_routed_experts=384; use prefill_devices=4 or 6"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(args, sentence, capsys):
    assert main(["memory", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"widemesh: {sentence}") and err.count("\n") == 1


def test_moving_experts(shown):
    table, numbers = shown("--preset", "flash", "--enable-eplb", "--eplb.num-redundant-experts", 32)
    config = EngineConfig(enable_eplb=True, eplb=EplbConfig(num_redundant_experts=32))
    assert numbers == plan_memory(FLASH, config).to_json() and "expert staging" in table and "expert commit" in table


def test_a_slot_count_that_is_no_number(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["memory", "--preset", "flash", "--slots", "many"])
    assert caught.value.code == 2 and "--slots" in capsys.readouterr().err


def test_help_says_the_short_names_without_importing_jax():
    program = (
        "import sys; from widemesh.tools.cli import main\n"
        "try: main(['memory', '--help'])\n"
        "except SystemExit as err: assert err.code == 0\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--slots INT, --max-num-seqs INT" in done.stdout and "--pages" in done.stdout


def test_packed_weights_on_gpus(shown):
    sizes = ("--preset", "flash", "--numerics", "serving", "--prefill-devices", 8, "--decode-devices", 8)
    table, numbers = shown(*sizes, "--platform", "gpu")
    config = EngineConfig(numerics="serving", prefill_devices=8, decode_devices=8)
    assert numbers == plan_memory(FLASH, config, "gpu").to_json() and "serving on a GPU" in table
    assert 6 * numbers["per_rank"]["decode"]["parameters"] < shown(*sizes)[1]["per_rank"]["decode"]["parameters"]
