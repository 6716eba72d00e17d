#!/usr/bin/env bash
# The grader runs students' code in Debian's bubblewrap. Installs it where that can be done without asking anybody.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v bwrap >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "set-up: no bubblewrap, the sandbox tests will be skipped (as root: apt-get install bubblewrap)"
    exit 0
fi
echo "set-up: installing bubblewrap for the sandbox tests"
mkdir -p build
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends bubblewrap; } >build/bubblewrap.log 2>&1 </dev/null ||
    echo "set-up: bubblewrap could not be installed, the log is in build/bubblewrap.log"
