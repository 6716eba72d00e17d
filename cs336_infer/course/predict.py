"""Predict, measure, explain: the reader commits to a guess before the measurement is made.

    predict("decode speed", low=5, high=20, unit="tokens/s", why="270 MB of weights at 10 GB/s")
    ...
    measured("decode speed", 31.0, bound=42.0, bound_label="memory bandwidth of this machine")
    explain("decode speed", "Each token reads all 270 MB of weights once.", must_mention=270)

The guess is kept apart from the result, so that running cells again, in any order, cannot quietly turn a
guess into a memory of the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cs336_infer.course import pictures
from cs336_infer.types import InferError

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?\s*%?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


class CourseError(InferError):
    """A step of an exercise is missing or wrong. A notebook shows its one line instead of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Guess:
    """What a reader expects of one quantity: `low` to `high`, in `unit`. `late`: made after the result was seen."""

    low: float
    high: float
    unit: str
    why: str = ""
    late: bool = False

    def __str__(self) -> str:
        span = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{span} {self.unit}"


_guesses: dict[str, Guess] = {}
_seen: set[str] = set()


def predict(name: str, *, low: float, high: float, unit: str, why: str = "") -> None:
    """Store the guess that `name` will be between `low` and `high`, and say it back.

    Raises:
        CourseError: the range is not two finite numbers in order, or a name or unit is missing.
    """
    if not name.strip() or not unit.strip():
        raise CourseError(f"a prediction needs a name and a unit, not name={name!r}, unit={unit!r}")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise CourseError(f"the guess for {name!r} must be finite with low <= high, not low={low!r}, high={high!r}")
    guess = Guess(float(low), float(high), unit, why)
    before = _guesses.get(name)
    if name in _seen and (before is None or replace(before, why=why, late=False) != guess):
        guess = replace(guess, late=True)
    elif before is not None:
        guess = replace(guess, late=before.late)
    _guesses[name] = guess
    reason = f", because {why}" if why else ""
    print(f"guess for {name}: {guess}{reason}{_late(guess)}")


def measured(name: str, value: float, *, bound: float | None = None, bound_label: str = "") -> None:
    """Draw the guess as a band, `value` as a dot and what this machine allows as a line; print the numbers.

    Args:
        value: the result, in the unit of the guess.
        bound: the best or the least this machine can do, in the same unit.
        bound_label: what sets the bound, for example "memory bandwidth of this machine".

    Raises:
        CourseError: there is no guess for `name`, a number is not finite, or a bound has no label.
    """
    guess = _guesses.get(name)
    if guess is None:
        have = ", ".join(repr(n) for n in _guesses) or "none"
        raise CourseError(f"no guess for {name!r} yet: run its predict(...) cell first (guesses so far: {have})")
    if not math.isfinite(value) or (bound is not None and not math.isfinite(bound)):
        raise CourseError(f"a result must be a finite number, not value={value!r}, bound={bound!r}")
    if bound is not None and not bound_label.strip():
        raise CourseError(f"the bound of {name!r} needs a bound_label that says what sets it")
    _seen.add(name)
    place = "below the guess" if value < guess.low else "above the guess" if value > guess.high else "inside the guess"
    text = f"{name} {value:.4g} {guess.unit}, {place} of {guess}"
    if bound is not None:
        text += f"; bound {bound:.4g} {guess.unit} ({bound_label})"
        text += f", result / bound = {value / bound:.3g}" if bound else ""
    print(f"timing: {text}")
    _draw(name, guess, value, bound, bound_label)


def explain(name: str, text: str, *, must_mention: float | Sequence[float] | None = None, within: float = 0.1) -> None:
    """Accept one or two sentences on why `name` came out as it did.

    Args:
        must_mention: numbers the sentences must contain, each to a relative error of `within`; `55 %` counts
            as 55 and as 0.55.

    Raises:
        CourseError: nothing was measured under `name`, the text is not one or two sentences, or a number is missing.
    """
    if name not in _seen:
        raise CourseError(f"explain {name!r} after its measured(...) cell has run")
    sentences = len(_SENTENCE_END.findall(text))
    if not text.strip() or not 1 <= sentences <= 2:
        raise CourseError(f"explain {name!r} in one or two whole sentences; this has {sentences}")
    wanted = [must_mention] if isinstance(must_mention, int | float) else list(must_mention or ())
    have = _numbers(text)
    for number in wanted:
        if not any(math.isclose(h, number, rel_tol=within, abs_tol=1e-12) for h in have):
            raise CourseError(
                f"the explanation of {name!r} lacks a number it rests on: none of {have or 'its 0 numbers'} "
                f"is within {within:.0%} of what was meant; look at the numbers printed by the measurement"
            )
    print(f"explanation of {name}: {text.strip()}")


def _numbers(text: str) -> list[float]:
    found: list[float] = []
    for match in _NUMBER.findall(text):
        value = float(match.rstrip("% \t\n").replace(",", ""))
        found += [value, value / 100] if "%" in match else [value]
    return found


def _late(guess: Guess) -> str:
    return " (guess made after the result)" if guess.late else ""


def _draw(name: str, guess: Guess, value: float, bound: float | None, bound_label: str) -> None:
    blue, orange, green = pictures.COLORS[:3]
    fig, ax = pictures.subplots(figsize=(7.0, 2.3))
    label = f"your guess: {guess}{_late(guess)}"
    if guess.low == guess.high:
        ax.plot([guess.low, guess.low], [0.15, 0.85], color=blue, linewidth=6, alpha=0.35, label=label)
    else:
        ax.axvspan(guess.low, guess.high, ymin=0.15, ymax=0.85, color=blue, alpha=0.25, linewidth=0, label=label)
    ax.plot([value], [0.5], "o", color=orange, markersize=11, label="measured")
    points = [guess.low, guess.high, value]
    if bound is not None:
        ax.axvline(bound, color=green, linestyle="--", label=f"bound: {bound_label}")
        points.append(bound)
    _scale(ax, points)
    ax.set(ylim=(0, 1), yticks=[], xlabel=guess.unit, title=name)
    ax.spines["left"].set_visible(False)
    fig.legend(loc="outside lower left", fontsize=9)
    alt = f"{name}: the guess of {guess} as a band{_late(guess)}, the measured value as a dot"
    alt += f", and {bound_label} as a dashed line." if bound is not None else "."
    pictures.show(fig, alt, measured=True)


def _scale(ax: pictures.Axes, points: list[float]) -> None:
    low, high = min(points), max(points)
    if low > 0 and high / low > 30:
        ax.set_xscale("log")
        ax.set_xlim(low / 2, high * 2)
        ax.xaxis.set_major_formatter("{x:g}")
    else:
        left = 0.0 if low >= 0 else low * 1.1
        ax.set_xlim(left, high * 1.1 if high > 0 else max(left + 1, 0.0))
