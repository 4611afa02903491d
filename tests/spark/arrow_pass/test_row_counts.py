"""Rows of `log` are counted by columns as they would be one by one, in any pieces. It needs no Java."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark.arrow_pass import pieces
from spark.arrow_pass.plan import TableFolder
from spark.arrow_pass.row_counts import counting
from spark.decode.record_columns import type_of
from spark.ingest.census import Census, census_of
from spark.log.verdicts import CONFLICT, DELETED
from tests.support.sizes import size
from tests.support.spark_records import EPOCH

DATED, UNDATED = date(2026, 3, 14), date(1970, 1, 1)
Row = dict[str, Any]

OF_OTHER_TYPES = {"duplicate": pa.bool_(), "event_date": pa.date32()}


def row_of(number: int = 1, error_us: int = 5, **others: Any) -> Row:
    """A good reading, `number` seconds after 1970."""
    return {
        "topic_id": "id-1",
        "topic": "device-thermo",
        "partition": 0,
        "offset": number,
        "kafka_timestamp": EPOCH + timedelta(seconds=10),
        "value": b"{}",
        "namespace": "plant",
        "gateway": "gw-1",
        "device": "42",
        "stream": "device-thermo",
        "buffer": "00112233445566aa",
        "lane": "0123456789ab",
        "lane_sequence": number,
        "ce_id": "some",
        "ce_type": "sluice.reading",
        "event_time": EPOCH + timedelta(seconds=number % 1_000),
        "time_error_us": error_us,
        "time_quality": "estimated",
        "gateway_boot": "boot",
        "boot_time_us": number,
        "boot_time_error_us": None,
        "device_boot": "7-1a2b3c4d",
        "device_sequence": number,
        "device_counter": None,
        "undeclared": None,
        "duplicate": False,
        "reject_reason": None,
        "ingest": "query",
        "event_date": DATED,
        **others,
    }


def batches_of(rows: Sequence[Row]) -> list[pa.RecordBatch]:
    columns = {
        name: pa.array([row[name] for row in rows], OF_OTHER_TYPES.get(name, type_of(name))) for name in row_of()
    }
    batch = pa.RecordBatch.from_pydict(columns)
    return [batch.slice(start, 3) for start in range(0, len(rows), 3)]


def census(rows: Sequence[Row]) -> Census:
    return census_of(count for made in counting()(batches_of(rows)) for count in made["counts"].to_pylist())


def may_be_copy(row: Row) -> bool:
    reason = row["reject_reason"]
    return row["ce_id"] is not None and (reason is None or reason.startswith(CONFLICT))


def expected(rows: Sequence[Row]) -> Census:
    """The census, by plain loops."""
    found = Census()
    for row in rows:
        kind, reason = row["ce_type"], row["reject_reason"]
        is_good, is_dated = reason is None, row["event_date"] != UNDATED
        found.rows += 1
        found.rejected += not is_good and reason != DELETED
        found.deleted += reason == DELETED
        found.corrections += is_good and kind == "sluice.gateway.time-correction"
        found.losses += is_good and kind == "sluice.gateway.loss"
        found.events += is_good and kind not in {None, "sluice.reading"}
        found.event_bytes += len(row["value"]) if is_good and kind == "sluice.gateway.heartbeat" else 0
        found.unwindowed += is_good and kind == "sluice.reading" and not row["duplicate"] and not is_dated
        add_topic(found, row)
    add_lanes(found, [row for row in rows if row["ce_id"] is not None])
    numbers = [row for row in rows if row["ce_type"] == "sluice.reading" and may_be_copy(row)]
    found.counted = sum(row["device_sequence"] is not None for row in numbers)
    return found


def add_topic(found: Census, row: Row) -> None:
    topic = row["topic"]
    if not row["ingest"].startswith("retry-"):
        offsets = found.next_offsets[topic]
        offsets[row["partition"]] = max(offsets.get(row["partition"], 0), row["offset"] + 1)
        if row["topic_id"] is not None:
            found.topic_ids[topic] = row["topic_id"]
    taken_us = (row["kafka_timestamp"] - EPOCH) // timedelta(microseconds=1)
    found.newest_us[topic] = max(taken_us, found.newest_us.get(topic, taken_us))
    if row["undeclared"]:
        found.undeclared[topic].update(row["undeclared"])


def add_lanes(found: Census, rows: Sequence[Row]) -> None:
    lanes: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lanes.setdefault((row["buffer"], row["lane"]), []).append(row)
    for lane, of_lane in lanes.items():
        found.lanes[lane] = sorted(row["lane_sequence"] for row in of_lane)
        good = {row["lane_sequence"] for row in of_lane if may_be_copy(row)}
        if nobodys := {*found.lanes[lane]} - good:
            found.nobodys_copies[lane] = sorted(nobodys)


def in_order(found: Census) -> dict[str, Any]:
    """The figures, with lists and lanes in one form."""
    told = {name: getattr(found, name) for name in Census.__dataclass_fields__}
    lanes = {lane: list(numbers) for lane, numbers in found.lanes.items()}
    # Repetitions are those of a piece. The test of `device_rows` knows pieces.
    return told | {"lanes": lanes, "repeated": None}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    row = row_of(
        draw(st.integers(0, 9) | st.sampled_from([-(2**63), 2**63 - 1])),
        draw(st.integers(0, 2)),
        topic=draw(st.sampled_from(["device-thermo", "gateway-events"])),
        partition=draw(st.integers(0, 1)),
        kafka_timestamp=datetime(2026, 3, 14, 12, draw(st.integers(0, 3)), tzinfo=UTC),
        event_time=datetime(2026, 3, 14, 12, draw(st.integers(0, 3)), tzinfo=UTC),
        value=draw(st.sampled_from([b"", b"{}", b"abc"])),
        gateway=draw(st.sampled_from(["gw-1", "gw-2"])),
        device=draw(st.sampled_from(["42", "43", "ü"])),
        lane=draw(st.sampled_from(["0123456789ab", "ba9876543210"])),
        ce_type=draw(
            st.sampled_from(
                ["sluice.reading"] * 5 + [f"sluice.gateway.{name}" for name in ("heartbeat", "loss", "time-correction")]
            )
        ),
        time_quality=draw(st.sampled_from(["estimated", "bounded"])),
        boot_time_error_us=draw(st.sampled_from([None, 0, 5])),
        device_boot=draw(st.sampled_from(["7-1a2b3c4d", "8-1a2b3c4d", None])),
        device_counter=draw(st.sampled_from([None, "", "a/b"])),
        undeclared=draw(st.sampled_from([None, None, ["x"], ["lux", "ü"]])),
        duplicate=draw(st.sampled_from([False, False, True])),
        reject_reason=draw(st.sampled_from([None] * 5 + ["header: bad", f"{CONFLICT}: other", DELETED])),
        ingest=draw(st.sampled_from(["query", "query", "retry-query"])),
        event_date=draw(st.sampled_from([DATED, UNDATED])),
        topic_id=draw(st.sampled_from(["id-1", None])),
    )
    number = row["lane_sequence"]
    if draw(st.integers(0, 5)) == 0:
        # Of a record with a fault in its headers, little is known.
        unknown = (
            "ce_id",
            "buffer",
            "lane",
            "lane_sequence",
            "event_time",
            "device_boot",
            "device_sequence",
            "ce_type",
        )
        row |= dict.fromkeys(unknown) | {"reject_reason": "header: bad", "event_date": UNDATED}
    return row | {"offset": abs(number) % 2**62}


@pytest.mark.campaign(seconds=10)
@settings(max_examples=size(100, 2_000), deadline=None)
@given(st.lists(rows(), min_size=1, max_size=30), st.integers(1, 40))
def test_columns_in_any_pieces_give_what_loops_give(drawn: list[Row], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_ROWS_MAX", piece)
        assert in_order(census(drawn)) == in_order(expected(drawn))


def test_one_read_gives_the_figures_of_a_batch_and_its_rows_of_devices() -> None:
    rows = [row_of(number) for number in (1, 2, 5)]
    folder = TableFolder(None, "", ("device", "first", "last"))
    *counts, file = [row for made in counting(folder, 7)(batches_of(rows)) for row in made.to_pylist()]
    assert in_order(census_of(row["counts"] for row in counts)) == in_order(expected(rows))
    (row,) = pq.read_table(pa.BufferReader(file["content"])).to_pylist()
    assert [(island["first"], island["last"]) for island in row["islands"]] == [(1, 2), (5, 5)]
    assert (row["batch_first"], row["batch_last"]) == (7, 7)


def test_a_lane_with_all_its_numbers_is_a_range() -> None:
    found = census([row_of(number) for number in (3, 1, 2)])
    assert found.lanes == {("00112233445566aa", "0123456789ab"): range(1, 4)}


def test_no_list_grows_by_names_that_a_program_makes_up() -> None:
    found = census([row_of(number, undeclared=[f"n{number:03}"]) for number in range(300)])
    assert found.undeclared["device-thermo"] == {f"n{number:03}" for number in range(101)}
