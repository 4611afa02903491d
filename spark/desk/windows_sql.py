"""`windows` in DuckDB's SQL (docs/decisions/094): `windows_table` and `window_status` have the same in Spark's words.

Figures are computed in whole numbers, for DuckDB divides decimals as doubles. A sum that fits no column is null, where
DuckDB would raise an error.
"""

from collections.abc import Sequence
from decimal import Decimal

KEY = ("namespace", "device", "stream", "metric")
UNITS = 1_000_000
"""Values are whole numbers of this part."""
HALVES = 10**19
"""Sums of squares are added in two halves of 19 digits each, which no sum makes overflow."""
PROOF_COLUMNS = {
    **dict.fromkeys(("namespace", "device", "stream"), "VARCHAR"),
    "last_us": "BIGINT",
    "proven": "STRUCT(run INTEGER, from_us BIGINT, to_us BIGINT)[]",
    **dict.fromkeys(
        ("missing", "lost", "waits"), "STRUCT(run INTEGER, from_us BIGINT, until_us BIGINT, why VARCHAR)[]"
    ),
}
"""Columns of a table of proofs, as `stream_proofs` makes them."""


def windows(parts: str, size_s: int, percentiles: Sequence[Decimal], proofs: str) -> str:
    """Return windows of `size_s` seconds with all their figures and their status.

    `parts` are rows of `window_parts`, whose length divides `size_s`. `proofs` has `PROOF_COLUMNS`.
    """
    figures = f"SELECT * FROM ({_shown(_folded(parts, size_s), size_s, percentiles)})"
    found = f"""SELECT w.*, {FINDING} AS found FROM (
            SELECT *, epoch_us(window_start) AS asked_from, epoch_us(window_end) AS asked_to FROM ({figures})
        ) AS w LEFT JOIN ({proofs}) AS proof USING (namespace, device, stream)"""
    return f"""SELECT * EXCLUDE (found, asked_from, asked_to), {STATUS} AS status, found.basis AS basis, {WHY} AS why
        FROM ({found})"""


def percentile_name(percentile: Decimal) -> str:
    """The column's name of a percentile, such as `p50` or `p99_9`."""
    return f"p{percentile.normalize():f}".replace(".", "_")


def _folded(parts: str, size_s: int) -> str:
    """Fold all parts of each window into one row. Sums stay whole numbers of millionths."""
    size_us = size_s * 1_000_000
    start_us = "epoch_us(window_start)"
    squares = "CAST(replace(CAST(sum_of_squares AS VARCHAR), '.', '') AS HUGEINT)"
    return f"""SELECT {", ".join(KEY)},
            make_timestamp({start_us} - (({start_us} % {size_us}) + {size_us}) % {size_us}) AS window_start,
            CAST(sum(n) AS BIGINT) AS n, min(min) AS min, max(max) AS max,
            sum(CAST(sum * {UNITS} AS HUGEINT)) AS units,
            count(*) FILTER (sum_of_squares IS NULL) AS without_squares,
            sum({squares} // {HALVES}) AS squares_high, sum({squares} % {HALVES}) AS squares_low,
            min({{'at': first_at, 'value': first}}).value AS first, max({{'at': last_at, 'value': last}}).value AS last,
            list_sort(flatten(list(values))) AS values, CAST(sum(late) AS BIGINT) AS late, max(ordinal) AS ordinal
        FROM ({parts}) GROUP BY ALL"""


def _shown(folded: str, size_s: int, percentiles: Sequence[Decimal]) -> str:
    """Give folded windows the columns that analysts read."""
    ranks = "".join(
        f"values[greatest(1, (n * {round(percentile * 1_000)} + 99999) // 100000)] AS {percentile_name(percentile)}, "
        for percentile in percentiles
    )
    # Twelve decimals of the mean, and eleven of a value's distance to it, as Spark's decimals have.
    away = f"(CAST(CAST(value AS DECIMAL(38, 6)) * {UNITS} AS HUGEINT) * {UNITS} - mean12)"
    distance = f"CAST(CAST(sign({away}) * ((abs({away}) + 5) // 10) AS VARCHAR) || 'e-11' AS DOUBLE)"
    distances = f"list_transform(values, lambda value: {distance})"
    return f"""WITH carried AS (
            SELECT *, squares_high + squares_low // {HALVES} AS high, squares_low % {HALVES} AS low,
                {_half_up(f"units * {UNITS}")} AS mean12
            FROM ({folded})),
        summed AS (
            SELECT *, CASE WHEN without_squares = 0 AND high < {HALVES} THEN high * {HALVES} + low END AS squares
            FROM carried)
        SELECT {", ".join(KEY)}, window_start, window_start + to_seconds({size_s}) AS window_end, n, min, max,
            {_decimal("units", 6)} AS sum, {_decimal("squares", 12)} AS sum_of_squares,
            {_decimal(f"{_half_up('units')} * {UNITS}", 12)} AS mean,
            CASE WHEN n > 1 THEN sqrt(list_sum(list_transform({distances}, lambda each: each * each)) / (n - 1)) END
                AS deviation,
            first, last, {ranks}values, late, ordinal, CAST(window_start AS DATE) AS window_date
        FROM summed"""


