"""The helpers of the lectures: pictures, predictions, widgets, and the builder of notebooks."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import ipywidgets as W
import nbformat
import pytest
from bs4 import BeautifulSoup

from cs336_infer.course import build, pictures, predict, slides, widgets


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Everything `pictures.show` displayed."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    monkeypatch.setattr(pictures, "display", lambda data, metadata, raw: found.append((data, metadata)))
    return found


@pytest.fixture(autouse=True)
def no_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_guesses", {})
    monkeypatch.setattr(predict, "_seen", set())


def a_figure() -> Any:
    fig, ax = pictures.subplots()
    ax.plot([1, 2], [3, 4], label="one")
    ax.set(xlabel="n", ylabel="ms", title="Growth")
    ax.legend()
    return fig


def test_show_gives_picture_alt_and_a_description_without_data(shown: list[Any]) -> None:
    pictures.show(a_figure(), "It\n grows.", measured=True)
    (data, metadata) = shown[0]
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == "It grows."
    assert data["text/plain"] == (
        "Figure of measurements: It grows.\naxes: 1\n  1. title 'Growth'; x 'n'; y 'ms'; lines 1; legend 'one'"
    )
    assert not pictures.plt.get_fignums(), "show closes the figure"


@pytest.mark.parametrize("alt", ["", " \n "])
def test_show_without_alt_text_is_refused(alt: str) -> None:
    fig = a_figure()
    with pytest.raises(ValueError, match="alt text"):
        pictures.show(fig, alt)
    pictures.plt.close(fig)


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert pictures.png(a_figure()) == pictures.png(a_figure())


def test_measured_needs_a_guess_first(shown: list[Any]) -> None:
    with pytest.raises(predict.CourseError, match="run its predict"):
        predict.measured("speed", 3.0)
    assert not shown


def test_predict_measure_explain(shown: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    predict.predict("speed", low=5, high=20, unit="tokens/s", why="270 MB at 5 GB/s")
    predict.measured("speed", 31.5, bound=42.0, bound_label="memory bandwidth")
    predict.explain("speed", "Each token reads all 270 MB of weights once.", must_mention=269.1)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "guess for speed: 5 to 20 tokens/s, because 270 MB at 5 GB/s"
    assert out[1].startswith("timing: speed 31.5 tokens/s, above the guess") and "0.75" in out[1]
    text = shown[0][0]["text/plain"]
    assert text.startswith(pictures.MEASURED)
    assert "memory bandwidth" in text and "31.5" not in text and "42" not in text, "no reading in what is compared"


@pytest.mark.parametrize(("value", "bound"), [(1e-3, 40.0), (3.0, None), (-5.0, 1.0), (0.0, 0.0), (7, 7)])
def test_any_result_can_be_drawn(shown: list[Any], value: float, bound: float | None) -> None:
    predict.predict("x", low=7, high=7, unit="ms")
    predict.measured("x", value, bound=bound, bound_label="a bound")
    assert len(shown) == 1


def test_a_guess_after_the_result_is_marked(shown: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    predict.predict("speed", low=5, high=20, unit="tokens/s")
    predict.measured("speed", 31.5)
    predict.predict("speed", low=5, high=20, unit="tokens/s")
    assert "after the result" not in capsys.readouterr().out, "running the cell again changes nothing"
    predict.predict("speed", low=30, high=32, unit="tokens/s")
    assert "guess made after the result" in capsys.readouterr().out
    predict.measured("speed", 31.5)
    predict.predict("speed", low=30, high=32, unit="tokens/s")
    assert "guess made after the result" in shown[-1][0]["text/plain"]
    assert "guess made after the result" in capsys.readouterr().out.splitlines()[-1], "running it again keeps the mark"


@pytest.mark.parametrize("low, high", [(2, 1), (float("nan"), 1), (0, float("inf"))])
def test_a_guess_must_be_a_range(low: float, high: float) -> None:
    with pytest.raises(predict.CourseError, match="low <= high"):
        predict.predict("speed", low=low, high=high, unit="ms")


@pytest.mark.parametrize("text", ["", "no full stop", "One. Two. Three.", "It reads 500 MB.", "It reads the weights."])
def test_explanations_that_miss_the_point(shown: list[Any], text: str) -> None:
    predict.predict("speed", low=5, high=20, unit="tokens/s")
    predict.measured("speed", 9.0)
    with pytest.raises(predict.CourseError):
        predict.explain("speed", text, must_mention=270)


@pytest.mark.parametrize(
    ("text", "number"),
    [("About 55 % of the bound.", 0.55), ("It is 1,024 bytes.", 1024), ("Only 2.7e8 bytes!", 270e6), ("-3 dB.", -3)],
)
def test_numbers_are_found_as_people_write_them(shown: list[Any], text: str, number: float) -> None:
    predict.predict("speed", low=5, high=20, unit="tokens/s")
    predict.measured("speed", 9.0)
    predict.explain("speed", text, must_mention=number)


def test_explain_comes_after_measuring() -> None:
    with pytest.raises(predict.CourseError, match="after its measured"):
        predict.explain("speed", "It is fast.")


def a_widget(factor: int = 2) -> widgets.Explorer:
    def draw(n: int) -> Any:
        fig, ax = pictures.subplots(figsize=(3, 2))
        ax.plot([0, n], [0, factor * n])
        return fig

    slider = W.IntSlider(value=4, min=1, max=10, description="n")
    return widgets.explorer({"n": slider}, draw, lambda n: f"{n} doubled is {factor * n}")


def test_explorer_follows_its_knob_and_shows_without_a_front_end() -> None:
    box = a_widget()
    before = box._image.value
    data, metadata = box._repr_mimebundle_()
    assert data["text/plain"].endswith("4 doubled is 8") and metadata["image/png"]["alt"] == "4 doubled is 8"
    box["n"].value = 5
    assert box.text == "5 doubled is 10" and "5 doubled is 10" in box._status.value
    assert box._image.value != before
    assert base64.b64decode(box._repr_mimebundle_()[0]["image/png"]) == box._image.value


def test_explorer_says_why_it_stopped() -> None:
    box = a_widget()
    box._describe = lambda n: 1 / 0  # type: ignore[assignment]
    box["n"].value = 6
    assert "ZeroDivisionError" in box._status.value


def test_a_knob_needs_a_label() -> None:
    with pytest.raises(ValueError, match="description"):
        widgets.explorer({"n": W.IntSlider()}, lambda n: a_figure(), str)


SOURCE = """\
# %% [markdown] slideshow={"slide_type": "slide"}
# # Tiny $x^2$

