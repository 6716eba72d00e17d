"""What students get: no answer in it, and an engine that runs on theirs."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from cs336_infer.course import bundle
from cs336_infer.course.assignment import Role, read_assignment

REPO = Path(__file__).resolve().parents[2]
SOURCES = [s for s in sorted((REPO / "solutions").glob("a*/a*.py")) if (s.parent / "bundle.toml").is_file()]
A1 = REPO / "solutions" / "a1_prefill_decode" / "a1_prefill_decode.py"


def plan_of(source):
    plan = bundle.read_plan(source)
    assert plan is not None
    return plan


@pytest.fixture(scope="module", params=SOURCES, ids=lambda s: s.stem)
def made(request):
    plan = plan_of(request.param)
    return plan, bundle.contents(plan)


def statements(code):
    """Simple statements, written one way: spaces, comments and quotes do not hide them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            text = ast.unparse(node)
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                yield text


def python_in(path, content):
    if path.endswith(".py"):
        yield content.decode()
    elif path.endswith(".ipynb"):
        yield from ("".join(c["source"]) for c in json.loads(content)["cells"] if c["cell_type"] == "code")


def test_no_statement_of_an_answer_is_in_it(made):
    plan, found = made
    secret = {}
    for cell in plan.assignment.cells:
        if cell.role is Role.SOLUTION:
            lines = cell.source.split("\n")
            inside = [n for r in cell.regions for n in range(r.first + 1, r.last)]
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno - 1 in inside:
                    secret[ast.unparse(node)] = lines[node.lineno - 1]
    for path in [*(REPO / "tests" / "hidden").glob("*.py"), *(REPO / "tests" / "mutants").glob("*_second.py")]:
        secret |= dict.fromkeys(statements(path.read_text()), path.name)
    for path in plan.withheld:
        secret |= dict.fromkeys(statements((REPO / path).read_text()), path)
    allowed = {*plan.allowed, "pass"}
    seen = {}
    for path, content in found.items():
        for code in python_in(path, content):
            for text in statements(code):
                if text in secret and len(text) >= 13 and text not in allowed:
                    seen[text] = (path, secret[text])
    assert seen == {}


def test_nothing_of_graders_is_in_it(made):
    plan, found = made
    assert all(p.split("/")[0] not in ("solutions", "tests", "dist", "build", ".git") for p in found)
    assert not [p for p in found if "grade" in p or "sandbox" in p or p.endswith((".pyc", ".whl", ".zip", ".so"))]
    for path in plan.withheld:
        assert path in found and found[path] != (REPO / path).read_bytes()
    for path, content in found.items():
        assert str(REPO) not in content.decode(), path
    notebook = json.loads(found[f"assignments/{plan.assignment.name}/{plan.assignment.name}.ipynb"])
    assert all(not c.get("outputs") for c in notebook["cells"])


def test_the_same_tree_gives_the_same_bytes(made):
    plan, found = made
    first, second = bundle.zipped(plan, found), bundle.zipped(plan_of(plan.assignment.path), bundle.contents(plan))
    assert first == second
    archive = zipfile.ZipFile(io.BytesIO(first))
    names = [i.filename for i in archive.infolist()]
    assert names == sorted(names) and {n.split("/")[0] for n in names} == {f"cs336-{plan.assignment.short}"}
    assert {i.date_time for i in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert {i.filename.endswith(".sh") for i in archive.infolist() if (i.external_attr >> 16) & 0o111} == {True}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cs336_infer/types.py", "# weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)\n"),
        ("README.md", "    return torch.zeros_like(p).scatter(0, order, ordered / ordered.sum())\n"),
        ("cs336_infer/models/attend.py", "rows = max(16, min(128, SCORES_AT_ONCE // (batch * heads * total)))\n"),
        ("cs336_infer/course/checks.py", 'weights = (keys @ q[b, h, i].double() / head_dim**0.5).softmax(-1)\n'),
        ("notebooks/extra.ipynb", json.dumps({"cells": [], "metadata": {"x": ["cache = layers * 2 * kv * batch * (context + 1)"]}})),  # noqa: E501
        ("tests/hidden/a1.py", ""),
        ("solutions/a.txt", ""),
        ("cs336_infer/__pycache__/types.cpython-311.pyc", ""),
    ],
)  # fmt: skip
def test_a_leak_is_refused(path, text):
    plan = plan_of(A1)
    found = {path: text.encode()}
    with pytest.raises(bundle.BundleError) as error:
        bundle.refuse_leaks(plan, found)
    assert path in str(error.value) and "\n" not in str(error.value)


def test_a_rung_of_a_later_stage_is_left_out_only_where_nobody_needs_it_at_once(made):
    plan, found = made
    rung = "kernels/cs336_kernels/ops/triton/rmsnorm.py"
    assert (rung in found) == (rung in plan.withheld)
    needed = dataclasses.replace(plan, later=(*plan.later, "kernels/cs336_kernels/ops/swiglu.py"))
    with pytest.raises(bundle.BundleError, match=r"needs kernels/cs336_kernels/ops/swiglu\.py to be imported"):
        bundle.contents(needed)


