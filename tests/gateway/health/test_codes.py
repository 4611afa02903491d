"""Every code of a condition or finding stands on the page of codes, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from gateway.commands.check import kafka, kafka_way
from gateway.condition_codes import CODES
from gateway.health import conditions

ROOT = Path(__file__).parents[3]
MODULES = [*(ROOT / "gateway/health").glob("*.py"), *(ROOT / "gateway/commands/check").glob("*.py")]
ELSEWHERE = {"disk-hangs", "gateway-failing", "topic-flaw"}
"""Codes that no call has as its first argument."""


def written() -> Iterator[str]:
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                code = node.args[0]
                if node.func.id in {"Condition", "_usual", "remark", "wrong"} and isinstance(code, ast.Constant):
                    yield str(code.value)


def test_each_code_is_on_the_page_once() -> None:
    on_page = re.findall(r"^\| `([a-z-]+)` \| ", (ROOT / "docs/conditions.md").read_text(), re.MULTILINE)
    assert len(on_page) == len(set(on_page))
    tables = {*conditions._COUNTED, *kafka_way._CODES.values(), kafka.TOPIC_ABSENT, kafka.TOPIC_UNWRITTEN}
    tables |= {kafka.BROKER_UNREACHED, kafka.BROKER_UNUSABLE}
    assert {*on_page} == {*written()} | tables | ELSEWHERE


def test_the_words_on_a_code_are_those_of_the_page() -> None:
    _, _, rest = (ROOT / "docs/conditions.md").read_text().partition("## Of a running gateway")
    page = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", rest.partition("\n## ")[0], re.MULTILINE))
    assert {code: words.means for code, words in CODES.items()} == page


def test_what_to_do_about_a_code_is_written_once() -> None:
    tree = ast.parse(Path(conditions.__file__).read_text())
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert texts.isdisjoint({words.todo for words in CODES.values()} - {""})
