"""`widemesh check`: what is wrong with a request is said before anything is compiled."""

from __future__ import annotations

import dataclasses

import pytest

from widemesh.model.presets import FLASH
from widemesh.pallas_kernels.gpu.facts import Calls, Compiled, KernelFacts, MemoryUse
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.serving.ahead import OPS, StepCheck, ops_of
from widemesh.tools.check import Check
from widemesh.tools.cli import main


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give either a folder DIR with a config.json, or --preset NAME"),
        (["--preset", "none"], "preset='none' is unknown; use one of flash, "),
        (["--preset", "flash", "--target", "A100"], "target='A100' is unknown; use one of H100, H200, B200, B300"),
        (["--preset", "flash", "--devices", "0"], "devices=0 must be at least 1"),
        (["--preset", "flash", "--slots", "13"], "slots=13 must be a multiple of devices=8; use 16"),
        (["--preset", "flash", "--pages", "-5"], "pages=-5 must be at least 2"),
        (["--preset", "flash", "tiny"], "give either a folder DIR with a config.json, or --preset NAME, and not both"),
        (["--preset", "flash", "--redundant-experts", "30"], "num_redundant_experts=30 does not suit num_experts=384 "
         "on 8 ranks with at most 8 copies of each; use 0, 8, 16, 24, 32, ... or 2688"),
        (["--preset", "flash", "--devices", "7"], "decode_devices=7 must divide the model's n_routed_experts=384; use "
         "decode_devices=6 or 8"),
        (["--preset", "flash", "--redundant-experts", "8", "--role", "prefill"], "redundant_experts=8 goes with role="),
        (["--preset", "flash", "--drafts", "-1"], "drafts=-1 must not be negative; use 0 to leave the draft out"),
        (["--preset", "flash", "--drafts", "6"], "num_speculative_tokens=6 exceeds dspark_block_size=5"),
        (["--preset", "flash", "--drafts", "3", "--decode-steps", "2"], "decode_steps=2 cannot be used with "
         "num_speculative_tokens=3; use decode_steps=1"),
        (["--preset", "flash", "--page-size", "7"], "page_size=7 must hold whole groups of every compress ratio"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(args, sentence, capsys):
    assert main(["check", *args]) == 2
    assert capsys.readouterr().err.startswith(f"widemesh: {sentence}")


def test_the_engine_that_is_checked():
    config = Check(preset="flash", devices=4, chunk_rows=512, pages=77, role="prefill").engine_config()
    assert (config.numerics, config.max_num_seqs, config.chunk_rows) == ("serving", 256, 512)
    assert (config.num_prefill_pages, config.num_pages, config.decode_devices) == (77, None, 4)
    assert config.num_speculative_tokens == 0
    assert Check(preset="flash", drafts=5).engine_config().decode_rows == 6
    assert not config.enable_eplb and Check(preset="flash", redundant_experts=0).engine_config().enable_eplb
    assert Check(preset="flash", redundant_experts=16).engine_config().expert_layouts(FLASH)[0].num_slots == 400


def compiled(*, argument_bytes: int = 100, spill_bytes: int = 0, ops: tuple[str, ...] = OPS) -> Compiled:
    kernel = KernelFacts(
        name="mhc_mix", arch="sm_90a", registers=64, spill_bytes=spill_bytes, smem_bytes=0, tmem_columns=0,
        instructions={},
    )  # fmt: skip
    return Compiled(
        target="H200", seconds=1.0, kernels=(kernel,), collectives=(), hlo="",
        calls=tuple(Calls(name=f"{op}_kernel", count=2, runs=4) for op in ops),
        memory=MemoryUse(argument_bytes=argument_bytes, output_bytes=30, alias_bytes=20, temp_bytes=5,
                         host_argument_bytes=0, host_temp_bytes=0),
    )  # fmt: skip


def check(errors: dict[str, str] | None = None, **programs: Compiled) -> StepCheck:
    return StepCheck(
        role="prefill", target=TARGETS["H200"], devices=8, programs=programs, errors=errors or {}, seconds=2.0,
        expected=dict.fromkeys(programs, OPS),
    )  # fmt: skip


def test_a_program_that_is_right():
    found = check(encode=compiled(), tail=compiled(argument_bytes=300))
    assert found.reasons() == [] and found.fits and found.compiled
    facts = found.to_json()
    assert (facts["argument_bytes"], facts["temp_bytes"]) == (300, 15)
    assert facts["kernels"] == dict.fromkeys(OPS, 4)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (check({"tail": "ValueError: no"}, encode=compiled()), "tail does not compile: ValueError: no"),
        (check(encode=compiled(argument_bytes=10**12)), "1000000000015 bytes are needed of the 150000000000 of a H200"),
        (check(encode=compiled(spill_bytes=8)), "kernels spill 8 bytes of registers"),
        (check(encode=compiled(ops=OPS[1:])), "encode has no kernel of sparse_attention"),
        (check(encode=compiled(), tail=compiled(ops=OPS[:-1])), "tail has no kernel of engram_gate"),
    ],
)  # fmt: skip
def test_what_makes_it_fail(found, reason):
    assert len(found.reasons()) == 1 and found.reasons()[0].startswith(reason)


def test_staging_rows_count_beside_the_programs():
    found = dataclasses.replace(check(decode=compiled(argument_bytes=149 * 10**9)), staging_bytes=10**9)
    assert found.total_bytes == 150 * 10**9 + 15 and not found.fits
    assert found.to_json()["staging_bytes"] == 10**9 and len(found.reasons()) == 1


def test_nothing_that_compiles_does_not_fit():
    found = check({"decode": "RuntimeError: gone"})
    assert not found.fits and not found.compiled and len(found.reasons()) == 1


def test_which_ops_a_program_has():
    assert ops_of(FLASH, "decode") == ops_of(FLASH, "prefill") == ops_of(FLASH, "encode") == OPS
    assert ops_of(FLASH, "tail") == ("sparse_attention", "select_entries", "grouped_moe", "mhc")
    plain = dataclasses.replace(FLASH, engram_layer_ids=(), engram_num_embeddings=())
    assert ops_of(plain, "decode") == OPS[:-1]
