#!/usr/bin/env bash
# The checks of issue 4 at full size: random schedules, crashes, bit flips, trace replay, and a prefix from every tier.
# Real traces are read from the folder in CS336_TRACES; without it the lines that need them say so and are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
infer=.venv/bin/cs336-infer
python=.venv/bin/python
SCHEDULES=200 OMP_NUM_THREADS=1 $python -m pytest -v tests/public/test_engine_schedules.py tests/public/test_engine.py \
    tests/public/test_pool.py tests/public/test_policies.py tests/public/test_tiers.py tests/public/test_disk_tier.py \
    tests/public/test_traces.py tests/public/test_replay.py
OMP_NUM_THREADS=1 $python tests/e2e/crash_kv.py --kills 200 --flips 1000
if [ -n "${CS336_TRACES:-}" ]; then
    $infer kv replay conversation --capacity 0.25M,1M,3M,10M,50M,inf --policy lru --beside belady --json
    $infer kv replay synthetic --capacity 1M,3M,10M,inf --policy lru --beside belady --json
    $infer kv replay coding-agent --capacity 1M,10M,inf --policy lru --beside belady --json
    $infer kv waste conversation --block-size 16 --json
else
    echo "soak-4: CS336_TRACES is not set: the real traces were not replayed"
    $infer kv replay generated --capacity 0.25M,1M,3M,10M,50M,inf --policy lru --beside belady --json
    $infer kv waste generated --block-size 16 --json
fi
$python benchmarks/kv_replay.py --json
$python benchmarks/kv_tiers.py --json --save
