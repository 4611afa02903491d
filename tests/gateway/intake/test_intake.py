"""The front door: route, identity, quarantine, losses, in front of a real buffer."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.buffer.commit_queue import DELETE_DELAY_S
from gateway.buffer.losses import losses_of_rows
from gateway.buffer.rows import Origin, Position, Quarantined, Series, spans_of
from gateway.buffer.sensor_runs import DeviceRuns, Run
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.clock.rfc3339 import rfc3339
from gateway.clock.sensor_clocks import SAVE_INTERVAL_US, SENSOR_CLOCK_MARKS
from gateway.clock.sensor_dates import DEFAULT_LIMITS, told_us
from gateway.intake.front_door import BrokerDoor, FrontDoor
from gateway.intake.kept_clocks import CLOCKS_AT_ONCE, keep_clocks, recall_clocks
from gateway.intake.payload_identity import BINARY
from gateway.intake.quarantine_retry import RetryOutcome, retry_quarantined
from gateway.intake.routes import compile_routes
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.record import ESTIMATED_ROUNDING_US, RecordEncoder
from gateway.reading import BufferFileError, Doubt, Reading, Recalled
from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from gateway.settings import GatewaySettings, KafkaSettings, PayloadIdentity, RouteSettings, TimeSource
from tests.support.buffers import CLOCK, changed, fill, input_of, opened, quarantined_of, reading_of, rows, series_of
from tests.support.waiting import patience, until

JSON_ROUTE = RouteSettings("device/{device}/{stream}", "device-{stream}", identity="json")
KAFKA = KafkaSettings(bootstrap=("127.0.0.1:1",))
GATEWAY = GatewaySettings("gw1", "north")
HELD = range(0)
"""A sensor that holds nothing."""


@asynccontextmanager
async def front_door(
    path: Path, key: str = "name", bytes_max: int = 10_000_000
) -> AsyncIterator[tuple[FrontDoor, Buffer]]:
    gateway = msgspec.convert({"id": "gw1", "namespace": "north", "key": key}, GatewaySettings)
    routes = compile_routes([JSON_ROUTE], None, frozenset((KAFKA.events_topic, KAFKA.quarantine_topic)))
    async with opened(path / "buffer.db", bytes_max=bytes_max, fair_from=1.0) as buffer:
        yield FrontDoor(buffer, routes, gateway, KAFKA, lambda: 5), buffer


async def take(door: FrontDoor, *readings: Reading) -> bool:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    door.take(readings, outcome.set_result)
    return await asyncio.wait_for(outcome, patience(10))


def reading(
    payload: bytes, topic: str = "device/42/thermo", writer: str | None = None, *, redelivered: bool = False
) -> Reading:
    return reading_of(topic, payload, doubt=Doubt.REDELIVERED if redelivered else 0, writer=writer)


async def test_a_reading_gets_its_series_and_its_sensors_identity(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(b'{"celsius": 21.5, "boot": "3-0000beef", "seq": 17}'))
        (row,) = await rows(buffer)
        assert (row.datum.device_boot, row.datum.device_sequence) == ("3-0000beef", 17)
        assert await series_of(buffer, row.series) == Series(
            "device-thermo", "42", "42", "device/42/thermo", "sluice.reading", "application/json", "device/42/thermo"
        )


async def test_each_stream_of_a_serial_sensor_keeps_its_variables(tmp_path: Path) -> None:
    """They share port, device and Kafka topic. Only the variables tell them apart."""
    route = RouteSettings("device/{device}/{stream}", "all")
    streams = ("thermo", "light", "thermo")
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route, serial_topic="device/{device}/{stream}")
        assert await take(door, *(reading_of(f"device/42/{stream}", b"1", port="/dev/ttyUSB0") for stream in streams))
        stored = [await series_of(buffer, row.series) for row in await rows(buffer)]
    assert [dict(series.variables)["stream"] for series in stored] == list(streams)
    assert len({series.key for series in stored}) == 1


async def test_a_name_is_refused_until_a_route_escapes_it_or_names_the_device(tmp_path: Path) -> None:
    """Input that waits in the quarantine because of its name is taken in again by a route that can take it."""
    topics = ("home/aa:bb/t", "home/Living room/t", f"home/{'ü' * 40}/t")
    plain = RouteSettings("home/{device}/{stream}", "home-{stream}")
    async with opened(tmp_path / "buffer.db") as buffer:
        assert await take(door_of(buffer, plain), *(reading(b"1", topic=topic) for topic in topics))
        named = RouteSettings("home/Living room/{stream}", "home-{stream}", device="living-room")
        mended = door_of(buffer, replace(plain, names="escape"), named)
        assert await retry_quarantined(mended, buffer, [1, 2, 3]) == RetryOutcome(2, {"device-name-too-long": 1}, 0)
        found = [await series_of(buffer, row.series) for row in (await rows(buffer))[-2:]]
    assert [(series.key, series.device, dict(series.variables)) for series in found] == [
        ("x--aa-3A-bb", "x--aa-3A-bb", {"device": "aa:bb", "stream": "t"}),
        ("living-room", "living-room", {}),
    ]


async def test_equal_names_of_two_sites_are_stored_apart_where_the_key_says_so(tmp_path: Path) -> None:
    """They do not share a duplicate window, nor a share of the buffer."""
    route = RouteSettings("{site}/{device}/{stream}", "all", key="{site}/{device}", identity="json")
    payload = b'{"boot":"b1","seq":1}'
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route)
        for topic in ("north/42/t", "south/42/t", "north/42/t"):
            assert await take(door, reading(payload, topic=topic))
        found = [await series_of(buffer, row.series) for row in await rows(buffer)]
    assert [series.device for series in found] == ["north/42", "south/42"]
    # The namespace is called `north` too: the tables take it off once.
    assert [series.key for series in found] == ["north/north/42", "south/42"]


FIELD = [
    b'{"boot":"b1","seq":2,"celsius":nan}',
    b'{"boot":"b1","seq":2,"v":1}\0',
    b'\xef\xbb\xbf{"boot":"b1","seq":2,"v":1}',
]


@pytest.mark.parametrize("payload", FIELD, ids=["nan", "NUL", "BOM"])
async def test_a_payload_that_is_no_json_is_stored_once_and_not_called_json(tmp_path: Path, payload: bytes) -> None:
    async with front_door(tmp_path) as (door, buffer):
        sent = [b'{"boot":"b1","seq":1,"v":1}', payload, payload, b'{"boot":"b1","seq":"3","v":1}']
        assert await take(door, *map(reading, sent))
        assert await take(door, reading(payload))
        stored = await rows(buffer)
        kinds = [(await series_of(buffer, row.series)).content_type for row in stored]
        assert [(row.datum.payload, row.datum.device_boot, row.datum.device_sequence) for row in stored] == [
            (sent[0], "b1", 1),
            (payload, "b1", 2),
            (sent[3], "b1", 3),
        ], "byte for byte, in order"
        assert kinds == ["application/json", "application/octet-stream", "application/json"]
        assert (door.counts["payload-not-json"], door.counts["identity-missing"]) == (3, 0)
        (fault,) = door.heard.last_faults(10)["payload-not-json"]
        assert (fault.device, fault.readings) == ("42", 3)


@pytest.mark.parametrize(
    ("declared", "payload", "sent_as"),
    [
        ("application/json", b"21.5", "application/json"),
        ("application/json", b"ON", "application/octet-stream"),
        ("application/json; charset=utf-8", b'{"t":nan}', "application/octet-stream"),
        ("application/senml+json", b'[{"n":"t","v":NaN}]', "application/octet-stream"),
        ("application/json", b'{"name":"\xe4"}', "application/octet-stream"),
        ("text/plain", b"nan", "text/plain"),
        ("application/cbor", b"\xff", "application/cbor"),
    ],
)
async def test_what_a_payload_is_sent_on_as(tmp_path: Path, declared: str, payload: bytes, sent_as: str) -> None:
    route = replace(JSON_ROUTE, identity="none", content_type=declared)
    async with opened(tmp_path / "buffer.db") as buffer:
        door = FrontDoor(buffer, compile_routes([route], None, frozenset()), GATEWAY, KAFKA, lambda: 5)
        assert await take(door, reading(payload))
        (row,) = await rows(buffer)
        assert (await series_of(buffer, row.series)).content_type == sent_as
        assert door.counts["payload-not-json"] == (sent_as != declared)


async def test_every_device_whose_payload_has_no_identity_is_told_with_the_cause(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, _):
        for device, payload in (
            ("a", b'{"seq":1}'),
            ("b", b"{"),
            ("a", b'{"boot":1,"seq":"x"}'),
            ("c", b'{"boot":1,"seq":1}'),
        ):
            assert await take(door, reading(payload, f"device/{device}/thermo"))
        told = door.heard.last_faults(10)["identity-missing"]
        assert [(fault.device, fault.cause, fault.readings) for fault in told] == [
            ("a", "no `boot`", 2),
            ("b", "no JSON: it ends too early, after 1 byte", 1),
        ], "a cause is looked for once a second"
        assert [fault.device for fault in door.heard.last_faults(1)["identity-missing"]] == ["a"]


async def test_the_key_may_carry_the_namespace(tmp_path: Path) -> None:
    async with front_door(tmp_path, key="namespace/name") as (door, buffer):
        await take(door, reading(b"{}"))
        (row,) = await rows(buffer)
        series = await series_of(buffer, row.series)
        assert (series.key, series.device) == ("north/42", "42")


@pytest.mark.parametrize(
    "payload",
    [
        b"21.5",
        b"{}",
        b'{"boot": 1}',
        b'{"boot": 1, "seq": -1}',
        b'{"boot": 1, "seq": 9223372036854775808}',
        b'{"boot": "", "seq": 1}',
        b'{"boot": [], "seq": 1}',
        b"\xff\x00",
        b"",
        b"[" * 50_000,
        b'{"boot": 1, "seq": 1, "deep": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
async def test_a_payload_without_an_identity_is_stored_as_it_is(tmp_path: Path, payload: bytes) -> None:
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(payload))
        (row,) = await rows(buffer)
        assert (row.datum.payload, row.datum.device_sequence) == (payload, None)
        assert door.counts["identity-missing"] == 1
        assert door.counted_last["identity-missing"] == "42"


async def test_serial_lines_without_identities_count_as_no_missing_identity(tmp_path: Path) -> None:
    topic, port = "device/42/text", "/dev/ttyUSB0"
    async with front_door(tmp_path) as (door, buffer):
        of_text = [reading_of(topic, payload, port=port) for payload in (b'{"grams":412}', b'{"boot":"b","seq":3}')]
        assert await take(door, *of_text, *of_text)
        assert door.counts["identity-missing"] == 0
        assert [row.datum.device_sequence for row in await rows(buffer)] == [None, 3, None], "one that is there is used"


async def test_the_quarantine_names_the_device_of_a_reading_without_a_route(tmp_path: Path) -> None:
    port = "/dev/serial/by-path/a"
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, serial_topic="farm/{stream}/{device}/x")
        scale = reading_of("farm/text/scale.1/x", b"{}", port=port)
        assert await take(door, scale)
        assert (door.quarantine.by_reason, door.quarantine.last) == (
            {"no-route": 1},
            {"no-route": ("scale.1", f"farm/text/scale.1/x ({port})")},
        )
        door.unreadable("wind", port, b"$", 1, "nmea-start")
        assert door.quarantine.last["nmea-start"] == ("wind", port)
        # A stranger's publication names nobody. A client that had to log in is known.
        assert await take(door, reading(b"1", "farm/text/42/x"), reading(b"2", "farm/text/42/x", writer="43"))
        kept = await quarantined_of(buffer, range(1, 5))
        assert [(of.device, of.topic, of.subject) for of in kept.values()] == [
            ("scale.1", scale.topic, port),
            ("wind", None, port),
            ("", "farm/text/42/x", "farm/text/42/x"),
            ("43", "farm/text/42/x", "farm/text/42/x"),
        ]


async def test_ever_new_topics_take_no_memory_for_ever(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, _):
        await take(door, *(reading(b"x", topic="kitchen/" + "x" * 60_000 + str(number)) for number in range(20)))
        assert not door._topics.known


async def test_a_payload_that_no_route_takes_is_acknowledged_and_quarantined_whole(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(b"\x00raw", topic="kitchen"), reading(b"x", writer="43"))
        unroutable, foreign = await rows(buffer)
        report = json.loads(unroutable.datum.payload)
        assert report["reason"] == "no-route"
        assert report["payload_base64"] == "AHJhdw=="
        assert json.loads(foreign.datum.payload)["reason"] == "not-the-writers-device"
        assert (await series_of(buffer, foreign.series)).topic == "gateway-quarantine"


async def test_losses_are_summed_up_by_device_and_reason(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        door.lost("42", "refused-qos0", 2)
        door.lost("42", "refused-qos0")
        door.lost("s1", "sensor-ring-overflow", 5)
        assert await door.events.report_losses() == 2
        assert await door.events.report_losses() == 0  # nothing is told twice
        kept = await rows(buffer)
        records = [json.loads(row.datum.payload) for row in kept]
        assert [(record["device"], record["reason"], record["count"]) for record in records] == [
            ("42", "refused-qos0", 3),
            ("s1", "sensor-ring-overflow", 5),
        ]


async def test_losses_that_the_buffer_refuses_are_counted_on(tmp_path: Path) -> None:
    async with front_door(tmp_path, bytes_max=1_000_000) as (door, buffer):
        await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = 1").fetchone())
        door.lost("42", "refused-qos0", 2)
        with pytest.raises(BufferFileError):
            await door.events.report_losses()
        door.lost("42", "refused-qos0", 1)
        await buffer.run(lambda file: file.connection.execute("PRAGMA query_only = 0").fetchone())
        assert await door.events.report_losses() == 1
        (kept,) = await rows(buffer)
        assert json.loads(kept.datum.payload)["count"] == 3


async def test_a_report_that_does_not_come_to_the_disk_makes_no_loss_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with front_door(tmp_path) as (door, buffer):
        door.lost("42", "refused-qos0", 2)
        with monkeypatch.context() as patched:
            patched.setattr("gateway.buffer.file.forget_losses", fails)
            for _ in range(3):
                with pytest.raises(BufferFileError):
                    await door.events.report_losses()
            assert not door.events.lost_told
        assert await door.events.report_losses() == 1
        assert door.events.lost_told == {"42": 2}
        assert door.events.lost_told_us
        assert len(await rows(buffer)) == 1


async def test_losses_outlive_a_restart_until_they_are_reported(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, _):
        door.lost("attic", "sensor-ring-overflow", 2, ("7-00000001", 5, 6))
        await asyncio.sleep(DELETE_DELAY_S + 0.3)
        door.lost("attic", "sensor-ring-overflow", 1, ("7-00000001", 9, 9))
    async with front_door(tmp_path) as (door, buffer):
        assert await door.events.report_losses() == 1
        (kept,) = await rows(buffer)
        body = json.loads(kept.datum.payload)
        assert (body["count"], body["device_boot"], body["first_sequence"], body["last_sequence"]) == (
            3,
            "7-00000001",
            5,
            9,
        )


async def test_losses_that_nobody_could_count_are_not_added_up(tmp_path: Path) -> None:
    """Together they would say that the numbers between them may be lost too."""
    run = "7-00000001"
    async with front_door(tmp_path) as (door, buffer):
        door.lost("attic", "sensor-ring-overflow", 2, (run, 1, 2))
        door.lost("attic", "sensor-ring-overflow", 0, (run, 5, 6))
        door.lost("attic", "sensor-ring-overflow", 0, (run, 20, 29))
        assert await door.events.report_losses() == 1
        told = [json.loads(row.datum.payload) for row in await rows(buffer)]
        kinds = {(await series_of(buffer, row.series)).type for row in await rows(buffer)}
        assert kinds == {"sluice.gateway.loss"}
        assert sorted((body["count"], body["first_sequence"], body["last_sequence"]) for body in told) == [
            (0, 5, 6),
            (0, 20, 29),
            (2, 1, 2),
        ]
        assert {(body["device"], body["device_boot"], body["reason"]) for body in told} == {
            ("attic", run, "sensor-ring-overflow")
        }
        # Records that are dropped unsent are counted again, added up, and then tell no numbers.
        (span,) = spans_of(await rows(buffer))
        await buffer.transact(lambda file: file.count_losses(losses_of_rows(file.connection, span, "buffer-full")))
        assert await door.events.report_losses() == 1
        again = json.loads((await rows(buffer))[-1].datum.payload)
        assert (again["count"], again["first_sequence"], again["last_sequence"]) == (2, 1, 2)


async def test_frames_of_a_serial_line_wait_for_no_disk(tmp_path: Path) -> None:
    sample = reading_of("device/attic/thermo", b"1", port="/dev/ttyUSB0", device_boot="7-1a", device_sequence=3)
    async with opened(tmp_path / "buffer.db", disk_after_ms=60_000) as buffer:
        beginning = Position(buffer.lane.number, -1)
        await buffer.read(beginning, 10)
        await buffer.go_direct(frozenset(["device-thermo"]), buffer.id)
        taken = asyncio.create_task(take(door_of(buffer, JSON_ROUTE), sample))
        await until(lambda: buffer.state.rows == 1)
        _, (row,) = await buffer.read(beginning, 10)
        buffer.confirm(buffer.id, spans_of([row]))
        assert await taken
        assert buffer.counts["spared"] == 1


OTHER_ROUTE = RouteSettings("kitchen/{device}", "kitchen")


def door_of(buffer: Buffer, *routes: RouteSettings, serial_topic: str | None = None) -> FrontDoor:
    gateway = msgspec.convert({"id": "gw1", "namespace": "north"}, GatewaySettings)
    return FrontDoor(buffer, compile_routes(routes, None, frozenset(), serial_topic), gateway, KAFKA, lambda: 5)


async def test_quarantined_input_is_taken_in_again_once_a_route_takes_it(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(b"1", topic="kitchen/7", redelivered=True), reading(b"2", topic="cellar"))
        assert await retry_quarantined(door, buffer, [1, 2, 99]) == RetryOutcome(0, {"no-route": 2}, 1)
        mended = door_of(buffer, JSON_ROUTE, OTHER_ROUTE)
        assert await retry_quarantined(mended, buffer, [1, 2, 99]) == RetryOutcome(1, {"no-route": 1}, 1)
        again = (await rows(buffer))[-1]
        assert (again.datum.payload, again.datum.doubt) == (b"1", Doubt.REDELIVERED)
        assert await retry_quarantined(mended, buffer, [1]) == RetryOutcome(0, {}, 1)
        assert await buffer.transact(lambda file: file.lose_quarantined([1, 2])) == 1


async def test_for_what_is_taken_in_again_nobody_waits(tmp_path: Path) -> None:
    """Its clock will not come to be known any more. With two clocks unknown, its receipt may lie years ahead."""
    path, unknown = tmp_path / "buffer.db", BootClock("unknown", 0.0)
    async with opened(path, "boot-0", lambda: unknown) as buffer:
        kept = reading_of("kitchen/7", b'{"boot":1,"seq":7,"tick":5}', 10**12)
        assert await take(door_of(buffer), kept)
    async with opened(path, clock=lambda: unknown) as buffer:
        mended = door_of(buffer, replace(OTHER_ROUTE, identity="json"))
        assert await retry_quarantined(mended, buffer, [1]) == RetryOutcome(1, {}, 0)
        assert (await rows(buffer))[-1].datum.tick_ms is not None
        assert not mended.new_clocks.waiting


async def test_a_record_refused_by_kafka_is_replayed_unchanged_although_its_sequence_is_known(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(b'{"boot": 1, "seq": 7}'))
        (row,) = await rows(buffer)
        datum = changed(row, received_us=3, doubt=Doubt.CONFLICT).datum
        refused = Quarantined(
            reason="record-too-large",
            device="42",
            subject="device/42/thermo",
            series=row.series,
            boot_id=buffer.boot_id,
            datum=datum,
        )
        await buffer.quarantine(buffer.id, [door.quarantine.entry(refused)], [])
        assert await retry_quarantined(door, buffer, [1]) == RetryOutcome(1, {}, 0)
        again = (await rows(buffer))[-1]
        assert changed(again, sequence=row.sequence, received_us=row.datum.received_us, doubt=0) == row
        assert again.datum.doubt == Doubt.CONFLICT
        assert again.datum.received_us == 3


async def test_times_of_another_boot_are_carried_over_with_their_bound(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    quarantined = input_of("no-route", b"x", "", "kitchen/7", 1_000, event_us=900, topic="kitchen/7")
    async with opened(path, boot="boot-0") as buffer:
        await buffer.quarantine(buffer.id, [door_of(buffer).quarantine.entry(quarantined)], [])
    with sqlite3.connect(path) as file:
        # That boot began a second before this one, and knew its time to 250 microseconds.
        file.execute("UPDATE boot SET offset_us = ?, error_us = 250, clock = NULL", (CLOCK.offset_us(0) - 1_000_000,))
    file.close()
    async with opened(path) as buffer:
        assert await retry_quarantined(door_of(buffer, OTHER_ROUTE), buffer, [1]) == RetryOutcome(1, {}, 0)
        row = (await rows(buffer))[-1]
        assert (row.datum.received_us, row.datum.event_us, row.datum.event_error_us) == (-999_000, -999_100, 250)


async def losses(door: FrontDoor, buffer: Buffer) -> list[tuple[object, ...]]:
    """Device, count, its boot, first and last sequence of each loss that is reported now."""
    before = {row.sequence for row in await rows(buffer)}
    await door.events.report_losses()
    records = [json.loads(row.datum.payload) for row in await rows(buffer) if row.sequence not in before]
    assert {record["reason"] for record in records} <= {"sensor-ring-overflow"}
    return [
        (record["device"], record["count"], record["device_boot"], record["first_sequence"], record["last_sequence"])
        for record in records
    ]


async def test_what_a_sensor_says_it_dropped_is_a_loss_once(tmp_path: Path) -> None:
    sample = reading(b'{"celsius":21.53,"boot":"7-1a2b3c4d","seq":58,"lost":[12,57]}')
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, sample)
        assert await take(door, sample), "sent again, as its acknowledgement was lost"
        assert await losses(door, buffer) == [("42", 46, "7-1a2b3c4d", 12, 57)]
        assert await losses(door, buffer) == []
        stored, _ = await rows(buffer)
        assert stored.datum.payload == sample.datum.payload
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, sample)
        assert await losses(door, buffer) == [], "the gateway's restart changes nothing"
        assert door.counts["lost-unreadable"] == 0


@pytest.mark.parametrize(
    "lost",
    [
        *(b"[57,12]", b"[-1,3]", b"[3,58]", b"[3]", b"[3,4,5]", b'"3"', b"3", b"null", b"{}", b"[3.5,4]", b"[1e3,4]"),
        b"[0,%d]" % 2**64,
        b"[" * 50_000 + b"]" * 50_000,
    ],
)
async def test_a_report_of_drops_that_makes_no_sense_costs_its_reading_nothing(tmp_path: Path, lost: bytes) -> None:
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(b'{"boot":"7-1a2b3c4d","seq":58,"lost":' + lost + b"}"))
        (row,) = await rows(buffer)
        assert await losses(door, buffer) == []
        # A payload that is too deep to be read has no identity either.
        assert (row.datum.device_sequence, door.counts["lost-unreadable"]) in {(58, 1), (None, 0)}
        assert row.datum.device_sequence == 58 or len(lost) > 1_000


async def test_drops_beyond_what_counters_hold_are_refused(tmp_path: Path) -> None:
    payload = b'{"boot":"7","seq":9223372036854775807,"lost":[0,9223372036854775806]}'
    async with front_door(tmp_path) as (door, buffer):
        assert await take(door, reading(payload))
        assert await losses(door, buffer) == []
        assert door.counts["lost-unreadable"] == 1


async def test_the_sequences_of_a_run_are_known_across_restarts_and_streams(tmp_path: Path) -> None:
    def sample(sequence: int, stream: str = "thermo", boot: str = "7") -> Reading:
        return reading(b'{"boot":"%s","seq":%d}' % (boot.encode(), sequence), f"device/42/{stream}")

    async with front_door(tmp_path) as (door, buffer):
        assert (await door.recall("42", "7", HELD)).stored == frozenset()
        assert await take(
            door, *(sample(sequence) for sequence in range(100)), sample(100, "door"), sample(3, boot="8")
        )
        expected = frozenset(range(36, 101))
        assert (await door.recall("42", "7", HELD)).stored == expected
        assert (await door.recall("42", "8", HELD)).stored == {3}
        assert (await door.recall("43", "7", HELD)).stored == frozenset()
    async with front_door(tmp_path) as (door, buffer):
        assert (await door.recall("42", "7", HELD)).stored == expected
        buffer.confirm(buffer.id, spans_of(await rows(buffer)))
        assert await take(door, sample(101))
    async with front_door(tmp_path) as (door, _):
        assert (await door.recall("42", "7", HELD)).stored == frozenset(range(37, 102)), "101 took the place of 36"


async def test_what_was_told_as_lost_and_what_is_quarantined_is_known_after_a_restart(tmp_path: Path) -> None:
    def sample(sequence: int, topic: str) -> Reading:
        return reading_of(topic, b"21.5", port="/dev/ttyUSB0", device_boot="7-1a2b3c4d", device_sequence=sequence)

    async with front_door(tmp_path) as (door, _):
        assert await take(door, sample(0, "device/attic/thermo"), sample(1, "no/route/for/this"))
        door.lost("attic", "sensor-ring-overflow", 8, ("7-1a2b3c4d", 2, 9))
        await asyncio.sleep(DELETE_DELAY_S * 2)
    async with front_door(tmp_path) as (door, _):
        assert await door.recall("attic", "7-1a2b3c4d", HELD) == Recalled(frozenset({0, 1}), 10)
        assert await door.recall("attic", "8-1a2b3c4d", HELD) == Recalled(frozenset(), 0)


async def test_a_serial_sensor_that_only_the_fallback_takes_is_known_by_its_name(tmp_path: Path) -> None:
    """Its losses are reported under that name, and its stored readings must be found under that name too."""
    topic, boot = "line/attic/thermo", "7-1a2b3c4d"
    samples = [reading_of(topic, b"1", port="/dev/ttyUSB0", device_boot=boot, device_sequence=n) for n in range(5, 9)]
    async with opened(tmp_path / "buffer.db") as buffer:
        gateway = msgspec.convert({"id": "gw1", "namespace": "north"}, GatewaySettings)
        routes = compile_routes([JSON_ROUTE], "strays", frozenset(), "line/{device}/{stream}")
        door = FrontDoor(buffer, routes, gateway, KAFKA, lambda: 5)
        door.lost("attic", "sensor-ring-overflow", 5, (boot, 0, 4))
        assert await take(door, *samples)
        assert await door.recall("attic", boot, HELD) == Recalled(frozenset(range(5, 9)), 5)
        assert await take(door, reading(b"1", topic))
        of_serial, of_mqtt = (await rows(buffer))[0], (await rows(buffer))[-1]
        assert (await series_of(buffer, of_serial.series)).key == "attic"
        assert (await series_of(buffer, of_mqtt.series)).key == topic


async def test_what_is_lost_from_the_quarantine_is_not_missing_from_a_run(tmp_path: Path) -> None:
    """It is counted there: a port that is opened anew must not count it as dropped by the sensor's ring."""

    def sample(sequence: int, topic: str = "device/attic/thermo") -> Reading:
        return reading_of(topic, b"21.5", port="/dev/ttyUSB0", device_boot="7-1a2b3c4d", device_sequence=sequence)

    async with opened(tmp_path / "buffer.db", quarantine_rows_max=2) as buffer:
        door = door_of(buffer, JSON_ROUTE, serial_topic="{stream}/{device}/x")
        assert await take(door, sample(0), *(sample(n, "no/attic/x") for n in (1, 2, 3)), sample(4))
        assert (await door.recall("attic", "7-1a2b3c4d", HELD)).stored == set(range(5)), "1 made room"
        assert await buffer.transact(lambda file: file.lose_quarantined([2, 3])) == 2
        assert (await door.recall("attic", "7-1a2b3c4d", HELD)).stored == set(range(5))
    async with front_door(tmp_path) as (door, _):
        assert (await door.recall("attic", "7-1a2b3c4d", HELD)).stored == set(range(5))


