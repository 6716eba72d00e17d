"""What a check expects of an answer, with messages that say where it differs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from cs336_infer.types import InferError

# Relative and absolute error allowed by default. For half precision an honest reference is the better measure: pass
# twice its error as `atol`.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


class CheckFailed(InferError):
    """An answer is wrong; the text says which property does not hold. `share` of the points is kept."""

    def __init__(self, message: str, share: float = 0.0) -> None:
        super().__init__(message)
        self.share = share


def fail(message: str, *, share: float = 0.0) -> NoReturn:
    """End a check: `message` says what is wrong, with values. `share` in [0, 1) of its points is kept."""
    if not 0 <= share < 1:
        raise ValueError(f"the share kept by a failed check must be in [0, 1), not {share!r}")
    raise CheckFailed(message, share)


def listed(got: Any) -> Any:
    """A tuple as a list, for comparing; everything else as it is."""
    return list(got) if isinstance(got, tuple) else got


def expect_close(got: Any, want: Any, *, what: str, rtol: float | None = None, atol: float | None = None) -> None:
    """Fail unless `got` has the shape, the dtype and, to a tolerance, the values of `want`.

    Both may be torch tensors, arrays, lists or numbers. A `want` without dtype (a number, a list) leaves the dtype
    open. NaN equals NaN, an infinity only itself; integers are compared exactly unless a tolerance is given.

    Args:
        what: the name of the value in messages, such as "weights".
        rtol, atol: |got - want| <= atol + rtol * |want|; by default both as `TOLERANCE` has it for the dtype.
    """
    wanted, dtype = _numbers(want)
    try:
        have, got_dtype = _numbers(got)
    except Exception:
        fail(f"{what}: got {_short(got)}, expected numbers of shape {_shape(wanted.shape)}")
    if have.shape != wanted.shape:
        fail(f"{what}: shape {_shape(have.shape)} instead of {_shape(wanted.shape)}")
    if dtype and got_dtype and dtype != got_dtype:
        fail(f"{what}: dtype {got_dtype} instead of {dtype}")
    exact = have.dtype.kind in "iub" and wanted.dtype.kind in "iub"
    default = 0.0 if exact else TOLERANCE.get(dtype or got_dtype, TOLERANCE["float64"])
    rtol, atol = default if rtol is None else rtol, default if atol is None else atol
    bad = have != wanted
    if not exact or rtol or atol:
        x, y = have.astype(np.float64), wanted.astype(np.float64)
        with np.errstate(all="ignore"):
            near = np.isfinite(x) & np.isfinite(y) & (np.abs(x - y) <= atol + rtol * np.abs(y))
        bad = ~(near | (x == y) | (np.isnan(x) & np.isnan(y)))
    if bad.any():
        _fail_at(what, have, wanted, bad, rtol, atol)


def _fail_at(what: str, have: np.ndarray, wanted: np.ndarray, bad: np.ndarray, rtol: float, atol: float) -> NoReturn:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    x, y = have[index].item(), wanted[index].item()
    text = f"{what}: " + (f"at {list(index)} " if index else "") + f"got {_number(x)}, expected {_number(y)}"
    if np.isfinite(x) and np.isfinite(y):
        text += f" (off by {_number(abs(x - y))}, allowed {_number(atol + rtol * abs(y))})"
    fail(text + (f"; {int(bad.sum())} of {bad.size} values differ" if index else ""))


def expect_equal(got: Any, want: Any, *, what: str) -> None:
    """Fail unless `got` is exactly `want`: numbers, text, lists (or tuples, tensors, arrays) and dicts of them.

    True is not 1, and NaN equals NaN. Lists are compared item by item, and the first that differs is named.
    """
    wanted = _plain(want)
    try:
        difference = _difference(_plain(got), wanted, "")
    except Exception:
        fail(f"{what}: got {_short(got)}, which cannot be compared with {_short(wanted)}")
    if difference:
        fail(f"{what}: {difference}")


def expect_shape(got: Any, shape: Sequence[int], *, what: str) -> None:
    """Fail unless `got` holds numbers of this shape."""
    try:
        have, _ = _numbers(got)
    except Exception:
        fail(f"{what}: got {_short(got)}, expected numbers of shape {_shape(shape)}")
    if have.shape != tuple(shape):
        fail(f"{what}: shape {_shape(have.shape)} instead of {_shape(shape)}")


def _difference(got: Any, want: Any, at: str) -> str:
    where = f"at {at} " if at else ""
    if isinstance(want, list) and isinstance(got, list):
        pairs = zip(got, want, strict=False)
        first = next((d for i, (x, y) in enumerate(pairs) if (d := _difference(x, y, f"{at}[{i}]"))), "")
        if len(got) != len(want):
            count = f"{where}{len(got)} items instead of {len(want)}"
            return f"{count}; {first}" if first else f"{count}; the first {min(len(got), len(want))} are right"
        return first
    if isinstance(want, Mapping) and isinstance(got, Mapping):
        for key in [*want, *(k for k in got if k not in want)]:
            if key not in got or key not in want:
                return f"{where}{'lacks' if key in want else 'has the unexpected'} key {_short(key)}"
            if found := _difference(got[key], want[key], f"{at}[{key!r}]"):
                return found
        return ""
    same = isinstance(got, bool) == isinstance(want, bool) and (got == want or (got != got and want != want))
    return "" if same else f"{where}got {_short(got)}, expected {_short(want)}"


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists, scalars of numpy as numbers of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _numbers(value: Any) -> tuple[np.ndarray, str]:
    """`value` as an array of numbers, and the name of its dtype ("" when it has none).

    Raises:
        TypeError: it holds something else than real numbers.
    """
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if dtype.startswith(("bfloat", "float8")) else value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"not numbers: {array.dtype}")
    return array, dtype


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _short(value: Any) -> str:
    """A plain value, abbreviated; of others only the type."""
    plain = value is None or isinstance(value, str | bytes | int | float | list | tuple | dict)
    try:
        return reprlib.repr(value) if plain else f"a {type(value).__name__}"
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
