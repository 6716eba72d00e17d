#!/usr/bin/env bash
# The checks of issue 2 at full size: the real model against transformers, the benchmark, one command line.
set -euo pipefail
cd "$(dirname "$0")/.."
CS336_SOAK=1 .venv/bin/python -m pytest tests/public/test_real_model.py tests/public/test_models.py -v
.venv/bin/cs336-infer generate "The capital of France is" --max-tokens 24 --temperature 0 --json
.venv/bin/python benchmarks/decode.py --vs transformers --save
