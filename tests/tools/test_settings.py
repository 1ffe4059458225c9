"""Settings files: the same names as the flags, flags win, mistakes are named."""

from __future__ import annotations

import pytest

from widemesh.model.config import ConfigError
from widemesh.tools.generate import Generate
from widemesh.tools.serve import Serve
from widemesh.tools.settings import as_flags


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


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("max_model_length: 3", "max_model_length is no setting; known are batch_invariant, "),
        ("[1, 2]", "must hold settings, not list"),
        ("a: [", "is not valid YAML"),
        ("port: {a: 1}", "port must be one value or a list of values"),
        ("port: 70000", "port=70000 must be between"),
    ],
)
def test_mistakes_are_named(tmp_path, yaml, words):
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, yaml, "/there")
    assert words in str(caught.value)


def test_values_as_flags():
    settings = {"on": True, "off": False, "none": None, "many": [1, 2], "said": 1, "unsaid": True}
    assert as_flags(settings, ["x", "--said=5", "--no-unsaid"]) == [
        "--on", "--no-off", "--none", "None", "--many", "1", "2"
    ]
    assert as_flags({"max_model_len": 5}, [], "engine.") == ["--engine.max-model-len", "5"]
