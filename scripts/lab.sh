#!/usr/bin/env bash
# Opens JupyterLab on the folder it is started in: scripts/lab.sh PYTHON NOTEBOOK [jupyter lab options].
# The kernel is PYTHON's own.
set -euo pipefail
python=$1 notebook=$2
shift 2
[ -f "$notebook" ] || {
    echo "lab: there is no notebook $notebook" >&2
    exit 1
}
root=()
[ "$(id -u)" = 0 ] && root=(--allow-root)
# A kernel called python3 that the reader registered earlier must not win over the one beside this Python.
export JUPYTER_PREFER_ENV_PATH=1
unset JUPYTER_PATH PYTHONPATH
exec "$python" -m jupyter lab --ServerApp.root_dir="$PWD" "${root[@]}" "$@" "$notebook"
