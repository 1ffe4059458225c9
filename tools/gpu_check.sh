#!/bin/bash
# Every GPU kernel against its reference on the GPU of this machine, then timings. Flags: see docs/gpu.md.
#   bash tools/gpu_check.sh [--out FILE]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m widemesh.tools.gpu_check "$@"
