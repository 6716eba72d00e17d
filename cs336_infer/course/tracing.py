"""The tensor operations that a function does, as plain values.

    trace(f, inputs) -> {"ops": [...], "inputs": 2, "output": {"ref": 7}}

The function runs once, on the inputs given; every aten op it comes down to is written down with its arguments, as
torch's dispatcher saw it. `program` checks such a list and runs it again, on other inputs, where the function itself
must not run. What a trace says need not be true: it is another program then.

This file also travels into the sandbox: it imports the standard library and torch.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_OPS = 5000
MAX_CONSTANT = 4096
"""Numbers of one constant: a table of the function's own."""


class TraceError(Exception):
    """The function does what a trace cannot hold. One line."""


def trace(function: Any, inputs: list[Any], *rest: Any) -> dict[str, Any]:
    """The program of `function(*inputs, *rest)`; `inputs` are tensors, `rest` are plain values that it is fixed for.

    Raises:
        TraceError: it reads values to decide what to do, does more than `MAX_OPS` ops, or returns no tensor.
    """
    recorder = _Recorder(inputs)
    with recorder, torch.no_grad():
        answer = function(*inputs, *rest)
    if not isinstance(answer, torch.Tensor):
        raise TraceError(f"it returned a {type(answer).__name__}, not a tensor")
    return {"inputs": len(inputs), "ops": recorder.ops, "output": recorder.encoded(answer)}


class _Recorder(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Yes, the default, has every process import the compiler first: for seconds."""
        return False

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.ops: list[dict[str, Any]] = []
        self.kept = list(inputs)  # alive, so that no other tensor gets the same id
        self.numbers = {id(t): i for i, t in enumerate(inputs)}
        self.next = len(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.ops) >= MAX_OPS:
            raise TraceError(f"it does more than {MAX_OPS} operations")
        name = str(func)
        if name == "aten._local_scalar_dense.default":
            raise TraceError("it reads a number out of a tensor, so what it does depends on values")
        entry = {
            "op": name,
            "args": [self.encoded(a) for a in args],
            "kwargs": {
                k: self.encoded(v) for k, v in (kwargs or {}).items() if k not in ("device", "layout", "pin_memory")
            },
        }
        out = func(*args, **(kwargs or {}))
        self.ops.append(entry)
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numbers[id(t)] = self.next
                self.kept.append(t)
            self.next += 1
        return out

    def encoded(self, value: Any) -> Any:
        """A plain value; a tensor is the number of the value it is, or a constant."""
        if isinstance(value, torch.Tensor):
            if id(value) in self.numbers:
                return {"ref": self.numbers[id(value)]}
            if value.numel() > MAX_CONSTANT:
                raise TraceError(
                    f"it uses a tensor of {value.numel()} numbers that is neither an input nor made of them"
                )
            return {"constant": value.detach().clone()}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"memory_format": str(value).removeprefix("torch.")}
        if isinstance(value, list | tuple):
            return [self.encoded(v) for v in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TraceError(f"it gives an operation a {type(value).__name__}")
