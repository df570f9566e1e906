"""House rules that a machine can hold: sizes, rule S1, forbidden names, first lines."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = ("banyan", "router", "worker", "kvstore", "kernels", "loadtest", "simulate", "seams")
SOURCES = sorted(
    p for room in ROOMS for p in (REPOSITORY / room).rglob("*.py") if "_pb2" not in p.name
)
NAMES_AVOIDED = re.compile(r"(manager|helper|util|handler)s?$", re.IGNORECASE)
CALLS_FORBIDDEN = {
    ("pickle", None),
    ("cloudpickle", None),
    ("marshal", None),
    ("torch", "load"),
    ("yaml", "load"),
    (None, "eval"),
    (None, "exec"),
}


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_there_are_sources() -> None:
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_module_size_and_first_line(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), "a module's first line says what it is"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_functions_fit_in_the_head(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{node.name} at line {node.lineno}"
            assert not NAMES_AVOIDED.search(node.name), node.name
        elif isinstance(node, ast.ClassDef):
            assert not NAMES_AVOIDED.search(node.name), node.name


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_that_executes_bytes(path: Path) -> None:
    """Rule S1: no pickle and friends on anything that crosses a socket or a disk."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.split(".")[0] for alias in node.names}
            names.add((getattr(node, "module", None) or "").split(".")[0])
            assert not names & {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert (called.value.id, called.attr) not in CALLS_FORBIDDEN
            elif isinstance(called, ast.Name):
                assert (None, called.id) not in CALLS_FORBIDDEN


def test_public_classes_and_functions_have_docstrings() -> None:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    missing = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not missing, "\n".join(missing)


def test_no_absolute_paths_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml", "*.toml", "Makefile"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    pattern = re.compile(r"/(work|root|home/\w+)/")
    wrong = [
        f
        for f in listed
        if f != relative(Path(__file__)) and pattern.search((REPOSITORY / f).read_text())
    ]
    assert not wrong


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by bare name: two of one name end the whole run."""
    names = [
        path.name for path in (REPOSITORY / "tests").rglob("*.py") if path.name != "conftest.py"
    ]
    assert sorted(names) == sorted(set(names))
