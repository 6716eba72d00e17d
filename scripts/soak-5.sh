#!/usr/bin/env bash
# The checks of issue 5 at full size.
set -euo pipefail
cd "$(dirname "$0")/.."
CS336_SOAK=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest -v -s tests/public/test_detectors_corpus.py
.venv/bin/python benchmarks/model_loops.py --json --save
