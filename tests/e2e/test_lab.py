"""A reader's session: `make lab`'s own command, a real browser, Run All, and a slider moved by keyboard."""

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

TINY = """\
import ipywidgets as W
from cs336_infer.course import pictures
from cs336_infer.course.widgets import explorer

def draw(batch):
    fig, ax = pictures.subplots(figsize=(5, 2.5))
    ax.plot([0, batch], [0, 512 * batch])
    ax.set(xlabel="sequences", ylabel="MiB")
    return fig

explorer({"batch": W.IntSlider(value=4, min=1, max=64, description="batch")}, draw, lambda batch: f"{512 * batch} MiB")
"""


def lectures() -> list[str]:
    """The first lecture with a widget, and a tiny notebook that needs nothing but the helpers."""
    first = sorted((REPO / "notebooks").glob("01_*.ipynb"))[:1]
    return ["tiny", *(path.name for path in first)]


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no chromium: the browser test must run under CI (apt-get install chromium)")
        pytest.skip("no chromium: the browser test did not run (apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to serve with unexecuted copies of the notebooks, so that none of ours is touched."""
    folder = tmp_path_factory.mktemp("reader") / "notebooks"
    folder.mkdir()
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(TINY), nbformat.v4.new_code_cell("print('the end')")],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, folder / "tiny.ipynb")
    for path in (REPO / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.update(outputs=[], execution_count=None)
        nbformat.write(notebook, folder / path.name)
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
    command = [REPO / "scripts" / "lab.sh", sys.executable, root / "notebooks" / "tiny.ipynb", "--no-browser"]
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
def page(server: str, chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        yield page
        browser.close()


@pytest.mark.parametrize("name", lectures())
def test_a_reader_runs_a_notebook_and_turns_a_knob(name: str, server: str, root: Path, page: Any) -> None:
    path = root / "notebooks" / (name if name.endswith(".ipynb") else f"{name}.ipynb")
    page_errors: list[str] = []
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    page.goto(f"{server}/lab/tree/notebooks/{path.name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)

    _run_all(page)
    notebook = _saved_when_finished(page, path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [error for cell in code for error in _unplanned(cell)]
    assert all(cell.execution_count for cell in code)

    _turn_a_knob(page)
    assert not page_errors


def _run_all(page: Any) -> None:
    # The notebook shows before its kernel answers; a run started then would ask which kernel to use.
    page.locator("#jp-main-statusbar", has_text="(ipykernel) | Idle").wait_for(timeout=60_000)
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


def _turn_a_knob(page: Any) -> None:
    """The first slider on the page: its line of text must change, and come back when the knob does."""
    handle = page.locator(".jp-OutputArea .noUi-handle").first
    handle.wait_for(timeout=30_000)
    handle.scroll_into_view_if_needed()
    box = page.locator(".jupyter-widgets.widget-vbox", has=page.locator(".noUi-handle")).first
    status = box.locator("[role=status]").first
    before, picture = status.inner_text(), box.locator("img").first.get_attribute("src")
    handle.focus()
    page.keyboard.press("ArrowRight")
    _wait_for(page, lambda: status.inner_text() != before)
    _wait_for(page, lambda: box.locator("img").first.get_attribute("src") != picture)
    assert box.locator("img").first.evaluate("image => image.naturalWidth") > 0
    page.keyboard.press("ArrowLeft")
    _wait_for(page, lambda: status.inner_text() == before)


def _wait_for(page: Any, condition: Any, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the page did not follow the slider"
        page.wait_for_timeout(100)
