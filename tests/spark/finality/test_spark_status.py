"""Finality of the job's own windows: through batches, a restart, losses, and records that Kafka has lost."""

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from spark.batch_job import BatchJob
from spark.cli import main
from spark.decode.streams_file import parse_streams
from spark.engine.delta_staging import jvm_of
from spark.engine.warehouse_folder import only_writer
from spark.finality.loss_table import read_losses
from spark.finality.stream_proofs import REJECTED
from spark.ingest import former_devices
from spark.ingest.former_devices import FORMER
from spark.ingest.reading_starts import append_start, first_start, start_after
from spark.log.device_parts import read_device_parts
from spark.log.log_table import BatchId, open_log
from spark.log.readings_view import open_readings
from spark.log.warehouse_version import folder_of
from spark.registry.registry import Gateway, Registry
from spark.registry.registry_table import load_registry
from spark.source.topic_changes import GoingOn, Loss, TopicNow, TopicRead
from spark.upkeep.device_deletion import delete_device
from spark.upkeep.quarantine_retry import RetryCounts, retry
from spark.upkeep.replay_job import replay
from spark.upkeep.table_upkeep import maintain
from spark.views.evidence import open_gaps
from spark.views.gateways_view import open_gateways
from spark.views.windows_view import open_windows
from tests.support import hostile
from tests.support.desk_equality import expect_same_answers
from tests.support.device_folds import fold_all_devices
from tests.support.former_devices import of_an_earlier_program
from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import EPOCH, LANE, NOON, kafka_frame, reading, reading_headers, rfc3339

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


EVENTS_LANE = LANE[::-1]
OTHER_LANE = "ba9876543210"
BOOT = "7-1a2b3c4d"
NOON_US = (NOON - EPOCH) // timedelta(microseconds=1)


def seconds(after: float) -> datetime:
    return NOON + timedelta(seconds=after)


def counted(*numbers: int, boot: str | None = BOOT, lane: str = LANE) -> list[KafkaRecord]:
    """A reading a second after noon, numbered by its second; without a boot it is not numbered by its sensor."""
    return [
        replace(
            reading(
                f'{{"t": {number}}}'.encode(),
                reading_headers(number, time=seconds(number), boot_us=number * 1_000_000, lane=lane, device_boot=boot),
                offset=number,
            ),
            timestamp=seconds(number + 1),
        )
        for number in numbers
    ]


def event(kind: str, at_s: float, body: dict[str, object], offset: int) -> KafkaRecord:
    headers = reading_headers(
        offset,
        time=seconds(at_s),
        boot_us=round(at_s * 1_000_000),
        quality="synced",
        event_type=f"sluice.gateway.{kind}",
        lane=EVENTS_LANE,
    )
    record = reading(json.dumps(body).encode(), headers, offset=offset, key=b"gw-1")
    return replace(record, topic="gateway-events", timestamp=seconds(at_s + 1))


def heartbeat(at_s: float, acknowledged: int, offset: int, **changes: object) -> KafkaRecord:
    """A heartbeat: the offset up to which Kafka has acknowledged, and that nothing else waits."""
    body: dict[str, object] = {
        "offsets": {"device-thermo": {"0": acknowledged}},
        "pending": [],
        "quarantined": [],
        "low_watermark": rfc3339(seconds(at_s)),
        "depth_rows": 0,
        "oldest_age_s": 0.0,
    }
    return event("heartbeat", at_s, body | changes, offset)


def loss(at_s: float, first: int, last: int, offset: int) -> KafkaRecord:
    body = {
        "device": "42",
        "reason": "sensor-ring-overflow",
        "count": last - first + 1,
        "boot": reading_boot(),
        "first_boottime_us": first * 1_000_000,
        "last_boottime_us": last * 1_000_000,
        "device_boot": BOOT,
        "first_sequence": first,
        "last_sequence": last,
    }
    return event("loss", at_s, body, offset)


def reading_boot() -> str:
    return dict(reading_headers())["ce_gatewayboot"].decode()  # type: ignore[union-attr]


def take(job: BatchJob, number: int, records: Iterable[KafkaRecord], topic_id: str = "id-1") -> None:
    topic_ids = {"device-thermo": topic_id, "gateway-events": "id-3"}
    job.take(kafka_frame(job.spark, list(records)), BatchId("query", number), topic_ids)


