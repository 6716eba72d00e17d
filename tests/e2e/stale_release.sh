#!/usr/bin/env bash
# Editing one solution line must make `make release CHECK=1` fail. Works in a copy; the checkout stays as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 cp --parents -t "$copy" 2>/dev/null
python=$PWD/.venv/bin/python
cd "$copy"
export PYTHONPATH="$copy:$copy/kernels"
"$python" -m cs336_infer.course.release --check
line='half = x.shape\[-1\] \/\/ 2'
grep -q "$line" solutions/a1_prefill_decode/a1_prefill_decode.py
sed -i "s/$line/half = int(x.shape[-1] \/ 2)/" solutions/a1_prefill_decode/a1_prefill_decode.py
if "$python" -m cs336_infer.course.release --check; then
    echo "stale_release: an edited solution was not noticed" >&2
    exit 1
fi
echo "stale_release: the edited line was noticed"
