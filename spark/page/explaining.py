"""Explains one window for the page."""

from typing import Final

from spark.desk.explain import Explanation, explain
from spark.desk.kept_tables import KeptTables
from spark.page.questions import Question, QuestionError

READINGS_MAX: Final = 50
"""Readings of a window that the page lists."""


def explained(tables: KeptTables, asked: Question) -> Explanation:
    """Explain the window that holds the time `at`. Raises QuestionError and what `explain` raises."""
    if asked.asked.device is None or asked.at_us is None:
        raise QuestionError("say which window: device=... and at=2026-03-14T12:05")
    return explain(
        tables,
        asked.asked.device,
        asked.at_us,
        metric=asked.asked.metric,
        stream=asked.asked.stream,
        namespace=asked.namespace,
        size_s=asked.size_s,
        readings_max=READINGS_MAX,
    )