def said(spark: SparkSession, warehouse: str, size_s: int | None = None) -> list[tuple[int, str, str | None]]:
    """Beginning and verdict of each window."""
    windows = open_windows(spark, warehouse, size_s).orderBy("window_start").collect()
    return [
        (round(row.window_start.timestamp() - NOON.timestamp()), row.status, row.basis)
        for row in windows
        if row.metric == "t"
    ]


@pytest.mark.long(seconds=75)
def test_numbers_heartbeats_and_what_was_lost_tell_what_is_final(spark: SparkSession, new_warehouse: str) -> None:
    def told() -> dict[str, list[tuple[str, str | None]]]:
        """The status of each device's windows, in their order."""
        found: dict[str, list[tuple[str, str | None]]] = {"42": [], "43": []}
        for row in open_windows(spark, new_warehouse).orderBy("window_start").collect():
            found[row.device].append((row.status, row.basis))
        return found

    def uncounted(*numbers: int) -> list[KafkaRecord]:
        """Records of another device, in another partition."""
        return [replace(each, key=b"43", partition=1) for each in counted(*numbers, boot=None, lane="c" * 12)]

    job = BatchJob(spark, new_warehouse)
    start = first_start(1)
    append_start(spark, job.tables, start)
    job.state.begin(start)
    # One of the first minute cannot be read. The heartbeat speaks of more than was read.
    numbered = [
        replace(each, value=b"{") if each.offset == 30 else each for each in counted(*range(70), *range(75, 130))
    ]
    offsets = {"device-thermo": {"0": 130, "1": 131}}
    take(job, 0, [*numbered, *uncounted(*range(121)), heartbeat(140, 0, 0, offsets=offsets)])
    job.save()
    # Before the first nothing was counted: numbers do not tell whether something was.
    assert told() == {
        "42": [("provisional", "watermark"), ("provisional", "sequence"), ("provisional", None)],
        "43": [("provisional", "watermark"), ("provisional", "watermark"), ("provisional", None)],
    }

    # A new process reads that, and some of the missing readings. Their sensor had lost the rest.
    job = BatchJob(spark, new_warehouse)
    take(job, 1, [*uncounted(*range(121, 131)), *counted(70, 74), loss(80, 71, 73, 1)])
    job.save()
    lost = [("complete_with_loss", "watermark"), ("complete_with_loss", "sequence"), ("provisional", None)]
    assert told() == {
        "42": lost,
        "43": [("complete", "watermark"), ("complete", "watermark"), ("provisional", None)],
    }
    gaps = open_gaps(spark, new_warehouse).orderBy("first").collect()
    assert [(gap.first, gap.last, gap.explained, gap.reasons) for gap in gaps] == [
        (30, 30, True, [REJECTED]),
        (71, 73, True, ["sensor-ring-overflow"]),
    ]

    # Records that Kafka lost unread may be of any earlier time, and of any device.
    now = {"device-thermo": TopicNow("id-2", {0: 130, 1: 140}, {0: 130, 1: 150})}
    losses = (Loss("device-thermo", "id-1", 1, 131, 140),)
    going_on = GoingOn({"device-thermo": {0: 130, 1: 140}}, losses)
    append_start(spark, job.tables, start_after(start, job.next_ordinal, 1, going_on, now))
    assert told() == {
        "42": lost,
        "43": [("complete_with_loss", "watermark"), ("complete_with_loss", "watermark"), ("provisional", None)],
    }


