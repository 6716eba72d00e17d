"""The ops that have a Triton kernel: how each is called at the shape of a model, and which bytes it cannot avoid.

python -m cs336_kernels.catalogue            names, one a line
python -m cs336_kernels.catalogue --table    the table of kernels/README.md
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cs336_kernels import calls
from cs336_kernels.calls import Arguments
from cs336_kernels.ops.add_rmsnorm import add_rms_norm
from cs336_kernels.ops.decode_attention import decode_attention
from cs336_kernels.ops.gate_up import gate_up
from cs336_kernels.ops.linear_add import linear, linear_add
from cs336_kernels.ops.prefill_attention import prefill_attention
from cs336_kernels.ops.qk_norm import qk_norm
from cs336_kernels.ops.qkv import qkv
from cs336_kernels.ops.quant_linear import quant_linear
from cs336_kernels.ops.rmsnorm import rms_norm
from cs336_kernels.ops.rope import apply_rope
from cs336_kernels.ops.sample import argmax, sample
from cs336_kernels.ops.swiglu import swiglu
from cs336_kernels.ops.write_kv import write_kv
from cs336_kernels.shapes import Shape, Values

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DECODE_TOKENS = 8
"""Up to so many tokens a product with a weight takes the time in which the weight is read."""


@dataclass(frozen=True)
class Op:
    """One op of the catalogue.

    Attributes:
        summary: what it does, one line. call: the op, `call(**arguments, path=...)`.
        arguments: (values, shape, tokens) -> arguments of a call; see `make`.
        minimal_bytes: arguments by name -> bytes that must be moved: each number that is needed is read once, each
            number of the result is written once.
        bound_up_to: tokens up to which the time is that of the bytes; 0 is never, inf is always.
        separate: for a fused op, the same by separate ops: (`Separate`, arguments by name) -> the result.
        exact: it moves or chooses numbers and rounds none, so that the result equals the reference.
        dtypes: of its numbers, the usual one first. needs_qk_norm: only for models that have QK norm.
    """

    name: str
    summary: str
    call: Callable[..., Any]
    arguments: Callable[[Values, Shape, int], Arguments]
    minimal_bytes: Callable[..., int]
    bound_up_to: float = math.inf
    separate: Callable[..., Any] | None = None
    exact: bool = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    needs_qk_norm: bool = False

    def make(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, tokens: int, seed: int | None = None
    ) -> Arguments:
        """Arguments of a call at the shape of a model, for `tokens` >= 1 new tokens, or rows.

        Args:
            seed: of the numbers. None leaves float tensors empty, for recording and counting; device may be "meta".
        """
        return self.arguments(Values(dtype, device, seed), shape, tokens)

    def fits(self, shape: Shape) -> bool:
        """Whether a model of this shape has the op."""
        return shape.qk_norm or not self.needs_qk_norm

    def bandwidth_bound(self, tokens: int) -> bool:
        """Whether the time of a call with so many tokens is that of its bytes."""
        return tokens <= self.bound_up_to

    def results(self, arguments: Arguments, returned: Any) -> list[torch.Tensor]:
        """What a call has made: what it returned, and the KV memory it wrote into, all of it."""
        made = [] if returned is None else list(returned) if isinstance(returned, tuple) else [returned]
        return made + [arguments[name] for name in ("keys", "values") if "slots" in arguments]


class Separate:
    """Runs the ops that a fused one replaces, one after the other.

    Attributes:
        names: what was run. minimal_bytes: the sum of what each must move; results between them go to memory and back.
    """

    def __init__(self, path: str) -> None:
        self.path, self.minimal_bytes = path, 0
        self.names: list[str] = []

    def __call__(self, name: str, **arguments: Any) -> Any:
        self.names.append(name)
        self.minimal_bytes += OPS[name].minimal_bytes(**arguments)
        return OPS[name].call(**arguments, path=self.path)

    def torch(self, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Note an op of torch that made `result` of `inputs`."""
        self.names.append(name)
        self.minimal_bytes += calls.nbytes(result, *inputs)
        return result


