"""A question's limits: of which devices, streams, metrics and times an answer is wanted."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


@dataclass(frozen=True, slots=True)
class Asked:
    """The limits of one question. None is no limit. Times are in microseconds since 1970."""

    device: str | None = None
    site: str | None = None
    """Site of the registry where the device was at the time."""
    stream: str | None = None
    metric: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    """Times from `since_us` to before `until_us`."""

    @property
    def has_span(self) -> bool:
        """True if times are limited."""
        return self.since_us is not None or self.until_us is not None


ALL = Asked()
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""Units of a span of time."""
_SPAN = re.compile(r"(\d{1,5})\s*([a-z]+)")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parsed_time(told: str) -> datetime:
    """Read a date or a time in ISO 8601. Raises ValueError, which says what to write."""
    try:
        return datetime.fromisoformat(told)
    except ValueError:
        raise ValueError(f"{told!r} is no time; write 2026-03-14 or 2026-03-14T12:00") from None


def parsed_span(told: str) -> timedelta:
    """Read a span of time. Raises ValueError, which says what to write."""
    found = _SPAN.fullmatch(told)
    if found is None or found[2] not in SECONDS:
        raise ValueError(f"{told!r} is no span of time; write 30min, 2h, 7d or 4w")
    return timedelta(seconds=int(found[1]) * SECONDS[found[2]])


def parsed_zone(told: str) -> tzinfo:
    """Find a time zone by its name. Raises ValueError, which says what to write."""
    if told == "UTC":
        # The default needs no table of zones on the machine.
        return UTC
    try:
        return ZoneInfo(told)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{told!r} is no time zone; write one such as Europe/Berlin") from None


def microseconds(time: datetime, zone: tzinfo = UTC) -> int:
    """Microseconds since 1970 of a time. A time without a zone is as clocks in `zone` show it."""
    return ((time if time.tzinfo else time.replace(tzinfo=zone)) - _EPOCH) // timedelta(microseconds=1)


def text(value: str) -> str:
    """A text as a literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def within(column: str, asked: Asked) -> list[str]:
    """Conditions on a column of times."""
    limits = ((">=", asked.since_us), ("<", asked.until_us))
    return [f"{column} {sign} make_timestamp({us})" for sign, us in limits if us is not None]


def equal(asked: Asked, *columns: str) -> list[str]:
    """Conditions on those of the columns `device`, `site`, `stream` and `metric` that are named."""
    wanted = {"device": asked.device, "site": asked.site, "stream": asked.stream, "metric": asked.metric}
    return [f"{name} = {text(value)}" for name in columns if (value := wanted[name]) is not None]


def may_hold(column: str, value: str) -> str:
    """A condition on Delta's statistics of a file: it may hold rows with this text in a column."""
    return f'("min.{column}" <= {text(value)} AND "max.{column}" >= {text(value)})'


def where(conditions: list[str]) -> str:
    """A WHERE of all conditions; empty without any."""
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""