def _half_up(units: str) -> str:
    """A whole number divided by `n`, rounded half up away from zero."""
    return f"(sign({units}) * ((2 * abs({units}) + n) // (2 * n)))"


def _decimal(number: str, decimals: int) -> str:
    """A whole number as a decimal of 38 digits, so many of them behind the point."""
    whole, rest = f"abs({number}) // {10**decimals}", f"abs({number}) % {10**decimals}"
    digits = f"concat({whole}, '.', lpad(CAST({rest} AS VARCHAR), {decimals}, '0'))"
    return f"CAST(CASE WHEN {number} < 0 THEN concat('-', {digits}) ELSE {digits} END AS DECIMAL(38, {decimals}))"


def _overlap(span: str) -> str:
    return f"{span}.from_us < asked_to AND {span}.until_us > asked_from"


def _some(spans: str, condition: str) -> str:
    return f"len(list_filter({spans}, lambda span: {condition})) > 0"


def _finding(final: str, basis: str, spans: str) -> str:
    kind = "STRUCT(run INTEGER, from_us BIGINT, until_us BIGINT, why VARCHAR)[]"
    return f"{{'is_final': {final}, 'basis': CAST({basis} AS VARCHAR), 'spans': CAST({spans} AS {kind})}}"


_COVERS = "span.from_us <= asked_from AND span.to_us >= asked_to"
_LOST_OF_RUN = f"""list_filter(proof.lost, lambda loss: {_overlap("loss")}
    AND len(list_filter(proof.proven, lambda span: span.run = loss.run AND {_COVERS})) > 0)"""


def _near(spans: str) -> str:
    return f"list_filter({spans}, lambda span: {_overlap('span')})"


FINDING = f"""CASE
    WHEN {_some("proof.proven", _COVERS)} THEN {_finding("TRUE", "'sequence'", _LOST_OF_RUN)}
    WHEN {_some("proof.missing", _overlap("span"))} THEN {_finding("FALSE", "'sequence'", _near("proof.missing"))}
    WHEN coalesce(proof.last_us < asked_to, TRUE) THEN {_finding("FALSE", "NULL", "NULL")}
    WHEN {_some("proof.waits", _overlap("span"))} THEN {_finding("FALSE", "'watermark'", _near("proof.waits"))}
    ELSE {_finding("TRUE", "'watermark'", _near("proof.lost"))}
END"""
"""The first rule that fits, with the spans of time that speak against the window: see `window_status.FINDING`."""
_WHYS = "list_transform(found.spans, lambda span: span.why)"
_PLACES = f"list_transform(list_distinct({_WHYS}), lambda why: {{'place': list_position({_WHYS}, why), 'why': why}})"
STATUS = """CASE WHEN NOT found.is_final THEN 'provisional' WHEN len(found.spans) = 0 THEN 'complete'
    ELSE 'complete_with_loss' END"""
WHY = f"""CASE
    WHEN found.basis IS NULL THEN 'no later reading of it'
    WHEN found.is_final AND len(found.spans) = 0 THEN NULL
    WHEN found.is_final
    THEN 'readings of about this time were lost: ' || array_to_string(list_sort(list_distinct({_WHYS})), ', ')
    WHEN found.basis = 'watermark'
    THEN array_to_string(list_transform(list_sort({_PLACES}), lambda each: each.why), '; ')
    WHEN len(found.spans) = 1 THEN found.spans[1].why
    ELSE concat(found.spans[1].why, ', and ', len(found.spans) - 1, ' more spans are')
END"""