def test_a_module_of_a_later_stage_is_refused(monkeypatch):
    plan = plan_of(A1)
    monkeypatch.setattr(bundle, "_code", lambda notebook: ["from cs336_infer.course import grade"])
    with pytest.raises(
        bundle.BundleError, match=r"course/grade\.py would be in the zip, which bundle\.toml does not allow"
    ):
        bundle.contents(plan)


def test_check_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bundle.main(["--check"]) == 0 and bundle.main([]) == 0
    (tmp_path / "solutions").symlink_to(REPO / "solutions")
    assert bundle.main(["--check"]) == 0
    assert "bundle: dist/student.zip can be made" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["solutions"]
    assert bundle.main(["a99"]) == 1
    assert "no bundle.toml for 'a99'; there is one for a1" in capsys.readouterr().err


def faces(code):
    """Name -> arguments of the public functions and methods of a module; kernels are its inside."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("_"):
            continue
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            kernel = "triton.jit" in map(ast.unparse, getattr(inner, "decorator_list", []))
            if (
                isinstance(inner, ast.FunctionDef)
                and not kernel
                and (not inner.name.startswith("_") or inner.name == "__init__")
            ):
                owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                found[owner + inner.name] = (ast.unparse(inner.args), inner.returns and ast.unparse(inner.returns))
    return found


def test_stand_ins_keep_the_public_face(made):
    plan, _ = made
    private = {"causal_mask", "tile_sizes"}  # used by the caches, which have stand-ins too, and by a kernel
    for path in plan.withheld:
        real, ours = faces((REPO / path).read_text()), faces(plan.standins[path].read_text())
        assert {n: f for n, f in real.items() if n not in private} == ours, path


@pytest.fixture(scope="module")
def unzipped(tmp_path_factory):
    plan = plan_of(A1)
    folder = tmp_path_factory.mktemp("student")
    with zipfile.ZipFile(io.BytesIO(bundle.zipped(plan, bundle.contents(plan)))) as archive:
        archive.extractall(folder)
    return folder / "cs336-a1"


def environment(root):
    return {
        **os.environ,
        "PYTHONPATH": f"{root}:{root / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def test_without_functions_the_engine_names_the_exercise(unzipped):
    code = """
import torch, cs336_infer
from cs336_infer import SamplingParams, generate, load_model, measure
from cs336_infer.course.plug import NotPlugged, plug
from cs336_infer.distribution import probabilities
from cs336_infer.kv import NoCache
from cs336_kernels.ops import attention
model = load_model(dtype="float32")
x = torch.ones(1, 1, 2, 4)
for call in (
    lambda: generate(model, "a"), lambda: attention(x, x, x), lambda: probabilities(x, SamplingParams()),
    lambda: measure.decode(model.config), lambda: measure.prefill(model.config, 3),
    lambda: model.net.forward(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1), NoCache()),
):
    try:
        print("ran", call())
    except NotPlugged as error:
        print(error)
print(cs336_infer.__file__)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(unzipped), capture_output=True, text=True, cwd=unzipped
    )
    assert run.returncode == 0, run.stderr
    *said, place = run.stdout.splitlines()
    names = ["rope", "causal_attention", "next_token_distribution", "decode_step_cost", "decode_step_cost", "rope"]
    assert said == [f"this needs your `{n}`: write it in the assignment, then call plug({n}={n})" for n in names]
    assert place.startswith(str(unzipped))


def executed(unzipped, notebook):
    client = NotebookClient(notebook, timeout=600, allow_errors=True, resources={"metadata": {"path": str(unzipped)}})
    client.execute(env=environment(unzipped))
    return notebook


def errors(cell):
    return [o.evalue for o in cell.get("outputs", []) if o.output_type == "error"]


def text(cell):
    return "".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream" and o.name == "stdout")


def test_the_notebook_in_the_bundle(unzipped):
    """As it is handed out every use ends in an error that names an exercise; with answers the real model runs on them
    and says what it says in the full checkout."""
    path = unzipped / "assignments" / "a1_prefill_decode" / "a1_prefill_decode.ipynb"
    untouched = executed(unzipped, nbformat.read(path, as_version=4))
    said = [e for cell in untouched.cells for e in errors(cell)]
    assert any("a1 rope: Rotate every head" in e for e in said) and len(said) >= 6
    solved = nbformat.read(path, as_version=4)
    answers = {c.grade_id: c.source for c in read_assignment(A1).cells if c.role is Role.SOLUTION}
    for cell in solved.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        if grade_id in answers:
            cell.source = answers[grade_id]
    solved = executed(unzipped, solved)
    assert [e for cell in solved.cells for e in errors(cell)] == []
    reference = nbformat.read(A1.with_suffix(".ipynb"), as_version=4)
    for got, want in zip(solved.cells, reference.cells, strict=True):
        assert text(got) == text(want)
    assert "same as the package's: True" in "".join(map(text, solved.cells))


def test_it_installs(unzipped, tmp_path):
    """The wheel that the set-up script would install, without its dependencies."""
    target = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
    ]
    run = subprocess.run([*command, str(unzipped)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (target / "cs336_infer" / "kv" / "none.py").read_bytes() == (
        unzipped / "cs336_infer" / "kv" / "none.py"
    ).read_bytes()
    assert not (target / "cs336_infer" / "course" / "grade.py").exists() and not (target / "bin").exists()
