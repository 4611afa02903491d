"""The daemon as a whole: a real MQTT client in front, a real Kafka broker behind, and a kill in between."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from gateway.buffer.losses import LOSS_TYPE
from gateway.buffer.status import read_status
from gateway.record_contract import COUNTER_HEADER, DEVICE_HEADERS, HEADERS
from tests.support.gateways import (
    SLUICE,
    consume,
    consume_until,
    daemon,
    free_port,
    header,
    publish,
    uplink_told,
    write_config,
)
from tests.support.kafka_admin import create_topic
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]
UNREACHABLE = "127.0.0.1:1"
WRITTEN_MAX = 1_000
"""Bytes on the disk for a reading that Kafka has first, some of them for what is written now and then."""


@asynccontextmanager
async def relay(port: int, bootstrap: str) -> AsyncIterator[None]:
    """The way to the broker at `bootstrap`, by another port of this box; it ends with the block."""
    host, _, behind = bootstrap.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(host, int(behind))
        tasks.update(asyncio.create_task(copy(*way)) for way in ((reader, to_broker), (from_broker, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def drained(config: Path) -> None:
    async with asyncio.timeout(patience(30)):
        while read_status(config.with_name("buffer.db")).rows:
            await asyncio.sleep(0.1)


async def test_a_reading_from_mqtt_to_kafka(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "first")
    with daemon(config, port):
        publish(port, "device/42/thermo", '{"celsius": 21.5, "boot": "1-0000beef", "seq": 0}')
        (record,) = await consume_until(kafka.bootstrap, 1, "first-thermo")
        await drained(config)
    assert (record.key, record.value) == (b"42", b'{"celsius": 21.5, "boot": "1-0000beef", "seq": 0}')
    # No default route leads to this Kafka topic.
    assert [name for name, _ in record.headers] == [*HEADERS, *DEVICE_HEADERS, COUNTER_HEADER]
    assert record.timestamp_type == 1, "the topic was created with LogAppendTime"


async def test_while_kafka_answers_the_card_is_left_alone(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "spared")
    with daemon(config, port) as process:
        publish(port, "device/42/thermo", '{"boot":"b1","seq":0}')
        async with asyncio.timeout(patience(60)):
            while not uplink_told(config.with_name("buffer.db"))["direct_topics"]:
                await asyncio.sleep(0.1)
        await asyncio.sleep(2)  # what came before is deleted by now
        before = written_bytes(process.pid)
        for number in range(1, 41):
            publish(port, "device/42/thermo", f'{{"boot":"b1","seq":{number}}}')
        spared = written_bytes(process.pid) - before <= 40 * WRITTEN_MAX
        told = uplink_told(config.with_name("buffer.db"))
        assert told["spared_today"] is not None
        assert not told["spared_about"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert spared, "each reading would have been nine pages"
    with daemon(config, port):
        publish(port, "device/42/thermo", '{"boot":"b1","seq":41}')
        records = await consume_until(kafka.bootstrap, 42, "spared-thermo")
        (loss,) = await consume_losses(kafka.bootstrap, "spared-events")
        assert uplink_told(config.with_name("buffer.db"))["spared_about"], "the last of them were not on disk"
    assert [json.loads(record.value)["seq"] for record in records] == list(range(42)), "each of them once"
    assert (loss["reason"], loss["count"]) == ("unclean-end", 0), "what cannot be sent again may be gone"


def written_bytes(pid: int) -> int:
    """Bytes that a process has given to the disk (proc(5))."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


async def consume_losses(bootstrap: str, topic: str) -> list[dict[str, object]]:
    """The bodies of the loss records in a topic, once there is one."""
    async with asyncio.timeout(patience(60)):
        while True:
            records = await consume(bootstrap, topic)
            found = [json.loads(each.value) for each in records if header(each, "ce_type") == LOSS_TYPE]
            if found:
                return found
            await asyncio.sleep(0.2)


