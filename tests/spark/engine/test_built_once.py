"""An expression is built once, until its arguments change."""

import pytest

from spark.engine.built_once import built_once

pytestmark = pytest.mark.spark


def test_a_built_expression_is_one_object_until_its_arguments_change() -> None:
    made: list[str] = []

    @built_once
    def build(name: str) -> list[str]:
        made.append(name)
        return [name]

    assert build("a") is build("a")
    assert build("b") == ["b"]
    assert made == ["a", "b"]