# %%
print("hello")

# %% tags=["raises-exception"]
raise ValueError("shown on purpose")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "notebooks" / "src" / "01_tiny.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return path


def test_build_then_check(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main([str(source)]) == 0
    target = build.target_of(source)
    first = target.read_text()
    assert build.main(["--check", str(source)]) == 0
    assert build.main([str(source)]) == 0
    assert target.read_text() == first, "the same source gives the same bytes"
    assert [p.name for p in target.parent.iterdir() if p.is_file()] == ["01_tiny.ipynb"], "nothing is left behind"
    source.write_text(SOURCE.replace("hello", "bye"))
    assert build.main(["--check", str(source)]) == 1
    assert "01_tiny.ipynb: the source of cell 2" in capsys.readouterr().err


def test_check_refuses_what_was_tampered_with(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.build(source)
    target = build.target_of(source)
    good = nbformat.read(target, as_version=4)

    def refused(change: Any) -> str:
        notebook = nbformat.from_dict(good)
        notebook = nbformat.reads(nbformat.writes(notebook), as_version=4)
        change(notebook)
        nbformat.write(notebook, target)
        assert build.main(["--check", str(source)]) == 1
        return capsys.readouterr().err

    assert "the id of cell 1" in refused(lambda nb: nb.cells[0].update(id="other"))
    assert "the metadata of cell 2" in refused(lambda nb: nb.cells[1].metadata.update(tags=["x"]))
    assert "not executed" in refused(lambda nb: nb.cells[1].update(execution_count=None, outputs=[]))
    error = nbformat.v4.new_output("error", ename="KeyError", evalue="x", traceback=[])
    assert "holds an error: KeyError" in refused(lambda nb: nb.cells[1].update(outputs=[error]))
    assert "its metadata" in refused(lambda nb: nb.metadata.language_info.update(version="3.11.7"))
    assert "2 cells" in refused(lambda nb: nb.cells.pop())
    home = nbformat.v4.new_output("stream", text=f"{Path.home()}/file")
    assert "names a folder" in refused(lambda nb: nb.cells[1].update(outputs=[home]))
    target.unlink()
    assert build.main(["--check", str(source)]) == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("1 / 0", "01_tiny.py: cell 2 of 2: ZeroDivisionError: division by zero"),
        ("import os; os._exit(1)", "cell 2 of 2 ended the kernel"),
        ("import os; print(os.getcwd())", "cell 2 names a folder of this machine"),
        ("", "cell 2 is empty"),
    ],
)
def test_a_bad_cell_is_named_in_one_line(source: Path, capfd: pytest.CaptureFixture[str], cell: str, says: str) -> None:
    source.write_text(f"# %%\nprint(1)\n\n# %%\n{cell}\n")
    assert build.main([str(source)]) == 1
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("build: ")]
    assert len(error) == 1 and says in error[0]
    assert not build.target_of(source).exists()


