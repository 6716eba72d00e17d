"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_bytes(path: Path, content: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Write `content` beside `path` and rename it into its place; nothing is left behind when that fails.

    Args:
        mode: permissions of the file. durable: it is on the disk (fsync) before it gets its name.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
