"""Files as students hand them in: read without running, whatever state they are in."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cs336_infer.course import submission

F = "def f(x):\n    return x + 1"
G = "class A:\n    def g(self): pass"


def notebook(path: Path, *cells: Any, **extra: Any) -> Path:
    """Cells are sources of code cells, or dicts as they lie in the file."""
    made = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": cell}
        if isinstance(cell, str)
        else cell
        for cell in cells
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made} | extra))
    return path


def text(source: str | list[str], kind: str = "markdown") -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source}


def problem(path: Path) -> str:
    found = submission.read(path)
    assert found.cells == [] and found.problem is not None and "\n" not in found.problem
    assert found.problem.startswith(path.name)
    return found.problem


@pytest.mark.parametrize("minor", [0, 2, 4, 5])
def test_code_cells_in_order(tmp_path: Path, minor: int) -> None:
    book = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Title\nSome def inition."),
            nbformat.v4.new_code_cell("import math"),
            nbformat.v4.new_raw_cell("raw"),
            nbformat.v4.new_code_cell(F, metadata={"nbgrader": {"grade": True}}),
            nbformat.v4.new_code_cell("   \n"),
        ]
    )
    book.nbformat_minor = minor
    path = tmp_path / "a1 (1).IPYNB"
    path.write_text(json.dumps(book))
    assert submission.read(path) == submission.Submission(path, ["import math", F])


def test_metadata_does_not_matter(tmp_path: Path) -> None:
    bare = [{"cell_type": "code", "source": [line + "\n" for line in F.split("\n")]}, {"source": 3}, 7, None, {}]
    path = notebook(tmp_path / "x.ipynb", *bare, F, F, metadata=None)
    assert submission.read(path).cells == [F + "\n", F, F]


def test_a_retyped_cell_is_taken_when_it_defines_a_function(tmp_path: Path) -> None:
    prose = "Write `def f(x)` so that\n\ndef f(x): does it."
    path = notebook(tmp_path / "x.ipynb", text(F), text(prose), text("x = 1"), text(G, "raw"))
    found = submission.read(path)
    assert found.cells == [F, G]
    assert len(found.notes) == 2 and "cell 1" in found.notes[0]


def test_magics_are_left_out_with_a_note(tmp_path: Path) -> None:
    source = "%matplotlib inline\n!pip install torch\nx = !ls\nif True:\n    %time y = 1\nf?\n?f\nz = 1"
    path = notebook(tmp_path / "x.ipynb", source, "%%bash\nrm -rf /", "\n%%time\nw = 2")
    found = submission.read(path)
    assert found.cells == ["pass\npass\npass\nif True:\n    pass\npass\npass\nz = 1", "\npass\nw = 2"]
    assert len(found.notes) == 8


def test_a_line_of_python_that_looks_like_a_magic_stays(tmp_path: Path) -> None:
    source = 'x = (7\n  % 4)\ntext = """\n!not a shell\n%nor a magic\nwhy?\n"""'
    assert submission.read(notebook(tmp_path / "x.ipynb", source)).cells == [source]
    found = submission.read(notebook(tmp_path / "y.ipynb", source + "\n%load_ext autoreload"))
    assert found.cells == [source + "\npass"]


def test_scripts(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(f"# ---\n# jupyter: x\n# ---\n\n# %% [markdown]\n# # Title\n\n# %%\nx = 1\n# %% tags=['a']\n{F}\n")
    found = submission.read(path)
    assert [cell.strip() for cell in found.cells] == ["# ---\n# jupyter: x\n# ---", "x = 1", F]
    path.write_text(F + "\n")
    assert submission.read(path).cells == [F]
    path.write_bytes(b"\xef\xbb\xbf" + F.replace("\n", "\r\n").encode())
    assert submission.read(path).cells == [F]
    path.write_text("# %% [markdown]\n" + F)
    assert submission.read(path).cells == [F]


def test_bad_files_have_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    for content, said in (
        ("{", "not valid JSON (line 1)"),
        ("[" * 10**6, "not valid JSON"),
        ("1" * 10**5, "not valid JSON"),
        ("[]", "not a notebook"),
        ("{}", "not a notebook"),
        ('{"nbformat": true, "cells": []}', "format 4"),
        ('{"nbformat": 3, "worksheets": []}', "format 4"),
        ('{"nbformat": 4, "cells": {}}', "format 4"),
        ('{"nbformat": 4, "cells": []}', "no code"),
        ("", "not valid JSON"),
    ):
        path.write_text(content)
        assert said in problem(path), content[:40]
    path.write_bytes(b"\xff\xfe{")
    assert "UTF-8" in problem(path)
    assert "cannot be read: No such file" in problem(tmp_path / "absent.py")
    assert "neither" in problem(tmp_path / "x.pdf")
    (tmp_path / "folder.py").mkdir()
    assert "cannot be read: Is a directory" in problem(tmp_path / "folder.py")
    os.mkfifo(tmp_path / "pipe.py")
    assert "not a file" in problem(tmp_path / "pipe.py")
    (tmp_path / "empty.py").write_text("\n")
    assert "no code" in problem(tmp_path / "empty.py")


def test_a_large_notebook_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    with path.open("wb") as file:
        file.truncate(100 * 10**6)
    tracemalloc.start()
    assert "100 MB" in problem(path)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_links(tmp_path: Path) -> None:
    folder = tmp_path / "alice"
    folder.mkdir()
    (tmp_path / "secret.py").write_text(F)
    (folder / "mine.py").write_text(F)
    for name, target in (("up.py", "../secret.py"), ("root.py", "/etc/hostname"), ("sub.py", "mine.py")):
        (folder / name).symlink_to(target)
    (folder / "loop.py").symlink_to("loop.py")
    (tmp_path / "linked").symlink_to("alice")
    for name in ("alice/up.py", "alice/root.py", "alice/sub.py", "alice/loop.py", "linked/mine.py"):
        assert "a link" in problem(tmp_path / name)
    assert submission.read(folder / "mine.py").cells == [F]


def test_the_fingerprint_reads_no_more_than_the_submission(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(F)
    (tmp_path / "b.py").symlink_to("/dev/zero")
    (tmp_path / "c.py").symlink_to("a.py")
    os.mkfifo(tmp_path / "d.py")
    found = [submission.fingerprint(tmp_path / name) for name in ("a.py", "b.py", "c.py", "d.py", "absent.py")]
    assert len(set(found)) == 4 and found[1] == found[2]


def test_a_name_in_a_message_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x\n33 of 33 points\x1b[2J.py"
    path.write_text("")
    assert submission.read(path).problem == "x?33 of 33 points?[2J.py: there is no code in it"


def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(F)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads everything")
    assert "cannot be read: Permission denied" in problem(path)


def test_nothing_is_run(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'trap')!r}, 'w')\n" + F
    assert submission.read(notebook(tmp_path / "x.ipynb", trap, text(trap), "%%python\n" + trap)).problem is None
    assert not (tmp_path / "trap").exists()


def test_half_a_surrogate_pair_becomes_text(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    path.write_text('{"nbformat": 4, "cells": [{"cell_type": "code", "source": "x = \'\\ud800\'"}]}')
    assert submission.read(path).cells == ["x = '?'"]


@pytest.mark.parametrize("source", ["(" * 10**5, "-" * 10**5 + "1", "[" * 5000 + "]" * 5000, "a" + ".b" * 10**5, "\0"])
def test_nesting_is_survived(tmp_path: Path, source: str) -> None:
    path = notebook(tmp_path / "x.ipynb", F, text(f"def g(): pass\n{source}"), source + "\n%x")
    assert submission.read(path).cells[0] == F


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text() | st.just("code") | st.just(F),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["cells", "nbformat", "source"]), inner),
    ).map(lambda value: json.dumps({"nbformat": 4, "cells": [value, {"cell_type": "code", "source": value}]}).encode())
)
def test_no_content_raises(tmp_path: Path, content: bytes) -> None:
    for name in ("x.ipynb", "x.py"):
        (tmp_path / name).write_bytes(content)
        found = submission.read(tmp_path / name)
        assert (found.problem is None) == bool(found.cells)
        assert all(type(cell) is str and cell.encode() for cell in found.cells)
