"""Bytes moved, counted: what the counter says of known operations, and programs that must be refused."""

from __future__ import annotations

import copy
import inspect
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from cs336_infer.course import a1_open_task as task
from cs336_infer.course import wire
from cs336_infer.course.ask import AskError
from cs336_infer.course.assignment import Role, read_assignment
from cs336_infer.course.program import Limits, ProgramError, run
from cs336_infer.course.questions import StudentProcess
from cs336_infer.course.tracing import MAX_CONSTANT, TraceError, trace
from cs336_infer.measure.traffic import count
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]
TABLE = torch.zeros(MAX_CONSTANT + 1)
A, B = torch.rand(8, 16), torch.rand(16, 4)
COUNTS = {
    "product": (lambda: A @ B, 4 * (8 * 16 + 16 * 4 + 8 * 4)),
    "views are free": (lambda: A.t()[2:5].reshape(3, 8).unsqueeze(0).expand(9, 3, 8), 0),
    "a reshape that copies is not": (lambda: A.t().reshape(-1), 4 * 2 * 8 * 16),
    "elementwise": (lambda: A + 1, 4 * 2 * 8 * 16),
    "the same tensor twice": (lambda: A * A, 4 * 2 * 8 * 16),
    "two views of one tensor": (lambda: A[:4] * A[4:], 4 * 3 * 4 * 16),
    "an expanded dimension counts once": (lambda: A[:1].expand(8, 16) + 1, 4 * (16 + 8 * 16)),
    "in place": (lambda: A.clone().add_(1), 4 * 4 * 8 * 16),
    "overwritten": (lambda: torch.empty(8, 16).copy_(A), 4 * 2 * 8 * 16),
    "zeroed": (lambda: torch.empty(8, 16).zero_(), 4 * 8 * 16),
    "set aside": (lambda: torch.empty(1000), 0),
    "rows that are picked": (lambda: A[torch.tensor([1, 3])], 4 * 2 * 2 * 16 + 2 * 8),
    "index_select": (lambda: A.index_select(0, torch.tensor([1, 3])), 4 * 2 * 2 * 16 + 2 * 8),
    "a slice is written": (lambda: torch.empty(8, 16)[2:4].copy_(A[:2]), 4 * 2 * 2 * 16),
    "another type": (lambda: A.double(), (4 + 8) * 8 * 16),
    "repeated heads are copied": (lambda: A.repeat_interleave(3, 0), 4 * (8 + 24) * 16),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_count_of_one_operation(name):
    function, want = COUNTS[name]
    assert count(function).bytes == want


def test_products_are_counted_in_flops_too():
    traffic = count(lambda: torch.bmm(torch.rand(3, 4, 5), torch.rand(3, 5, 6)) @ torch.rand(6, 2))
    assert traffic.flops == 2 * 3 * 4 * 6 * (5 + 2) and {"aten.bmm", "aten.mm"} & set(traffic.by_op)


def start(q, k, v, k_cache, v_cache, lengths):
    return STUDENT["decode_attention"](q, k, v, k_cache, v_cache, lengths)


STUDENT: dict = {"torch": torch, "bytes_moved": lambda f: None}
for _cell in read_assignment(REPO / "solutions" / "a1_prefill_decode" / "a1_prefill_decode.py").cells:
    if _cell.role is Role.SOLUTION or "def decode_attention" in _cell.source:
        exec(_cell.source, STUDENT)


def grouped(q, k, v, k_cache, v_cache, lengths, *, scale=lambda s, d: s.mul_(d**-0.5), extra=0, keep=lambda t: t):
    out, kv_heads = torch.empty_like(q), k.shape[1]
    for row, n in enumerate(lengths):
        k_cache[row, :, n], v_cache[row, :, n] = k[row], v[row]
        keys, values = keep(k_cache[row, :, : n + 1 + extra]), keep(v_cache[row, :, : n + 1 + extra])
        heads = q[row].view(kv_heads, -1, q.shape[-1])
        scores = scale(torch.bmm(heads, keys.transpose(1, 2)), q.shape[-1])
        out[row] = torch.bmm(scores.softmax(-1), values).view(q.shape[1:])
    return out


def score(function, seed=0):
    def ask(name, inputs, lengths):
        sent = wire.decode(wire.encode(trace(function, inputs, lengths)))
        return sent

    return task.score(ask, seed)


def test_the_start_moves_what_the_exercise_says_and_a_better_one_less():
    first, better = score(start), score(grouped)
    assert first == {"ok": True, "bytes_per_token": task.START, "reference": task.START, "bound": 105216, "message": ""}
    assert better["ok"] and better["bound"] < better["bytes_per_token"] < 1.2 * better["bound"]
    assert score(grouped, seed=5) == better, "the number depends on the operations only"


def test_each_wasteful_habit_costs_exactly_its_bytes():
    base = score(grouped)["bytes_per_token"] * task.TOKENS
    positions = sum(n + 1 for lengths in task.CASES for n in lengths)
    element, row = 4, task.KV_HEADS * task.HEAD_DIM
    copies = score(lambda *a: grouped(*a, keep=torch.clone))["bytes_per_token"] * task.TOKENS
    assert abs(copies - base - 2 * 2 * positions * row * element) <= task.TOKENS  # keys and values, read and written
    fresh = score(lambda *a: grouped(*a, scale=lambda s, d: s / d**0.5))["bytes_per_token"] * task.TOKENS
    assert fresh == base, "a new tensor or the same one: read once and written once"
    twice = score(lambda *a: grouped(*a, scale=lambda s, d: s * 2 / (2 * d**0.5)))["bytes_per_token"] * task.TOKENS
    assert abs(twice - base - 2 * positions * task.HEADS * element) <= task.TOKENS


WRONG = {
    "unwritten memory was read": lambda *a: grouped(*a, extra=1),
    "the answer is off by": lambda *a: grouped(*a, scale=lambda s, d: s),
    "k_cache is not what it must be": lambda q, k, v, kc, vc, n: grouped(q, k, v, kc.clone(), vc, n),
    "q is not what it must be": lambda q, *a: (grouped(q, *a), q.zero_())[0],
    "returned torch.float64": lambda *a: grouped(*a).double(),
    "not torch.float32 [3, 9, 64]": lambda *a: grouped(*a)[:, :1],
    "the answer is not finite": lambda *a: torch.empty_like(a[0]),
    "'aten._scaled_dot_product_flash_attention_for_cpu.default', is not one this task allows": lambda q, k, v, kc, vc, n: torch.nn.functional.scaled_dot_product_attention(q[:, :, None], kc, vc, enable_gqa=True)[:, :, 0],  # noqa: E501
    "'aten.rand_like.default', is not one": lambda *a: torch.rand_like(a[0]),
}  # fmt: skip


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_answer_has_no_number(says):
    result = score(WRONG[says])
    assert not result["ok"] and result["bytes_per_token"] is None
    assert says in result["message"] and "\n" not in result["message"]
    with pytest.raises(InferError) as error:
        task.bytes_moved(WRONG[says])
    assert says in str(error.value)


def test_the_notebook_shows_the_number():
    assert task.bytes_moved(start).startswith(f"{task.START:,} bytes per token")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x if float(x.sum()) > 0 else -x, "depends on values"),
        (lambda x: x.tolist(), "it returned a list"),
        (lambda x: [x], "it returned a list"),
        (lambda x: [x := x + 1 for _ in range(6000)][-1], "more than 5000 operations"),
        (lambda x: x[0] + TABLE, "neither an input nor made of them"),
    ],
)
def test_what_cannot_be_traced(function, says):
    with pytest.raises(TraceError, match=says):
        trace(function, [torch.rand(3)])


