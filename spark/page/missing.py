"""What is missing in a span, in words."""

from typing import Any, NamedTuple

from spark.desk.asked import Asked, text, where
from spark.desk.evidence import Evidence
from spark.desk.kept_tables import KeptTables

_COLUMNS = (
    "epoch_us(after_time)",
    "epoch_us(before_time)",
    *("device", "device_boot", "first", "last", "count", "explained", "reasons"),
)


class Missing(NamedTuple):
    """Readings that are not here. They were taken between two times, in microseconds; None where nothing bounds it."""

    from_us: int | None
    to_us: int | None
    explained: bool
    words: str


def missing_in(tables: KeptTables, limits: Asked, evidence: Evidence, namespace: str | None) -> list[Missing]:
    """All that is missing of a device in a span, the earliest first."""
    named = where([] if namespace is None else [f"namespace = {text(namespace)}"])
    query = f"""SELECT {", ".join(_COLUMNS)} FROM ({tables.missing_sql(limits, evidence)}) {named}
        ORDER BY after_time NULLS FIRST, before_time NULLS FIRST, first, reasons"""
    return [
        Missing(after_us, before_us, explained, _words(*figures, explained=explained, reasons=reasons))
        for after_us, before_us, *figures, explained, reasons in tables.source.rows(query)
    ]


def _words(  # noqa: PLR0913 - columns of `gaps`
    device: str | None,
    boot: str | None,
    first: int | None,
    last: int | None,
    count: int | None,
    *,
    explained: bool,
    reasons: list[Any],
) -> str:
    why = ", ".join(map(str, reasons))
    of_boot = f" of boot {boot}" if boot else ""
    if first is not None:
        numbers = f"Reading {first}" if first == last else f"Readings {first} to {last}"
        are, they = ("is", "it") if first == last else ("are", "they")
        if explained:
            return f"{numbers}{of_boot} {are} gone for good: {why}."
        return f"{numbers}{of_boot} {are} missing. Nobody has said why, so {they} may still come."
    lost = "Readings may be lost, and nobody can count them" if count is None else f"{count:,} {_plural(count)} lost"
    whose = "" if device is not None else " Nobody can say whose they were: they may be of this device."
    return f"{lost}: {why}.{whose}"


def _plural(count: int) -> str:
    return "reading was" if count == 1 else "readings were"