@pytest.mark.long(seconds=35)
def test_a_devices_numbers_tell_what_is_final_and_a_loss_record_explains_a_hole(
    spark: SparkSession, new_warehouse: str
) -> None:
    warehouse = new_warehouse
    job = BatchJob(spark, warehouse)
    take(job, 0, counted(*range(70), *range(75, 130)))
    job.save()

    assert said(spark, warehouse) == [
        # Nothing was counted before it: its numbers do not tell whether something was.
        (0, "provisional", "watermark"),
        (60, "provisional", "sequence"),
        (120, "provisional", None),
    ]
    (gap,) = open_gaps(spark, warehouse).collect()
    assert (gap.first, gap.last, gap["count"], gap.explained) == (70, 74, 5, False)

    # Two of them come late; of the others the gateway tells that its sensor had lost them.
    take(job, 1, [*counted(70, 74), loss(80, 71, 73, 0)])
    job.save()

    assert said(spark, warehouse)[1:] == [(60, "complete_with_loss", "sequence"), (120, "provisional", None)]
    (row,) = open_windows(spark, warehouse).where("status = 'complete_with_loss'").collect()
    assert row.why == "readings of about this time were lost: sensor-ring-overflow"
    shown = CliRunner().invoke(main, ["gaps", "--warehouse", warehouse, "--json"])
    (told,) = map(json.loads, shown.output.splitlines())
    assert (told["first"], told["last"], told["explained"], told["reasons"]) == (71, 73, True, ["sensor-ring-overflow"])


@pytest.mark.long(seconds=70)
def test_all_that_a_device_often_loses_is_known(spark: SparkSession, new_warehouse: str) -> None:
    warehouse, lost = new_warehouse, range(4, 400, 5)
    job = BatchJob(spark, warehouse)
    for number in range(4):
        first = 100 * number
        take(job, number, counted(*(each for each in range(first, first + 100) if each not in lost)))
        job.save()

    gaps = open_gaps(spark, warehouse).orderBy("first").collect()
    assert [(gap.first, gap.last) for gap in gaps] == [(each, each) for each in lost[:-1]]

    # Readings of a minute come late, and earlier ones come again: one unchanged, the others by another gateway.
    late = counted(*(each for each in lost if 59 <= each < 130))
    again = [*counted(81), *counted(82, 64, 8, lane=OTHER_LANE)]
    again = [replace(each, offset=1_000 + each.offset) for each in again]
    job = BatchJob(spark, warehouse)
    counts = job.take(kafka_frame(spark, [*late, *again]), BatchId("query", 4), {"device-thermo": "id-1"})
    job.save()
    assert (counts.duplicates, counts.rejected) == (4, 0)
    assert (60, "complete", "sequence") in said(spark, warehouse)
    still = [each for each in lost[:-1] if not 59 <= each < 130]
    assert [gap.first for gap in open_gaps(spark, warehouse).orderBy("first").collect()] == still
    assert open_readings(spark, warehouse).count() == 400 - len(lost) + len(late)

    # It starts anew, and all that is missing stays known.
    new = counted(*range(3), boot="8-5e6f7a8b", lane=OTHER_LANE)
    take(job, 5, [replace(each, offset=2_000 + each.offset) for each in new])
    fold_all_devices(spark, job.tables)
    assert [gap.first for gap in open_gaps(spark, warehouse).orderBy("first").collect()] == still


@pytest.mark.long(seconds=45)
@pytest.mark.parametrize("saved", [1, 2])
def test_a_warehouse_of_a_program_before_device_parts_is_gone_on_with(
    spark: SparkSession, new_warehouse: str, saved: int
) -> None:
    job = BatchJob(spark, new_warehouse)
    take(job, 0, counted(*range(10), *range(20, 30)))
    take(job, 1, counted(40))
    take(job, 2, counted(50))
    job.save()
    of_an_earlier_program(spark, job.tables, saved)

    # Nothing is known of devices until the next start, so no window is final by mistake.
    assert {status for _, status, _ in said(spark, new_warehouse)} == {"provisional"}
    job = BatchJob(spark, new_warehouse)
    assert not {path.name for path in Path(job.tables).iterdir()} & {*FORMER}
    lost = [(10, 19), (30, 39), (41, 49)]
    assert [(gap.first, gap.last) for gap in open_gaps(spark, new_warehouse).orderBy("first").collect()] == lost
    # Again through another gateway, with what was missing.
    copies = [replace(each, offset=1_000 + each.offset) for each in counted(5, 40, 50, lane=OTHER_LANE)]
    counts = job.take(
        kafka_frame(spark, [*counted(*range(10, 20)), *copies]), BatchId("query", 3), {"device-thermo": "id-1"}
    )
    assert counts.duplicates == 3
    assert [(gap.first, gap.last) for gap in open_gaps(spark, new_warehouse).orderBy("first").collect()] == lost[1:]
    assert open_readings(spark, new_warehouse).count() == 32


