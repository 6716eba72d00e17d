#!/usr/bin/env bash
# scripts/debian.sh PACKAGE COMMAND TESTS: installs a Debian package that TESTS need, unless COMMAND is there already,
# where that can be done without asking anybody.
set -euo pipefail
cd "$(dirname "$0")/.."
package=$1 command=$2 tests=$3
command -v "$command" >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "set-up: no $package, the $tests will be skipped (as root: apt-get install $package)"
    exit 0
fi
echo "set-up: installing $package for the $tests"
mkdir -p build
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends "$package"; } >"build/$package.log" 2>&1 </dev/null ||
    echo "set-up: $package could not be installed, the log is in build/$package.log"
