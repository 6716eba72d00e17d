#!/usr/bin/env bash
# The checks of issue 6 at full size: every op against float64, the corpus of broken kernels, the sanitizer's overhead and other
# releases of Triton, bytes, ahead-of-time compilation of every kernel for three targets.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
export OMP_NUM_THREADS=1
KERNELS_FULL=1 $python -m pytest tests -v -k kernels
$python tests/e2e/sanitize_corpus.py
$python benchmarks/sanitizer_overhead.py
$python -m cs336_kernels.traffic --check
$python -m cs336_kernels.aot --check
$python -m cs336_kernels.aot --json --compare kernels/aot_table.json > /dev/null
bash scripts/sanitizer_versions.sh
