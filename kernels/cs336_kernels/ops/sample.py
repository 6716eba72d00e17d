"""From logits to the next token: argmax, and temperature, top-k and top-p with the random number given."""

from __future__ import annotations

import torch

from cs336_kernels.ops.checks import need_triton

MOST_VOCAB = 1 << 20
SHORTLISTS = (256, 4096)  # a nucleus nearly always fits in the first


def argmax(logits: torch.Tensor, path: str = "reference") -> torch.Tensor:
    """The id of each row's largest logit, the first of equals.

    Args:
        logits: [rows, vocab] float32, vocab >= 1, no NaN (what a NaN does is not the same on both paths); rows at any
            stride.
        path: "reference" or "triton".

    Returns:
        [rows] int64.

    Raises:
        ValueError: an unknown path, or a wrong shape, dtype or stride.
    """
    _check_logits(logits)
    if path == "reference":
        return logits.argmax(-1)
    need_triton("argmax", path)
    from cs336_kernels.ops.triton import sample as kernels

    return kernels.argmax(logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    path: str = "reference",
) -> torch.Tensor:
    """The id of each row at which its cumulative distribution passes `uniform`, each row by its own numbers.

    The distribution is softmax(logits / temperature); of it the `top_k` largest logits stay, of these the fewest whose
    share of the rest reaches `top_p`, the one that reaches it included. Tokens are dropped from the smallest logit up
    and among equal logits from the last id down. The chosen id is the first whose cumulative share, in the order of
    ids, is above `uniform`. Temperature 0 is argmax, whatever else is asked for.

    "reference" computes in float64. "triton" computes 2^x, x = (logit - largest) * (log2(e) / temperature), in float32,
    truncates it to a whole number of units of 2^(bit_length(vocab) - 62), and adds these as int64: sums are exact in
    any order, so ids depend neither on the order of the blocks nor on their size. The share that it gives to a set of
    the kept tokens is wrong by less than e = 2 D / (1 - D), with p the exact share of a token and

        D = sum of p (2^-22 + 3 * 2^-24 |x| ln 2) over the kept + (vocab + 1) * 2^(bit_length(vocab) - 62),

    where 2^-22 is the error of a GPU's exponential and 3 * 2^-24 three roundings of x. e is below 1e-5. So ids differ
    between the paths only where `uniform` is within e of a step of the cumulative distribution, or where `top_p` is
    within e of a sum that it is compared with.

    Args:
        logits: [rows, vocab] float32, 1 <= vocab <= 2^20; rows at any stride. -inf is a token that is never drawn; no
            NaN or +inf, and one finite logit at least.
        temperature: [rows] float32 or float64, finite, >= 0.
        top_k: [rows] int32 or int64, >= 0; 0, vocab or more keep all.
        top_p: [rows] float32 or float64, above 0; 1 or more keep all.
        uniform: [rows] float32 or float64, 0 <= u < 1. 1, which rounding to float32 makes of some, draws the last kept.
        path: "reference" or "triton".

    Returns:
        [rows] int64.

    Raises:
        ValueError: an unknown path, or a wrong shape, dtype or stride. Values are not looked at: on a GPU that would
            mean waiting for it.
    """
    _check_logits(logits)
    for name, tensor, kinds in (
        ("temperature", temperature, (torch.float32, torch.float64)),
        ("top_k", top_k, (torch.int32, torch.int64)),
        ("top_p", top_p, (torch.float32, torch.float64)),
        ("uniform", uniform, (torch.float32, torch.float64)),
    ):
        _check_parameter(name, tensor, kinds, logits)
    if path == "reference":
        return _reference(logits, temperature, top_k, top_p, uniform)
    need_triton("sample", path)
    from cs336_kernels.ops.triton import sample as kernels

    return kernels.sample(logits, temperature, top_k, top_p, uniform)


def _reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    numbers = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True)
    chosen = [
        row.argmax() if t == 0 else _draw(_distribution(row.double(), t, k, p), u.double())
        for row, u, (t, k, p) in zip(logits, uniform, numbers, strict=True)
    ]
    return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=logits.device)


def _distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """logits: [vocab] float64. Returns [vocab] float64, 0 for what is dropped."""
    p = ((logits - logits.max()) / temperature).softmax(-1)
    if 0 < top_k < len(p):
        p = torch.where(_largest(logits, top_k), p, 0.0)
    if top_p < 1:
        p = p / p.sum()
        p = torch.where(_largest(logits, _nucleus(p, top_p)), p, 0.0)
    return p / p.sum()


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest of x [n] are, of equals the first; [n] bool."""
    border = x.topk(count).values[-1]
    above, equal = x > border, x == border
    return above | (equal & (equal.cumsum(-1) <= count - above.sum()))


def _nucleus(p: torch.Tensor, top_p: float) -> int:
    """How many of the most probable tokens it takes for their sum to reach top_p."""
    kept = len(p)
    for shortlist in (*(n for n in SHORTLISTS if n < len(p)), len(p)):
        best = p.topk(shortlist).values
        kept = int((best.cumsum(-1) - best < top_p).sum())
        if kept < shortlist:
            break
    return kept


def _draw(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution at one number."""
    cumulative = p.cumsum(-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return torch.minimum(index, p.nonzero()[-1, 0])


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST_VOCAB or logits.dtype != torch.float32:
        raise ValueError(f"logits is {list(logits.shape)} {logits.dtype}, not [rows, 1 to {MOST_VOCAB}] torch.float32")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits has strides {logits.stride()}; a row must be contiguous")


def _check_parameter(name: str, tensor: torch.Tensor, kinds: tuple[torch.dtype, ...], logits: torch.Tensor) -> None:
    if tensor.shape != logits.shape[:1] or tensor.dtype not in kinds or tensor.device != logits.device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, not [{len(logits)}] "
            f"{' or '.join(map(str, kinds))} on {logits.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride(0)}, not 1")
