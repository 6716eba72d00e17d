"""The journal of a grading run: one line of JSON for each finished submission, on disk before the next one counts.

It lies beside the results, is locked while a run writes it, and is removed when the results are written. So a run
that was killed goes on, and two runs never write the same results.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cs336_infer.course.collect import GradeError


class Journal:
    """Opened for one run. Use it as a context manager.

    Args:
        course: key of the checks; what was graded by other checks does not count.
        resume: go on with what an earlier run left. Otherwise there must be nothing.

    Attributes:
        results: finished submissions, by key.

    Raises:
        GradeError: another run has it, it cannot be written, or it holds results and `resume` is False.
    """

    def __init__(self, path: Path, course: str, *, resume: bool = False) -> None:
        self.path = path
        self.course = course
        try:
            self._descriptor = _locked(path)
            self.results = dict(self._read())
        except BlockingIOError:
            raise GradeError(f"{path}: another run is grading into it") from None
        except OSError as e:
            raise GradeError(f"{path}: cannot be written: {e.strerror}") from None
        if self.results and not resume:
            self.close()
            raise GradeError(
                f"{path} holds {len(self.results)} graded submissions of a run that did not end: "
                "go on with --resume, or remove it"
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Raises GradeError when the line cannot be written whole; what was written before is kept."""
        line = json.dumps({"course": self.course, "key": key, "result": result}).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(0, "no space left on device")
            os.fsync(self._descriptor)
        except OSError as e:
            raise GradeError(
                f"{self.path}: cannot be written: {e.strerror} ({len(self.results)} submissions are kept for --resume)"
            ) from None
        self.results[key] = result

    def remove(self) -> None:
        """The results are in their place: the journal is not needed any more."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the lock. A journal without a line is removed."""
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size == 0:
                self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Finished submissions. What follows the last line break was cut when a run was killed: it is removed."""
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
        for line in data[:whole].splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["course"] == self.course:
                    yield entry["key"], dict(entry["result"])


def _locked(path: Path) -> int:
    """`path` opened for appending, held by this process alone. The kernel lets go of it when the process ends.

    Raises:
        BlockingIOError: another process has it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:  # a file system without locks
                return descriptor
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the run before removed it between the two calls
