"""Turning a knob: controls, a picture and a line of text that follow each other, and a still picture where
no front end runs (GitHub, an exported page, a checker)."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as W
from matplotlib.figure import Figure

from cs336_infer.course import pictures

Control = Any  # an ipywidgets widget with `value`, `description`, `style` and `layout`; they share no such base class


def explorer(controls: Mapping[str, Control], draw: Callable[..., Figure], describe: Callable[..., str]) -> Explorer:
    """Show `draw(**values)` and `describe(**values)` for the values of `controls`, and follow their changes.

    Args:
        controls: argument name -> widget with a `value`, such as `ipywidgets.IntSlider(description="batch")`.
        draw: returns the matplotlib figure for the values.
        describe: returns the data of the picture in words; it is the alt text, and what checks compare.

    Raises:
        ValueError: a control has no visible label (its `description`).
    """
    return Explorer(controls, draw, describe)


class Explorer(W.VBox):
    """The box that `explorer` makes. `ex["batch"].value = 8` turns a knob from code; `ex.text` reads the result."""

    def __init__(
        self, controls: Mapping[str, Control], draw: Callable[..., Figure], describe: Callable[..., str]
    ) -> None:
        self._controls = dict(controls)
        self._draw, self._describe = draw, describe
        for name, control in self._controls.items():
            if not getattr(control, "description", ""):
                raise ValueError(f"the control {name!r} needs a description: a reader must see what the knob turns")
            control.style.description_width = "initial"
            control.layout.width = "min(32em, 95%)"
        self._image = W.Image(format="png", layout=W.Layout(max_width="100%", align_self="flex-start"))
        self._status = W.HTML()
        self.text = ""
        hint = W.HTML("<small>Drag, or select a control and press the arrow keys.</small>")
        super().__init__([*self._controls.values(), hint, self._status, self._image])
        self._refresh()
        for control in self._controls.values():
            control.observe(self._follow, names="value")

    def __getitem__(self, name: str) -> Control:
        return self._controls[name]

    def _refresh(self) -> None:
        values = {name: control.value for name, control in self._controls.items()}
        image, text = pictures.png(self._draw(**values)), " ".join(self._describe(**values).split())
        self._image.value, self.text = image, text
        self._status.value = f"<p role='status'>{html.escape(text)}</p>"

    def _follow(self, change: Any) -> None:
        # An exception in an observer would vanish in a log: the reader must see why the picture stopped.
        try:
            self._refresh()
        except Exception as error:
            self.text = f"{type(error).__name__}: {error}"
            self._status.value = f"<p role='status'>{html.escape(self.text)}</p>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        still = {
            "text/plain": f"{type(self).__name__} of {', '.join(self._controls)}: {self.text}",
            "image/png": base64.b64encode(self._image.value).decode(),
        }
        return {**data, **still}, {**metadata, "image/png": {"alt": self.text}}
