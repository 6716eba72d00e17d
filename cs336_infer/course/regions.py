"""The regions of a cell that a student does not get, and what stands in their place.

A region of lines lies between `# BEGIN SOLUTION` and `# END SOLUTION`, or `# BEGIN HIDDEN TESTS` and
`# END HIDDEN TESTS`, each a comment on a line of its own (in markdown also `<!-- BEGIN SOLUTION -->`).
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass

from cs336_infer.types import InferError

SOLUTION, HIDDEN = "SOLUTION", "HIDDEN TESTS"
_MARKER = re.compile(r"#\s*(BEGIN|END) (SOLUTION|HIDDEN TESTS)|<!--\s*(BEGIN|END) (SOLUTION)\s*-->")
_MENTION = re.compile(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS|MARK SCHEME)")
STEP = "# Step:"
ANSWER_HERE = "Your answer here."
HIDDEN_HERE = "# More checks run here when your work is graded."
_DEFS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Problem(InferError):
    """What is wrong with a cell, without its place."""


@dataclass(frozen=True)
class Region:
    """Lines `first` to `last` of a cell, from 0, both markers included. `kind` is SOLUTION or HIDDEN."""

    kind: str
    first: int
    last: int


def parse(source: str) -> ast.Module:
    """The tree of a code cell; a solution or check cell must be plain Python."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree = compile(source, "cell", "exec", ast.PyCF_ONLY_AST | flags, dont_inherit=True)
        compile(tree, "cell", "exec", flags, dont_inherit=True)
        return tree
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise Problem(f"is not plain Python: {line}") from None


def comments(source: str) -> dict[int, str]:
    """Line (from 0) -> comment, of code; a `#` inside a string is none."""
    parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0] - 1: t.string for t in tokens if t.type == tokenize.COMMENT}


def find_regions(source: str, kind: str = "code") -> tuple[Region, ...]:
    """The regions of a cell, in order; markers are only recognised as comments on lines of their own."""
    lines = source.split("\n")
    if not any(_MENTION.search(line.upper()) for line in lines):
        return ()
    found: list[Region] = []
    opened: tuple[str, int] | None = None
    notes = comments(source) if kind == "code" else {}
    for i, line in enumerate(lines):
        text = line.strip()
        match = _MARKER.fullmatch(text)
        if match is None or (kind == "code" and notes.get(i) != text):
            if _MENTION.search(line) or _MENTION.search(notes.get(i, "").upper()):
                raise Problem(f"line {i + 1}: a marker must be a comment on a line of its own, not {text!r}")
            continue
        word, marker = match.group(1) or match.group(3), match.group(2) or match.group(4)
        if word == "BEGIN" and opened is None:
            opened = marker, i
        elif word == "END" and opened is not None and opened[0] == marker:
            found.append(Region(marker, opened[1], i))
            opened = None
        else:
            state = f"# BEGIN {opened[0]} of line {opened[1] + 1} is open" if opened else "no region is open"
            raise Problem(f"line {i + 1}: {word} {marker} where {state}")
    if opened is not None:
        raise Problem(f"line {opened[1] + 1}: # BEGIN {opened[0]} has no END")
    return tuple(found)


def stub(source: str, label: str) -> str:
    """`source` of a code cell with each solution region replaced by its `# Step:` comments and an error.

    The error is `NotImplementedError("<label>: <first line of the docstring around the region>")`.

    Raises:
        Problem: the regions are wrong, one leaves the block it starts in, or the stub is not Python.
    """
    lines, tree, notes = source.split("\n"), parse(source), comments(source)
    for region in reversed(find_regions(source)):
        code = _code_lines(source, region)
        first = min(code, default=region.first)
        indent = _indent(lines[first])
        if any(len(_indent(lines[i])) < len(indent) for i in code):
            raise Problem(f"line {region.first + 1}: the region leaves the block it starts in; start it further out")
        steps = [notes[i] for i in range(region.first, region.last) if notes.get(i, "").startswith(STEP)]
        about = _docstring(tree, first + 1)
        error = json.dumps(f"{label}: {about}" if about else label, ensure_ascii=False)
        new = [*steps, f"raise NotImplementedError({error})"]
        lines[region.first : region.last + 1] = [indent + line for line in new]
    return _checked("\n".join(lines))


def without_hidden(source: str) -> str:
    """`source` of a check cell without its hidden regions.

    Raises:
        Problem: the regions are wrong, or what is left is not Python.
    """
    kept = _replaced(source, find_regions(source), [])
    if not any(line.strip() and not line.strip().startswith("#") for line in kept.split("\n")):
        return "\n".join(filter(None, [kept.strip(), HIDDEN_HERE]))
    return _checked(kept.strip("\n"))


def without_answer(source: str) -> str:
    """`source` of a question without the answer."""
    return _replaced(source, find_regions(source, "markdown"), [ANSWER_HERE])


def region_lines(source: str, kind: str = "code") -> tuple[list[str], list[str]]:
    """The stripped lines inside and outside of the regions of a cell; markers and `# Step:` comments are neither."""
    lines, inside, outside = source.split("\n"), [], []
    regions = find_regions(source, kind)
    for i, line in enumerate(lines):
        around = next((r for r in regions if r.first <= i <= r.last), None)
        if around is None:
            outside.append(line.strip())
        elif i not in (around.first, around.last) and not line.strip().startswith(STEP):
            inside.append(line.strip())
    return inside, outside


def _replaced(source: str, regions: tuple[Region, ...], new: list[str]) -> str:
    lines = source.split("\n")
    for region in reversed(regions):
        lines[region.first : region.last + 1] = new
    return "\n".join(lines)


def _checked(source: str) -> str:
    try:
        parse(source)
    except Problem as problem:
        raise Problem(f"without its regions it {problem}") from None
    return source


def _code_lines(source: str, region: Region) -> list[int]:
    """First lines of the statements between the markers, also of those inside a compound statement."""
    found: list[int] = []
    fresh = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            fresh |= token.type == tokenize.NEWLINE
            continue
        line = token.start[0] - 1
        if fresh and region.first < line < region.last and token.type != tokenize.ENDMARKER:
            found.append(line)
        fresh = False
    return found


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _docstring(tree: ast.Module, line: int) -> str:
    """First line of the docstring of the innermost function or class around `line` that has one."""
    around = [n for n in ast.walk(tree) if isinstance(n, _DEFS) and n.lineno <= line <= (n.end_lineno or 0)]
    for node in sorted(around, key=lambda n: n.lineno, reverse=True):
        text = ast.get_docstring(node)
        if text and (line > node.body[0].lineno):
            return text.strip().split("\n")[0].strip()
    return ""
