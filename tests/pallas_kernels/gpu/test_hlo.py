"""Reading optimised programs."""

import pytest

from widemesh.pallas_kernels.gpu.facts import Calls, Collective
from widemesh.pallas_kernels.gpu.hlo import Program, type_bytes

_CALL = 'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/scope/%s/mpmd_map" stack_frame_id=1}'
_HASH = 'backend_config={kernel_hash = "%s", module = "ML\\\\EFR %%nothing = f32[8] all-reduce(\\""}'

TEXT = f"""
HloModule jit_step, is_scheduled=true

%body.1 (param: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {{
  %param = (s32[], bf16[8,4]{{1,0}}) parameter(0)
  %x.1 = bf16[8,4]{{1,0}} get-tuple-element(%param), index=1
  %k.1 = bf16[8,4]{{1,0}} custom-call(%x.1), {_CALL % "op_first"}, {_HASH % "AA"}
  %gather-start.1 = (bf16[8,4]{{1,0}}, bf16[64,4]{{1,0}}) all-gather-start(%k.1), channel_id=1, dimensions={{0}}
  %gather-done.1 = bf16[64,4]{{1,0}} all-gather-done(%gather-start.1)
  ROOT %scatter.1 = bf16[8,4]{{1,0}} reduce-scatter(%gather-done.1), channel_id=1, to_apply=%add
}}

%condition.1 (param.2: (s32[], bf16[8,4])) -> pred[] {{
  %param.2 = (s32[], bf16[8,4]{{1,0}}) parameter(0)
  ROOT %less = pred[] constant(false)
}}

%wrapped (param.3: f32[16]) -> f32[16] {{
  %param.3 = f32[16]{{0}} parameter(0)
  ROOT %exchange = f32[16]{{0}} all-to-all(%param.3), dimensions={{0}}
}}

%never (param.4: f32[16]) -> f32[16] {{
  %param.4 = f32[16]{{0}} parameter(0)
  ROOT %unused = f32[16]{{0}} all-to-all(%param.4), dimensions={{0}}
}}

ENTRY %main (a: bf16[8,4], b: f32[16]) -> bf16[8,4] {{
  %a = bf16[8,4]{{1,0}} parameter(0)
  %b = f32[16]{{0}} parameter(1)
  %k.2 = bf16[8,4]{{1,0}} custom-call(%a), {_CALL % "op_first"}, {_HASH % "BB"}
  %k.3 = (bf16[8,4]{{1,0}}, f32[2]{{0}}) custom-call(%a), {_CALL % "op_second"}, {_HASH % "CC"}
  %gemm = bf16[8,4]{{1,0}} custom-call(%a), custom_call_target="__cublas$gemm", metadata={{op_name="jit(step)/dot"}}
  %while.1 = (s32[], bf16[8,4]{{1,0}}) while(%k.2), condition=%condition.1, body=%body.1, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
  %while.2 = (s32[], bf16[8,4]{{1,0}}) while(%k.2), condition=%condition.1, body=%body.1
  %start = ((f32[16]{{0}}), f32[16]{{0}}, s32[]) async-start(%b), calls=%wrapped
  %permute-start = (f32[16]{{0}}, f32[16]{{0}}, u32[], u32[]) collective-permute-start(%b), channel_id=2
  ROOT %sum = f32[16]{{0}} all-reduce(%b), to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("bf16[64,512]{1,0:T(8,128)}", 65536),
        ("(bf16[8,4]{1,0}, u8[3]{0}, s32[])", 71),
        ("pred[5]", 5),
        ("f8e4m3fn[16]", 16),
        ("f4e2m1fn[3]", 2),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_type(text, num_bytes):
    assert type_bytes(text) == num_bytes


def test_calls_in_loops_count_once_per_turn():
    program = Program(TEXT)
    assert program.calls() == (
        Calls(name="op_first", count=2, runs=1 + 5 + 1),
        Calls(name="op_second", count=1, runs=1),
    )
    assert program.kernel_hashes() == {"op_first": ['"AA"', '"BB"'], "op_second": ['"CC"']}


def test_collectives_with_the_bytes_of_the_larger_side():
    gathered, scattered = 64 * 4 * 2, 64 * 4 * 2
    assert Program(TEXT).collectives() == (
        Collective(kind="all-gather", count=1, runs=6, num_bytes=6 * gathered),
        Collective(kind="all-reduce", count=1, runs=1, num_bytes=64),
        Collective(kind="all-to-all", count=2, runs=1, num_bytes=64),
        Collective(kind="collective-permute", count=1, runs=1, num_bytes=64),
        Collective(kind="reduce-scatter", count=1, runs=6, num_bytes=6 * scattered),
    )
