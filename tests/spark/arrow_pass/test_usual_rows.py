"""Usual readings by columns give what the rule book gives, for any record. It needs no Java."""

import random
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark.arrow_pass import pieces, usual_rows
from spark.arrow_pass.partition_pass import PartitionPass
from spark.arrow_pass.plan import TableFolder, WindowRules
from spark.arrow_pass.usual_rows import UsualReader
from spark.decode.codec_declarations import NO_STREAMS, Retention, Streams
from spark.decode.record_times import microseconds
from spark.decode.streams_file import parse_streams
from spark.decode.topic_speakers import TopicOwners
from spark.log.edge_times import Clocks, Correction, clocks
from spark.log.record_verdicts import Verdicts
from tests.spark.arrow_pass.test_partition_pass import NUMBERS, folded, rows_of
from tests.spark.decode.test_payload_decode import DECLARED, payloads
from tests.support.read_records import source_batch
from tests.support.sizes import size
from tests.support.spark_oracle import Headers, KafkaRecord
from tests.support.spark_records import BOOTS, NOON, changed, reading, reading_headers, rfc3339

PLAIN = Verdicts(NO_STREAMS, TopicOwners(), {})
FLAT = parse_streams(
    """
    unknown = "accept"
    [streams.device-thermo]
    codec = "json"
    metrics.t = { decimals = 2, min = -40, max = 125.5 }
    metrics.u = { decimals = 0 }
    metrics.tick = {}
    metrics.kwh = { from = "x", scale = "0.001", decimals = 3, min = -40.125 }
    metrics."ü" = {}
    """,
    Path("streams.toml"),
)


