"""The pass over a partition, against the oracle: windows and rows of `log`, for any split. It needs no Java."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark.arrow_pass import pieces, usual_rows
from spark.arrow_pass.partition_pass import Made, PartitionPass
from spark.arrow_pass.plan import BatchNumbers, ChangesPlan, TableFolder, WindowRules
from spark.arrow_pass.window_parts import Parts, parts_table
from spark.decode.codec_declarations import NO_STREAMS
from spark.decode.correction_records import CORRECTION_TYPE
from spark.decode.record_columns import records_of
from spark.decode.record_rules import Record
from spark.decode.record_times import microseconds
from spark.decode.topic_speakers import TopicOwners
from spark.engine.made_file import MadeFile
from spark.log.edge_times import Clocks, clocks
from spark.log.lane_sequences import Lane, LowNumbers, SeenLane
from spark.log.record_verdicts import Verdicts
from spark.log.time_corrections import correction_in
from tests.support import spark_oracle
from tests.support.read_records import read, source_batch
from tests.support.sizes import size
from tests.support.spark_oracle import KafkaRecord, WindowKey, WindowRow
from tests.support.spark_records import drawn_records, reading, reading_headers

VERDICTS = Verdicts(NO_STREAMS, TopicOwners(), {})
NUMBERS = BatchNumbers(7, "1.2.3", "abc", "query", 5)


def over(  # noqa: PLR0913 - the parts of a pass
    folder: Path,
    batches: Iterable[pa.RecordBatch],
    known: Clocks | None = None,
    *,
    numbers: BatchNumbers = NUMBERS,
    changes: ChangesPlan | None = None,
    seen: Mapping[Lane, LowNumbers] | None = None,
) -> Made:
    log = TableFolder(str(folder / "log"), "event_date", ("event_time", "device", "ordinal"))
    parts = TableFolder(str(folder / "parts"), "window_date", ("window_start", "device"))
    devices = TableFolder(str(folder / "devices"), "", ("run",))
    rules = WindowRules(60, NO_STREAMS.times, known or Clocks())
    judge = VERDICTS.judge().judge
    return PartitionPass(log, parts, devices, numbers, VERDICTS, rules, changes, seen or {}).over(batches, (judge,))


def once_each(records: Iterable[KafkaRecord]) -> list[KafkaRecord]:
    """The records without copies, which only a whole batch can tell apart."""
    first: dict[object, KafkaRecord] = {}
    for record in records:
        first.setdefault(dict(record.headers or []).get("ce_id") or record.place, record)
    return list(first.values())


def known_of(records: Iterable[Record]) -> Clocks:
    told = [
        correction_in(each.namespace or "", each.gateway or "", each.value, each.event_us or 0, each.ce_id or "")
        for each in records
        if each.ce_type == CORRECTION_TYPE and each.reject_reason is None
    ]
    return clocks([correction for correction in told if correction is not None], {})


def rows_of(folder: Path, files: Iterable[MadeFile]) -> list[dict[str, Any]]:
    return [row for file in files for row in pq.ParquetFile(folder / file.name).read().to_pylist()]


def folded(rows: list[dict[str, Any]]) -> dict[WindowKey, tuple[WindowRow, Decimal, list[Decimal]]]:
    """Windows of parts, with the sum of squares and the values."""
    by_key: dict[WindowKey, list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["namespace"], row["device"], row["stream"], row["metric"], row["window_start"])
        by_key.setdefault(key, []).append(row)
    return {
        key: (
            WindowRow(
                sum(part["n"] for part in parts),
                min(part["min"] for part in parts),
                max(part["max"] for part in parts),
                sum(part["sum"] for part in parts),
                min((tuple(part["first_at"].values()), part["first"]) for part in parts)[1],
                max((tuple(part["last_at"].values()), part["last"]) for part in parts)[1],
            ),
            sum(part["sum_of_squares"] for part in parts),
            sorted(value for part in parts for value in part["values"]),
        )
        for key, parts in by_key.items()
    }


@pytest.mark.campaign(seconds=20)
@settings(max_examples=size(5, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 50))
def test_any_split_gives_the_windows_of_all_readings(
    tmp_path_factory: pytest.TempPathFactory, seed: int, partitions: int, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("pass")
    rng = random.Random(seed)  # noqa: S311
    records = once_each(drawn_records(rng, 100))
    known = known_of(read(records))
    of_partition = [[record for record in records if rng.randrange(partitions) == 0] for _ in range(partitions - 1)]
    taken = {record.place for each in of_partition for record in each}
    of_partition.append([record for record in records if record.place not in taken])
    splits = [list({record.place: record for record in each}.values()) for each in of_partition]
    seen: set[tuple[str, int, int]] = set()
    parts: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_ROWS_MAX", piece)
        patch.setattr(usual_rows, "ROWS_MIN", 2)
        for split in splits:
            fresh = [record for record in split if record.place not in seen]
            seen |= {record.place for record in fresh}
            batches = [source_batch(fresh[start : start + 20]) for start in range(0, len(fresh), 20)]
            with_ids = [batch.append_column("topic_id", pa.nulls(batch.num_rows, pa.string())) for batch in batches]
            made = over(folder, with_ids, known)
            parts += rows_of(folder / "parts", made.parts)
            rows += rows_of(folder / "log", made.log)

    expected = spark_oracle.tables(records)
    assert expected.duplicates == 0
    found = folded(parts)
    assert {key: row for key, (row, _, _) in found.items()} == expected.windows
    for row, squares, values in found.values():
        assert (len(values), sum(values)) == (row.n, row.sum)
        assert squares == sum(value * value for value in values)
    assert sorted((row["topic"], row["partition"], row["offset"]) for row in rows) == sorted(
        record.place for record in records
    )


def good_number(record: Record) -> tuple[Lane, int] | None:
    """The lane and the number of a record that may be a copy."""
    if record.reject_reason is not None or record.ce_id is None:
        return None
    assert record.buffer is not None
    assert record.lane is not None
    assert record.lane_sequence is not None
    return (record.buffer, record.lane), record.lane_sequence


@pytest.mark.campaign(seconds=20)
@settings(max_examples=size(5, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(2, 60))
def test_what_came_before_is_set_aside_and_in_no_part(
    tmp_path_factory: pytest.TempPathFactory, seed: int, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("pass")
    rng = random.Random(seed)  # noqa: S311
    sent = drawn_records(rng, 100)
    judge, records = VERDICTS.judge(), list(records_of(source_batch(sent)))
    for each in records:
        judge.judge(each)
    numbers = [named for named in map(good_number, records) if named is not None]
    lanes: dict[Lane, SeenLane] = {}
    for lane, number in rng.sample(numbers, len(numbers) // 8):
        lanes.setdefault(lane, SeenLane()).add([number], 0)
    earlier = {lane: seen.low() for lane, seen in lanes.items()}
    batches = [source_batch(sent[start : start + piece]) for start in range(0, len(sent), piece)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_ROWS_MAX", piece)
        patch.setattr(usual_rows, "ROWS_MIN", 2)
        made = over(
            folder,
            [batch.append_column("topic_id", pa.nulls(batch.num_rows, pa.string())) for batch in batches],
            known_of(records),
            seen=earlier,
        )

    aside: set[tuple[str, int, int]] = set()
    final = Parts(WindowRules(60, NO_STREAMS.times, known_of(records)))
    for place, record in enumerate(records):
        named = good_number(record)
        # In its piece, or in the piece before.
        near = map(good_number, records[max(place // piece - 1, 0) * piece : place])
        if named is not None and (named in near or is_in(named[1], earlier.get(named[0]))):
            aside.add((record.topic, record.partition, record.offset))
        else:
            final.add(record)
    rows = {name: rows_of(folder / "log", files) for name, files in (("final", made.log), ("aside", made.aside))}
    places = {name: sorted((row["topic"], row["partition"], row["offset"]) for row in of) for name, of in rows.items()}
    assert places["aside"] == sorted(aside)
    assert made.set_aside == len(places["aside"])
    assert sorted(places["final"] + places["aside"]) == sorted(each.place for each in sent)
    expected, _ = parts_table(final.parts, NUMBERS.ordinal)
    assert folded(rows_of(folder / "parts", made.parts)) == folded(expected.to_pylist())


def is_in(number: int, seen: LowNumbers | None) -> bool:
    return seen is not None and (number < seen.below or bool(seen.above >> (number - seen.below) & 1))


def test_a_row_of_log_has_all_that_the_record_and_its_batch_tell(tmp_path: Path) -> None:
    headers = reading_headers(17, device_boot="7-1a2b3c4d", doubt="conflict", boot_error_us=5, counter="a/b")
    pack = b'[{"n": "t", "v": 1}, {"n": "t", "v": 2.5, "t": -60}]'
    sent = reading(pack, [*headers, ("trace", b"\xff")], key=b"plant/42")
    sent = replace(
        sent, headers=[(n, b"application/senml+json" if n == "content-type" else v) for n, v in sent.headers or []]
    )
    batch = source_batch([sent, reading(b"{", offset=1)])
    batch = batch.append_column("topic_id", pa.array(["id-1", None]))

    made = over(tmp_path, [batch])
    row, reject = rows_of(tmp_path / "log", made.log)

    assert row == {
        "topic_id": "id-1",
        "topic": "device-thermo",
        "partition": 0,
        "offset": 0,
        "kafka_timestamp": sent.timestamp,
        "key": "plant/42",
        "value": pack,
        "headers": [{"key": "trace", "value": b"\xff"}],
        "namespace": "plant",
        "gateway": "gw-1",
        "device": "42",
        "stream": "device-thermo",
        "buffer": "00112233445566aa",
        "lane": "0123456789ab",
        "lane_sequence": 17,
        "ce_id": "00112233445566aa-0123456789ab-17",
        "ce_type": "sluice.reading",
        "subject": "device/42/thermo",
        "event_time": datetime.fromisoformat("2026-03-14T12:00:00Z"),
        "time_error_us": 1_000,
        "time_quality": "estimated",
        "received_time": datetime.fromisoformat("2026-03-14T12:00:00Z"),
        "gateway_boot": "5d0a1f7e",
        "boot_time_us": 123_456_789,
        "content_type": "application/senml+json",
        "device_boot": "7-1a2b3c4d",
        "device_sequence": 17,
        "device_counter": "a/b",
        "doubt": "conflict",
        "boot_time_error_us": 5,
        "metrics": [
            {"name": "t", "value": Decimal(1), "ago_us": None},
            {"name": "t", "value": Decimal("2.5"), "ago_us": 60_000_000},
        ],
        "pack_span_us": 60_000_000,
        "undeclared": None,
        "duplicate": False,
        "reject_reason": None,
        "ingest": "query",
        "batch": 5,
        "ordinal": 7,
        "code_version": "1.2.3",
        "declarations": "abc",
        "event_date": date(2026, 3, 14),
    }
    assert (reject["value"], reject["metrics"], reject["pack_span_us"]) == (b"{", None, None)
    assert reject["reject_reason"] == "undecodable: the payload is not one JSON object"


def test_records_of_another_version_keep_their_own_batches(tmp_path: Path) -> None:
    batch = source_batch([reading(headers=reading_headers(number), offset=number) for number in (1, 2)])
    for name, values in (("topic_id", ["a", "a"]), ("ingest", ["old", "older"]), ("batch", [3, 4])):
        batch = batch.append_column(name, pa.array(values))

    made = over(tmp_path, [batch], numbers=replace(NUMBERS, ingest=None, batch=None))

    rows = rows_of(tmp_path / "log", made.log)
    assert [(row["ingest"], row["batch"], row["ordinal"]) for row in rows] == [("old", 3, 7), ("older", 4, 7)]


def test_each_part_is_told_as_a_change(tmp_path: Path) -> None:
    records = [
        reading(payload, reading_headers(number), key=key, offset=number)
        for number, (payload, key) in enumerate([(b'{"t": 1}', b"42"), (b'{"t": 2.5}', b"42"), (b'{"t": 1e1}', b"43")])
    ]
    batch = source_batch(records).append_column("topic_id", pa.nulls(3, pa.string()))
    columns = ("namespace", "device", "stream", "metric", "window_start", "n", "min", "max", "late", "ordinal")
    at = datetime(2026, 3, 15, 0, 0, 1, tzinfo=UTC)
    folder = TableFolder(str(tmp_path / "changes"), "at_date", ("window_start", "device", "at"))
    plan = ChangesPlan(folder, columns, "readings", 3, microseconds(at))

    made = over(tmp_path, [batch], changes=plan)

    parts, changes = rows_of(tmp_path / "parts", made.parts), rows_of(tmp_path / "changes", made.changes)
    told = {"cause": "readings", "version": 3, "at": at, "at_date": date(2026, 3, 15)}
    assert changes == [{name: part[name] for name in columns} | told for part in parts]
    assert sorted(change["n"] for change in changes) == [1, 2]


def test_topics_whose_records_have_the_time_of_their_sender_are_told(tmp_path: Path) -> None:
    batch = source_batch([reading(offset=1), replace(reading(offset=2), topic="device-other"), reading(offset=3)])
    batch = batch.append_column("topic_id", pa.nulls(3, pa.string()))
    assert over(tmp_path, [batch]).of_senders == set()
    place = batch.schema.get_field_index("timestampType")
    by_sender = batch.set_column(place, "timestampType", pa.array([1, 0, 1], pa.int32()))
    assert over(tmp_path, [by_sender]).of_senders == {"device-other"}


def test_a_sum_of_squares_that_no_table_holds_is_null(tmp_path: Path) -> None:
    headers = [reading_headers(number) for number in range(101)]
    records = [reading(b'{"t": 999999999999.999999}', each, offset=place) for place, each in enumerate(headers)]

    def squares(count: int) -> Decimal | None:
        batch = source_batch(records[:count]).append_column("topic_id", pa.nulls(count, pa.string()))
        made = over(tmp_path / str(count), [batch])
        (row,) = rows_of(tmp_path / str(count) / "parts", made.parts)
        found: Decimal | None = row["sum_of_squares"]
        return found

    assert squares(100) == Decimal("99999999999999999800000000.0000000001")
    assert squares(101) is None
