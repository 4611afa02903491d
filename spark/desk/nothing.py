"""Explains an answer without rows: where the nearest rows are, or which name nobody knows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo
from difflib import get_close_matches

from spark.desk.asked import Asked, text
from spark.desk.row_text import time_text
from spark.desk.tables import Tables
from spark.engine.told_error import ToldError


class UnknownNameError(ToldError):
    """A question names a device, site, stream or metric that nobody knows. The message has the nearest name."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


@dataclass(frozen=True, slots=True)
class Nothing:
    """Times in microseconds since 1970 of the nearest rows outside of a span; None where there are none."""

    before_us: int | None = None
    after_us: int | None = None
    has_span: bool = False

    def words(self, zone: tzinfo = UTC) -> str:
        """Say where the nearest rows are; empty if no span was asked for."""
        nearest = [
            f"the {where} it is of {time_text(us, zone)}"
            for where, us in (("last before", self.before_us), ("first after", self.after_us))
            if us is not None
        ]
        if nearest:
            return f"nothing in this span: {', '.join(nearest)}"
        return "nothing in this span, nor at any other time" if self.has_span else ""


def why_nothing(tables: Tables, asked: Asked, time: str | None, rows: Callable[[Asked], str]) -> Nothing:
    """Find out why an answer has no rows. Raises UnknownNameError.

    `rows` gives SQL of the rows within other limits, and `time` is their column that the span limits.
    """
    found = Nothing() if time is None else _nearest(tables, asked, time, rows)
    if found.before_us is None and found.after_us is None:
        known = {"device": tables.devices, "site": tables.sites, "stream": tables.streams, "metric": tables.metrics}
        for what, names in known.items():
            if (name := getattr(asked, what)) is not None:
                _expect_known(name, what, names())
    return replace(found, has_span=asked.has_span)


def _nearest(tables: Tables, asked: Asked, time: str, rows: Callable[[Asked], str]) -> Nothing:
    """The times of the last row before a span and of the first row after it."""
    limits = []
    if asked.since_us is not None:
        limits.append(("before_us", f"max({time})", f"{time} < make_timestamp({asked.since_us})"))
    if asked.until_us is not None:
        limits.append(("after_us", f"min({time})", f"{time} >= make_timestamp({asked.until_us})"))
    anytime = rows(replace(asked, since_us=None, until_us=None)) if limits else ""
    found = {}
    for name, figure, condition in limits:
        ((found[name],),) = tables.source.rows(f"SELECT epoch_us({figure}) FROM ({anytime}) WHERE {condition}")
    return Nothing(**found)


def _expect_known(name: str, what: str, known: list[str]) -> None:
    if name in known:
        return
    near = get_close_matches(name, known, 1, 0.5)
    few = f"; there are {', '.join(known[:5])}{' and others' if len(known) > 5 else ''}" if known else ""
    told = f". Did you mean {near[0]}?" if near else few
    raise UnknownNameError(f"there is no {what} {text(name)} here{told}", what)
