"""A zip for Gradescope from the sources of the assignments, made by otter-grader 7.0.0.

    python -m cs336_infer.course.otter_export                   every assignment in solutions/ -> dist/otter/
    otter run -a dist/otter/a1_prefill_decode.zip -o out solutions/a1_prefill_decode/a1_prefill_decode.ipynb

Each check is a test of its own, public or hidden, with its points. The zip carries what it needs: the hidden checks
and a wheel of this package. Students hand in the notebook of assignments/, whatever its name and metadata.

Tried: `otter assign` and `otter run`, with the zips as they are written here. Not tried: Gradescope itself, so neither
its image (setup.sh needs its network) nor its pages. Otter runs the student's code and the tests in one process, gives
a check all its points or none, and has no time limit for a cell of the notebook; written answers are not in the zip.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from tqdm import tqdm

from cs336_infer.course import build, release
from cs336_infer.course.assignment import Exercise, Role
from cs336_infer.course.checks import Check
from cs336_infer.course.grade import Course, open_course
from cs336_infer.types import InferError

IN_THE_IMAGE = "/autograder/source/files"  # where Gradescope unpacks the files of the zip
TORCH_WITHOUT_CUDA = "https://download.pytorch.org/whl/cpu"


class OtterError(InferError):
    """The zip cannot be made. One line with what otter or pip said last."""


def master_notebook(course: Course, wheel: str) -> NotebookNode:
    """What `otter assign` reads: imports, the solution of each exercise and its tests."""
    assignment = course.assignment
    exercises = {e.name: e for e in assignment.exercises}
    last = max(cell.number for cell in assignment.cells if cell.role is Role.SOLUTION)
    cells = [_raw(_config(assignment.name, wheel))]
    for cell in assignment.cells:
        if cell.role is Role.SOLUTION:
            exercise = exercises[cell.grade_id]
            checks = [c for c in course.checks if c.exercise == exercise.name]
            total = f"{sum(c.points for c in checks):g}"
            cells += [
                _raw(f"# BEGIN QUESTION\nname: {exercise.name}\npoints: {total}\ncheck_cell: false"),
                _raw("# BEGIN SOLUTION"),
                nbformat.v4.new_code_cell(cell.source),
                _raw("# END SOLUTION"),
                _raw("# BEGIN TESTS"),
                *(nbformat.v4.new_code_cell(_test(course, exercise, c, i)) for i, c in enumerate(checks, 1)),
                _raw("# END TESTS"),
                _raw("# END QUESTION"),
            ]
        elif cell.kind == "code" and cell.role in (Role.PLAIN, Role.READ_ONLY) and cell.number < last:
            cells.append(nbformat.v4.new_code_cell(cell.source))
    return build.assemble(cells)


def _raw(text: str) -> NotebookNode:
    return nbformat.v4.new_raw_cell(text)


def _config(name: str, wheel: str) -> str:
    """Without a name of the assignment: otter would refuse a notebook whose metadata an editor removed."""
    config = {
        "python_version": "3.11",
        "init_cell": False,
        "export_cell": False,
        "tests": {"ok_format": False},
        "autograder_files": [f"hidden/{name}.py", f"wheels/{wheel}"],
        "requirements": [f"--extra-index-url {TORCH_WITHOUT_CUDA}", f"{IN_THE_IMAGE}/wheels/{wheel}"],
        "generate": {"show_hidden": False, "show_stdout": False},
    }
    return "# ASSIGNMENT CONFIG\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items())


def _test(course: Course, exercise: Exercise, check: Check, number: int) -> str:
    """A test cell. It names the check and holds nothing of it."""
    hidden = check in course.hidden
    arguments = [json.dumps(course.assignment.name), json.dumps(check.title, ensure_ascii=False), "env"]
    arguments += [json.dumps(list(exercise.forbidden)), f"hidden={hidden}"]
    return "\n".join(
        [
            '""" # BEGIN TEST CONFIG',
            f"points: {check.points:g}",
            f"hidden: {json.dumps(hidden)}",
            '""" # END TEST CONFIG',
            f"def test_{number}(env):",
            "    from cs336_infer.course import graded_cell",
            f"    graded_cell.passes({', '.join(arguments)})",
        ]
    )


def write(course: Course, root: Path, wheel: Path, folder: Path) -> Path:
    """Run `otter assign` and put its zip into `folder`; otter has then graded the solution with it, in full.

    Raises:
        OtterError: otter failed, or the solution did not get all points.
    """
    name = course.assignment.name
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        for inner in ("hidden", "wheels"):
            (work / inner).mkdir()
        shutil.copy(root / "tests" / "hidden" / f"{name}.py", work / "hidden")
        shutil.copy(wheel, work / "wheels")
        (work / f"{name}.ipynb").write_text(build.text_of(master_notebook(course, wheel.name)), encoding="utf-8")
        _run([sys.executable, "-m", "otter", "assign", f"{name}.ipynb", "made"], work)
        zips = list((work / "made" / "autograder").glob("*.zip"))
        if len(zips) != 1:
            raise OtterError(f"{name}: otter assign left {len(zips)} zips, not one")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(zips[0], folder / f"{name}.zip"))


def make_wheel(root: Path, folder: Path) -> Path:
    """A wheel of this package in `folder`.

    Raises:
        OtterError: pip failed.
    """
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder.resolve()), "."]
    _run([sys.executable, "-m", *command], root)
    return next(folder.glob("cs336_infer-*.whl"))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise OtterError(f"{' '.join(command[2:4])} failed: {last.strip()}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cs336_infer.course.otter_export", description="For Gradescope.")
    parser.add_argument("folders", nargs="*", type=Path, help="solutions/aN_slug; all of solutions/ when none is named")
    parser.add_argument("--to", type=Path, default=Path("dist/otter"), metavar="DIR", help="default dist/otter")
    args = parser.parse_args(argv)
    root = Path(".")
    sources = [f / f"{f.resolve().name}.py" for f in args.folders] or release.sources_in(root / "solutions")
    bar = tqdm(sources, disable=None, unit="zip")
    try:
        with tempfile.TemporaryDirectory() as place:
            wheel = make_wheel(root, Path(place))
            made = [write(open_course(root, s.stem.split("_")[0]), root, wheel, args.to) for s in _named(bar)]
    except InferError as error:
        bar.close()
        print(f"otter export: {error}", file=sys.stderr)
        return 1
    print(f"otter export: {', '.join(map(str, made))}; upload one as the autograder of its assignment")
    return 0


def _named(bar: tqdm[Path]) -> Iterable[Path]:
    for source in bar:
        bar.set_postfix_str(source.stem)
        yield source


if __name__ == "__main__":
    sys.exit(main())
