"""A reader's session: `make lab`'s own command, a real browser, Run All, and a slider moved by keyboard.

Then a student's: nbgrader's Validate button on both notebooks of an assignment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

REPO = Path(__file__).resolve().parents[2]
TOKEN = "reader"
RUN_ALL_TIMEOUT_S = 400
LECTURE = "01_lifetime_of_a_token.ipynb"  # the first with a slider
ASSIGNMENT = "a1_prefill_decode"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to serve with copies of the notebooks, lectures unexecuted, so that none of ours is touched."""
    folder = tmp_path_factory.mktemp("reader") / "notebooks"
    folder.mkdir()
    for path in (REPO / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, folder / path.name)
    for kind in ("assignments", "solutions"):
        (folder.parent / kind).mkdir()
        shutil.copy(REPO / kind / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", folder.parent / kind)
    # A long notebook is drawn only where it is looked at; a script that looks for a slider needs all of it.
    settings = folder.parent / "config" / "lab" / "user-settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    return folder.parent


@pytest.fixture(scope="module")
def server(chromium: str, root: Path) -> Iterator[str]:
    """JupyterLab on a free port, started by the script behind `make lab`; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [REPO / "scripts" / "lab.sh", sys.executable, root / "notebooks" / LECTURE, "--no-browser"]
    command += ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={TOKEN}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER_", "PYTEST_"))}
    environment |= {f"JUPYTER_{kind}_DIR": str(root / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    log = root / "lab.log"
    with log.open("wb") as out:
        lab = subprocess.Popen(
            list(map(str, command)), cwd=root, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", lab, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        try:
            lab.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(lab.pid, signal.SIGKILL)
            lab.wait(20)


def _wait_until_up(url: str, lab: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if lab.poll() is not None:
            pytest.fail(f"the lab ended with {lab.returncode}: {log.read_text()[-1500:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    pytest.fail(f"the lab did not answer in 90 s: {log.read_text()[-1500:]}")


@pytest.fixture
def page(server: str, browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page_errors: list[str] = []
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    yield page
    assert not page_errors


def test_a_reader_runs_a_notebook_and_turns_a_knob(server: str, root: Path, page: Any, shots: Path) -> None:
    path = root / "notebooks" / LECTURE
    _open(page, f"{server}/lab/tree/notebooks/{path.name}")
    _run_all(page)
    notebook = _saved_when_finished(page, path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [error for cell in code for error in _unplanned(cell)]
    assert all(cell.execution_count for cell in code)

    _turn_a_knob(page, shots / "knob")


def test_validate_names_the_cells_that_a_student_has_not_written(server: str, page: Any, shots: Path) -> None:
    pytest.importorskip("nbgrader")
    said = _validate(page, f"{server}/lab/tree/assignments/{ASSIGNMENT}.ipynb", shots / "validate_student.png")
    notebook = nbformat.read(REPO / "assignments" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", as_version=4)
    checks = [cell.source for cell in notebook.cells if cell.cell_type == "code" and _is_graded(cell)]
    assert checks and said.count("The following cell failed") == len(checks)
    assert all(f"{check}\nNotPassed" in said for check in checks)


def test_validate_passes_the_solution(server: str, page: Any, shots: Path) -> None:
    pytest.importorskip("nbgrader")
    said = _validate(page, f"{server}/lab/tree/solutions/{ASSIGNMENT}.ipynb", shots / "validate_solution.png")
    assert "Success" in said


def test_the_lab_had_nothing_to_complain_about(server: str, root: Path) -> None:
    """Runs last: what the server wrote while the tests above used it, with nbgrader's extensions where installed."""
    lines = (root / "lab.log").read_text().splitlines()
    assert not [line for line in lines if re.match(r"\[[EC] |Traceback|\S*Error\b", line)]


def _is_graded(cell: nbformat.NotebookNode) -> bool:
    return cell.metadata.get("nbgrader", {}).get("grade", False)


def _open(page: Any, address: str) -> None:
    page.goto(f"{address}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    # The notebook shows before its kernel answers; a run started then would ask which kernel to use.
    page.locator("#jp-main-statusbar", has_text="(ipykernel) | Idle").wait_for(timeout=60_000)


def _validate(page: Any, address: str, shot: Path) -> str:
    """What nbgrader's dialog says after a click on Validate."""
    _open(page, address)
    page.get_by_role("button", name="Validate").click()
    dialog = page.locator(".jp-Dialog-content")
    dialog.wait_for(timeout=300_000)
    page.wait_for_timeout(1000)
    page.screenshot(path=shot)
    return dialog.inner_text()


def _run_all(page: Any) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()


def _saved_when_finished(page: Any, path: Path) -> nbformat.NotebookNode:
    """Wait until every code cell ran or one failed, and read what Ctrl+S wrote. The served copy starts unexecuted."""
    deadline = time.monotonic() + RUN_ALL_TIMEOUT_S
    while time.monotonic() < deadline:
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        notebook = nbformat.read(path, as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        running = page.locator(".jp-InputPrompt", has_text="[*]").count()
        if not running and (all(cell.execution_count for cell in code) or any(_unplanned(cell) for cell in code)):
            return notebook
    pytest.fail(f"{path.name} did not finish in {RUN_ALL_TIMEOUT_S} s")


def _unplanned(cell: nbformat.NotebookNode) -> list[str]:
    """The errors of a cell that was not meant to raise."""
    if "raises-exception" in cell.metadata.get("tags", []):
        return []
    return [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]


def _turn_a_knob(page: Any, shot: Path) -> None:
    """The first slider on the page: its line of text must change, and come back when the knob does."""
    handle = page.locator(".jp-OutputArea .noUi-handle").first
    handle.wait_for(timeout=30_000)
    handle.scroll_into_view_if_needed()
    box = page.locator(".jupyter-widgets.widget-vbox", has=page.locator(".noUi-handle")).first
    status = box.locator("[role=status]").first
    before, picture = status.inner_text(), box.locator("img").first.get_attribute("src")
    box.scroll_into_view_if_needed()
    page.screenshot(path=f"{shot}_before.png")
    handle.focus()
    page.keyboard.press("ArrowRight")
    _wait_for(page, lambda: status.inner_text() != before)
    _wait_for(page, lambda: box.locator("img").first.get_attribute("src") != picture)
    assert box.locator("img").first.evaluate("image => image.naturalWidth") > 0
    page.screenshot(path=f"{shot}_after.png")
    page.keyboard.press("ArrowLeft")
    _wait_for(page, lambda: status.inner_text() == before)


def _wait_for(page: Any, condition: Any, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the page did not follow the slider"
        page.wait_for_timeout(100)
