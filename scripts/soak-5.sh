#!/usr/bin/env bash
# The checks of the serving stage at full size.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
.venv/bin/python tests/e2e/load_serve.py --clients 200 --seconds 120
FUZZ_EXAMPLES=400 .venv/bin/python -m pytest -q tests/public/test_fuzz_serve.py
.venv/bin/python benchmarks/throughput.py --vs transformers --dtype float32 --threads "$(nproc)" --save
