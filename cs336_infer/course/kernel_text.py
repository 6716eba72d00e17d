"""A student's Triton kernels as text that runs by itself, and nothing in it but Triton.

An interpreter of kernels runs their bodies as Python, beside the books that say what they did. So the text is looked at
before anything runs it: every statement, name and attribute must be on a list. What is not on it has no way to the
interpreter's own objects, to a file, or to an import.

Nothing here imports Triton.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cs336_infer.course.ask import NOT_DONE, AskError

HEADER = "import triton\nimport triton.language as tl\n"
MOST_CHARACTERS, MOST_NODES = 20_000, 5_000
MAX_PARSED = 10**6
"""Characters of a cell that is looked at."""
BUILTINS = frozenset(("range", "float", "int", "bool", "min", "max", "abs", "len"))
MODULES = frozenset(("tl", "triton"))
_PYTHONS = MODULES | frozenset(dir(builtins))

_LANGUAGE = """
    program_id num_programs arange zeros full zeros_like load store where sum max min argmax argmin exp exp2 log log2
    sqrt sqrt_rn rsqrt sigmoid softmax maximum minimum clamp abs fma floor ceil cos sin erf dot trans permute reshape
    ravel broadcast broadcast_to expand_dims join split interleave cat flip cumsum cdiv range static_range static_assert
    constexpr debug_barrier multiple_of max_contiguous max_constancy cast umulhi div_rn swizzle2d
    atomic_add atomic_cas atomic_xchg atomic_max atomic_min atomic_and atomic_or atomic_xor
    float16 bfloat16 float32 float64 int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64"""
_OF_VALUES = "to dtype element_ty T shape sum max min reshape trans permute broadcast_to expand_dims"
_STRINGS = """
    inf -inf nan acquire release relaxed acq_rel gpu cta sys evict_first evict_last evict_normal .ca .cg .cs .cv
    .wb .wt ieee tf32 tf32x3"""
LANGUAGE = frozenset(_LANGUAGE.split())
"""Of `tl`, and of `tl.math`."""
OF_TRITON = frozenset(("cdiv", "next_power_of_2"))
OF_VALUES = frozenset(_OF_VALUES.split())
"""Methods and attributes of tensors and types."""
STRINGS = frozenset(_STRINGS.split())

_NODES = (
    ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Pass,
    ast.If, ast.IfExp, ast.For, ast.While, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword,
    ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_STUB = re.compile(r"a\d+ \w+(:|$)")


class NotTriton(AskError):
    """A kernel that is not run: one line that names it, the line and what is not allowed there."""


@dataclass(frozen=True)
class Definition:
    """What a name stands for at the top level of a notebook: the text of a kernel, or of `NAME = a number`."""

    text: str
    is_kernel: bool


Lookup = Callable[[str], Definition | None]


def cells_lookup(cells: Sequence[str]) -> Lookup:
    """Definitions at the top level of code cells; of several with one name the last. Runs nothing."""
    found: dict[str, Definition] = {}
    for cell in cells:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            lines = re.split("\r\n|\r|\n", cell)
            for node in ast.parse(cell).body if len(cell) <= MAX_PARSED else ():
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    first = min((d.lineno for d in node.decorator_list), default=node.lineno)
                    found[node.name] = Definition("\n".join(lines[first - 1 : node.end_lineno]), _is_kernel(node))
                elif (number := _number(node)) is not None:
                    found[number[0]] = Definition(number[1], False)
    return found.get


def kernel_text(names: Sequence[str], lookup: Lookup) -> str:
    """A module of the kernels `names`, the helpers that they call and the constants that they use.

    Raises:
        NotTriton: it is too long, uses a name of which there is no definition, or holds what is not on the lists here.
        AskError: there is no such kernel, or it is `NOT_DONE` yet.
    """
    parts: dict[str, Definition] = {}
    todo = [(name, name) for name in names]
    for name in names:
        definition = lookup(name)
        if definition is None:
            raise AskError(f"`{name}` is not defined: run the cell that defines it", "NameError")
        if not definition.is_kernel:
            raise AskError(f"`{name}` is not a @triton.jit function", "TypeError")
    while todo:
        kernel, name = todo.pop()
        if name in parts:
            continue
        one = lookup(name)
        if one is None:
            raise NotTriton(f"{kernel} uses `{name}`, which is neither Triton nor a kernel or number of this notebook")
        parts[name] = one
        if sum(len(each.text) for each in parts.values()) > MOST_CHARACTERS:
            raise NotTriton(f"{kernel} has more than {MOST_CHARACTERS:,} characters with what it uses")
        todo += [(kernel, used) for used in sorted(_checked(kernel, one))]
    numbers = [each.text for each in parts.values() if not each.is_kernel]
    kernels = [each.text for each in parts.values() if each.is_kernel]
    return HEADER + "".join(f"{line}\n" for line in numbers) + "".join(f"\n\n{k}\n" for k in reversed(kernels))


def _number(node: ast.stmt) -> tuple[str, str] | None:
    """Name and text of `NAME = number`, `NAME = tl.constexpr(number)` or `NAME: tl.constexpr = number`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return None
    constant = isinstance(node, ast.AnnAssign) and _dotted(node.annotation) == "tl.constexpr"
    if isinstance(value, ast.Call) and _dotted(value.func) == "tl.constexpr" and len(value.args) == 1:
        constant, value = True, value.args[0]
    minus = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub)
    inner = value.operand if minus and isinstance(value, ast.UnaryOp) else value
    if not isinstance(target, ast.Name) or not isinstance(inner, ast.Constant) or isinstance(inner.value, str | bytes):
        return None
    if not _plain(inner.value) or inner.value is None:
        return None
    text = "-" * minus + repr(inner.value)
    return target.id, f"{target.id} = tl.constexpr({text})" if constant else f"{target.id} = {text}"