def test_a_student_that_gives_no_trace():
    def ask(*args):
        raise AskError("timeout: decode_attention took longer than 20 s", "timeout")

    assert task.score(ask, 0)["message"].startswith("timeout")


def program(*ops, output=1, inputs=1):
    return {
        "inputs": inputs,
        "ops": [{"op": f"aten.{o}", "args": a, "kwargs": k} for o, a, k in ops],
        "output": {"ref": output},
    }


X = {"ref": 0}
FORGED = {
    "this is not a traced program": [1],
    "takes 7 inputs, not 1": program(inputs=7),
    "takes True inputs": program(inputs=True),
    "'aten.as_strided.default', is not one": program(("as_strided.default", [X, [10**6], [1]], {})),
    "'aten.set_.source_Tensor', is not one": program(("set_.source_Tensor", [X, X], {})),
    "'aten.__class__.mro', is not one": program(("__class__.mro", [], {})),
    "'os.system', is not one": {"inputs": 1, "ops": [{"op": "os.system", "args": ["true"], "kwargs": {}}], "output": X},
    "operation 1 is not one": {"inputs": 1, "ops": [{"op": "aten.neg.default"}], "output": X},
    "has no list of arguments": program(("neg.default", (X,), {})),
    "more than 134,217,728 bytes": program(("zeros.default", [[2**30, 8]], {})),
    "set aside: more than 134,217,728 bytes": program(*[("empty.memory_format", [[2**24]], {})] * 3),
    "the number 1099511627776 is out of range": program(("zeros.default", [[2**40]], {})),
    "integer multiplication overflow": program(("expand.default", [X, [2**39, 2**39, 3]], {})),
    "expand: more than 134,217,728 bytes": program(("expand.default", [X, [2**30, 3]], {})),
    "more than 2,147,483,648 FLOP": program(
        ("zeros.default", [[2048, 2048]], {}), ("mm.default", [{"ref": 1}, {"ref": 1}], {})
    ),
    "more than 268,435,456 elements in all": program(
        ("expand.default", [X, [2**20, 3]], {}), *[("sum.default", [{"ref": 1}], {})] * 100
    ),
    "IndexError": program(("select.int", [X, 0, 99], {})),
    "RuntimeError": program(("view.default", [X, [2, 2]], {})),
    "an argument that is not one": program(("neg.default", [{"ref": 5}], {})),
    "an argument that is not one ": program(("neg.default", [{"ref": -1}], {})),
    "an argument that is not one  ": program(("_to_copy.default", [X], {"dtype": {"dtype": "complex64"}})),
    "an argument that is not one   ": program(("_to_copy.default", [X], {"dtype": {"dtype": ["float32"]}})),
    "an argument that is not one    ": program(("neg.default", ["cpu"], {})),
    "an argument that it does not have": program(("neg.default", [X], {"out": X})),
    "an argument that it does not have ": program(("neg.default", [X, X], {})),
    "the output: an argument that is not one": program(("neg.default", [X], {}), output=9),
    "at most 5000 are run": program(*[("neg.default", [X], {})] * 5001),
    "constants hold more than": program(*[("add.Tensor", [X, {"constant": torch.zeros(2**17)}], {})] * 3),
}