@pytest.mark.long(seconds=35)
def test_a_take_over_that_dies_before_the_former_tables_are_gone_is_finished(
    spark: SparkSession, new_warehouse: str
) -> None:
    job = BatchJob(spark, new_warehouse)
    take(job, 0, counted(*range(10), *range(20, 30)))
    job.save()
    of_an_earlier_program(spark, job.tables, 0)

    def dying(_: SparkSession, path: str) -> None:
        min(Path(path, "_delta_log").glob("*.json")).unlink()
        raise InterruptedError

    with patch.object(former_devices, "remove_folder", dying), pytest.raises(InterruptedError):
        BatchJob(spark, new_warehouse)
    jvm_of(spark).org.apache.spark.sql.delta.DeltaLog.clearCache()
    rows = read_device_parts(spark, job.tables).count()

    job = BatchJob(spark, new_warehouse)

    assert read_device_parts(spark, job.tables).count() == rows
    assert not {path.name for path in Path(job.tables).iterdir()} & {*FORMER}
    assert [(gap.first, gap.last) for gap in open_gaps(spark, new_warehouse).collect()] == [(10, 19)]


@pytest.mark.long(seconds=35)
def test_a_heartbeat_counts_once_all_that_it_speaks_of_was_read(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    job = BatchJob(spark, warehouse)
    # It says that Kafka has 131 records of the topic; 121 of them were read.
    take(job, 0, [*counted(*range(121), boot=None), heartbeat(140, 131, 0)])
    job.save()

    assert [status for _, status, _ in said(spark, warehouse)] == ["provisional"] * 3
    (gateway,) = open_gateways(spark, warehouse).collect()
    assert (gateway.gateway, gateway.heartbeat_time, gateway.waiting) == ("gw-1", None, 1)

    # A new process knows all that: the saved state, and the records after it.
    take(job, 1, counted(121, boot=None))
    job = BatchJob(spark, warehouse)
    take(job, 2, counted(*range(122, 131), boot=None))
    job.save()

    found = said(spark, warehouse)
    assert found == [(0, "complete", "watermark"), (60, "complete", "watermark"), (120, "provisional", None)]
    # An hour is not over before all of it is.
    assert said(spark, warehouse, 3600) == [(0, "provisional", None)]
    (gateway,) = open_gateways(spark, warehouse).collect()
    assert (gateway.waiting, gateway.depth_rows, gateway.pending) == (0, 0, 0)
    assert gateway.complete_to_time == gateway.heartbeat_time - timedelta(microseconds=1_000)
    assert (gateway.version, gateway.conditions) == (None, None)
    # Of its box it tells last what had waited in a backlog.
    old, new = ({**hostile.STATE, "lane_number": lane, "version": f"1.{lane}"} for lane in (2, 3))
    take(job, 3, [event("state", 141, new, 1), event("state", 20, old, 2)])
    job.save()
    (gateway,) = open_gateways(spark, warehouse).collect()
    assert (gateway.version, gateway.level, gateway.conditions) == ("1.3", "warn", ["device-silent"])
    assert gateway.state_time - gateway.booted_time == timedelta(seconds=141)
    assert expect_same_answers(spark, warehouse, (), ("gateways",)) > 0
    shown = CliRunner().invoke(main, ["gateways", "--warehouse", warehouse])
    assert "2026-03-14T12:02:20Z" in shown.output
    # The job's own figures, at once and after a start.
    for known in (job, BatchJob(spark, warehouse)):
        (now,) = known.gateways()
        assert (now.gateway, now.site, now.level, now.depth_rows) == ("gw-1", None, "warn", 0)
        assert [each.code for each in now.troubles] == ["device-silent"]
    load_registry(spark, warehouse, Registry(gateways=(Gateway("plant", "gw-1", "north", NOON),)))
    assert BatchJob(spark, warehouse).gateways() == []


@pytest.mark.long(seconds=35)
def test_a_reject_is_a_loss_until_it_could_be_read(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    declared = '[streams."device-thermo"]\ncodec = "json"\nmetrics.t = {{ max = {} }}\n'
    readings = [
        replace(record, value=b'{"t": 999}') if record.offset == 30 else record for record in counted(*range(70))
    ]
    job = BatchJob(spark, warehouse, parse_streams(declared.format(100), Path("streams.toml")))
    take(job, 0, [*readings, heartbeat(80, 70, 0)])
    job.save()
    assert said(spark, warehouse)[0] == (0, "complete_with_loss", "watermark")

    mended = BatchJob(spark, warehouse, parse_streams(declared.format(1_000), Path("streams.toml")))
    assert retry(mended) == RetryCounts(1, 1)

    assert said(spark, warehouse)[0] == (0, "complete", "watermark")


@pytest.mark.long(seconds=30)
def test_records_that_kafka_lost_before_they_were_read_are_losses_of_each_gateway(
    spark: SparkSession, new_warehouse: str
) -> None:
    warehouse = new_warehouse
    job = BatchJob(spark, warehouse)
    start = first_start(1)
    append_start(spark, job.tables, start)
    job.state.begin(start)
    take(job, 0, counted(*range(80), boot=None))
    now = {"device-thermo": TopicNow("id-2", {0: 100}, {0: 131})}
    losses = (Loss("device-thermo", "id-1", 0, 80, 100),)
    anew = start_after(start, job.next_ordinal, 1, GoingOn({"device-thermo": {0: 100}}, losses), now)
    append_start(spark, job.tables, anew)
    # The process ends here: the next one knows where to read on.
    job = BatchJob(spark, warehouse)
    assert job.state.topics()["device-thermo"] == TopicRead("id-2", {0: 100})
    take(job, 1, [*counted(*range(100, 131), boot=None), heartbeat(140, 131, 0)], "id-2")
    job.save()

    # Which readings they were nobody knows: they may have been of any time before.
    assert said(spark, warehouse)[:2] == [
        (0, "complete_with_loss", "watermark"),
        (60, "complete_with_loss", "watermark"),
    ]
    assert BatchJob(spark, warehouse).state.topics()["device-thermo"].next_offsets == {0: 131}


@pytest.mark.long(seconds=100)
def test_the_status_of_windows_stays_when_the_log_has_forgotten_them(spark: SparkSession, new_warehouse: str) -> None:
    warehouse = new_warehouse
    job = BatchJob(spark, warehouse, parse_streams('unknown = "accept"\n[retention]\nlog_days = 30\n', Path("s.toml")))
    # 70 to 74 were lost by the sensor, 125 cannot be read, and one topic fell silent.
    (bad,) = counted(125)
    (idle,) = counted(1, boot=None)
    early = [
        *counted(*range(70), *range(75, 125), *range(126, 190)),
        replace(bad, value=b"{"),
        replace(idle, topic="device-idle", offset=4),
        loss(191, 70, 74, 0),
    ]
    take(job, 0, early)
    days_100 = timedelta(days=100)
    offsets = {"device-thermo": {"0": 190}, "device-idle": {"0": 5}}
    take(job, 1, [heartbeat(days_100.total_seconds(), 0, 1, offsets=offsets)])
    job.save()
    before = said(spark, warehouse), open_gaps(spark, warehouse).count()
    assert [status for _, status, _ in before[0]].count("complete_with_loss") == 2
    assert before[1] == 2

    maintain(job, (NOON + days_100).date())
    job.save()
    assert open_log(spark, warehouse).count() == 1
    assert (said(spark, warehouse), open_gaps(spark, warehouse).count()) == before

    # A replay knows less about records that it can no longer read. It does not forget losses.
    losses = {(row.reason, row["count"]) for row in read_losses(spark, job.tables).collect()}
    assert losses == {("sensor-ring-overflow", 5), (REJECTED, 1)}
    version = replay(spark, warehouse, None, None, only_writer, lambda _: None)
    tables = folder_of(warehouse, version.number)
    assert {(row.reason, row["count"]) for row in read_losses(spark, tables).collect()} == losses
    assert "complete" not in {status for _, status, _ in said(spark, warehouse)}

    delete_device(spark, warehouse, "plant", "42")
    assert [row.reason for row in read_losses(spark, tables).collect()] == ["sensor-ring-overflow"]