async def test_what_waits_for_room_is_recalled_once_it_is_stored(tmp_path: Path) -> None:
    """A port is opened anew while the buffer is full: readings that the former line took are no loss."""

    def sample(sequence: int) -> Reading:
        return reading_of(
            "device/attic/thermo", b"1", port="/dev/ttyUSB0", device_boot="7-1a", device_sequence=sequence
        )

    async with front_door(tmp_path, bytes_max=400_000) as (door, buffer):
        _, held = await fill(buffer)
        taken = asyncio.create_task(take(door, sample(0), sample(1)))
        await asyncio.sleep(0)
        recall = asyncio.create_task(door.recall("attic", "7-1a", HELD))
        assert (await door.recall("attic", "8-1a", HELD)).stored == frozenset(), "others do not wait"
        await asyncio.wait((recall,), timeout=0.5)
        assert not recall.done()
        afterwards = asyncio.create_task(take(door, *(sample(n) for n in range(40, 140))))
        buffer.confirm(buffer.id, spans_of(await rows(buffer)))
        assert await held
        assert await taken
        assert await afterwards
        assert (await asyncio.wait_for(recall, patience(10))).stored == {0, 1}


async def test_a_run_that_could_not_be_recalled_is_looked_at_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [reading(b'{"boot":"7","seq":%d}' % sequence) for sequence in range(20)]
    async with front_door(tmp_path) as (door, _):
        assert await take(door, samples[0])
        assert await take(door, *samples[1:])
    looked_up, faults = DeviceRuns._known, [sqlite3.OperationalError("disk I/O error")]

    def known(runs: DeviceRuns, run: Run) -> object:
        if faults:
            raise faults.pop()
        return looked_up(runs, run)

    async with front_door(tmp_path) as (door, buffer):
        monkeypatch.setattr(DeviceRuns, "_known", known)
        with pytest.raises(BufferFileError):
            await door.recall("42", "7", HELD)
        assert await take(door, *samples)
        assert len(await rows(buffer)) == len(samples), "what is sent again is known"


