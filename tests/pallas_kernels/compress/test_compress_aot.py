"""The compiled step: pages and ring are updated where they lie."""

import json
import subprocess
import sys

import pytest

from widemesh.pallas_kernels.gpu.processes import environment
from widemesh.pallas_kernels.gpu.toolchain import has_plugin

_PROGRAM = """
import json
from widemesh.pallas_kernels.compress.aot import KERNELS
from widemesh.pallas_kernels.gpu.aot import compile_ahead

case = KERNELS[0]
compiled = compile_ahead(case.function, case.args, "H200")
memory = compiled.memory
donated = sum(a.size * a.dtype.itemsize for a in case.args[:2])
copies = [line for line in compiled.hlo.splitlines() if " copy(" in line or " copy-start(" in line]
print(json.dumps({"alias": memory.alias_bytes, "donated": donated, "temp": memory.temp_bytes, "copies": copies}))
"""


@pytest.mark.skipif(not has_plugin(), reason="needs pip install 'widemesh[aot]'")
def test_donated_pages_and_ring_are_not_copied():
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["copies"] == []
    assert found["alias"] == found["donated"] > 3 << 30  # 3.5 GiB of pages
    assert found["temp"] < 1 << 20
