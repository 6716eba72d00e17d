#!/usr/bin/env bash
# The checks of stage 3 at full size: release, gates, attacks, exports, browser, and the grader beside nbgrader.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
make release CHECK=1
bash tests/e2e/stale_release.sh
scripts/debian.sh chromium chromium "browser test"
scripts/debian.sh bubblewrap bwrap "sandbox tests"
make release
.venv/bin/python -m pytest -v tests/public/test_gates.py tests/public/test_attacks.py tests/public/test_sandbox.py tests/public/test_grade.py \
    tests/public/test_grade_runs.py tests/public/test_written.py tests/public/test_nbgrader.py tests/public/test_otter.py \
    tests/public/test_bundle.py
AS_USER_TESTS=test .venv/bin/python -m pytest -v tests/public/test_zygote.py
E2E_SHOTS=build/e2e .venv/bin/python -m pytest -v tests/e2e/test_lab.py tests/e2e/test_slides.py
ls -l build/e2e
.venv/bin/python benchmarks/grading.py --json --save