# -- sensors' clocks --------------------------------------------------------------------------------


def learnt(door: FrontDoor, device: str, now_us: int) -> None:
    assert door.clocks.of(device, "7-1").probed(now_us, now_us + 1_000, now_us // 1000, 0)


async def test_clocks_are_kept_in_commits_that_store_readings_and_no_oftener_than_that(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        learnt(door, "42", 1)
        await take(door)
        assert await door.marks(SENSOR_CLOCK_MARKS) == {}, "for them alone no card is worn"
        assert await take(door, reading(b"{}"))
        kept = await door.marks(SENSOR_CLOCK_MARKS)
        assert list(kept) == [f"{SENSOR_CLOCK_MARKS}42/"]
        learnt(door, "43", 2_000_000)
        assert await take(door, reading(b"{}"))
        assert await door.marks(SENSOR_CLOCK_MARKS) == kept, "it is not ten seconds later"
        assert await take(door, changed(reading(b"{}"), received_us=1 + SAVE_INTERVAL_US))
        assert list(await door.marks(SENSOR_CLOCK_MARKS)) == [f"{SENSOR_CLOCK_MARKS}42/", f"{SENSOR_CLOCK_MARKS}43/"]
        assert len(await rows(buffer)) == 3


async def test_clocks_are_kept_with_a_commit_that_is_made_anyway(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", queue_bytes_max=100_000, commit_delay_ms=300) as buffer:
        door = door_of(buffer, JSON_ROUTE)
        assert await take(door, reading(b"{}"))
        learnt(door, "42", 1)
        # The queue takes one that it is not full before, however large that is.
        large = asyncio.create_task(take(door, reading(bytes(200_000))))
        await asyncio.sleep(0)
        assert not await take(door, changed(reading(b"{}"), received_us=1 + SAVE_INTERVAL_US))
        assert await door.marks(SENSOR_CLOCK_MARKS) == {}
        assert await large
        assert list(await door.marks(SENSOR_CLOCK_MARKS)) == [f"{SENSOR_CLOCK_MARKS}42/"]


async def test_all_clocks_are_kept_at_the_end_and_gone_on_with(tmp_path: Path) -> None:
    names = [f"{number:04}" for number in range(2 * CLOCKS_AT_ONCE + 1)]
    async with front_door(tmp_path) as (door, buffer):
        for name in names:
            learnt(door, name, 1_000_000)
        keep_clocks(buffer, door.clocks, 5)
    async with front_door(tmp_path) as (door, buffer):
        await recall_clocks(buffer, door.clocks)
        assert sorted(run.device for run in door.clocks.runs()) == names
        clock = door.clocks.find(names[-1], "7-1")
        assert clock is not None
        assert clock.fit.observed_us == 1_001_001


async def test_clocks_that_cannot_be_read_stop_nothing(tmp_path: Path) -> None:
    async with front_door(tmp_path) as (door, buffer):
        pass
    await recall_clocks(buffer, door.clocks)
    assert list(door.clocks.runs()) == []


def route(identity: PayloadIdentity = "json", time: TimeSource = "auto", **others: Any) -> RouteSettings:
    return RouteSettings("device/{device}/{stream}", "device-{stream}", identity=identity, time=time, **others)


NOW_US = CLOCK.offset_us(0)
"""Wall time at CLOCK_BOOTTIME 0."""


async def record(door: FrontDoor, buffer: Buffer, payload: bytes, received_us: int) -> dict[str, str]:
    """The headers of a reading's record, by way of the file."""
    topic = "device/42/thermo"
    assert await take(door, reading_of(topic, payload, received_us))
    row = (await rows(buffer))[-1]
    assert row.datum.payload == payload
    series = await series_of(buffer, row.series)
    batch = EncodedBatch("none")
    batch.add(RecordEncoder(GATEWAY, buffer.lane, series).encode(row, BootTimes(buffer.clock()), 0))
    (found,) = DefaultRecordBatch(bytes(batch._build()))
    assert found.value == payload
    return {name: value.decode() for name, value in found.headers}


@pytest.mark.parametrize("identity", ["json", "cbor", "binary"])
async def test_readings_with_a_tick_get_the_time_that_follows_from_it(tmp_path: Path, identity: Any) -> None:
    """A sensor that sends each second, and each tenth time also the readings that it had kept for ten seconds."""

    def payload(sequence: int, tick_ms: int) -> bytes:
        members = {"celsius": 21.5, "boot": "7-1a2b3c4d", "seq": sequence, "tick": tick_ms}
        if identity == "binary":
            return BINARY.pack(1, 7, 0x1A2B3C4D, sequence, tick_ms) + b"21.5"
        return cbor2.dumps(members) if identity == "cbor" else json.dumps(members).encode()

    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route(identity, oscillator="crystal"))
        samples = []
        for sequence in range(300):
            taken_us = 60_000_000 + sequence * 1_000_000
            kept_us = 10_000_000 if sequence % 10 == 0 else 5_000
            samples.append((taken_us, taken_us + kept_us, payload(sequence, 1_000 + sequence * 1_000)))
        for _, received_us, sent in sorted(samples, key=lambda sample: sample[1]):
            assert await take(door, reading_of("device/42/thermo", sent, received_us))
        stored = sorted(await rows(buffer), key=lambda row: row.datum.device_sequence or 0)
    # A tick that has told its reading's time is not kept beside it.
    assert [(row.datum.device_boot, row.datum.tick_ms) for row in stored] == [
        ("7-1a2b3c4d", 1_000 + sequence * 1_000 if row.datum.event_us is None else None)
        for sequence, row in zip(range(300), stored, strict=True)
    ]
    placed = [
        (row, taken_us) for row, (taken_us, _, _) in zip(stored, samples, strict=True) if row.datum.event_us is not None
    ]
    assert len(placed) > 200
    for row, taken_us in placed:
        assert row.datum.event_us is not None
        assert row.datum.event_us <= row.datum.received_us
        assert abs(row.datum.event_us - taken_us) <= row.datum.event_error_us
    assert placed[-1][0].datum.event_error_us < 200_000


async def test_a_tick_whose_clock_is_not_known_claims_no_bound(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route())
        headers = await record(door, buffer, b'{"boot":"7","seq":1,"tick":5000}', 1_000_000)
        assert (headers["ce_timequality"], headers["ce_timeerror"]) == ("bounded", str(TIME_ERROR_UNKNOWN_US))


@pytest.mark.parametrize("tick", [b"-1", b"4294967296", b"1.5", b'"1"', b"null", b"1e999", b"[1]"])
@pytest.mark.parametrize("time", ["auto", "tick", "receipt"])
async def test_a_tick_that_makes_no_sense_costs_a_reading_nothing(tmp_path: Path, tick: bytes, time: Any) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route(time=time))
        headers = await record(door, buffer, b'{"boot":"7","seq":1,"tick":%b}' % tick, 1_000_000)
        assert (headers["ce_timequality"], headers["ce_devicesequence"]) == ("received", "1")
        is_none = tick == b"null"
        assert door.counts["time-missing"] == (time == "tick" and is_none)
        assert door.counts["tick-unreadable"] == (time != "receipt" and not is_none), "by receipt nobody reads it"


async def test_by_receipt_no_tick_counts(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route(time="receipt"))
        headers = await record(door, buffer, b'{"boot":"7","seq":1,"tick":5000}', 1_000_000)
        assert (headers["ce_timequality"], headers["ce_timeerror"]) == ("received", str(CLOCK.error_us(0)))
        assert (await rows(buffer))[0].datum.tick_ms is None


SENML = {"content_type": "application/senml+json", "time_error_ms": 250.0}


async def test_a_time_that_the_sensor_sent_is_the_readings(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route("none", "senml", **SENML))
        said_us = NOW_US - 1_500_000
        headers = await record(door, buffer, b'[{"bt":%d.5,"n":"a","v":1}]' % (said_us // 10**6), 20_000_000)
        expected = rfc3339(said_us).decode()
        assert (headers["ce_time"], headers["ce_timequality"], headers["ce_timeerror"]) == (
            expected,
            "device",
            "250000",
        )
        assert headers["ce_boottime"] == "20000000", "that of the receipt"
        assert headers["ce_receivedtime"] == rfc3339(NOW_US + 20_000_000).decode()
        assert door.counts["time-missing"] == 0
        (pending,) = (await buffer.outstanding()).lanes
        assert pending.event_from_us <= said_us - NOW_US, "what waits may be of that time"


async def test_a_time_relative_to_now_is_that_long_before_the_receipt(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route("none", "senml", **SENML))
        headers = await record(door, buffer, b'[{"n":"a","t":-7.25,"v":1},{"n":"a","t":-90,"v":1}]', 20_000_000)
        assert (headers["ce_boottime"], headers["ce_timequality"]) == ("12750000", "estimated")
        assert headers["ce_timeerror"] == str(250_000 + 1_000 | ESTIMATED_ROUNDING_US)
        headers = await record(door, buffer, b'[{"n":"a","t":3,"v":1}]', 30_000_000)
        assert headers["ce_boottime"] == "30000000", "nothing was measured after it came in"
        headers = await record(door, buffer, b'[{"n":"a","v":1}]', 40_000_000)
        assert (headers["ce_boottime"], headers["ce_timequality"]) == ("40000000", "received")
        assert not {name for name in door.counts if "time" in name}
        for t, reason in ((b"-2592001", "behind"), (b"61", "ahead"), (b"-1e300", "behind")):
            headers = await record(door, buffer, b'[{"n":"a","t":%b,"v":1}]' % t, 50_000_000)
            assert (headers["ce_boottime"], headers["ce_timequality"]) == ("50000000", "received")
            assert door.counts[f"device-time-{reason}"]


@pytest.mark.parametrize(
    ("timestamp", "counted"),
    [
        (b"0", "device-time-behind"),
        (b"-1", "device-time-behind"),
        (b"-%d" % 10**30, "device-time-behind"),
        (b"%d" % (2**32 * 1000), "device-time-ahead"),
        (b"%d" % 10**30, "device-time-ahead"),
        (b"1e300", "device-time-ahead"),
        (b"%d" % (NOW_US // 1_000_000), "device-time-behind"),
        (b'"2023-11-14T22:13:20Z"', "time-missing"),
        (b"null", "time-missing"),
        (b"NaN", "time-missing"),
        (b"Infinity", "time-missing"),
        (b"1e999", "time-missing"),
        (b"true", "time-missing"),
        (b"1.5", "time-missing"),
    ],
)
async def test_a_time_that_cannot_be_right_costs_a_reading_nothing(
    tmp_path: Path, timestamp: bytes, counted: str
) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        door = door_of(buffer, route("none", "timestamp"))
        headers = await record(door, buffer, b'{"timestamp":%b,"celsius":21.5}' % timestamp, 20_000_000)
        assert headers["ce_time"] == headers["ce_receivedtime"] == rfc3339(NOW_US + 20_000_000).decode()
        assert headers["ce_timequality"] == "received"
        assert door.counts[counted] == 1
        events = [json.loads(row.datum.payload) for row in await rows(buffer)][:-1]
        assert [(event["device"], event["reason"]) for event in events] == (
            [] if counted == "time-missing" else [("42", counted.removeprefix("device-time-"))]
        )


async def test_a_sensors_time_outlives_the_quarantine_and_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    said_us = NOW_US + 5_000_000
    async with opened(path, boot="boot-0") as buffer:
        door = door_of(buffer, route("none", "timestamp"))
        assert await take(door, reading(b'{"timestamp":%d}' % (said_us // 1_000)))
        (row,) = await rows(buffer)
        assert row.datum.device_time_us == said_us
        refused = Quarantined(
            reason="record-too-large", device="42", subject="device/42/thermo", series=row.series, datum=row.datum
        )
        await buffer.quarantine(buffer.id, [door.quarantine.entry(refused)], [])
    async with opened(path) as buffer:
        door = door_of(buffer, route("none", "timestamp"))
        assert await retry_quarantined(door, buffer, [1]) == RetryOutcome(1, {}, 0)
        first, *_, again = await rows(buffer)
        assert (first.datum.device_time_us, again.datum.device_time_us) == (said_us, said_us)
        assert again.datum.event_error_us >= first.datum.event_error_us
        assert told_us(again.datum, CLOCK.around(0), DEFAULT_LIMITS) == said_us


async def test_devices_without_a_secret_leave_room_to_those_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where nobody has one, nobody leaves any."""
    origins: list[Origin] = []
    async with opened(tmp_path / "buffer.db") as buffer:
        monkeypatch.setattr(buffer, "append", lambda _entries, _done, _marks, origin: origins.append(origin))
        for has_secrets in (True, False):
            routes = compile_routes([JSON_ROUTE], None, frozenset())
            door = FrontDoor(buffer, routes, GatewaySettings("gw1"), KAFKA, lambda: 5, has_secrets=has_secrets)
            plain = reading_of("device/42/thermo", b"1")
            door.take([replace(plain, writer="42")], lambda _: None)
            door.take([plain], lambda _: None)
            door.take([replace(plain, subject="/dev/ttyUSB0")], lambda _: None)
            BrokerDoor(door).take([plain], lambda _: None)
    guest, broker = Origin(leaves_room=True), Origin(leaves_room=True, is_broker=True)
    secret = Origin(has_secret=True)
    assert origins == [secret, guest, guest, broker, secret, Origin(), Origin(), Origin(is_broker=True)]
