"""Our grader against nbgrader 0.9.6: the same submissions, the same checks, two processes each, in one run.

    python benchmarks/grading.py --n 100 --json --save

A class of `--n` notebooks of assignment 1, made with a fixed seed: the reference in several dresses, a second correct
solution, the seeded bugs of tests/mutants, unfinished and untouched notebooks, and two that crash. `cs336-infer grade
--jobs 2` grades them, and `nbgrader autograde` with the settings of `make release NBGRADER=1`, as two processes with
half of the students and a gradebook each. Both are timed as commands, from start to end; making the class and
nbgrader's release are not. Each round grades all once with both, in turn; a rate is the median over the rounds.

Both run the public and hidden checks, nbgrader in the kernel that ran the notebook, ours from a process without
student code. The cells that plug the functions into a real model are executed by neither. Scores must agree.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests" / "public"))

try:
    import nbformat
    from classroom import NAME, filled, hand_in, mutants, mutated, reference, second
    from tqdm import tqdm

    from cs336_infer import InvalidRequest, measure
    from cs336_infer.course import graded_cell, nbgrader_export
except ModuleNotFoundError as e:
    sys.exit(f"grading.py: {e.name} is not installed: after make test, run .venv/bin/python benchmarks/grading.py")

RESULTS = Path(__file__).parent / "results"
BIN = Path(sys.executable).parent
INPUTS = 336  # seed of the checks' random inputs, the same for both
EXITS = "def decode_step_cost(*arguments):\n    import os\n\n    os._exit(1)\n"
RAISES = "raise RuntimeError('a cell that was meant to be deleted')\n"


def make_class(release: Any, n: int, folders: Sequence[Path], seed: int) -> dict[str, str]:
    """Hand in `n` notebooks, dealt to the course folders in turn. Student -> what the notebook is."""
    rng = random.Random(seed)
    kinds = rng.choices(["reference", "second", "bug", "two bugs", "half done", "stub"], [20, 15, 40, 10, 10, 5], k=n)
    kinds[-2:] = ["exits", "raises"] if n >= 4 else kinds[-2:]
    told: dict[str, str] = {}
    for i, kind in enumerate(kinds):
        student = f"s{i:03}"
        code, told[student] = _code(kind, rng)
        hand_in(filled(release, code), folders[i % len(folders)], student)
    return told


def _code(kind: str, rng: random.Random) -> tuple[dict[str, str], str]:
    code, number = reference(), rng.randrange(len(mutants()))
    if kind == "reference":
        dress = rng.choice(["# my solution\n", "print('cell done')\n", "import warnings\nwarnings.warn('old')\n", ""])
        return {name: dress + text for name, text in code.items()}, kind
    if kind == "second":
        return second(), kind
    if kind == "half done":
        kept = rng.sample(sorted(code), 3)
        return {name: code[name] for name in kept}, f"only {', '.join(kept)}"
    if kind == "stub":
        return {}, kind
    if kind == "exits":
        return {**code, "decode_step_cost": EXITS}, kind
    if kind == "raises":
        return {**code, "rope": RAISES}, kind
    code, told = mutated(number), f"bug: {mutants()[number][0]}"
    if kind == "two bugs":
        other = rng.choice([i for i, m in enumerate(mutants()) if m[1] != mutants()[number][1]])
        exercise = mutants()[other][1]
        code, told = {**code, exercise: mutated(other)[exercise]}, f"{told}, and: {mutants()[other][0]}"
    return code, told


def timed(commands: list[tuple[list[str], Path]], done: Callable[[], int], n: int, what: str) -> dict[str, float]:
    """Run the commands at once and take the time until the last one ends."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log, tqdm(total=n, desc=what, unit="submission", disable=None) as bar:
        environment = {**os.environ, graded_cell.SEED: str(INPUTS)}
        running = [subprocess.Popen(c, cwd=at, env=environment, stdout=log, stderr=log) for c, at in commands]
        while any(p.poll() is None for p in running):
            time.sleep(0.2)
            bar.update(done() - bar.n)
        wall = time.perf_counter() - start
        bar.update(n - bar.n)
    return {"wall_s": wall, "per_minute": 60 * n / wall}