def _quantised(bits: int) -> Op:
    return Op(
        f"quant_linear_int{bits}",
        f"x W^T (+ residual) with a weight of {bits} bits and a float16 scale for each group of 64",
        quant_linear,
        partial(calls.quant_linear_call, bits=bits),
        calls.quant_linear_bytes,
        bound_up_to=DECODE_TOKENS,
        separate=calls.quant_linear_separate,
    )


OPS = {
    op.name: op
    for op in (
        Op("rms_norm", "RMSNorm of rows", rms_norm, calls.rms_norm_call, calls.rms_norm_bytes),
        Op(
            "add_rms_norm",
            "the residual sum, and the RMSNorm of it",
            add_rms_norm,
            calls.add_rms_norm_call,
            calls.add_rms_norm_bytes,
            separate=calls.add_rms_norm_separate,
        ),
        Op("apply_rope", "rotates query and key heads", apply_rope, calls.apply_rope_call, calls.apply_rope_bytes),
        Op(
            "qk_norm",
            "RMSNorm of each query and key head",
            qk_norm,
            calls.qk_norm_call,
            calls.qk_norm_bytes,
            needs_qk_norm=True,
        ),
        Op("swiglu", "silu(gate) * up", swiglu, calls.swiglu_call, calls.swiglu_bytes),
        Op("linear", "x W^T; here the head", linear, calls.linear_call, calls.linear_bytes, DECODE_TOKENS),
        Op(
            "linear_add",
            "x W^T + residual; here the second half of the MLP",
            linear_add,
            calls.linear_add_call,
            calls.linear_bytes,
            bound_up_to=DECODE_TOKENS,
            separate=calls.linear_add_separate,
        ),
        Op(
            "gate_up",
            "RMSNorm, gate and up, silu(gate) * up: the first half of the MLP",
            gate_up,
            calls.gate_up_call,
            calls.gate_up_bytes,
            bound_up_to=DECODE_TOKENS,
            separate=calls.gate_up_separate,
        ),
        Op(
            "qkv",
            "RMSNorm, QKV, QK norm where the model has it, RoPE; K and V go into their slots",
            qkv,
            calls.qkv_call,
            calls.qkv_bytes,
            bound_up_to=DECODE_TOKENS,
            separate=calls.qkv_separate,
        ),
        _quantised(8),
        _quantised(4),
        Op(
            "write_kv",
            "keys and values into their slots of paged memory",
            write_kv,
            calls.write_kv_call,
            calls.write_kv_bytes,
            exact=True,
        ),
        Op(
            "decode_attention",
            "attention of one query a row over pages, split along the positions",
            decode_attention,
            calls.decode_attention_call,
            calls.decode_attention_bytes,
        ),
        Op(
            "prefill_attention",
            "attention of many queries a row over pages, also behind a cached prefix",
            prefill_attention,
            calls.prefill_attention_call,
            calls.prefill_attention_bytes,
            bound_up_to=0,
        ),
        Op(
            "argmax",
            "the largest logit's id",
            argmax,
            calls.argmax_call,
            calls.sampling_bytes,
            exact=True,
            dtypes=(torch.float32,),
        ),
        Op(
            "sample",
            "temperature, top-k, top-p, and the draw by a given random number",
            sample,
            calls.sample_call,
            calls.sampling_bytes,
            exact=True,
            dtypes=(torch.float32,),
        ),
    )
}
"""Every op with a Triton kernel, by name."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cs336_kernels.catalogue", description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--table", action="store_true", help="what each does and the bytes it moves, in Markdown")
    if parser.parse_args(argv).table:
        from cs336_kernels.catalogue_table import table

        print(table())
    else:
        print("\n".join(OPS))
    return 0


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of our output may go, as in `| head`
    sys.exit(main())
