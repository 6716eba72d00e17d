"""The ladder of kernels as a file: launches and bytes of one layer on every rung, as in `kernels/README.md`.

python -m cs336_infer.course.ladder_picture kernels/ladder.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cs336_kernels.shapes import MODELS
from matplotlib.figure import Figure

from cs336_infer.course.kernel_drawings import rungs
from cs336_infer.course.layer_ladder import RUNGS, layer

MODEL = "Llama-3.2-1B"


def ladder(tokens: int = 1) -> Figure:
    """One layer of Llama-3.2-1B in bfloat16 for `tokens` new tokens, counted and not timed."""
    counted = layer(MODELS[MODEL], tokens)
    return rungs(
        list(RUNGS),
        [counted.launches(rung) for rung in RUNGS],
        [("weights", counted.weights / 1e6), ("keys and values", counted.cached / 1e6)],
        [counted.between(rung) / 1e6 for rung in RUNGS],
        title=f"one layer of {MODEL}, {tokens} token{'s' * (tokens != 1)}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cs336_infer.course.ladder_picture", description="Draws the ladder.")
    parser.add_argument("file", type=Path, help="PNG or SVG to write")
    args = parser.parse_args(argv)
    ladder().savefig(args.file, dpi=120, bbox_inches="tight")
    return 0


if __name__ == "__main__":
    sys.exit(main())
