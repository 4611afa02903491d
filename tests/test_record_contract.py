"""The words that stand in Kafka's records are written once, for both sides."""

import ast
from collections.abc import Iterator
from pathlib import Path

from gateway.record_contract import READING_TYPE, REDELIVERED

ROOT = Path(__file__).parents[1]


def literals(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_module_of_either_side_writes_them_again() -> None:
    # A `conflict` is not only a doubt of a record: other modules have conflicts of their own.
    words = {READING_TYPE, REDELIVERED}
    modules = [*(ROOT / "gateway").rglob("*.py"), *(ROOT / "spark").rglob("*.py")]
    again = {str(module.relative_to(ROOT)): found for module in modules if (found := words & {*literals(module)})}
    assert again.keys() == {"gateway/record_contract.py"}