@pytest.fixture(autouse=True)
def columns_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads few records by columns too."""
    monkeypatch.setattr(usual_rows, "ROWS_MIN", 1)


def with_ids(records: Iterable[KafkaRecord]) -> pa.RecordBatch:
    batch = source_batch(records)
    return batch.append_column("topic_id", pa.nulls(batch.num_rows, pa.string()))


def usual_places(records: Sequence[KafkaRecord], verdicts: Verdicts = PLAIN, known: Clocks | None = None) -> list[int]:
    table = pa.Table.from_batches([with_ids(records)])
    found = UsualReader(verdicts, known or Clocks()).read(table)
    return sorted(np.concatenate([each.rows for each in found]).tolist()) if found else []


@contextmanager
def by_the_rule_book() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UsualReader, "read", lambda *_: [])
        yield


def passed(folder: Path, records: Sequence[KafkaRecord], verdicts: Verdicts, rules: WindowRules) -> tuple[Any, Any]:
    """The rows of `log`, by date, and the folded windows."""
    log, parts = TableFolder(str(folder / "log"), "d", ()), TableFolder(str(folder / "parts"), "d", ())
    over = PartitionPass(log, parts, TableFolder(str(folder / "devices"), "", ()), NUMBERS, verdicts, rules)
    made = over.over([with_ids(records)], (verdicts.judge().judge,))
    rows = [(file.name.split("/")[0], rows_of(folder / "log", [file])) for file in made.log]
    found = rows_of(folder / "parts", made.parts)
    windows = [(row["namespace"], row["device"], row["stream"], row["metric"], row["window_start"]) for row in found]
    if len(set(windows)) < len(windows):
        assert len(set(made.devices)) < len(made.devices)
    late: dict[Any, int] = {}
    for key, row in zip(windows, found, strict=True):
        late[key] = late.get(key, 0) + row["late"]
    return rows, (folded(found), late)


def expect_same(
    folder: Path, records: Sequence[KafkaRecord], verdicts: Verdicts = PLAIN, rules: WindowRules | None = None
) -> None:
    rules = rules or WindowRules(60, verdicts.streams.times)
    by_columns = passed(folder / "columns", records, verdicts, rules)
    with by_the_rule_book():
        by_rules = passed(folder / "rules", records, verdicts, rules)
    assert by_columns[0] == by_rules[0]
    assert by_columns[1] == by_rules[1]


TEXTS = st.one_of(
    st.sampled_from(
        ["", "0", "-0", "007", "+1", " 1", "9223372036854775807", "9223372036854775808", "-5", "1_0", "\u0661"]
    ),
    st.sampled_from(["2026-02-30T00:00:00.000000Z", "0999-01-01T00:00:00.000000Z", "2026-03-14T24:00:00.000000Z"]),
    st.sampled_from(["/plant/gw-2", "/a/b/c", "//b", "plant/gw", "/plant/", "sluice.gateway.heartbeat", "ü", "1.0"]),
    st.integers(-(2**63), 2**63).map(str),
    st.datetimes(timezones=st.just(UTC)).map(rfc3339),
    st.text(max_size=3),
)


USERS: st.SearchStrategy[tuple[str, bytes | None]] = st.tuples(
    st.sampled_from(["mqtt_unit", "mqtt_", "mqtt_ü", "mqtt_ce_id", "mqtt_" + "n" * 8_188]),
    st.sampled_from([b"C", b"C", b"", b"\xff", None, b"v" * 8_192, b"v" * 8_193]),
)
"""Headers of user properties, most of them as a gateway writes them."""


@st.composite
def headers(draw: st.DrawFn) -> Headers | None:
    """Headers of readings, most of them right."""
    sequence = draw(st.integers(0, 3) | st.sampled_from([10**15, 2**53, 2**53 + 1, 2**63 - 1]))
    made = reading_headers(
        sequence,
        time=draw(st.sampled_from([NOON, NOON + timedelta(seconds=59, microseconds=999_999), NOON.replace(2000)])),
        error_us=draw(st.sampled_from([0, 1_000, 2**63 - 1])),
        gateway_boot=draw(st.sampled_from(BOOTS)),
        boot_us=draw(st.sampled_from([0, 60_000_000, -5, 2**62])),
        namespace=draw(st.sampled_from(["plant", "plant", "attic"])),
        content_type=draw(st.sampled_from(["application/json", "application/octet-stream", "text/plain"])),
        lane=draw(st.sampled_from(["0123456789ab", "ba9876543210"])),
        device_boot=draw(st.sampled_from([None, "7-1a2b3c4d"])),
        boot_error_us=draw(st.sampled_from([None, None, None, 5])),
        doubt=draw(st.sampled_from([None, None, None, "conflict"])),
    )
    made = [*made, *draw(st.lists(USERS, max_size=3))]
    wrong = draw(st.integers(0, 9))
    if wrong == 0:
        name = draw(st.sampled_from([name for name, _ in made]))
        made = [(each, draw(TEXTS).encode() if each == name else content) for each, content in made]
    elif wrong == 1:
        place = draw(st.integers(0, len(made)))
        extra = draw(st.sampled_from([("traceparent", b"\xff"), ("ce_id", b"1"), ("", None)]))
        made = [*made[:place], extra, *made[place + draw(st.integers(0, 1)) :]]
    elif wrong == 2:
        nothing: Headers = [(name, None) for name, _ in made]
        return draw(st.sampled_from([None, [], made[::-1], nothing]))
    return made


USUAL_PAYLOADS = st.dictionaries(
    st.sampled_from(["t", "u", "x", "tick", "seq", "boot", "lux"]),
    st.one_of(
        st.integers(-999, 999).map(str),
        st.decimals(-(10**12), 10**12, places=6, allow_nan=False).map(lambda number: f"{number:f}"),
        st.sampled_from(
            ["125.505", "125.504999", "-40.005", "-0.5", "0.5", "-0", "1.0049999996", "null", '"a:t"', "true"]
        ),
    ),
    max_size=4,
).map(lambda members: "{" + ", ".join(f'"{name}": {value}' for name, value in members.items()) + "}")


@st.composite
def records(draw: st.DrawFn, offset: int = 0) -> KafkaRecord:
    text = draw(st.one_of(USUAL_PAYLOADS, USUAL_PAYLOADS, payloads()))
    key = draw(st.sampled_from([b"42", b"42", b"plant/42", b"attic/42", b"/", b"", b"\xff", None, "ü/ü".encode()]))
    record = reading(text.encode("utf-8", "surrogatepass"), draw(headers()), offset=offset, key=key)
    arrived = draw(st.sampled_from([timedelta(seconds=5), timedelta(minutes=3), timedelta(days=-400)]))
    return replace(
        record,
        value=None if draw(st.integers(0, 30)) == 0 else record.value,
        topic=draw(st.sampled_from(["device-thermo", "device-thermo", "device-other", "device-nested", "level"])),
        timestamp=NOON + arrived,
    )


CORRECTED = clocks(
    [
        Correction(
            *("plant", "gw-1", BOOTS[0], 1, "synced", 0, microseconds(NOON) - 60_000_000, Decimal(5), 10, Decimal(1)),
            *(False, microseconds(NOON), "a"),
        ),
        Correction(
            *("plant", "gw-1", BOOTS[1], 1, "synced", 0, microseconds(NOON), Decimal("-0.5"), 10, Decimal(1)),
            *(True, microseconds(NOON), "b"),
        ),
    ],
    {},
)


@pytest.mark.campaign(seconds=60)
@settings(max_examples=size(60, 1_000), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(records(), min_size=1, max_size=12),
    st.sampled_from([NO_STREAMS, FLAT, DECLARED, replace(FLAT, retention=Retention(log_days=300))]),
    st.sampled_from([TopicOwners(), TopicOwners((("/plant/gw-1", ("device-t*",)),))]),
    st.sampled_from([{}, {("plant", "42"): microseconds(NOON)}]),
    st.sampled_from([Clocks(), CORRECTED]),
    st.sampled_from([None, microseconds(NOON)]),
)
def test_columns_give_the_rows_and_windows_of_the_rule_book(  # noqa: PLR0913, PLR0917 - all that decides
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[KafkaRecord],
    streams: Streams,
    owners: TopicOwners,
    deletions: dict[tuple[str, str], int],
    known: Clocks,
    open_from_us: int | None,
) -> None:
    placed = [replace(record, offset=offset) for offset, record in enumerate(drawn)]
    rules = WindowRules(60, streams.times, known, open_from_us)
    expect_same(tmp_path_factory.mktemp("usual"), placed, Verdicts(streams, owners, deletions), rules)


def test_the_usual_reading_is_read_by_columns() -> None:
    numbered = reading_headers(device_boot="7-1a2b3c4d")
    several = [
        reading(b'{"t": 21.5, "u": 40}'),
        reading(b' {"seq": 3,"t":-0.5, "boot": "7-1a"}'.strip(), numbered),
        reading(b'{"u": 1, "x": 5}'),
        reading(key=b"plant/42", value=b'{"t": 1}'),
    ]
    flat = Verdicts(FLAT, TopicOwners(), {})
    assert usual_places(several, flat) == [0, 1, 2, 3]
    users: Headers = [("mqtt_unit", b"C"), ("mqtt_raw", b"\xff")]
    with_users = [
        replace(each, headers=[*(each.headers or ()), *users[:number]]) for number, each in enumerate(several[:3])
    ]
    assert usual_places(with_users, flat) == [0, 1, 2]
    strange: Headers = [("traceparent", b"1")]
    assert usual_places([replace(several[1], headers=[*(several[1].headers or ()), *users, *strange])], flat) == []
    # Of which nothing is declared, too; but not what the first of them lacks.
    assert usual_places(several) == [0, 1, 3]


@pytest.mark.parametrize(
    "record",
    [
        reading(b'{"t": 1, "t": 2}'),
        reading(b'{"seq": 1, "seq": 2, "t": 1}'),
        reading(b'{"t": 1, "lux": 2}'),
        reading(b'{"t": 126}'),
        reading(b'{"t": 1e1}'),
        reading(b'{"t": 1, "s": "a\\"t\\": 2"}'),
        reading(b'{"seq": 1}'),
        reading(b"{}"),
        reading(headers=reading_headers(doubt="conflict")),
        reading(headers=changed(reading_headers(), "ce_type", "sluice.gateway.heartbeat")),
        reading(headers=changed(reading_headers(), "ce_timeerror", "-1")),
        reading(headers=changed(reading_headers(), "ce_lanesequence", "01")),
    ],
)
def test_what_is_not_usual_is_left_to_the_rule_book(record: KafkaRecord, tmp_path: Path) -> None:
    flat = Verdicts(FLAT, TopicOwners(), {})
    good = reading(b'{"t": 1}')
    assert usual_places([good, record, good], flat) == [0, 2]
    expect_same(tmp_path, [good, record, good], flat)


def test_sums_are_exact_whatever_the_values(tmp_path: Path) -> None:
    rng = random.Random(1)  # noqa: S311
    values = [
        f"{rng.choice(['', '-'])}{rng.randrange(10 ** rng.choice([2, 5, 11]))}.{rng.randrange(10**6):06d}"
        for _ in range(300)
    ]
    sent = [
        reading(
            f'{{"t": {value}}}'.encode(),
            reading_headers(number, time=NOON + timedelta(seconds=number % 3)),
            offset=number,
        )
        for number, value in enumerate(values)
    ]
    assert len(usual_places(sent)) == 300
    expect_same(tmp_path, sent)


def test_a_reading_that_a_correction_no_longer_moves_is_usual() -> None:
    start_us = microseconds(NOON)
    sent = [reading(headers=reading_headers(number, boot_us=boot_us)) for number, boot_us in enumerate([0, 10**9])]
    correction = Correction(
        *("plant", "gw-1", BOOTS[0], 1, "synced", 0, start_us, Decimal(0), 10, Decimal(1), False, start_us, "a")
    )
    assert usual_places(sent, known=clocks([correction], {})) == [1]


def test_few_records_of_a_topic_are_left_to_the_rule_book(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual_rows, "ROWS_MIN", 3)
    several = [replace(reading(), topic=topic) for topic in ("a", "b", "a", "b", "a")]
    assert usual_places(several) == [0, 2, 4]


def test_dates_of_all_kinds_are_those_of_the_rule_book(tmp_path: Path) -> None:
    days = [date(2019, 12, 31), date(2020, 1, 1), NOON.date(), NOON.date() + timedelta(days=2)]
    sent = [
        reading(headers=reading_headers(number, time=datetime(day.year, day.month, day.day, 23, 59, 59, tzinfo=UTC)))
        for number, day in enumerate(days)
    ]
    expect_same(tmp_path, sent)


def test_one_piece_at_a_time_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ROWS_MAX", 1)
    expect_same(tmp_path, [reading(headers=reading_headers(number), offset=number) for number in range(5)])
