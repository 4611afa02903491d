"""Tests that do more in `make test-long` say so, or `make test-slice` would not have them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = "tests.support.sizes"


def named_in(node: ast.AST) -> set[str]:
    """The names that a piece of code reads or asks for: those of fixtures too."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name | ast.arg))
    return {each.id if isinstance(each, ast.Name) else each.arg for each in names}


def defined_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def marked_by(node: ast.AST) -> bool:
    """Whether a piece of code has a mark by which `make test-slice` takes a test."""
    return any(isinstance(each, ast.Attribute) and each.attr in {"campaign", "long"} for each in ast.walk(node))


@cache
def sized_in(module: str) -> frozenset[str]:
    """Names of another module of ours that depend on `size`."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if module == SIZES:
        return frozenset({"size"})
    return (
        frozenset(sized(ast.parse(path.read_text()).body))
        if module.startswith("tests.") and path.exists()
        else frozenset()
    )


def sized(body: list[ast.stmt]) -> set[str]:
    """Names of a module that depend on `size`, by themselves or through others."""
    names = set[str]()
    for node in body:
        if isinstance(node, ast.ImportFrom):
            names |= {each.name for each in node.names} & sized_in(node.module or "")
    while names and (found := set[str]().union(*(defined_by(node) for node in body if named_in(node) & names)) - names):
        names |= found
    return names


def unmarked(source: str) -> list[str]:
    """Tests of a module that depend on `size` and have no mark that says so."""
    body = ast.parse(source).body
    names = sized(body)
    if not names or any("pytestmark" in defined_by(node) and marked_by(node) for node in body):
        return []
    tests = [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [each.name for each in tests if each.name.startswith("test_") and each.name in names and not marked_by(each)]


@pytest.mark.parametrize(
    "test",
    [
        "def test_one(): size(1, 2)",
        "COUNT = size(1, 2)\ndef test_one(): print(COUNT)",
        "@pytest.fixture\ndef many(): return size(1, 2)\nasync def test_one(many): print(many)",
        "def helper(): size(1, 2)\nRUNS = [helper]\n@pytest.mark.parametrize('run', RUNS)\ndef test_one(run): run()",
    ],
)
def test_a_test_that_asks_for_its_size_and_does_not_say_so_is_found(test: str) -> None:
    source = f"import pytest\nfrom {SIZES} import size\n{test}\ndef test_other(): pass\n"
    assert unmarked(source) == ["test_one"]
    marked = re.sub(r"\n((async )?def test_one)", r"\n@pytest.mark.campaign(seconds=5)\n\1", source)
    assert unmarked(marked) == []
    assert unmarked(source + "pytestmark = pytest.mark.campaign(seconds=5)\n") == []


def test_what_another_module_sizes_is_found() -> None:
    source = "from tests.support.join_frames import packed\n@packed\ndef test_one(): pass\n"
    assert unmarked(source) == ["test_one"]


@pytest.mark.slow
def test_every_test_that_asks_for_its_size_says_so() -> None:
    found = {path.name: names for path in ROOT.glob("tests/**/*.py") if (names := unmarked(path.read_text()))}
    assert not found, "give them @pytest.mark.campaign(seconds=...): see tests/support/sizes.py"
