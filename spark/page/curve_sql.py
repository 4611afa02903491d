"""The query that a person would write for a curve, to go on from in `sluice-cloud sql`."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spark.desk.asked import Asked, equal, text

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def curve_sql(limits: Asked, namespace: str | None, size_s: int, base_s: int) -> dict[str, str]:
    """Return a query for each view of the page. The view `windows` has windows of `base_s` seconds."""
    in_namespace = [] if namespace is None else [f"namespace = {text(namespace)}"]
    of_series = [*equal(limits, "device", "stream", "metric"), *in_namespace]
    of_counter = [*equal(limits, "device"), *in_namespace]
    # A counter that all streams share has no stream.
    of_counter += [f"(stream IS NULL OR {condition})" for condition in equal(limits, "stream")]
    # The windows that begin in the span.
    whole = replace(limits, since_us=_up(limits.since_us, size_s), until_us=_up(limits.until_us, size_s))
    return {
        "windows": _windows(whole, of_series, size_s, base_s),
        "readings": f"""SELECT event_time, time_error_us, time_quality, metric, value, doubt
{_from("readings", [*of_series, *_span("event_time", whole), *_at("readings", "event_time", limits)])}
ORDER BY event_time""",
        "gaps": f"""SELECT after_time, before_time, device_boot, first, last, count, explained, reasons
{_from("gaps", [*of_counter, *_overlap("after_time", "before_time", limits)])}
ORDER BY after_time""",
    }


def _windows(limits: Asked, of_series: list[str], size_s: int, base_s: int) -> str:
    limited = _from("windows", [*of_series, *_span("window_start", limits), *_at("windows", "window_start", limits)])
    if size_s == base_s:
        shown = "window_start, device, metric, n, min, max, mean, deviation, status, basis, why"
        return f"SELECT {shown}\n{limited}\nORDER BY window_start"
    # Of windows, for they are exact sums. `mean` is a binary float then.
    return f"""SELECT time_bucket(INTERVAL {size_s} SECOND, window_start) AS start, device, metric, sum(n) AS n,
  min(min) AS min, max(max) AS max, sum(sum) / sum(n) AS mean, bool_and(status <> 'provisional') AS is_final
{limited}
GROUP BY start, device, metric ORDER BY start"""


def _from(view: str, conditions: list[str]) -> str:
    return f"FROM {view}\nWHERE " + "\n  AND ".join(conditions)


def _span(column: str, limits: Asked) -> list[str]:
    signs = ((">=", limits.since_us), ("<", limits.until_us))
    return [f"{column} {sign} TIMESTAMP '{_time(us)}'" for sign, us in signs if us is not None]


def _overlap(first: str, last: str, limits: Asked) -> list[str]:
    since, until = Asked(since_us=limits.since_us), Asked(until_us=limits.until_us)
    return [
        f"({column} IS NULL OR {each})"
        for column, span in ((last, since), (first, until))
        for each in _span(column, span)
    ]


def _at(view: str, time: str, limits: Asked) -> list[str]:
    """The condition that the device was at the site then."""
    return [] if limits.site is None else [_AT_SITE.format(view=view, time=time, site=text(limits.site))]


_AT_SITE = """EXISTS (SELECT 1 FROM devices WHERE devices.namespace = {view}.namespace
    AND devices.device = {view}.device AND site = {site}
    AND {time} >= coalesce(valid_from, TIMESTAMP '1970-01-01')
    AND {time} < coalesce(valid_to, TIMESTAMP '9999-01-01'))"""


def _up(us: int | None, size_s: int) -> int | None:
    """The first beginning of a window from a time on."""
    return None if us is None else -(-us // (size_s * 1_000_000)) * size_s * 1_000_000


def _time(us: int) -> str:
    time = _EPOCH + timedelta(microseconds=us)
    return f"{time:%Y-%m-%d %H:%M:%S}" + (f".{time.microsecond:06}" if time.microsecond else "")
