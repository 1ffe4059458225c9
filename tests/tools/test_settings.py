"""Settings files: the same names as the flags, flags win, mistakes are named."""

from __future__ import annotations

import dataclasses
import os

import pytest

from widemesh.eplb import EplbConfig
from widemesh.model.config import ConfigError
from widemesh.tools.generate import Generate
from widemesh.tools.launch import Launch
from widemesh.tools.serve import Serve
from widemesh.tools.settings import as_flags, check_output, read_settings, whole_file


def parse(tmp_path, yaml, *args):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml)
    return Serve.parse("widemesh serve", [*args, "--config", str(path)])


def test_a_file_says_what_flags_would_say(tmp_path):
    serve = parse(tmp_path, "model: /here\nmax_model_len: 77\nmax-num-seqs: 16\nport: 1234\nserved_model_name: it\n")
    assert (serve.engine.model, serve.engine.max_model_len, serve.engine.max_num_seqs) == ("/here", 77, 16)
    assert (serve.server.port, serve.engine.served_model_name) == (1234, "it")


def test_flags_win_in_every_spelling(tmp_path):
    yaml = "model: /here\nmax_model_len: 77\nport: 1234\nhost: 0.0.0.0\n"
    serve = parse(tmp_path, yaml, "/there", "--max-model-len=99", "--port", "5", "--host", "127.0.0.2")
    assert (serve.engine.model, serve.engine.max_model_len) == ("/there", 99)
    assert (serve.server.port, serve.server.host) == (5, "127.0.0.2")


def test_an_empty_file_changes_nothing(tmp_path):
    assert parse(tmp_path, "", "/there").engine == Serve.parse("widemesh serve", ["/there"]).engine


def test_generate_reads_engine_settings(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("model: /here\nmax_model_len: 77\nseed: 3\n")
    args = ["--file", "a", "--out", "b", f"--config={path}", "--seed", "9", "--engine.max-model-len", "99"]
    generate = Generate.parse("widemesh generate", args)
    assert (generate.engine.model, generate.engine.max_model_len, generate.engine.seed) == ("/here", 99, 3)
    assert generate.sampling.seed == 9


GROUP = """\
model: /here
enable_eplb: true
eplb:
  num-redundant-experts: 32
  log_balancedness: true
  window_size: 5
"""


def test_a_group_of_settings_is_a_mapping_in_a_file(tmp_path):
    engine = parse(tmp_path, GROUP, "--eplb.window-size", "7", "--eplb.no-log-balancedness").engine
    assert engine.enable_eplb and engine.eplb == EplbConfig(num_redundant_experts=32, window_size=7)
    assert parse(tmp_path, "eplb:\n", "/there").engine.eplb == EplbConfig()


@pytest.mark.parametrize("flag", [["--eplb-config", "{JSON}"], ["--eplb_config={JSON}"]])
def test_a_group_as_json_wins_over_the_file_and_loses_to_flags(tmp_path, flag):
    text = '{"window_size": 9, "step-interval": 99, "max_swaps": 3}'
    args = [part.replace("{JSON}", text) for part in flag]
    engine = parse(tmp_path, GROUP, *args, "--eplb.max-swaps", "4").engine
    assert engine.eplb == EplbConfig(num_redundant_experts=32, log_balancedness=True, window_size=9, step_interval=99,
                                     max_swaps=4)  # fmt: skip


def test_groups_of_other_commands(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(GROUP)
    args = ["--file", "a", "--out", "b", f"--config={path}", "--engine.eplb.window-size", "8"]
    generate = Generate.parse("widemesh generate", [*args, "--engine.eplb-config", '{"max_swaps": 3}'])
    wanted = EplbConfig(num_redundant_experts=32, log_balancedness=True, window_size=8, max_swaps=3)
    assert generate.engine.eplb == wanted and generate.engine.enable_eplb
    given = ["--config", str(path), "--eplb.max-swaps", "3", "--eplb.window-size", "8"]
    launch = Launch.parse("widemesh launch", [*given, "--num-processes", "2"])
    assert launch.engine.eplb == wanted and launch.handed_on == tuple(given)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--eplb-config", '{"use_async": true}'], "--eplb-config: use_async is no setting; known are "),
        (["--eplb-config", "{"], "--eplb-config='{' is not JSON (Expecting property name"),
        (["--eplb-config"], "--eplb-config='' is not JSON"),
        (["--eplb-config=3"], '--eplb-config=\'3\' must be an object; write {"name": value, ...}'),
        (["--eplb.window-size", "4000"], "window_size=4000 must be at most step_interval=3000; use 1 to 3000"),
        (["--eplb.num-redundant-experts", "4"], "eplb.num_redundant_experts=4 needs enable_eplb; set it, or use 0"),
        (["--eplb-config", '{"log_balancedness": 0}'], "--eplb-config: log_balancedness=0 must be true or false"),
        (["--eplb-config=" + "[" * 100_000], "--eplb-config='[[["),
        (["--draft-eplb-config", '{"num_redundant_experts": 4}', "--enable-eplb"],
         "draft_eplb.num_redundant_experts=4 needs a draft; set num_speculative_tokens, or use 0"),
    ],
)
def test_mistakes_in_a_group_are_named(args, words):
    with pytest.raises(ConfigError) as caught:
        Serve.parse("widemesh serve", ["/there", *args])
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("max_model_length: 3", "max_model_length is no setting; known are batch_invariant, "),
        ("[1, 2]", "must hold settings, not list"),
        ("a: [", "is not valid YAML"),
        ("port: {a: 1}", "port must be one value or a list of values"),
        ("eplb: {frob: 1, window-size: 2}", "eplb.frob is no setting; known are "),
        ("eplb: {window_size: {a: 1}}", "eplb.window_size must be one value or a list of values"),
        ("eplb: 3", "eplb must hold settings, not int; write lines of `name: value` below it"),
        ("eplb: {window_size: 4000}", "window_size=4000 must be at most step_interval=3000"),
        ("port: 70000", "port=70000 must be between"),
        ("port: -1", "port=-1 must be between"),
        ("enable_eplb: 0", "enable_eplb=0 must be true or false; write one of them"),
        ("enable_eplb: 'false'", "enable_eplb='false' must be true or false"),
        ("batch_invariant:", "batch_invariant=None must be true or false"),
        ("eplb: {log_balancedness: 1}", "eplb.log_balancedness=1 must be true or false"),
        ("port: true", "port=True must not be true or false; write text in quotes"),
        ("served_model_name: no", "served_model_name=False must not be true or false"),
        ("port: [5000, 6000]", "port=[5000, 6000] must be one value; write no list"),
        ("served_model_name: ['a', '--port=7']", "served_model_name=['a', '--port=7'] must be one value"),
        ("model: [a, b]", "model=['a', 'b'] must be one value"),
        ("model: false", "model=False must not be true or false"),
        ("model: 5", "model=5 must be text; write it in quotes"),
        ("model: 2020-99-99", "is not valid YAML (month must be in 1..12)"),
        ("? " + "1" * 5000 + "\n: 3", "is not valid YAML (Exceeds the limit"),
        ("[" * 10_000, "is not valid YAML (maximum recursion depth exceeded"),
    ],
)
def test_mistakes_are_named(tmp_path, yaml, words):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, yaml, "/there")
    assert words in str(caught.value)


