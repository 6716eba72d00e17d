"""The sanitizer's command over broken kernels and their repaired twins.

python tests/e2e/sanitize_corpus.py [--schedules 20] [--seed 0] [--policy mixed] [--only barrier]

In a broken script a comment `# finding: kind` marks the line that must be found; a repaired one must be clean. Prints a
line for each script and one for all; exit status 1 when anything was missed or found wrongly.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent.parent / "corpus" / "kernels"
MARK = re.compile(r"# finding: ([a-z-]+)$")

Expected = set[tuple[str, int]]
"""Kinds and lines."""


def expected(script: Path) -> Expected:
    lines = script.read_text().splitlines()
    return {(mark[1], number) for number, line in enumerate(lines, start=1) if (mark := MARK.search(line))}


def sanitize(scripts: Iterable[Path], options: list[str]) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit status of the command and its findings by script.

    Raises:
        SystemExit: the command failed.
    """
    paths = [str(path) for path in scripts]
    command = [sys.executable, "-m", "cs336_infer.cli", "sanitize", *paths, "--json", *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode not in (0, 1):
        sys.exit(f"sanitize ended with {ran.returncode}\n{ran.stderr}")
    answer = json.loads(ran.stdout)
    return ran.returncode, {path: [f for f in answer["findings"] if f["script"] == path] for path in paths}


def told(findings: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} in line {line}" for kind, line in sorted(findings))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="mixed")
    parser.add_argument("--only", default="", help="scripts with this in their name")
    args = parser.parse_args()
    options = [f"--schedules={args.schedules}", f"--seed={args.seed}", f"--policy={args.policy}"]
    broken, repaired = (
        sorted(path for path in CORPUS.glob(f"*_{kind}.py") if args.only in path.name)
        for kind in ("broken", "repaired")
    )
    if not broken or [p.name.replace("_broken", "_repaired") for p in broken] != [p.name for p in repaired]:
        sys.exit(f"{len(broken)} broken and {len(repaired)} repaired scripts are not pairs")
    start = time.perf_counter()
    status, found = sanitize(broken, options)
    right, further, alarms, kinds = 0, 0, 0, Counter[str]()
    for script in broken:
        wanted = expected(script)
        if len(wanted) != 1:
            sys.exit(f"{script} marks {len(wanted)} lines, not one")
        seen = {(f["kind"], f["line"]) for f in found[str(script)] if Path(f["file"]) == script}
        right += wanted <= seen
        kinds.update(kind for kind, _ in wanted & seen)
        more = len(found[str(script)]) - len(wanted & seen)
        further += more > 0
        verdict = f"found {told(wanted)}" if wanted <= seen else f"MISSED {told(wanted)}"
        print(f"{script.name}: {verdict}" + (f", further: {told(seen - wanted)}" if more else ""))
    clean_status, found = sanitize(repaired, options)
    for script in repaired:
        alarms += bool(found[str(script)])
        wrong = {(f["kind"], f["line"]) for f in found[str(script)]}
        print(f"{script.name}: {'FALSE ALARM ' + told(wrong) if wrong else 'clean'}")
    seconds = time.perf_counter() - start
    print("kinds: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(f"{further}/{len(broken)} with further findings")
    print(
        f"corpus: {right}/{len(broken)} found with the right class and line, {alarms}/{len(repaired)} false alarms, "
        f"{args.schedules} schedules, {seconds:.0f} s"
    )
    good = right == len(broken) and not alarms and not further
    return 0 if good and (status, clean_status) == (1, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
