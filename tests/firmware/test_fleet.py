"""The MQTT fleet: its sensors without a socket, then the whole fleet against the listener that it is made for."""

import asyncio
import csv
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gateway.mqtt.protocol import Connect, Publish, ServerProtocol, acknowledgements
from gateway.reading import Reading
from sluice_sim.cli import main
from sluice_sim.fleet import FleetOptions, Progress, run_fleet
from sluice_sim.fleet_ledger import SequenceRanges
from sluice_sim.mqtt_sensor import RING_SAMPLES, WINDOW, LinkError, MqttSensor
from tests.support.gateways import free_port
from tests.support.mqtt_peers import RecordingIntake, listening
from tests.support.waiting import patience, until

ACCEPTED = b"\x20\x02\x00\x00"
MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
Numbers = dict[tuple[str, str], set[int]]


def spread(ranges: object) -> list[int]:
    assert isinstance(ranges, list)
    return [number for first, last in ranges for number in range(first, last + 1)]


# --- the ledger's ranges ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60)))
def test_ranges_hold_what_was_added_closed_sorted_and_disjoint(numbers: list[int]) -> None:
    ranges = SequenceRanges()
    for number in numbers:
        ranges.add(number)
    pairs = ranges.pairs()
    assert spread(pairs) == sorted(set(numbers))
    assert ranges.count == len(set(numbers))
    assert all(before[1] + 1 < after[0] for before, after in pairwise(pairs))
    taken = []
    while ranges:
        taken.append(list(ranges.take_first()))
    assert taken == pairs
    assert ranges.count == 0


# --- one sensor, with the gateway's parser as its peer ----------------------------------------------------


class Gateway:
    """Takes a sensor's packets by the gateway's own parser, without a socket."""

    def __init__(self, sensor: MqttSensor) -> None:
        self.sensor = sensor
        self.publishes: list[Publish] = []
        self.protocol = ServerProtocol(65_536)
        (connect,) = self.protocol.receive(sensor.connect())
        assert isinstance(connect, Connect)
        self.connect = connect
        self.take(sensor.receive(ACCEPTED))

    def take(self, data: bytes) -> None:
        for event in self.protocol.receive(data):
            assert isinstance(event, Publish)
            self.publishes.append(event)

    def acknowledge(self, count: int) -> None:
        packet_ids = [publish.packet_id for publish in self.publishes[:count]]
        del self.publishes[:count]
        self.take(self.sensor.receive(acknowledgements(packet_ids)))


def test_a_sensor_publishes_json_with_its_boot_and_sequence() -> None:
    sensor = MqttSensor("m001", "3-1a2b3c4d")
    gateway = Gateway(sensor)
    gateway.take(sensor.sample(21.529, 456_789))
    assert gateway.connect == Connect("m001", False, 60, None, None, None)
    assert gateway.publishes == [
        Publish("device/m001/thermo", b'{"celsius":21.53,"boot":"3-1a2b3c4d","seq":0,"tick":456789}', 1, 1, dup=False)
    ]


def test_a_sensor_with_a_secret_gives_its_name_as_user_name() -> None:
    connect = Gateway(MqttSensor("m001", "1-0", "codeword")).connect
    assert (connect.user_name, connect.password) == ("m001", b"codeword")


def test_a_sensor_has_few_unacknowledged_and_sends_them_again_with_dup() -> None:
    sensor = MqttSensor("m001", "1-0")
    gateway = Gateway(sensor)
    for _ in range(WINDOW + 2):
        gateway.take(sensor.sample(20.0))
    assert len(gateway.publishes) == WINDOW
    sensor.disconnected()
    again = Gateway(sensor)
    assert [publish.dup for publish in again.publishes] == [True] * WINDOW
    assert [publish.packet_id for publish in again.publishes] == [publish.packet_id for publish in gateway.publishes]
    assert [publish.payload for publish in again.publishes] == [publish.payload for publish in gateway.publishes]
    again.acknowledge(WINDOW)
    assert [publish.dup for publish in again.publishes] == [False, False]
    again.acknowledge(2)
    assert sensor.boot.line() == {
        "device": "m001",
        "boot": "1-0",
        "seed": 0,
        "qos": 1,
        "taken": WINDOW + 2,
        "sent": WINDOW + 2,
        "acknowledged": [[0, WINDOW + 1]],
        "handed_over": [],
        "dropped": [],
        "reported": [],
        "vanished": [],
    }


def test_a_sensor_without_a_gateway_drops_its_oldest_samples_and_says_so() -> None:
    sensor = MqttSensor("m001", "1-0")
    for _ in range(RING_SAMPLES + 10):
        assert sensor.sample(20.0) == b""
    assert sensor.boot.line()["dropped"] == [[0, 9]]
    assert sensor.waiting == RING_SAMPLES


