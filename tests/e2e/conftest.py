"""What the browser tests share: the browser, and a folder for pictures of what it showed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no chromium: the browser test must run under CI (apt-get install chromium)")
        pytest.skip("no chromium: the browser test did not run (apt-get install chromium)")
    return found


@pytest.fixture(scope="session")
def shots() -> Path:
    """Screenshots go to build/e2e, or to the folder that E2E_SHOTS names."""
    folder = Path(os.environ.get("E2E_SHOTS") or REPO / "build" / "e2e")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