async def test_a_reading_whose_sensor_fails_is_the_same_reading_when_it_is_sent_again(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    """Promise P3, as sensors write JSON: with nan, with an infinity, with a text for a number."""
    payloads = [
        '{"boot":"b1","seq":1,"celsius":21.5}',
        '{"boot":"b1","seq":2,"celsius":nan}',
        '{"boot":"b1","seq":"3","celsius":21.5}',
        ' {"celsius":-Infinity,"boot":"b1","seq":4}',
    ]
    config = write_config(tmp_path, kafka.bootstrap, port, "failing")
    with daemon(config, port):
        for payload in payloads:
            for _ in range(2):
                publish(port, "device/42/thermo", payload)
        publish(port, "device/43/thermo", '{"celsius":nan}')
        records = await consume_until(kafka.bootstrap, 5, "failing-thermo")
        await drained(config)
        told = subprocess.run(  # noqa: ASYNC221 - the daemon runs beside
            [SLUICE, "status", "--config", config], capture_output=True, text=True, check=False, timeout=patience(30)
        )
    of_42 = [record for record in records if record.key == b"42"]
    assert [(header(record, "ce_devicesequence"), record.value.decode()) for record in of_42] == [
        (str(number), payload) for number, payload in enumerate(payloads, 1)
    ], "once each, in order, byte for byte"
    kinds = [header(record, "content-type") for record in of_42]
    assert kinds == ["application/json", "application/octet-stream"] * 2
    lines = " ".join(told.stdout.split())
    assert "43: no `boot` and no `seq` (1 reading)" in lines, told
    assert "note: 5 readings since the start" in lines
    assert "42: `-Infinity` at byte 13 (4 readings)" in lines or "42: `nan` at byte 32 (4 readings)" in lines


async def test_readings_are_acknowledged_without_kafka_and_follow_when_it_is_there(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    """Promise P1: the acknowledgement does not wait for Kafka. P2: nothing leaves the buffer before Kafka has it."""
    config = write_config(tmp_path, UNREACHABLE, port, "later")
    with daemon(config, port):
        for sequence in range(5):
            publish(port, "device/42/thermo", f'{{"celsius": 1, "boot": "b", "seq": {sequence}}}')
    readings_and_events = read_status(tmp_path / "buffer.db").rows
    assert readings_and_events >= 5
    config.write_text(config.read_text().replace(UNREACHABLE, kafka.bootstrap))
    with daemon(config, port):
        records = await consume_until(kafka.bootstrap, 5, "later-thermo")
        await drained(config)
    assert [header(record, "ce_devicesequence") for record in records] == ["0", "1", "2", "3", "4"]


async def test_readings_taken_in_while_kafka_was_away_go_to_the_backlog_topic_alone(
    kafka: Broker, tmp_path: Path
) -> None:
    mqtt_port, kafka_port = free_port(), free_port()
    config = write_config(tmp_path, f"127.0.0.1:{kafka_port}", mqtt_port, "away")
    lanes = '[kafka]\nbacklog_topic = "{topic}.backlog"\nlane_s_min = 1.0\nbackoff_s_max = 1.0'
    config.write_text(config.read_text().replace("[kafka]", lanes))
    with daemon(config, mqtt_port):
        publish(mqtt_port, "device/42/thermo", "1")
        publish(mqtt_port, "device/42/thermo", "2")
        await asyncio.sleep(2.5)
        async with relay(kafka_port, kafka.bootstrap):
            await drained(config)
            publish(mqtt_port, "device/42/thermo", "3")
            (live,) = await consume_until(kafka.bootstrap, 1, "away-thermo")
            behind = await consume_until(kafka.bootstrap, 2, "away-thermo.backlog")
            await drained(config)
    assert live.value == b"3"
    assert [record.value for record in behind] == [b"1", b"2"]


@pytest.mark.parametrize("disk_first", [False, True], ids=["kafka-first", "disk-first"])
async def test_killed_in_the_middle_nothing_acknowledged_is_missing_and_no_reading_counts_twice(
    kafka: Broker, tmp_path: Path, port: int, *, disk_first: bool
) -> None:
    """Promises P1 and P3 against `kill -9`, three times, under the fleet.

    A reading that Kafka had, and whose sensor was not told so, comes again under another id. Boot and sequence name it.
    """
    topic = f"killed-{disk_first}".lower()
    config = write_config(tmp_path, kafka.bootstrap, port, topic)
    config.write_text(config.read_text().replace("[buffer]", f"[buffer]\ndisk_first = {disk_first}".lower()))
    ledger = tmp_path / "fleet.ledger"
    command = [sys.executable, "-m", "sluice_sim", "fleet", "--port", str(port), "--sensors", "20"]
    command += ["--interval-ms", "50", "--seconds", "0", "--ledger", str(ledger), "--json"]
    fleet = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - a fork, and back
    try:
        for _ in range(3):
            with daemon(config, port) as process:
                await asyncio.sleep(1.5)
                process.send_signal(signal.SIGKILL)
        with daemon(config, port):
            await asyncio.sleep(1)
            fleet.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(fleet.wait, 30) == 0
            await drained(config)
            records = await consume(kafka.bootstrap, f"{topic}-thermo")
    finally:
        fleet.kill()
        fleet.wait()
    acknowledged = {
        (line["device"], line["boot"], sequence)
        for line in map(json.loads, ledger.read_text().splitlines())
        for first, last in line["acknowledged"]
        for sequence in range(first, last + 1)
    }
    identities = {
        header(record, "ce_id"): (
            record.key.decode(),
            header(record, "ce_deviceboot"),
            int(header(record, "ce_devicesequence")),
        )
        for record in records
    }
    assert len(acknowledged) > 500
    assert acknowledged <= set(identities.values())
    # What this box sends again carries the same ce_id. What a sensor sends again, after a kill, has another.
    twice = [reading for reading, count in Counter(identities.values()).items() if count > 1]
    values = {(identities[header(record, "ce_id")], record.value) for record in records}
    assert len(values) == len(set(identities.values())), "copies of a reading are equal, so they count once"
    assert not (disk_first and twice)


async def test_order_by_device_is_kept_from_the_sensor_to_the_partition(kafka: Broker, tmp_path: Path) -> None:
    """Promise P8, judged on first occurrences."""
    port = free_port()
    config = write_config(tmp_path, kafka.bootstrap, port, "order")
    ledger = tmp_path / "fleet.ledger"
    command = [sys.executable, "-m", "sluice_sim", "fleet", "--port", str(port), "--sensors", "10"]
    command += ["--interval-ms", "20", "--seconds", "3", "--ledger", str(ledger), "--json"]
    with daemon(config, port):
        await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, timeout=patience(60))
        await drained(config)
        records = await consume(kafka.bootstrap, "order-thermo")
    sequences: dict[bytes, list[int]] = {}
    for record in records:
        of_device = sequences.setdefault(record.key, [])
        sequence = int(header(record, "ce_devicesequence"))
        if sequence not in of_device:
            of_device.append(sequence)
    assert len(sequences) == 10
    assert all(found == sorted(found) for found in sequences.values())


async def test_a_record_that_cannot_be_forwarded_goes_aside_and_the_next_one_passes(
    kafka: Broker, tmp_path: Path
) -> None:
    """Promise P6: unroutable, too large for Kafka, and a topic that would delete it early."""
    port = free_port()
    config = write_config(tmp_path, kafka.bootstrap, port, "poison")
    config.write_text(config.read_text().replace("[kafka]", "[kafka]\nrecord_bytes_max = 65536"))
    await create_topic(kafka.bootstrap, "poison-dated", message_timestamp_type="CreateTime")
    with daemon(config, port):
        publish(port, "kitchen", "unroutable")
        publish(port, "device/42/thermo", "x" * 65_400)
        publish(port, "device/42/dated", "1")
        publish(port, "device/42/thermo", "21.5")
        (passed,) = await consume_until(kafka.bootstrap, 1, "poison-thermo")
        reports = await consume_until(kafka.bootstrap, 3, "poison-quarantine")
        await drained(config)
        assert await consume(kafka.bootstrap, "poison-dated") == []
        assert read_status(tmp_path / "buffer.db").quarantined == 3
    assert passed.value == b"21.5"
    assert sorted(json.loads(report.value)["reason"] for report in reports) == [
        "no-route",
        "record-too-large",
        "topic-not-logappendtime",
    ]


async def test_the_heartbeat_tells_offsets_and_what_is_pending(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "beat")
    with daemon(config, port):
        publish(port, "device/42/thermo", "21.5")
        await drained(config)
        await asyncio.sleep(1.5)
    events = await consume(kafka.bootstrap, "beat-events")
    kinds = [header(event, "ce_type") for event in events]
    assert {"sluice.gateway.boot", "sluice.gateway.lane-opened", "sluice.gateway.heartbeat"} <= set(kinds)
    beats = [event for event, kind in zip(events, kinds, strict=True) if kind == "sluice.gateway.heartbeat"]
    last = json.loads(beats[-1].value)
    assert sum(last["offsets"]["beat-thermo"].values()) == 1
    assert last["quarantine_topic"] == "beat-quarantine"
    assert last["pending"] == []
    now = datetime.fromisoformat(header(beats[-1], "ce_time"))
    off = timedelta(microseconds=int(header(beats[-1], "ce_timeerror")))
    # Bounds in headers are rounded up.
    assert now - off <= datetime.fromisoformat(last["low_watermark"]) < now
    assert [int(header(beat, "ce_lanesequence")) for beat in beats] == list(range(len(beats)))


async def test_a_lane_is_closed_with_its_count_and_offsets_are_known_after_a_kill(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    """Readings that a killed gateway had acknowledged are below the offsets that the next one tells first."""
    config = write_config(tmp_path, kafka.bootstrap, port, "kept")
    with daemon(config, port) as process:
        for sequence in range(5):
            publish(port, "device/42/thermo", f'{{"celsius": 1, "boot": "b", "seq": {sequence}}}')
        await drained(config)
        process.kill()
    with daemon(config, port):
        await drained(config)
        await asyncio.sleep(1.5)
    records = await consume(kafka.bootstrap, "kept-thermo")
    events = await consume(kafka.bootstrap, "kept-events")
    told = [(header(event, "ce_type").removeprefix("sluice.gateway."), json.loads(event.value)) for event in events]
    lane = header(records[0], "ce_lane")
    (closed,) = [body for kind, body in told if kind == "lane-closed"]
    of_lane = [record for record in (*records, *events) if header(record, "ce_lane") == lane]
    numbers = {int(header(record, "ce_lanesequence")) for record in of_lane}
    assert closed["lane"] == lane
    # An event that Kafka got as the process died may have a number behind those that were known to be durable.
    assert set(range(closed["rows"])) <= numbers
    assert max(int(header(record, "ce_lanesequence")) for record in records) < closed["rows"]
    assert next(body["lane"] for kind, body in told if kind == "lane-opened") == lane
    last_start = max(place for place, (kind, _) in enumerate(told) if kind == "boot")
    beat = next(body for kind, body in told[last_start:] if kind == "heartbeat")
    assert sum(beat["offsets"]["kept-thermo"].values()) == 5


def test_a_wrong_configuration_starts_nothing_and_says_what_to_write(tmp_path: Path) -> None:
    config = write_config(tmp_path, UNREACHABLE, free_port(), "wrong")
    config.write_text(config.read_text().replace("anonymous", "anonimous"))
    # readline, where pytest loads it, sets COLUMNS for children behind Python's back.
    wide = {**os.environ, "COLUMNS": "1000"}
    ended = subprocess.run(
        [SLUICE, "run", "--config", config], capture_output=True, text=True, timeout=patience(20), check=False, env=wide
    )
    assert ended.returncode == 2
    assert f"{config}:11: mqtt_listener.anonimous: there is no such setting; write 'anonymous' instead" in ended.stderr
    assert not (tmp_path / "buffer.db").exists()


def test_a_port_that_is_taken_is_explained(tmp_path: Path, port: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write_config(tmp_path / "a", UNREACHABLE, port, "a")
    second = write_config(tmp_path / "b", UNREACHABLE, port, "b")
    with daemon(first, port):
        ended = subprocess.run(
            [SLUICE, "run", "--config", second], capture_output=True, text=True, timeout=patience(20), check=False
        )
    assert ended.returncode == 1
    assert f"{port}: the port is taken" in ended.stderr
    assert "mqtt_listener.port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_check_finds_what_is_wrong_with_topics_and_mends_what_it_may(kafka: Broker, tmp_path: Path) -> None:
    config = write_config(tmp_path, kafka.bootstrap, free_port(), "checked")
    asyncio.run(create_topic(kafka.bootstrap, "checked-dated", message_timestamp_type="CreateTime"))

    def check(*options: str) -> tuple[int, dict[str, tuple[bool, str]]]:
        command = [str(SLUICE), "check", "--config", str(config), "--json", *options]
        ended = subprocess.run(command, capture_output=True, timeout=patience(30), check=False)
        return ended.returncode, {
            finding["subject"]: (finding["ok"], finding["words"]) for finding in json.loads(ended.stdout)
        }

    code, findings = check()
    assert code == 1
    assert findings["topic checked-events"][0], "sluice run makes it: create_topics = true"
    assert "does not exist yet" in findings["topic checked-events"][1]
    assert "LogAppendTime" in findings["topic checked-dated"][1]
    _, findings = check("--create-topics")
    ok, words = findings["topic checked-events"]
    assert ok
    assert words.startswith("created, with LogAppendTime; Kafka has readings first")
    assert not findings["topic checked-dated"][0]


def test_check_says_that_kafka_cannot_be_reached(tmp_path: Path) -> None:
    config = write_config(tmp_path, UNREACHABLE, free_port(), "x")
    ended = subprocess.run(
        [SLUICE, "check", "--config", config], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert ended.returncode == 1
    assert f"FAIL connection to {UNREACHABLE}: cannot be made: nothing listens" in " ".join(ended.stdout.split())
    assert "kafka.bootstrap" in ended.stdout