@given(st.lists(st.one_of(st.just("sample"), st.just("cut"), st.integers(1, WINDOW)), max_size=400))
def test_every_sample_is_acknowledged_dropped_or_held_whatever_happens(steps: list[str | int]) -> None:
    sensor = MqttSensor("m001", "1-0")
    gateway = Gateway(sensor)
    acknowledged = set()
    for step in steps:
        if step == "sample":
            gateway.take(sensor.sample(20.0))
        elif step == "cut":
            sensor.disconnected()
            gateway = Gateway(sensor)
        else:
            count = int(step)
            acknowledged |= {json.loads(publish.payload)["seq"] for publish in gateway.publishes[:count]}
            gateway.acknowledge(count)
        assert len(gateway.publishes) <= WINDOW
    ledger = sensor.boot.line()
    assert set(spread(ledger["acknowledged"])) == acknowledged
    assert acknowledged.isdisjoint(spread(ledger["dropped"]))
    assert len(acknowledged) + len(spread(ledger["dropped"])) + sensor.waiting == sensor.boot.taken


def test_packet_identifiers_begin_again_and_are_never_used_twice_at_a_time() -> None:
    sensor = MqttSensor("m001", "1-0")
    gateway = Gateway(sensor)
    gateway.take(sensor.sample(20.0))
    held = gateway.publishes.pop().packet_id  # not acknowledged all the while
    seen = []
    for _ in range(65_540):
        gateway.take(sensor.sample(20.0))
        seen.append(gateway.publishes[-1].packet_id)
        gateway.acknowledge(1)
    assert held == 1
    assert seen[65_533:65_536] == [65_535, 2, 3]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"\x20\x02\x00\x05", "wants a user name"),
        (b"\x20\x02\x00\x03", "takes no readings at present"),
        (b"\x40\x02\x00\x01", "not asked for"),
        (b"HTTP/1.1 400", "not asked for"),
    ],
)
def test_a_sensor_gives_up_a_connection_that_is_of_no_use(answer: bytes, why: str) -> None:
    sensor = MqttSensor("m001", "1-0")
    sensor.connect()
    with pytest.raises(LinkError, match=why):
        sensor.receive(answer)


# --- the fleet --------------------------------------------------------------------------------------------


def of_the_ledger(ledger: Path, key: str) -> Numbers:
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    return {(line["device"], line["boot"]): set(spread(line[key])) for line in lines}


def of_the_intake(readings: list[Reading]) -> Numbers:
    numbers: Numbers = defaultdict(set)
    for reading in readings:
        payload = json.loads(reading.datum.payload)
        numbers[reading.topic.split("/")[1], payload["boot"]].add(payload["seq"])
    return dict(numbers)


def ignore(progress: Progress) -> None:
    """Show nothing."""


async def fleet_until(options: FleetOptions, condition: Callable[[], object]) -> Progress:
    stopping = asyncio.Event()
    running = asyncio.create_task(run_fleet(options, stopping, ignore))
    try:
        await until(condition)
        stopping.set()
        return await running
    finally:
        running.cancel()


async def test_the_ledger_is_what_the_intake_took_although_the_listener_was_away(tmp_path: Path) -> None:
    intake = RecordingIntake()
    ledger, port = tmp_path / "fleet.jsonl", free_port()
    stopping = asyncio.Event()
    options = FleetOptions("127.0.0.1", port, sensors=20, interval_ms=20, ledger=ledger)
    running = asyncio.create_task(run_fleet(options, stopping, ignore))
    async with listening(intake, port):
        await until(lambda: len(intake.stored) > 300)
        # Commits that end too late for their connection: these readings are stored and sent again.
        intake.outcome = None
        await until(lambda: sum(len(readings) for readings, _ in intake.batches) > 20)
    while intake.batches:
        intake.decide(True)
    before = len(intake.stored)
    await asyncio.sleep(0.3)
    intake.outcome = True
    async with listening(intake, port) as listener:
        await until(lambda: len(listener.shared.sessions) == 20)
        await until(lambda: len(intake.stored) > before + 300)
        stopping.set()
        last = await running
        assert listener.counts["disconnected"] == 20
    assert last.waiting == 0
    assert last.acknowledged + last.dropped == last.taken
    assert last.reported == last.dropped
    assert last.reconnects >= 20
    assert of_the_ledger(ledger, "acknowledged") == of_the_intake(intake.stored)
    assert len(intake.stored) > last.acknowledged  # some came twice, and count once


async def test_each_sample_stands_in_the_samples_with_the_time_at_which_it_was_taken(tmp_path: Path) -> None:
    intake = RecordingIntake()
    samples = tmp_path / "samples.csv"
    began_us = time.time_ns() // 1000
    async with listening(intake) as listener:
        options = FleetOptions("127.0.0.1", listener.port, 3, 20, seconds=0.5, samples=samples)
        last = await run_fleet(options, asyncio.Event(), ignore)
    ended_us = time.time_ns() // 1000
    with samples.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == last.taken > 0
    noted: Numbers = defaultdict(set)
    for row in rows:
        noted[row["device"], row["boot"]].add(int(row["sequence"]))
    assert noted == of_the_intake(intake.stored)
    times_us = [int(row["time_us"]) for row in rows]
    assert times_us == sorted(times_us)
    assert began_us <= times_us[0]
    assert times_us[-1] <= ended_us