def _is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and [_dotted(d) for d in node.decorator_list] == ["triton.jit"]


def _dotted(node: ast.AST) -> str:
    """ "tl.math.exp" of names with attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def _checked(kernel: str, one: Definition) -> set[str]:
    """The names that a definition takes from outside.

    Raises:
        NotTriton: see `kernel_text`.
    """
    if not one.is_kernel:
        return set()
    try:
        return _names_in(kernel, ast.parse(one.text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotTriton(f"{kernel}: not Python that can be read ({type(error).__name__})") from None


def _names_in(kernel: str, tree: ast.Module) -> set[str]:
    (function,), nodes = tree.body, list(ast.walk(tree))
    if not isinstance(function, ast.FunctionDef) or not _is_kernel(function):
        raise NotTriton(f"{kernel}: not one @triton.jit function")
    if any(_is_stub(node) for node in nodes):
        raise AskError(NOT_DONE)
    if len(nodes) > MOST_NODES:
        raise NotTriton(f"{kernel}: {function.name} has {len(nodes):,} nodes, at most {MOST_NODES:,} are run")
    for line, what in _odd(function):
        raise NotTriton(f"{kernel}: line {line} of {function.name}: {what} is not on the list of what a kernel may use")
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    if shadowed := sorted((own | {function.name}) & _PYTHONS):
        raise NotTriton(f"{kernel}: {function.name} gives `{shadowed[0]}` another meaning")
    return names - own - BUILTINS - MODULES


def _is_stub(node: ast.AST) -> bool:
    call = node.exc if isinstance(node, ast.Raise) else None
    if not isinstance(call, ast.Call) or _dotted(call.func) != "NotImplementedError" or len(call.args) != 1:
        return False
    said = call.args[0]
    return isinstance(said, ast.Constant) and isinstance(said.value, str) and bool(_STUB.match(said.value))


def _odd(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """(line, what) of all that is not on a list, the lines counted from the decorator."""
    body = function.body
    docstring = body[0].value if isinstance(body[0], ast.Expr) and ast.get_docstring(function) is not None else None
    if function.args.vararg or function.args.kwarg:
        yield function.lineno, "an open list of arguments"
    # What stands in the head is computed outside of the function, where its own names mean something else.
    notes = [function.returns, *(a.annotation for a in ast.walk(function.args) if isinstance(a, ast.arg))]
    notes += [node.annotation for node in ast.walk(function) if isinstance(node, ast.AnnAssign)]
    for note in notes:
        if note is not None and _dotted(note) != "tl.constexpr":
            yield note.lineno, f"the annotation `{ast.unparse(note)[:40]}`"
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if default is not None and not isinstance(default, ast.Constant):
            yield default.lineno, f"the default `{ast.unparse(default)[:40]}`"
    held = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        line = getattr(node, "lineno", function.lineno)
        if not isinstance(node, _NODES) or (isinstance(node, ast.FunctionDef) and node is not function):
            yield line, f"`{type(node).__name__}`"
        elif isinstance(node, ast.Attribute) and node is not function.decorator_list[0]:
            if not _known(node):
                yield line, f"`{_dotted(node) or '.' + node.attr}`"
        elif isinstance(node, ast.Name) and ("__" in node.id or (node.id in MODULES and id(node) not in held)):
            yield line, f"`{node.id}`"
        elif isinstance(node, ast.arg) and "__" in node.arg:
            yield line, f"`{node.arg}`"
        elif isinstance(node, ast.Call) and not isinstance(node.func, ast.Name | ast.Attribute):
            yield line, "a call of a value"
        elif isinstance(node, ast.Constant) and node is not docstring and not _plain(node.value):
            yield line, f"the value {str(node.value)[:20]!r}"


def _known(node: ast.Attribute) -> bool:
    if not isinstance(node.ctx, ast.Load):
        return False
    name = _dotted(node)
    module, _, last = name.rpartition(".")
    if module in ("tl", "tl.math"):
        return last in LANGUAGE or name == "tl.math"
    if module == "triton":
        return last in OF_TRITON
    return node.attr in OF_VALUES and name.split(".")[0] not in MODULES | BUILTINS


def _plain(value: object) -> bool:
    if isinstance(value, str):
        return value in STRINGS
    return value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 2**63)
