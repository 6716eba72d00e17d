#!/usr/bin/env bash
# The sanitizer's tests and its corpus on other releases of Triton, each in a folder of its own under build/.
#   scripts/sanitizer_versions.sh [VERSION...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
export OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- 3.6.0 3.9.0
failed=()
for version in "$@"; do
    folder=$PWD/build/triton-$version
    if [ ! -d "$folder/triton" ]; then
        rm -rf "$folder.part"
        $python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder.part" "triton==$version"
        rm -rf "$folder" && mv "$folder.part" "$folder"
    fi
    export PYTHONPATH=$folder
    found=$($python -c 'import triton; print(triton.__version__)')
    [ "$found" = "$version" ] || { echo "sanitizer_versions: found triton $found, not $version" >&2; exit 1; }
    echo "triton $version"
    $python -m pytest -q -rs tests/public/test_kernels_sanitizer*.py -k "not test_corpus" || failed+=("$version")
    $python tests/e2e/sanitize_corpus.py | tail -n 1 || failed+=("$version")
    unset PYTHONPATH
done
[ ${#failed[@]} -eq 0 ] || { echo "sanitizer_versions: failed on ${failed[*]}" >&2; exit 1; }
echo "sanitizer_versions: $* pass"
