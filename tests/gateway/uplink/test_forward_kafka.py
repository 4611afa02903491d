"""The forwarder against a real broker: refusals, a dead line, a clock that nothing vouches for."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from demo.kafka_broker import Broker, kafka_broker
from demo.uplink import Uplink
from gateway.buffer.status import read_status
from gateway.clock.kernel_clock import read_wall_clock
from gateway.record_contract import TIME_ERROR_UNKNOWN_US
from gateway.settings import GatewaySettings
from tests.support.gateways import (
    HOLD_NEW_CLOCK_S,
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
from tests.support.kafka_admin import administered, alter_topic, create_topic, limit_producer, until_refused
from tests.support.waiting import patience, until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
]


def sluice(command: str, config: Path) -> str:
    return subprocess.run([SLUICE, command, "--config", config], capture_output=True, text=True, check=True).stdout


def reading(sequence: int, text: str = "") -> str:
    return json.dumps({"celsius": 1, "boot": "b", "seq": sequence, "text": text})


@asynccontextmanager
async def lowered_under_a_daemon(kafka: Broker, tmp_path: Path, prefix: str) -> AsyncIterator[int]:
    """A daemon, by its MQTT port, that has looked at its topic: what that takes at most was lowered to 2000 since.

    It learns of it from refusals.
    """
    port = free_port()
    await create_topic(kafka.bootstrap, f"{prefix}-thermo")
    config = write_config(tmp_path, kafka.bootstrap, port, prefix)
    # Long enough for readings to share a batch, and for the broker to go by its new setting.
    config.write_text(config.read_text().replace("[kafka]", "[kafka]\nlinger_ms = 3000"))
    with daemon(config, port):
        publish(port, "device/42/thermo", reading(100))
        await consume_until(kafka.bootstrap, 1, f"{prefix}-thermo")
        await alter_topic(kafka.bootstrap, f"{prefix}-thermo", max_message_bytes="2000")
        yield port


async def test_a_record_that_the_broker_refuses_goes_aside_and_its_partition_flows_on(
    kafka: Broker, tmp_path: Path
) -> None:
    """Two in a row of twelve: the topic's bound is learnt from the first refusal, and held from then on."""
    async with lowered_under_a_daemon(kafka, tmp_path, "refused") as port:
        for sequence in range(12):
            # Random digits do not compress.
            publish(port, "device/42/thermo", reading(sequence, os.urandom(3000).hex() if sequence in {5, 6} else ""))
        async with asyncio.timeout(patience(60)):
            while read_status(tmp_path / "buffer.db").rows:
                await asyncio.sleep(0.2)
        records = await consume(kafka.bootstrap, "refused-thermo")
        reports = await consume(kafka.bootstrap, "refused-quarantine")
    passed = list(dict.fromkeys(int(header(record, "ce_devicesequence")) for record in records))
    assert passed == [100, 0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert {json.loads(report.value)["reason"] for report in reports} == {"topic-max-message-bytes"}
    assert read_status(tmp_path / "buffer.db").quarantined == 2


async def test_a_record_that_is_refused_alone_is_taken_in_again_once_its_topic_is_mended(
    kafka: Broker, tmp_path: Path
) -> None:
    """No batch to halve: one refusal tells what the topic takes now, and what to wait for."""
    async with lowered_under_a_daemon(kafka, tmp_path, "lone") as port:
        publish(port, "device/42/thermo", reading(0, os.urandom(3000).hex()))
        (report,) = await consume_until(kafka.bootstrap, 1, "lone-quarantine")
        assert json.loads(report.value)["reason"] == "topic-max-message-bytes"
        await alter_topic(kafka.bootstrap, "lone-thermo", max_message_bytes="1000000")
        records = await consume_until(kafka.bootstrap, 2, "lone-thermo")
    assert [header(record, "ce_devicesequence") for record in records] == ["100", "0"]
    assert not read_status(tmp_path / "buffer.db").quarantined


async def test_a_topic_that_refuses_everything_does_not_hold_up_the_others(kafka: Broker, tmp_path: Path) -> None:
    port = free_port()
    await create_topic(kafka.bootstrap, "condemned-bulk")
    config = write_config(tmp_path, kafka.bootstrap, port, "condemned")
    with daemon(config, port):
        publish(port, "device/42/bulk", reading(100))
        await consume_until(kafka.bootstrap, 1, "condemned-bulk")
        await alter_topic(kafka.bootstrap, "condemned-bulk", max_message_bytes="100")
        await until_refused(kafka.bootstrap, "condemned-bulk", 200)
        for sequence in range(40):
            publish(port, "device/42/bulk", reading(sequence))
        publish(port, "device/42/thermo", reading(40))
        await consume_until(kafka.bootstrap, 1, "condemned-thermo")
        async with asyncio.timeout(patience(30)):
            while read_status(tmp_path / "buffer.db").rows:
                await asyncio.sleep(0.2)
    assert read_status(tmp_path / "buffer.db").quarantined == 40


async def test_readings_flow_although_the_heartbeat_is_refused(kafka: Broker, tmp_path: Path, port: int) -> None:
    await create_topic(kafka.bootstrap, "mute-events", max_message_bytes="100")
    config = write_config(tmp_path, kafka.bootstrap, port, "mute")
    with daemon(config, port):
        for sequence in range(5):
            publish(port, "device/42/thermo", reading(sequence))
        await consume_until(kafka.bootstrap, 5, "mute-thermo")


async def test_it_stops_at_once_although_nothing_answers(tmp_path: Path, port: int) -> None:
    """SIGTERM while the client is being closed: aiokafka swallows the cancellation, the daemon must not."""
    async with Uplink() as silent:
        config = write_config(tmp_path, f"127.0.0.1:{silent.port}", port, "silent")
        soon = "[kafka]\nrequest_timeout_s = 1\nconnect_timeout_s = 0.5"
        config.write_text(config.read_text().replace("[kafka]", soon))
        for wait_s in (0.2, 1.0, 1.2):
            with daemon(config, port) as process:
                await asyncio.sleep(wait_s)
                process.terminate()
                assert await asyncio.to_thread(process.wait, 10) == 0


async def test_after_a_dead_line_it_is_sending_again_without_a_restart(tmp_path: Path, port: int) -> None:
    async with Uplink() as uplink:
        with kafka_broker(tmp_path / "kafka", gateway_port=uplink.port) as broker:
            assert broker.gateway_listener_port is not None
            uplink.open(broker.gateway_listener_port)
            config = write_config(tmp_path, f"127.0.0.1:{uplink.port}", port, "line")
            with daemon(config, port):
                await asyncio.to_thread(publish, port, "device/42/thermo", reading(0))
                await consume_until(broker.bootstrap, 1, "line-thermo")
                await uplink.cut()
                for sequence in range(1, 6):
                    # Acknowledged although nothing answers (promise P1).
                    await asyncio.to_thread(publish, port, "device/42/thermo", reading(sequence))
                await asyncio.sleep(3)
                assert len(await consume(broker.bootstrap, "line-thermo")) == 1
                assert read_status(tmp_path / "buffer.db").rows >= 5
                await uplink.restore()
                records = await consume_until(broker.bootstrap, 6, "line-thermo")
    sequences = [int(header(record, "ce_devicesequence")) for record in records]
    assert list(dict.fromkeys(sequences)) == [0, 1, 2, 3, 4, 5]


async def test_a_quota_of_the_brokers_that_holds_the_gateway_back_is_told(kafka: Broker, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, kafka.bootstrap, port, "throttled")
    config.write_text(config.read_text().replace('id = "gw1"', 'id = "throttled"'))
    await limit_producer(kafka.bootstrap, "throttled", 3_000)
    with daemon(config, port):
        assert uplink_told(tmp_path / "buffer.db")["throttled_s"] == 0
        for sequence in range(5):
            # Random digits do not compress: more than the ten seconds allow that the broker looks back on.
            publish(port, "device/42/thermo", reading(sequence, os.urandom(7_000).hex()))
        async with asyncio.timeout(patience(20)):
            while not uplink_told(tmp_path / "buffer.db")["throttled_s"]:
                await asyncio.sleep(0.1)
        told = " ".join(sluice("status", config).split())
        assert "A quota of Kafka's holds this gateway back. The last request waited for " in told
        assert "for the client id throttled" in told
        assert len(await consume_until(kafka.bootstrap, 5, "throttled-thermo")) == 5, "nothing is lost"
        # A broker that reads nothing for a while is neither silent nor gone.
        state = uplink_told(tmp_path / "buffer.db")
        assert (state["up"], state["parked"], state["error"]) == (True, {}, None)
    log = config.with_suffix(".log").read_text()
    assert log.count("a quota of Kafka's holds this gateway back") == 1
    assert "does not answer" not in log
    assert log.count("uplink is up") == 1


async def test_a_metered_link_is_left_alone_when_its_quota_is_used_up(kafka: Broker, tmp_path: Path, port: int) -> None:
    """The sensors have their acknowledgements all the same, and a restart gives nothing back."""
    config = write_config(tmp_path, kafka.bootstrap, port, "quota")
    config.write_text(config.read_text().replace("[kafka]", "[kafka]\nbytes_per_day_max = 100_000"))

    async def used_up() -> dict[str, Any]:
        async with asyncio.timeout(patience(30)):
            while True:
                state = uplink_told(tmp_path / "buffer.db")
                if state["quota_used_up"]:
                    return state
                await asyncio.sleep(0.2)

    with daemon(config, port):
        for sequence in range(20):
            await asyncio.to_thread(publish, port, "device/42/thermo", reading(sequence, os.urandom(10_000).hex()))
        state = await used_up()
        assert 100_000 <= state["wire_bytes"] <= 160_000, "overdrawn by one request at the most"
        assert state["quota_until"] is not None
    # Behind the daemon's end: what Kafka has is deleted a second after it was confirmed, or then.
    waiting = read_status(tmp_path / "buffer.db").rows
    assert waiting > 0
    with daemon(config, port):
        await used_up()
        assert read_status(tmp_path / "buffer.db").rows >= waiting
        shown = await asyncio.to_thread(sluice, "status", config)
    assert "the quota of the day is used up (kafka.bytes_per_day_max)" in " ".join(shown.split())


async def test_a_metered_link_is_given_no_more_by_the_second(kafka: Broker, tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "slow")
    config.write_text(config.read_text().replace("[kafka]", "[kafka]\nbytes_per_s_max = 20_000"))

    def told_bytes() -> int:
        return int(uplink_told(tmp_path / "buffer.db")["wire_bytes"])

    with daemon(config, port):
        began_s = time.monotonic()
        for sequence in range(8):
            await asyncio.to_thread(publish, port, "device/42/thermo", reading(sequence, os.urandom(10_000).hex()))
        await consume_until(kafka.bootstrap, 8, "slow-thermo")
        # Kafka has the records before the daemon has told the bytes of their round.
        await until(lambda: told_bytes() >= 80_000)
        # A burst of two seconds, and one request beyond it.
        assert told_bytes() <= 20_000 * (time.monotonic() - began_s + 2) + 50_000


async def test_a_clock_that_nothing_vouches_for_is_waited_for_and_then_not_believed(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    """Promise P5: `gateway.hold_unsynced_s`, then the time of receipt with no bound claimed."""
    if read_wall_clock(GatewaySettings("gw1")).synced:
        pytest.skip("this machine's kernel clock is synced")
    config = write_config(tmp_path, kafka.bootstrap, port, "clockless")
    config.write_text(config.read_text().replace('clock = "system"', 'clock = "kernel"\nhold_unsynced_s = 3'))
    began_s = time.time()
    with daemon(config, port):
        publish(port, "device/42/thermo", "21.5")
        (record,) = await consume_until(kafka.bootstrap, 1, "clockless-thermo")
        shown = " ".join((await asyncio.to_thread(sluice, "status", config)).split())
        publish(port, "device/42/thermo", "21.6")
        await consume_until(kafka.bootstrap, 2, "clockless-thermo")
    assert "Readings go with times that may be wrong" in shown
    assert record.timestamp / 1000 >= began_s + 3, "it was sent before the wait was over"
    log = config.with_suffix(".log").read_text()
    assert log.index("readings wait on disk until the kernel says") < log.index("uplink is up")
    assert log.index("uplink is up") < log.index("readings wait for it no longer: they go to Kafka")
    assert log.count("readings wait for it no longer") == 1
    assert header(record, "ce_timequality") == "received"
    assert int(header(record, "ce_timeerror")) == TIME_ERROR_UNKNOWN_US
    assert header(record, "ce_boottimeerror") == "0", "once the clock is known, its time is"


async def test_the_first_readings_of_a_sensor_wait_for_its_clock_and_nobody_elses_do(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "settling")
    config.write_text(config.read_text().replace(f"hold_new_clock_s = {HOLD_NEW_CLOCK_S}", ""))
    with daemon(config, port):
        taken_s: list[float] = []
        shown, until_s = "", time.monotonic() + patience(60)
        # A slow machine sends seldom, and the clock is learnt late.
        while len(taken_s) < 5 or len(await consume(kafka.bootstrap, "settling-thermo")) < 2:
            assert time.monotonic() < until_s, "the sensor's clock is never known"
            tick_ms = 1_000 + time.monotonic_ns() // 1_000_000 % 2**31
            taken_s.append(time.time())
            told = json.dumps({"boot": "7", "seq": len(taken_s), "tick": tick_ms, "celsius": 1})
            await asyncio.to_thread(publish, port, "device/42/thermo", told)
            if len(taken_s) == 3:
                await asyncio.to_thread(publish, port, "device/43/thermo", reading(0))
                (first,) = await consume_until(kafka.bootstrap, 1, "settling-thermo")
                shown = " ".join((await asyncio.to_thread(sluice, "status", config)).split())
            await asyncio.sleep(0.2)
        found = await consume_until(kafka.bootstrap, len(taken_s) + 1, "settling-thermo")
    assert first.key == b"43"
    assert "readings of 1 sensor that began a moment ago wait until the sensor's clock is known" in shown
    ticking = sorted((each for each in found if each.key == b"42"), key=lambda each: each.offset)
    assert [json.loads(each.value)["seq"] for each in ticking] == list(range(1, len(taken_s) + 1))
    for each, at_s in zip(ticking, taken_s, strict=True):
        assert header(each, "ce_timequality") == "estimated"
        told_s = datetime.fromisoformat(header(each, "ce_time")).timestamp()
        assert abs(told_s - at_s) <= int(header(each, "ce_timeerror")) / 1e6 < patience(3)


async def test_a_topic_that_is_deleted_under_a_session_holds_up_nobody_and_is_made_again(
    kafka: Broker, tmp_path: Path, port: int
) -> None:
    config = write_config(tmp_path, kafka.bootstrap, port, "deleted")
    with daemon(config, port):
        for stream in ("thermo", "hygro"):
            publish(port, f"device/42/{stream}", reading(0))
            await consume_until(kafka.bootstrap, 1, f"deleted-{stream}")
        async with administered(kafka.bootstrap) as admin:
            await admin.delete_topics(["deleted-thermo"])
        await asyncio.sleep(1)
        publish(port, "device/42/thermo", reading(1))
        await asyncio.sleep(0.5)
        publish(port, "device/42/hygro", reading(1))
        began_s = time.monotonic()
        await consume_until(kafka.bootstrap, 2, "deleted-hygro")
        # A request's time-out is 30 s: one topic's trouble must not take the others that long.
        assert time.monotonic() - began_s < patience(15)
        (record,) = await consume_until(kafka.bootstrap, 1, "deleted-thermo")
    assert json.loads(record.value)["seq"] == 1
    assert record.timestamp_type == 1, "LogAppendTime"


def sent_streams(port: int, device: str, streams: range) -> None:
    """One reading for each of so many streams, over one connection; returns after the last PUBACK."""
    client = Client(CallbackAPIVersion.VERSION2, device)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        sent = [client.publish(f"device/{device}/junk{number}", reading(number), qos=1) for number in streams]
        for each in sent:
            each.wait_for_publish(patience(30))
            assert each.is_published()
    finally:
        client.disconnect()
        client.loop_stop()


async def topics_of(kafka: Broker, prefix: str) -> set[str]:
    async with administered(kafka.bootstrap) as admin:
        return {topic for topic in await admin.list_topics() if topic.startswith(prefix)}


async def test_a_device_that_makes_streams_up_gets_its_bound_of_topics_and_delays_nobody(
    kafka: Broker, tmp_path: Path
) -> None:
    port, bound = free_port(), 20
    await create_topic(kafka.bootstrap, "made-up-thermo")
    config = write_config(tmp_path, kafka.bootstrap, port, "made-up")
    buffer = tmp_path / "buffer.db"
    with daemon(config, port):
        publish(port, "device/42/thermo", reading(0))
        await consume_until(kafka.bootstrap, 1, "made-up-thermo")
        flood = asyncio.create_task(asyncio.to_thread(sent_streams, port, "7", range(200)))
        published_s = []
        for sequence in range(1, 16):
            published_s.append(time.time())
            await asyncio.to_thread(publish, port, "device/42/thermo", reading(sequence))
            await asyncio.sleep(0.1)
        await flood
        records = await consume_until(kafka.bootstrap, 16, "made-up-thermo")
        async with asyncio.timeout(patience(30)):
            while read_status(buffer).quarantined < 200 - bound:
                await asyncio.sleep(0.1)
        shown = " ".join((await asyncio.to_thread(sluice, "status", config)).split())
        made = await topics_of(kafka, "made-up-junk")
    # By the broker's own stamp, on this machine's clock.
    waited_s = [
        record.timestamp / 1000 - at_s
        for record, at_s in zip(sorted(records, key=lambda each: each.timestamp)[1:], published_s, strict=True)
    ]
    assert max(waited_s) < patience(3), waited_s
    assert len(made) == bound
    assert "7 sends for more new topics than this gateway makes" in shown
    assert "They go to the quarantine: 180 readings of it today." in shown
    log = config.with_suffix(".log").read_text()
    assert log.count("a device sends for more new topics than this gateway makes") == 1
    # A busy broker leaves some unanswered for a while, which is told of each.
    told = [line for line in log.splitlines() if "junk" in line and "a partition takes" not in line]
    assert len(told) <= 12, log
    # A restart is no new day: what was not made is not made now, and what was is gone on with.
    with daemon(config, port):
        await asyncio.to_thread(sent_streams, port, "7", range(150, 250))
        publish(port, "device/42/thermo", reading(16))
        await consume_until(kafka.bootstrap, 17, "made-up-thermo")
        async with asyncio.timeout(patience(30)):
            while read_status(buffer).rows:
                await asyncio.sleep(0.1)
        assert await topics_of(kafka, "made-up-junk") == made
        reports = await consume(kafka.bootstrap, "made-up-quarantine")
    assert {json.loads(report.value)["reason"] for report in reports} == {
        "topic-limit-of-device: kafka.topics_per_device_day_max"
    }
