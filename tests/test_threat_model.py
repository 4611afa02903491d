"""Each line of the threat model names tests, and these are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "threat-model.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| threat", "|---"))
]


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("line", LINES, ids=[line[0] for line in LINES])
def test_each_threat_has_a_test_that_is_there(line: list[str]) -> None:
    _, measure, tests, provisions = line
    assert measure
    assert re.fullmatch(r"(?:(?:5\.\d+|I\d+)(?:, )?)+", provisions)
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("`") / 2 > 0
    for file, function in named:
        (place,) = (ROOT / "tests").rglob(file)
        assert function in functions_of(place), f"{file} has no {function}"


def test_every_entry_of_the_lists_that_concerns_a_gateway_has_a_line() -> None:
    told = {provision for line in LINES for provision in line[3].split(", ")}
    # 5.2 is about an organisation, not about software: how reports of holes are taken.
    assert {f"5.{number}" for number in range(1, 14) if number != 2} <= told
    assert {f"I{number}" for number in range(1, 11)} <= told
