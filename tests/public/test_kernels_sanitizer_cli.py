"""`cs336-infer sanitize`: exit status, JSON, scripts that go wrong; and options of `sanitize` that make no sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cs336_kernels.sanitizer import sanitize

from cs336_infer.cli import main

CORPUS = Path(__file__).parents[1] / "corpus" / "kernels"
BROKEN, REPAIRED = CORPUS / "02_load_mask_off_by_one_broken.py", CORPUS / "02_load_mask_off_by_one_repaired.py"
QUICK = "--schedules=2"


@pytest.fixture
def run(capsys):
    def run(*args: object) -> tuple[object, str, str]:
        try:
            code: object = main(["sanitize", *map(str, args)])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def script(tmp_path):
    def script(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return script


def test_a_clean_script(run):
    code, out, err = run(REPAIRED, QUICK)
    assert (code, out, err) == (0, f"{REPAIRED}: 0 findings in 1 launch\n", "")


def test_findings_are_told_by_file_and_line(run):
    code, out, err = run(BROKEN, REPAIRED, QUICK)
    found, first, second = out.splitlines()
    assert (code, err) == (1, "") and found.startswith(f"{BROKEN.name}:11: out-of-bounds: reads x[29]")
    assert (first, second) == (f"{BROKEN}: 1 finding in 1 launch", f"{REPAIRED}: 0 findings in 1 launch")


def test_one_json_object(run):
    code, out, err = run(BROKEN, REPAIRED, QUICK, "--json", "--seed=7")
    answer = json.loads(out)
    assert (code, err, out.count("\n")) == (1, "", 1) and set(answer) == {"findings", "scripts"}
    (found,) = answer["findings"]
    assert found | {"message": ""} == {
        **{"script": str(BROKEN), "file": str(BROKEN), "line": 11, "other_line": None, "kind": "out-of-bounds"},
        **{"kernel": "double", "programs": [3], "seed": 7, "tensor": "x", "message": ""},
    }
    assert [s["script"] for s in answer["scripts"]] == [str(BROKEN), str(REPAIRED)]
    for told in answer["scripts"]:
        (launch,) = told["launches"]
        assert (launch["kernel"], launch["grid"], launch["schedules"], launch["steps"]) == ("double", [4, 1, 1], 2, 8)
        assert launch["traffic"]["x"]["loaded"] == launch["traffic"]["y"]["stored"] == 29 * 4
        assert (told["total_bytes"], told["unique_bytes"]) == (232, 232)


def test_options_reach_the_sanitizer(run):
    barrier = CORPUS / "08_grid_over_residency_broken.py"
    assert run(barrier, QUICK)[0] == 1 and run(barrier, QUICK, "--resident=12")[0] == 0
    _, out, _ = run(REPAIRED, "--policy=exhaustive", "--schedules=5", "--json")
    assert json.loads(out)["scripts"][0]["launches"][0]["schedules"] == 5
    code, out, _ = run(REPAIRED, QUICK, "--traffic")
    assert code == 0 and out.splitlines()[-1] == "unique bytes 232, all bytes 232"


PRINTS = """
import sys
print("begins", sys.argv, __name__, __file__)
def ends():
    sys.exit()
if __name__ == "__main__":
    ends()
"""


def test_what_a_script_prints_does_not_mix_with_json(run, script):
    path, before = script(PRINTS), (list(sys.argv), list(sys.path))
    code, out, err = run(path, "--json")
    assert (code, json.loads(out)["findings"], err) == (0, [], f"begins {[str(path)]} __main__ {path}\n")
    code, out, err = run(path)
    assert out.startswith("begins ") and out.endswith(f"{path}: 0 findings in 0 launches\n")
    assert err == f"cs336-infer: {path} launched no kernel: nothing was checked\n"
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize("code", ["3", "'no data'"])
def test_a_script_that_gives_up_is_not_taken_for_clean(run, script, code):
    path = script(f"import sys\nsys.exit({code})\n")
    ended, out, err = run(path)
    assert (ended, out) == (2, "")
    assert err == f"cs336-infer: {path} failed: it ended itself with exit code {code}\n"


def test_one_that_fails_does_not_take_the_others_along(run, script):
    path = script("raise OSError('no data')\n")
    code, out, err = run(BROKEN, path, REPAIRED, QUICK, "--json")
    answer = json.loads(out)
    assert code == 2 and err.endswith(f"cs336-infer: {path} failed: OSError: no data\n")
    assert {f["script"] for f in answer["findings"]} == {str(BROKEN)}
    assert [s.get("error") for s in answer["scripts"]] == [None, "OSError: no data", None]


def test_a_script_finds_its_neighbours(run, script):
    path = script("import neighbour_of_script\nprint(neighbour_of_script.VALUE)\n")
    (path.parent / "neighbour_of_script.py").write_text("VALUE = 5\n")
    assert run(path)[1].startswith("5\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\ntorch.zeros(2)[3]\n", "IndexError: index 3 is out of bounds"),
        ("def (:\n", "SyntaxError: invalid syntax"),
        ("import cs336_no_such_module\n", "ModuleNotFoundError: No module named 'cs336_no_such_module'"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_script_that_raises(run, script, text, message, form):
    path = script(text)
    code, out, err = run(path, QUICK, *form)
    assert code == 2 and "Traceback" in err and str(path) in err
    assert json.loads(out)["scripts"][0]["error"].startswith(message) if form else out == ""
    assert err.splitlines()[-1].startswith(f"cs336-infer: {path} failed: {message}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.py"], "no such script: none.py"),
        ([str(CORPUS)], f"{CORPUS} is a folder"),
        ([str(REPAIRED), "5"], "no such script: 5"),
        ([str(REPAIRED), "--size=5"], "unrecognized arguments: --size=5"),
        ([str(REPAIRED), "--schedules=0"], "--schedules must be an integer >= 1, not 0"),
        ([str(REPAIRED), "--resident=-1"], "--resident must be an integer >= 1, not -1"),
        ([str(REPAIRED), "--policy=fair"], "invalid choice: 'fair'"),
        ([], "the following arguments are required: script"),
    ],
)
def test_requests_that_make_no_sense(run, args, message):
    code, out, err = run(*args)
    assert (code, out) == (2, "") and message in err.splitlines()[-1] and "Traceback" not in err


def test_the_command_in_a_process_of_its_own():
    command = [sys.executable, "-m", "cs336_infer.cli", "sanitize", str(BROKEN), QUICK, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr == "" and len(json.loads(ran.stdout)["findings"]) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedules": 0}, "schedules must be >= 1"),
        ({"resident": 0}, "resident must be >= 1"),
        ({"max_steps": -1}, "max_steps must be >= 1"),
        ({"policy": "fair"}, "policy must be one of mixed, "),
    ],
)
def test_options_that_make_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message), sanitize(**wrong):
        pass