@pytest.mark.parametrize("says", FORGED)
def test_a_forged_program_is_refused_before_it_costs_anything(says):
    said = says.strip().removeprefix("expand: ").removeprefix("set aside: ")
    with pytest.raises(ProgramError) as error:
        run(FORGED[says], [torch.rand(3)])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_indices_out_of_range_are_an_error_and_not_memory():
    for op in (
        ("index_select.default", [X, 0, {"constant": torch.tensor([99])}], {}),
        ("gather.default", [X, 0, {"constant": torch.tensor([-5])}], {}),
        ("index.Tensor", [X, [{"constant": torch.tensor([3])}]], {}),
        ("index_copy_.default", [X, 0, {"constant": torch.tensor([7])}, {"constant": torch.ones(1)}], {}),
        ("scatter_.src", [X, 0, {"constant": torch.tensor([7])}, {"constant": torch.ones(1)}], {}),
    ):
        with pytest.raises(ProgramError):
            run(program(op), [torch.rand(3)])


def test_a_trace_cannot_say_what_it_moves():
    """Extra keys, another count: there is no place for one. A cheaper program with a wrong answer is wrong."""
    inputs = task.make_inputs(np.random.default_rng(0), (4,))
    honest = trace(grouped, task.make_inputs(np.random.default_rng(1), (4,)), [4])
    assert task.moved(honest, [t.clone() for t in inputs], (4,)) > 0
    for forge in (lambda p: p.update(bytes=0), lambda p: p["ops"].pop(), lambda p: p.update(output={"ref": 0})):
        forged = copy.deepcopy(honest)
        forge(forged)
        with pytest.raises(ProgramError):
            task.moved(forged, [t.clone() for t in inputs], (4,))


def test_the_tracer_needs_nothing_of_ours():
    text = Path(sys.modules["cs336_infer.course.tracing"].__file__).read_text()
    assert "cs336_infer" not in text and Limits().ops >= 5000


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap: the grader needs it")
def test_a_submission_is_traced_in_its_sandbox():
    source = textwrap.dedent(inspect.getsource(grouped)).replace("def grouped", f"def {task.NAME}")
    with StudentProcess(["import torch", source, task.CELL], files=task.FILES) as student:
        assert task.score(student.ask, 3) == score(grouped)


def test_tracing_does_not_import_the_compiler() -> None:
    """It would be most of the time of a submission."""
    code = (
        "import sys, torch; from cs336_infer.course.tracing import trace\n"
        "print(len(trace(lambda x: x * 2 + 1, [torch.ones(3)])['ops']), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