def ours(
    folders: Sequence[Path], work: Path, jobs: int, n: int, ways: set[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Time and scores of `cs336-infer grade`; how it started submissions is added to `ways`."""
    out = work / "ours.json"
    journal = out.with_name("ours.json.journal")
    paths = [str(folder / "submitted") for folder in folders]
    command = [str(BIN / "cs336-infer"), "grade", *paths, "--assignment", "a1", "--course", str(REPO)]
    command += ["--json", str(out), "--jobs", str(jobs), "--seed", str(INPUTS)]

    def done() -> int:
        return max(journal.read_bytes().count(b"\n") - 1, 0) if journal.exists() else 0

    time_used = timed([(command, work)], done, n, "ours")
    if not out.is_file():
        raise SystemExit(f"grading.py: failed: {' '.join(command)}")
    rows = json.loads(out.read_text(encoding="utf-8"))["submissions"]
    ways |= {r["process"] for r in rows}
    return time_used, {Path(r["submission"]).parts[-3]: r["score"] for r in rows}


def theirs(folders: Sequence[Path], n: int) -> tuple[dict[str, float], dict[str, float]]:
    """Time and scores of `nbgrader autograde`, one process for each folder; nothing of an earlier round is left."""
    for folder in folders:
        shutil.rmtree(folder / "autograded", ignore_errors=True)
        shutil.copy(folder / "released.db", folder / "gradebook.db")
    command = [str(BIN / "nbgrader"), "autograde", NAME]

    def done() -> int:
        return sum(len(list(folder.glob(f"autograded/*/{NAME}"))) for folder in folders)

    time_used = timed([(command, folder) for folder in folders], done, n, "nbgrader")
    scores: dict[str, float] = {}
    for folder in folders:
        _run(["export", "--to", "grades.csv"], folder)
        with (folder / "grades.csv").open() as file:
            scores.update({row["student_id"]: float(row["raw_score"]) for row in csv.DictReader(file)})
    return time_used, scores


def _run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run([str(BIN / "nbgrader"), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise SystemExit(f"grading.py: nbgrader {arguments[0]} failed: {last}")


def differences(
    mine: dict[str, float], other: dict[str, float], told: dict[str, str], folders: Sequence[Path]
) -> list[dict[str, Any]]:
    """Students whose scores differ, with the reason where it is known."""
    found = []
    for student in told:
        if mine.get(student) != other.get(student):
            kept = any((folder / "autograded" / student).exists() for folder in folders)
            reason = "unknown" if kept else "the kernel died: nbgrader gives the whole submission no score"
            scores = {"ours": mine.get(student), "nbgrader": other.get(student)}
            found.append({"student": student, "what": told[student], **scores, "reason": reason})
    return found


def compare(n: int, jobs: int, rounds: int, seed: int, work: Path) -> dict[str, Any]:
    folders = [work / f"course{i}" for i in range(jobs)]
    for folder in folders:
        nbgrader_export.write(REPO, [REPO / "solutions" / NAME / f"{NAME}.py"], folder)
    for folder in folders:
        _run(["generate_assignment", NAME], folder)
        shutil.copy(folder / "gradebook.db", folder / "released.db")
    release = nbformat.read(folders[0] / "release" / NAME / f"{NAME}.ipynb", as_version=4)
    told = make_class(release, n, folders, seed)
    times: dict[str, list[dict[str, float]]] = {"ours": [], "nbgrader": []}
    unlike: list[dict[str, Any]] = []
    ways: set[str] = set()
    for r in range(rounds):
        scores: dict[str, dict[str, float]] = {}
        for name in list(times)[:: 1 if r % 2 == 0 else -1]:
            used, scores[name] = ours(folders, work, jobs, n, ways) if name == "ours" else theirs(folders, n)
            times[name].append(used)
        unlike += [{"round": r, **d} for d in differences(scores["ours"], scores["nbgrader"], told, folders)]
    row: dict[str, Any] = {"submissions": n, "processes": jobs, "rounds": rounds, "seed": seed, "started": sorted(ways)}
    for name, used in times.items():
        row[name] = {key: statistics.median(u[key] for u in used) for key in used[0]}
    pairs = [b["wall_s"] / a["wall_s"] for a, b in zip(times["ours"], times["nbgrader"], strict=True)]
    row["ratio"] = {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}
    return {**row, "scores_agree": n * rounds - len(unlike), "scores_differ": unlike}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, default=100, help="submissions (default 100)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of each grader (default 2)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the class")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/grading.json")
    args = parser.parse_args()
    for name in ("n", "jobs", "rounds"):
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name} must be >= 1, not {getattr(args, name)}")
    if args.n < args.jobs:
        raise InvalidRequest(f"--n must be at least --jobs, {args.jobs}, not {args.n}")
    with tempfile.TemporaryDirectory(prefix="grading") as place:
        row = compare(args.n, args.jobs, args.rounds, args.seed, Path(place))
    result = {"machine": measure.describe().to_dict(), **row}
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "grading.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
        return 0
    for name in ("ours", "nbgrader"):
        print(f"{name:8} {result[name]['per_minute']:6.1f} submissions per minute")
    r = result["ratio"]
    print(f"ours is {r['median']:.2f}x as fast ({r['min']:.2f} to {r['max']:.2f})")
    print(f"{result['scores_agree']} of {args.n * args.rounds} scores agree")
    for d in result["scores_differ"]:
        print(f"  {d['student']} ({d['what']}): ours {d['ours']:g}, nbgrader {d['nbgrader']:g}: {d['reason']}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidRequest as error:
        print(f"grading.py: {error}", file=sys.stderr)
        sys.exit(2)
