#!/usr/bin/env bash
# The browser test drives Debian's chromium. Installs it where that can be done without asking anybody.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "set-up: no chromium, the browser test will be skipped (as root: apt-get install chromium)"
    exit 0
fi
echo "set-up: installing chromium for the browser test"
mkdir -p build
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends chromium; } >build/chromium.log 2>&1 </dev/null ||
    echo "set-up: chromium could not be installed, the log is in build/chromium.log"
