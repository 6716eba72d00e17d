"""Which weights these are: what a KV block on disk must agree with before anybody reads it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WHOLE = 1 << 20  # the beginning of a file, with its header, is read whole
SAMPLES, SAMPLE = 64, 4096


def fingerprint(path: Path) -> str:
    """Hex digest of a model's files: names, sizes, headers and samples spread over the weights.

    A fine-tuned or requantised copy differs nearly everywhere, so samples tell it apart without reading gigabytes
    (64 samples of 4 KiB a file). It does not protect against somebody who changes weights between the samples.

    Args:
        path: a GGUF file or a folder, as `load_model` resolves it.
    """
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in (".json", ".safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as f:
            digest.update(f.read(WHOLE))
            for i in range(SAMPLES):
                f.seek(max(0, size - SAMPLE) * i // SAMPLES)
                digest.update(f.read(SAMPLE))
            f.seek(max(0, size - SAMPLE), os.SEEK_SET)
            digest.update(f.read(SAMPLE))
    return digest.hexdigest()