def test_measurements_and_the_tag_go_together(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = "from cs336_infer.course import pictures as p\nf, a = p.subplots()\np.show(f, 'x', measured={})\n"
    source.write_text("# %%\n" + show.format(True))
    assert build.main([str(source)]) == 1
    assert "without the tag `measured`" in capsys.readouterr().err
    source.write_text('# %% tags=["measured"]\n' + show.format(False))
    assert build.main([str(source)]) == 1
    assert "shows no figure of measurements" in capsys.readouterr().err


def test_a_lecture_has_at_most_60_cells(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source.write_text("".join(f"# %%\n{i}\n\n" for i in range(61)))
    assert build.main([str(source)]) == 1
    assert "61 cells" in capsys.readouterr().err


def test_progress_bars_keep_their_last_state_only(source: Path) -> None:
    source.write_text("# %%\nfrom tqdm import tqdm\nfor _ in tqdm(range(4), mininterval=0):\n    pass\n")
    output = nbformat.read(build.build(source), as_version=4).cells[0].outputs
    assert len(output) == 1 and output[0].text.count("%|") == 1 and "4/4" in output[0].text


def test_slides_need_npm_and_a_slide(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = build.build(source)
    monkeypatch.setattr(slides.shutil, "which", lambda name: None)
    assert slides.main([str(notebook), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "needs npm" in error and len(error.splitlines()) == 1
    html = slides.deck(notebook)
    assert html.count("<section") >= 1 and 'src="https:' not in html and 'href="https://' not in html
    source.write_text("# %%\nprint(1)\n")
    with pytest.raises(slides.SlidesError, match="no cell starts a slide"):
        slides.deck(build.build(source))


def test_slides_keep_alt_text(source: Path) -> None:
    show = "from cs336_infer.course import pictures as p\nf, a = p.subplots()\np.show(f, 'A <b> \"picture\".')\n"
    source.write_text('# %% slideshow={"slide_type": "slide"}\n' + show)
    images = BeautifulSoup(slides.deck(build.build(source)), "html.parser").find_all("img")
    assert [image.get("alt") for image in images] == ['A <b> "picture".']


def test_the_committed_notebooks_are_what_their_sources_give(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).resolve().parents[2] / "notebooks"
    sources = sorted((folder / "src").glob("*.py"))
    if not sources:
        pytest.skip("no lecture notebook yet")
    assert build.main(["--check", *map(os.fspath, sources)]) == 0, capsys.readouterr().err
    assert {p.stem for p in folder.glob("*.ipynb")} == {p.stem for p in sources}, "a notebook without a source"