async def test_a_refusing_intake_costs_no_acknowledged_reading(tmp_path: Path) -> None:
    intake = RecordingIntake()
    ledger = tmp_path / "fleet.jsonl"
    async with listening(intake) as listener:
        options = FleetOptions("127.0.0.1", listener.port, sensors=5, interval_ms=20, ledger=ledger)
        stopping = asyncio.Event()
        running = asyncio.create_task(run_fleet(options, stopping, ignore))
        await until(lambda: len(intake.stored) > 50)
        intake.outcome, intake.cannot_store = False, True
        await until(lambda: listener.counts["intake-refused"] and listener.counts["connect-while-refusing"])
        intake.outcome, intake.cannot_store = True, False
        before = len(intake.stored)
        await until(lambda: len(intake.stored) > before + 50)
        stopping.set()
        await running
    assert of_the_ledger(ledger, "acknowledged") == of_the_intake(intake.stored)


# Held up, a sensor takes what it has missed at one tick.
@pytest.mark.usefixtures("steady_time")
async def test_a_fleet_ends_after_its_seconds_and_its_sensors_take_turns() -> None:
    intake = RecordingIntake()
    async with listening(intake) as listener:
        options = FleetOptions("127.0.0.1", listener.port, sensors=10, interval_ms=100, seconds=0.555)
        last = await run_fleet(options, asyncio.Event(), ignore)
    assert last.taken == 56
    assert last.acknowledged == 56
    ticks = [json.loads(reading.datum.payload)["tick"] for reading in intake.stored if "m001" in reading.topic]
    assert ticks == sorted(set(ticks))
    first = next(reading for reading in intake.stored if json.loads(reading.datum.payload)["seq"] == 1)
    assert first.topic == "device/m001/thermo"


async def test_the_same_seed_repeats_a_run_and_no_seed_never_does() -> None:
    """Ticks are a sensor's clock, so they are not repeated."""

    async def payloads(seed: int | None) -> set[bytes]:
        intake = RecordingIntake()
        async with listening(intake) as listener:
            options = FleetOptions("127.0.0.1", listener.port, 3, 50, seconds=0.2, seed=seed)
            await run_fleet(options, asyncio.Event(), ignore)
        return {reading.datum.payload.split(b',"tick"')[0] for reading in intake.stored}

    assert await payloads(7) == await payloads(7)
    assert not await payloads(None) & await payloads(None)


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
async def test_a_broker_that_knows_nothing_of_sluice_understands_the_sensors(port: int) -> None:
    assert MOSQUITTO is not None
    broker = await asyncio.create_subprocess_exec(MOSQUITTO, "-p", str(port), stderr=asyncio.subprocess.DEVNULL)
    try:
        last = await run_fleet(FleetOptions("127.0.0.1", port, 5, 50, seconds=1.0), asyncio.Event(), ignore)
    finally:
        broker.terminate()
        await broker.wait()
    assert last.acknowledged == last.taken > 50


async def test_the_secret_opens_the_door_and_a_wrong_one_is_reported() -> None:
    intake = RecordingIntake()
    digest = hashlib.sha256(b"codeword").hexdigest()
    async with listening(intake, anonymous=False, users={"m001": digest}) as listener:
        options = FleetOptions("127.0.0.1", listener.port, 1, 20, secret="codeword")  # noqa: S106
        await fleet_until(options, lambda: intake.stored)
        assert intake.stored[0].writer == "m001"
        reports: list[Progress] = []
        stopping = asyncio.Event()
        options = FleetOptions("127.0.0.1", listener.port, 1, 60_000, secret="wrong")  # noqa: S106
        running = asyncio.create_task(run_fleet(options, stopping, reports.append))
        await until(lambda: reports)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert reports[0].last_error == "the gateway refused m001: wrong user name or password"


# --- the command ------------------------------------------------------------------------------------------


async def test_sigterm_ends_the_command_with_its_ledger_written(tmp_path: Path) -> None:
    intake = RecordingIntake()
    ledger = tmp_path / "fleet.jsonl"
    async with listening(intake) as listener:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice_sim", "fleet", "--port", str(listener.port), "--sensors", "4"),
            *("--interval-ms", "50", "--ledger", str(ledger), "--json"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        first = json.loads(await asyncio.wait_for(process.stdout.readline(), patience(10)))
        assert first["connected"] == 4
        process.send_signal(signal.SIGTERM)
        rest, _ = await asyncio.wait_for(process.communicate(), patience(10))
        assert process.returncode == 0
    last = json.loads(rest.splitlines()[-1])
    assert last["waiting"] == 0
    assert last["acknowledged"] == len(intake.stored)
    assert of_the_ledger(ledger, "acknowledged") == of_the_intake(intake.stored)


def test_a_ledger_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["fleet", "--ledger", str(tmp_path / "missing" / "ledger"), "--seconds", "1"])
    assert result.exit_code == 1
    assert "cannot write the ledger" in result.output
    assert "--ledger" in result.output
