"""Every deck, opened from the disk without a network: nothing is cut off, and the keyboard reaches all of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from cs336_infer.course import slides

REPO = Path(__file__).resolve().parents[2]
DECKS = sorted(path.stem for path in (REPO / "notebooks").glob("[0-9]*.ipynb"))

# Slides that need scrolling, or stand out of the canvas of 1280 x 720.
TOO_TALL = """() => Reveal.getSlides().map((slide, i) => {
  const {h, v} = Reveal.getIndices(slide);
  Reveal.slide(h, v);
  const wide = [...slide.querySelectorAll('*')].some(e => e.scrollWidth > 1280 || e.offsetWidth > 1280);
  const tall = slide.scrollHeight > slide.clientHeight || slide.offsetHeight > 720;
  const shown = slide.offsetHeight > 60;
  return shown && !wide && !tall ? null : `page ${i + 1}: ${slide.scrollHeight} of ${slide.clientHeight}`;
}).filter(Boolean)"""


@pytest.fixture(scope="module")
def decks(chromium: str) -> Path:
    """The decks of the committed lectures. Reveal.js and MathJax are kept between runs."""
    folder = REPO / "build" / "slides"
    if not (folder / "vendor" / "versions.txt").is_file() and shutil.which("npm") is None:
        pytest.skip("no npm: the test of the slides did not run (apt-get install npm)")
    assert slides.main([*(str(REPO / "notebooks" / f"{name}.ipynb") for name in DECKS), "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", DECKS)
def test_a_deck_fits_its_slides_and_needs_no_network(name: str, decks: Path, browser: Any, shots: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 720}, offline=True)
    page = context.new_page()
    requests: list[str] = []
    page_errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: page_errors.append(str(error)))
    page.goto((decks / f"{name}.html").as_uri())
    page.wait_for_function("window.Reveal && Reveal.isReady()", timeout=60_000)

    assert page.evaluate(TOO_TALL) == []
    page.set_viewport_size({"width": 1920, "height": 1080})
    assert page.evaluate(TOO_TALL) == []
    page.set_viewport_size({"width": 1280, "height": 720})

    assert page.evaluate("[...document.images].filter(i => !i.naturalWidth || !i.alt.trim()).length") == 0
    assert page.evaluate("document.images.length") == pictures_of(name)
    _walk(page, shots if os.environ.get("E2E_SHOTS") else None, name)
    assert {url.split(":")[0] for url in requests} <= {"file", "data"}
    assert not page_errors


def pictures_of(name: str) -> int:
    notebook = nbformat.read(REPO / "notebooks" / f"{name}.ipynb", as_version=4)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return sum("image/png" in o.get("data", {}) for o in outputs)


def _walk(page: Any, shots: Path | None, name: str) -> None:
    """The right arrow leads from the first page to the last, through every one and every step of each."""
    pages = page.evaluate("Reveal.getTotalSlides()")
    steps = page.evaluate("document.querySelectorAll('.fragment').length")
    page.keyboard.press("Home")
    seen = [page.evaluate("Reveal.getSlidePastCount()")]
    for _ in range(pages + steps):
        page.keyboard.press("ArrowRight")
        past = page.evaluate("Reveal.getSlidePastCount()")
        if past != seen[-1]:
            if shots:
                page.screenshot(path=shots / f"slides_{name}_{seen[-1]:02}.png")
            seen.append(past)
    assert seen == list(range(pages))
    assert page.evaluate("Reveal.isLastSlide()")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("Reveal.getSlidePastCount()") in (pages - 2, pages - 1)
