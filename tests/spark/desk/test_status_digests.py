"""Digests of evidence by day: if a window has another status, its day has another digest, and hardly any other day."""

from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.desk.asked import microseconds
from spark.desk.delta_source import Source
from spark.desk.evidence import Device
from spark.desk.status_digests import digests
from spark.desk.tables import Tables
from spark.desk.windows_sql import windows
from spark.finality.sequence_gaps import Proven
from spark.finality.stream_proofs import StreamProof, Within
from spark.log.edge_times import FOREVER_US

FIRST = date(2026, 3, 14)
DAYS = [FIRST + timedelta(days=number) for number in range(3)]
START_US = microseconds(datetime.combine(FIRST, datetime.min.time(), UTC))
HOUR_US = 3_600_000_000
DEVICE = Device("plant", "42")

# Ends of spans in half hours: at windows' ends, between them, at midnight, and days before and after.
times = st.one_of(
    st.integers(-100, 250).map(lambda halves: START_US + halves * HOUR_US // 2),
    st.just(-FOREVER_US),
    st.just(FOREVER_US),
)
runs = st.integers(0, 2)
spans = st.builds(Within, st.one_of(st.none(), runs), times, times, st.sampled_from(["a", "b"]))
proofs = st.builds(
    StreamProof,
    st.just("thermo"),
    st.one_of(st.none(), times),
    st.lists(st.builds(Proven, runs, times, times), max_size=3),
    *[st.lists(spans, max_size=2)] * 3,
)


@pytest.fixture(scope="module")
def hours() -> Tables:
    """A window for each hour of three days."""
    source = Source()
    source.db.execute(f"""CREATE TABLE parts AS SELECT 'plant' AS namespace, '42' AS device, 'thermo' AS stream,
            't' AS metric, make_timestamp({START_US} + hour * {HOUR_US}) AS window_start, CAST(1 AS BIGINT) AS n,
            v AS min, v AS max, CAST(v AS DECIMAL(38, 6)) AS sum, CAST(1 AS DECIMAL(38, 12)) AS sum_of_squares,
            v AS first, 1 AS first_at, v AS last, 1 AS last_at, [v] AS values, CAST(0 AS BIGINT) AS late, 0 AS ordinal
        FROM (SELECT unnest(range(72)) AS hour, CAST(1 AS DECIMAL(18, 6)) AS v)""")
    return Tables("", source)


def statuses(hours: Tables, proof: StreamProof) -> dict[date, list[tuple[object, ...]]]:
    """What is said of the windows of each day."""
    query = windows("SELECT * FROM parts", 3_600, (), hours.proofs_sql([(DEVICE, proof)]))
    found: dict[date, list[tuple[object, ...]]] = {}
    for day, *told in hours.source.rows(
        f"SELECT CAST(window_start AS DATE), status, basis, why FROM ({query}) ORDER BY window_start"
    ):
        found.setdefault(day, []).append(tuple(told))
    return found


@given(before=proofs, now=proofs, also=proofs)
def test_no_status_changes_on_a_day_whose_digest_is_the_same(
    hours: Tables, before: StreamProof, now: StreamProof, also: StreamProof
) -> None:
    # Most proofs that are drawn differ everywhere. Some have most in common.
    for after in (now, before._replace(proven=now.proven), before._replace(waits=[*before.waits, *also.waits])):
        told, tells = statuses(hours, before), statuses(hours, after)
        was, becomes = digests([(DEVICE, before)], DAYS), digests([(DEVICE, after)], DAYS)
        assert {day for day in DAYS if told[day] != tells[day]} <= {day for day in DAYS if was[day] != becomes[day]}


def at(hour: float) -> int:
    return START_US + round(hour * HOUR_US)


def proof(reach: float, *missing: tuple[float, float], acknowledged: float = 0, last_run: int = 0) -> StreamProof:
    """Numbers without a hole up to an hour, and the word of a gateway up to another."""
    proven = [Proven(0, at(-500), at(1)), Proven(last_run, at(2), at(reach))]
    gaps = [Within(last_run, at(begin), at(end), "missing") for begin, end in missing]
    return StreamProof("thermo", at(reach), proven, gaps, [], [Within(None, at(acknowledged), FOREVER_US, "waits")])


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        (proof(30), proof(30), []),
        (proof(30), proof(31), [1]),
        (proof(30), proof(50), [1, 2]),
        (proof(30, acknowledged=3), proof(30, acknowledged=26), [0, 1]),
        (proof(71, (25, 26)), proof(71), [1]),
        (proof(71, (23, 25)), proof(71), [0, 1]),
        # Another run was found between two: all keep their places in time.
        (proof(60, last_run=1), proof(60, last_run=2), []),
    ],
)
def test_only_days_that_changed_spans_reach_into_have_another_digest(
    before: StreamProof, now: StreamProof, changed: list[int]
) -> None:
    was, becomes = digests([(DEVICE, before)], DAYS), digests([(DEVICE, now)], DAYS)
    assert [number for number, day in enumerate(DAYS) if was[day] != becomes[day]] == changed


def test_the_order_of_devices_does_not_matter_and_their_names_do() -> None:
    other = Device("plant", "43")
    both = [(DEVICE, proof(3)), (other, proof(5))]
    assert digests(both, DAYS) == digests(both[::-1], DAYS)
    assert digests(both, DAYS) != digests([(DEVICE, proof(5)), (other, proof(3))], DAYS)