def test_values_as_flags():
    settings = {"on": True, "off": False, "none": None, "many": [1, 2], "said": 1, "unsaid": True}
    assert as_flags(settings, ["x", "--said=5", "--no-unsaid"]) == [
        "--on", "--no-off", "--none=None", "--many", "1", "2"
    ]
    assert as_flags({"max_model_len": 5}, [], "engine.") == ["--engine.max-model-len=5"]


def test_a_value_may_begin_with_dashes(tmp_path):
    serve = parse(tmp_path, "served_model_name: --port=7\nhost: -x\nseed:\n", "/there")
    assert (serve.engine.served_model_name, serve.server.host, serve.server.port) == ("--port=7", "-x", 50051)
    assert serve.engine.seed is None


@dataclasses.dataclass
class Many:
    many: tuple[str, ...] | None = None


def test_a_list_is_for_a_field_of_several_values_and_holds_no_flags(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("many: [a, -1]")
    assert read_settings(path, [Many]) == {"many": ["a", -1]}
    path.write_text("many: [a, --many]")
    with pytest.raises(ConfigError, match=r"many=\['a', '--many'\] must not hold \"--\"; leave it out$"):
        read_settings(path, [Many])


# --- files to write ----------------------------------------------------------------------------------------------


def test_an_output_file_is_none_that_is_something_else(tmp_path):
    pipe, source = tmp_path / "pipe", tmp_path / "in"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "nowhere").symlink_to(tmp_path / "no" / "file")
    for path, words in ((pipe, "is no regular file; name one"), (tmp_path / "device", "is no regular file; name one"),
                        (source, "is the input file, which it would overwrite; name another one"),
                        (tmp_path / "link", "is the input file, which it would overwrite; name another one"),
                        (tmp_path / "nowhere", "its folder does not exist; make it first")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            check_output(path, source=source)
    check_output(source)


def test_a_file_is_written_whole_where_a_link_leads_or_not_at_all(tmp_path):
    (tmp_path / "other").mkdir()
    link, file = tmp_path / "link", tmp_path / "other" / "file"
    link.symlink_to(file)
    with whole_file(link) as scratch:
        scratch.write_text("new")
        assert not file.exists()
    assert link.is_symlink() and file.read_text() == "new"
    with pytest.raises(KeyError), whole_file(link) as scratch:
        scratch.write_text("half")
        raise KeyError
    assert file.read_text() == "new" and [path.name for path in file.parent.iterdir()] == ["file"]
