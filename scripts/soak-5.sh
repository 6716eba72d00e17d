#!/usr/bin/env bash
# The checks of issue 5 at full size: random schedules, both clients, bug cases, detectors and faults, load, fuzz, throughput.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/debian.sh curl curl "tests by a second client"
python=.venv/bin/python
export OMP_NUM_THREADS=1
SCHEDULES=300 $python -m pytest -v tests/public/test_engine_schedules.py tests/public/test_scheduler.py tests/public/test_async.py
$python -m pytest -v tests/public/test_serve.py tests/public/test_curl.py tests/public/test_bench_serve.py tests/public/test_safety.py
$python -m pytest -v tests/public/test_bug_cases_serving.py tests/public/test_loops.py tests/public/test_drift.py \
    tests/public/test_faults.py
CS336_SOAK=1 $python -m pytest -v tests/public/test_detectors_corpus.py
$python tests/e2e/load_serve.py --clients 200 --seconds 120
FUZZ_SECONDS=300 $python -m pytest -v -s tests/public/test_fuzz_serve.py
$python benchmarks/model_loops.py --json
unset OMP_NUM_THREADS
$python benchmarks/throughput.py --vs transformers --json --save
