"""Slide decks from the executed lectures: `make slides` writes dist/slides/NN_slug.html.

A deck opens from the disk without a network: reveal.js and MathJax are fetched once through npm into
dist/slides/vendor. Pictures keep their alt text, which the stock template of nbconvert drops.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbconvert.exporters import SlidesExporter
from tqdm import tqdm

from cs336_infer.course.slide_template import TEMPLATE
from cs336_infer.types import InferError

REVEAL = "reveal.js@4.6.0"
MATHJAX = "mathjax@3.2.2"
SLIDE_TYPES = {"slide", "subslide"}


class SlidesError(InferError):
    """Slides cannot be made. One line that says what is missing."""


def vendor(folder: Path) -> None:
    """Put reveal.js and MathJax into `folder`, once for a pair of versions.

    Raises:
        SlidesError: npm is missing or fails.
    """
    stamp, wanted = folder / "versions.txt", f"{REVEAL}\n{MATHJAX}\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    npm = shutil.which("npm")
    if npm is None:
        raise SlidesError(f"making slides needs npm, to fetch {REVEAL} and {MATHJAX} once; apt-get install npm")
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "install", "--prefix", temporary, "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        done = subprocess.run([*command, REVEAL, MATHJAX], capture_output=True, text=True, check=False)
        modules = Path(temporary) / "node_modules"
        if done.returncode or not modules.is_dir():
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise SlidesError(f"npm could not install {REVEAL} and {MATHJAX}: {lines[-1]}")
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("dist", "plugin/notes", "LICENSE"):
            _copy(modules / "reveal.js" / part, folder / "reveal.js" / part)
        _copy(modules / "mathjax" / "es5" / "tex-svg-full.js", folder / "mathjax" / "tex-svg-full.js")
        _copy(modules / "mathjax" / "LICENSE", folder / "mathjax" / "LICENSE")
    stamp.write_text(wanted)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def deck(notebook: Path) -> str:
    """The HTML of the slides of an executed notebook; it expects `vendor/` beside it.

    Raises:
        SlidesError: no cell starts a slide.
    """
    read = nbformat.read(notebook, as_version=4)
    starts = [c for c in read.cells if c.metadata.get("slideshow", {}).get("slide_type") in SLIDE_TYPES]
    if not starts:
        raise SlidesError(f'{notebook.name}: no cell starts a slide; give one slideshow={{"slide_type": "slide"}}')
    exporter = SlidesExporter(raw_template=TEMPLATE, reveal_url_prefix="vendor/reveal.js", reveal_theme="white")
    exporter.exclude_anchor_links = True
    html, _ = exporter.from_notebook_node(read, {"metadata": {"name": notebook.stem}})
    return html


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cs336_infer.course.slides", description="Make slide decks.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="executed notebooks; all lectures when none is named")
    parser.add_argument("--out", type=Path, default=Path("dist/slides"), help="folder of the decks")
    args = parser.parse_args(argv)
    notebooks = args.notebooks or sorted(Path("notebooks").glob("[0-9]*.ipynb"))
    try:
        if not notebooks:
            raise SlidesError("there is no notebook in notebooks/")
        vendor(args.out / "vendor")
        for notebook in tqdm(notebooks, unit="deck", disable=None):
            (args.out / f"{notebook.stem}.html").write_text(deck(notebook), encoding="utf-8")
    except InferError as error:
        print(f"slides: {error}", file=sys.stderr)
        return 1
    print(f"slides: {len(notebooks)} decks in {args.out}, open them in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
