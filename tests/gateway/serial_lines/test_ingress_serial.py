"""The serial ingress on real pseudo-terminals: ports come and go, and an ACK is sent after the commit only."""

import asyncio
import errno
import json
import os
import secrets
import subprocess
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import serial
from pymodbus.framer import FramerRTU
from structlog.testing import capture_logs

from gateway.reading import Mark, Reading, Recalled
from gateway.serial_lines import frame_link, port_line, serial_ingress
from gateway.serial_lines.frames import Ack, Data, Frame, FrameDecoder, Hello, HelloRequest, Probe, Reply, encode_frame
from gateway.serial_lines.ports import _PTY_MAJORS, open_port
from gateway.serial_lines.serial_ingress import FAULT_REPORT_INTERVAL_US, SerialIngress
from gateway.serial_lines.text_line import TextLine
from gateway.settings import (
    ModbusRegister,
    ModbusUnit,
    SerialFormatSettings,
    SerialModbusSettings,
    SerialSettings,
    SerialTextSettings,
)
from sluice_sim.avr import Board, inhibit_sampling, start_boards, stop_boards
from tests.support.waiting import until

INCARNATION = 0x1A2B3C4D
DEADLINE_S = 20.0
FrameType = TypeVar("FrameType", bound=Frame)


@dataclass
class RecordingIntake:
    """Stands for the buffer: nothing is committed until the test says so."""

    taken: list[tuple[Sequence[Reading], Callable[[bool], None]]] = field(default_factory=list)
    losses: list[tuple[str | None, str, int]] = field(default_factory=list)
    quarantined: list[tuple[str, str, bytes, str]] = field(default_factory=list)
    events: list[tuple[str, str | None, dict[str, object]]] = field(default_factory=list)
    recent: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    held: list[range] = field(default_factory=list)

    cannot_store: bool = False

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        assert not marks
        self.taken.append((readings, done))

    async def marks(self, prefix: str) -> dict[str, bytes]:
        raise NotImplementedError(prefix)

    async def recall(self, device: str, boot: str, held: range) -> Recalled:
        self.held.append(held)
        stored = self.recent.get((device, boot), frozenset[int]())
        return Recalled(stored, min(stored, default=held.start))

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        assert sequences is None or sequences[2] - sequences[1] + 1 == count
        self.losses.append((device, reason, count))

    def unreadable(self, device: str, subject: str, payload: bytes, received_us: int, reason: str) -> None:
        assert received_us > 0
        self.quarantined.append((device, subject, payload, reason))

    def event(self, kind: str, device: str | None, **details: object) -> None:
        self.events.append((kind, device, details))

    async def next(self) -> tuple[Sequence[Reading], Callable[[bool], None]]:
        await until(lambda: bool(self.taken))
        return self.taken.pop(0)


class PtySensor:
    """A sensor at the far end of a pseudo-terminal, whose near end is found under `port`."""

    def __init__(self, port: Path, device: str = "attic", boot: int = 7) -> None:
        self.port = port
        self.device = device
        self.boot = boot
        self.run = boot ^ INCARNATION
        self.heard: list[Frame] = []
        self._decoder = FrameDecoder()
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        attributes = termios.tcgetattr(self._slave)
        attributes[2] |= termios.HUPCL
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        os.set_blocking(self._master, False)
        port.symlink_to(os.ttyname(self._slave))

    async def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.002)

    async def send(self, *frames: Frame) -> None:
        await self.write(b"".join(encode_frame(frame) for frame in frames))

    async def opened(self) -> None:
        """Wait until the gateway has opened the port. Clearing HUPCL is its last step."""
        await until(lambda: not termios.tcgetattr(self._slave)[2] & termios.HUPCL)

    def listen(self) -> bool:
        with suppress(BlockingIOError):
            self.heard += self._decoder.feed(os.read(self._master, 65536))
        return bool(self.heard)

    async def expect(self, kind: type[FrameType]) -> FrameType:
        """The next frame of this type; frames of other types before it are passed over."""
        while True:
            await until(self.listen)
            frame = self.heard.pop(0)
            if isinstance(frame, kind):
                return frame

    async def hello(self, oldest: int = 0) -> None:
        await self.opened()
        await self.send(Hello(self.boot, INCARNATION, 2, oldest, oldest, self.device, "1.0", ("thermo",)))
        assert await self.expect(Ack) == Ack(self.run, oldest, 0)

    def data(self, sequence: int, oldest: int = 0) -> Data:
        return Data(self.run, sequence, oldest, 1000 * sequence, 0, b"%d" % sequence)

    async def jam(self) -> None:
        """Fill the line from the gateway to here, with zeros that end no frame."""
        os.set_blocking(self._slave, False)
        refused_in_a_row = 0
        while refused_in_a_row < 10:
            try:
                os.write(self._slave, bytes(1 if refused_in_a_row else 512))
                refused_in_a_row = 0
            except BlockingIOError:
                # The kernel still moves bytes from one of its buffers to the next.
                refused_in_a_row += 1
                await asyncio.sleep(0.002)

    def unplug(self) -> None:
        self.port.unlink(missing_ok=True)
        for fd in (self._master, self._slave):
            with suppress(OSError):
                os.close(fd)
        self._master = self._slave = -1


@dataclass
class Bench:
    """A directory of ports, and the readings that its ingress has handed over."""

    ports: Path
    intake: RecordingIntake
    skipped_us: int = 0
    looked: int = 0
    sensors: list[PtySensor] = field(default_factory=list)

    def plug(self, name: str = "ttyUSB0", device: str = "attic", boot: int = 7) -> PtySensor:
        sensor = PtySensor(self.ports / name, device, boot)
        self.sensors.append(sensor)
        return sensor

    def now_us(self) -> int:
        self.looked += 1
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 + self.skipped_us

    @asynccontextmanager
    async def serving(
        self,
        text: tuple[SerialTextSettings, ...] = (),
        modbus: tuple[SerialModbusSettings, ...] = (),
        formats: tuple[SerialFormatSettings, ...] = (),
    ) -> AsyncIterator[SerialIngress]:
        settings = SerialSettings(
            ports=(f"{self.ports}/ttyUSB*",), scan_interval_s=0.02, text=text, modbus=modbus, format=formats
        )
        ingress = SerialIngress(settings, self.intake, self.now_us, lambda: 0xC0FFEE)
        async with running(ingress):
            yield ingress


@asynccontextmanager
async def running(ingress: SerialIngress) -> AsyncIterator[None]:
    task = asyncio.create_task(ingress.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def idle(tmp_path: Path) -> Bench:
    """A bench whose ingress does not run yet."""
    return Bench(tmp_path, RecordingIntake())


@pytest.fixture
async def bench(idle: Bench) -> AsyncIterator[Bench]:
    async with idle.serving():
        yield idle
    for sensor in idle.sensors:
        sensor.unplug()


def devices(ingress: SerialIngress) -> dict[str, str | None]:
    """The device on each open port, as far as it is known."""
    ports: Any = ingress.state()["ports"]
    return {name: state["device"] for name, state in ports.items()}


def port_state(ingress: SerialIngress, sensor: PtySensor) -> dict[str, Any]:
    """State of a port for `sluice status`."""
    ports: Any = ingress.state()["ports"]
    found: dict[str, Any] = ports[str(sensor.port)]
    return found


async def listed(ingress: SerialIngress, sensor: PtySensor) -> None:
    """Wait until a port is among the ingress's own, which is a moment after it was opened."""
    await until(lambda: str(sensor.port) in devices(ingress))


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_reading_is_acknowledged_after_its_commit_and_not_before(bench: Bench) -> None:
    sensor = bench.plug()
    await sensor.hello()
    await sensor.send(sensor.data(0))
    (reading,), done = await bench.intake.next()
    assert (reading.topic, reading.subject) == ("device/attic/thermo", str(sensor.port))
    assert (reading.datum.device_boot, reading.datum.device_sequence, reading.datum.payload) == ("7-1a2b3c4d", 0, b"0")
    # A later HELLO is answered at once, and that ACK still does not cover the reading.
    await sensor.send(Hello(7, INCARNATION, 2, 0, 1, "attic", "1.0", ("thermo",)))
    assert await sensor.expect(Ack) == Ack(7 ^ INCARNATION, 0, 0)
    done(True)
    assert await sensor.expect(Ack) == Ack(7 ^ INCARNATION, 1, 0)


async def test_a_commit_that_failed_is_not_acknowledged_and_the_repetition_is_taken(bench: Bench) -> None:
    sensor = bench.plug()
    await sensor.hello()
    await sensor.send(sensor.data(0))
    _, done = await bench.intake.next()
    done(False)
    await sensor.send(sensor.data(0))
    _, done = await bench.intake.next()
    done(True)
    assert await sensor.expect(Ack) == Ack(7 ^ INCARNATION, 1, 0)


async def test_a_hello_is_reported_with_the_reason_of_the_reset(bench: Bench) -> None:
    sensor = bench.plug()
    await sensor.hello()
    assert bench.intake.events == [
        (
            "device-appeared",
            "attic",
            {
                "port": str(sensor.port),
                "firmware": "1.0",
                "reset_cause": 2,
                "boot": "7-1a2b3c4d",
                "oldest": 0,
                "next": 0,
            },
        )
    ]


async def test_two_sensors_and_one_that_comes_later(bench: Bench) -> None:
    attic, cellar = bench.plug("ttyUSB0", "attic"), bench.plug("ttyUSB1", "cellar", boot=3)
    await attic.hello()
    await cellar.hello()
    shed = bench.plug("ttyUSB2", "shed")
    await shed.hello()
    for sensor in (attic, cellar, shed):
        await sensor.send(sensor.data(0))
        (reading,), done = await bench.intake.next()
        assert reading.topic == f"device/{sensor.device}/thermo"
        done(True)
        assert await sensor.expect(Ack) == Ack(sensor.run, 1, 0)


async def test_unplugged_in_the_middle_of_a_frame_and_plugged_in_again(bench: Bench) -> None:
    with capture_logs() as logs:
        sensor = bench.plug()
        await sensor.hello()
        await sensor.send(sensor.data(0))
        _, done = await bench.intake.next()
        await sensor.write(encode_frame(sensor.data(1))[:11])
        sensor.unplug()
        await until(lambda: any(line["event"].startswith("serial port closed") for line in logs))
        sensor = bench.plug()
        await sensor.opened()
        # The old line's commit ends now: the new one, which may well have its descriptor, hears nothing of it.
        done(True)
        await sensor.hello()
        await sensor.send(sensor.data(0), sensor.data(1))
        readings, done = await bench.intake.next()
        assert [reading.datum.device_sequence for reading in readings] == [0, 1]
        done(True)
        assert await sensor.expect(Ack) == Ack(7 ^ INCARNATION, 2, 0)
    assert len([line for line in logs if line["event"].startswith("serial port closed")]) == 1
    assert bench.intake.losses == []


async def test_what_the_sensors_ring_dropped_is_reported_as_lost(bench: Bench) -> None:
    sensor = bench.plug()
    await sensor.hello()
    await sensor.send(sensor.data(5, oldest=5))
    await bench.intake.next()
    assert bench.intake.losses == [("attic", "sensor-ring-overflow", 5)]


async def test_readings_dropped_by_the_ring_are_reported_once_although_the_port_comes_back_twice(
    bench: Bench,
) -> None:
    # Of an earlier start of the gateway, the buffer holds up to 40.
    bench.intake.recent["attic", "7-1a2b3c4d"] = frozenset(range(20, 41))
    for _ in range(2):
        sensor = bench.plug()
        await sensor.hello(oldest=70)
        await until(lambda: bool(bench.intake.losses))
        sensor.unplug()
        await asyncio.sleep(0.1)
    assert bench.intake.losses == [("attic", "sensor-ring-overflow", 29)]
    assert {held.start for held in bench.intake.held} == {70}


async def test_a_probe_gives_readings_their_time(bench: Bench) -> None:
    sensor = bench.plug()
    await sensor.opened()
    await sensor.send(Hello(7, INCARNATION, 2, 0, 0, "attic", "1.0", ("thermo",)))
    assert await sensor.expect(Probe) == Probe(0xC0FFEE)
    await sensor.send(Reply(0xC0FFEE, 0, 500), sensor.data(0))
    (reading,), _ = await bench.intake.next()
    assert reading.datum.event_us is not None
    assert reading.datum.event_us <= reading.datum.received_us
    assert reading.datum.event_error_us > 0
    # The next one comes by the clock, without anything being received.
    assert await sensor.expect(Probe) == Probe(0xC0FFEE)


@pytest.mark.parametrize("is_cdc", [False, True])
async def test_only_on_a_port_that_may_be_a_wire_is_what_bytes_take_on_it_left_out_of_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cdc: bool
) -> None:
    if is_cdc:
        monkeypatch.setattr("gateway.serial_lines.ports._CDC_MAJORS", _PTY_MAJORS)
    idle = Bench(tmp_path, RecordingIntake())
    # At 2400 baud PROBE and REPLY take more than 100 ms.
    settings = SerialSettings(ports=(f"{tmp_path}/ttyUSB*",), baud=2400, scan_interval_s=0.02)
    ingress = SerialIngress(settings, idle.intake, idle.now_us, lambda: 0xC0FFEE)
    async with plugged(idle, "ttyUSB0") as (sensor,), running(ingress):
        await sensor.opened()
        await sensor.send(Hello(7, INCARNATION, 2, 0, 0, "attic", "1.0", ("thermo",)))
        for _ in range(frame_link.WIRE_TRIPS + 2):
            await sensor.expect(Probe)
            tick_us = idle.now_us()
            await asyncio.sleep(0.15)
            await sensor.send(Reply(0xC0FFEE, tick_us // 1000 % 2**32, tick_us % 1000))
        await sensor.send(replace(sensor.data(0), tick_ms=tick_us // 1000 % 2**32))
        (reading,), _ = await idle.intake.next()
    assert reading.datum.event_us is not None
    assert (reading.datum.event_error_us >= 75_000) is is_cdc


async def test_random_bits_are_drawn_for_probes_alone(tmp_path: Path, idle: Bench) -> None:
    drawn = 0

    def nonce() -> int:
        nonlocal drawn
        drawn += 1
        return drawn

    settings = SerialSettings(ports=(f"{tmp_path}/ttyUSB*",), scan_interval_s=0.02)
    async with plugged(idle, "ttyUSB0") as (sensor,):
        async with running(SerialIngress(settings, idle.intake, idle.now_us, nonce)):
            await sensor.hello()
            for sequence in range(20):
                await sensor.send(sensor.data(sequence))
                _, done = await idle.intake.next()
                done(True)
                await sensor.expect(Ack)
        sensor.listen()
        assert drawn <= 1 + frame_link.PROBES_FIRST


async def test_data_of_an_unknown_sensor_is_asked_about(bench: Bench) -> None:
    sensor = bench.plug()
    await sensor.opened()
    await sensor.send(sensor.data(0))
    assert await sensor.expect(HelloRequest) == HelloRequest()
    assert bench.intake.taken == []


async def test_one_name_on_two_ports_is_shown_at_both(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0", "ttyUSB1") as (first, second), idle.serving() as ingress:
        cellar = idle.plug("ttyUSB2", "cellar")
        for sensor in (first, second, cellar):
            await sensor.hello()
        words = "attic is on {} too: their readings mix; give each its own name: to a sensor with our frames by"
        await until(lambda: port_state(ingress, first)["shared"] is not None)
        assert port_state(ingress, first)["shared"].startswith(words.format(second.port))
        assert port_state(ingress, second)["shared"].startswith(words.format(first.port))
        assert port_state(ingress, cellar)["shared"] is None


async def test_one_name_on_two_ports_is_reported_once(bench: Bench) -> None:
    with capture_logs() as logs:
        first, second = bench.plug("ttyUSB0"), bench.plug("ttyUSB1")
        await first.hello()
        await second.hello()
        await until(lambda: any(kind == "device-name-shared" for kind, _, _ in bench.intake.events))
        third = bench.plug("ttyUSB2", "cellar")
        await third.hello()
    ports = [str(first.port), str(second.port)]
    assert [event for event in bench.intake.events if event[0] == "device-name-shared"] == [
        ("device-name-shared", "attic", {"ports": ports})
    ]
    assert [line["ports"] for line in logs if line["event"].startswith("one device name")] == [ports]


async def test_a_sensor_with_a_bad_name_is_refused_visibly(bench: Bench) -> None:
    sensor = bench.plug(device="att/ic")
    await sensor.opened()
    await sensor.send(Hello(7, 1, 2, 0, 0, "att/ic", "1.0", ("thermo",)))
    await until(lambda: bool(bench.intake.events))
    ((kind, device, details),) = bench.intake.events
    assert (kind, device, details["port"]) == ("device-refused", None, str(sensor.port))
    assert "'att/ic'" in str(details["reason"])


async def test_garbage_costs_nothing_and_is_reported_once_a_minute(bench: Bench) -> None:
    with capture_logs() as logs:
        sensor = bench.plug()
        await sensor.hello()
        await sensor.write(b"\xff" * 5000 + b"\0" + b"\x02noise\0")
        await sensor.send(sensor.data(0))
        _, done = await bench.intake.next()
        done(True)
        assert await sensor.expect(Ack) == Ack(7 ^ INCARNATION, 1, 0)

        def reports() -> list[object]:
            return [line["faults"] for line in logs if line["event"].startswith("serial frames")]

        bench.skipped_us += FAULT_REPORT_INTERVAL_US
        await until(lambda: bool(reports()))
        await sensor.write(b"\x02more noise\0")
        await sensor.send(sensor.data(1))
        await bench.intake.next()
        assert reports() == [{"too-long": 1, "bad-cobs": 1}]
        bench.skipped_us += FAULT_REPORT_INTERVAL_US
        await until(lambda: len(reports()) == 2)
    assert bench.intake.losses == []


async def test_a_sensor_that_does_not_read_holds_up_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # No probe falls due meanwhile, so that nothing but the line itself sets the writing going again.
    monkeypatch.setattr(frame_link, "PROBE_FIRST_INTERVAL_US", 3_600_000_000)
    deaf, other = bench.plug("ttyUSB0", "deaf"), bench.plug("ttyUSB1", "other")
    await deaf.hello()
    await other.hello()
    await deaf.jam()
    await deaf.send(deaf.data(0))
    _, done = await bench.intake.next()
    done(True)
    await other.send(other.data(0))
    (reading,), done = await bench.intake.next()
    done(True)
    assert reading.topic == "device/other/thermo"
    assert await other.expect(Ack) == Ack(7 ^ INCARNATION, 1, 0)

    # Bytes that waited are sent when the line takes them again.
    assert await deaf.expect(Ack) == Ack(7 ^ INCARNATION, 1, 0)
    await deaf.send(deaf.data(1))
    _, done = await bench.intake.next()
    done(True)
    assert await deaf.expect(Ack) == Ack(7 ^ INCARNATION, 2, 0)
    # And nothing is left going round: an idle ingress looks at the clock at its scans only.
    looked = bench.looked
    await asyncio.sleep(0.1)
    assert bench.looked - looked <= 100


async def test_a_file_that_is_no_port_is_reported_once_and_stops_nothing(bench: Bench) -> None:
    with capture_logs() as logs:
        (bench.ports / "ttyUSB5").write_bytes(b"")
        await until(lambda: any(line["event"].startswith("serial port cannot") for line in logs))
        sensor = bench.plug("ttyUSB6")
        await sensor.hello()
    (line,) = [line for line in logs if line["event"].startswith("serial port cannot")]
    assert line["reason"] == "it is no serial port: leave it out, or write what matches serial ports only"


async def refused_with(bench: Bench, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> str:
    """Log of a port whose opening fails in this way."""
    with capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(serial_ingress, "open_port", lambda _name, _baud: fail())
            (bench.ports / "ttyUSB5").write_bytes(b"")
            await until(lambda: any(line["event"].startswith("serial port cannot") for line in logs))
        (bench.ports / "ttyUSB5").unlink()
    return next(str(line["reason"]) for line in logs if line["event"].startswith("serial port cannot"))


async def test_the_reason_is_what_pyserial_wrapped_and_no_other_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped() -> None:
        try:
            os.close(-1)
        except OSError as error:
            raise ValueError(f"Failed to set custom baud rate (12345): {error}")  # noqa: B904 - as pyserial does it

    def unrelated() -> None:
        try:
            del dict[int, int]()[12345]
        except KeyError:
            raise ValueError("Invalid baud rate: 12345")  # noqa: B904 - the same

    assert await refused_with(bench, monkeypatch, wrapped) == os.strerror(errno.EBADF)
    assert await refused_with(bench, monkeypatch, unrelated) == "Invalid baud rate: 12345"


def told_missing(logs: Sequence[MutableMapping[str, Any]]) -> list[str]:
    return [line["port"] for line in logs if line["event"].startswith("no such serial port")]


async def test_a_port_that_is_not_there_is_told_once_and_again_when_it_has_gone_unopened(tmp_path: Path) -> None:
    idle = Bench(tmp_path, RecordingIntake())
    with capture_logs() as logs:
        async with idle.serving() as ingress:
            missing = f"{tmp_path}/ttyUSB*"
            await until(lambda: told_missing(logs) == [missing])
            awaited = {missing: f"nothing is called {missing} now; it may come later"}
            assert ingress.state() == {"ports": {}, "unopened": {}, "missing": [], "awaited": awaited, "gone": {}}
            sensor = idle.plug()
            await sensor.hello()
            assert any(line["event"] == "serial port opened" for line in logs)
            await until(lambda: devices(ingress) == {str(sensor.port): "attic"})
            assert ingress.state()["awaited"] == {}
            sensor.unplug()
            # That a served port has gone is told by its closing.
            await until(lambda: ingress.state()["awaited"] == awaited)
            assert sum(line["event"].startswith("serial port closed") for line in logs) == 1
            (tmp_path / "ttyUSB7").write_bytes(b"")
            await until(lambda: f"{tmp_path}/ttyUSB7" in str(ingress.state()["unopened"]))
            (tmp_path / "ttyUSB7").unlink()
            await until(lambda: len(told_missing(logs)) == 2)
            assert ingress.state()["unopened"] == {}
            await asyncio.sleep(0.1)
    assert told_missing(logs) == [missing, missing]


@pytest.mark.parametrize(("name", "level"), [("ttyUSB*", "info"), ("ttyUSB0", "warning")])
async def test_a_pattern_that_finds_nothing_yet_is_no_trouble_and_a_port_that_is_named_is(
    name: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serial_ingress, "brltty_words", lambda: None)
    settings = SerialSettings(ports=(f"{tmp_path}/{name}",), scan_interval_s=0.01)
    ingress = SerialIngress(settings, RecordingIntake(), lambda: 0, lambda: 0)
    with capture_logs() as logs:
        task = asyncio.create_task(ingress.run())
        await until(lambda: bool(told_missing(logs)))
        await until(lambda: bool(ingress.state()["missing"] or ingress.state()["awaited"]))
        task.cancel()
    assert [line["log_level"] for line in logs if line["event"].startswith("no such serial port")] == [level]
    assert ingress.state()["missing"] == ([] if level == "info" else [f"{tmp_path}/{name}"])


def gone(ingress: SerialIngress) -> dict[str, Any]:
    """Ports for `sluice status` that are gone."""
    found: Any = ingress.state()["gone"]
    return dict(found)


async def test_a_port_that_went_with_its_sensor_is_missed_until_it_is_back_or_the_sensor_is_elsewhere(
    idle: Bench,
) -> None:
    async with plugged(idle, "ttyUSB0", "ttyUSB1") as (attic, nobody), idle.serving() as ingress:
        await nobody.opened()
        await attic.hello()
        cellar = idle.plug("ttyUSB2", "cellar")
        await cellar.hello()
        assert gone(ingress) == {}
        for sensor in (attic, nobody, cellar):
            sensor.unplug()
        await until(lambda: devices(ingress) == {})
        await until(lambda: set(gone(ingress)) == {str(attic.port), str(cellar.port)})
        assert gone(ingress)[str(attic.port)]["devices"] == ("attic",)
        idle.skipped_us += 40_000_000
        assert 40 <= gone(ingress)[str(attic.port)]["gone_s"] < 40 + DEADLINE_S
        # The port is back, whichever sensor is on it now.
        back = idle.plug("ttyUSB0", "attic")
        await back.opened()
        await until(lambda: set(gone(ingress)) == {str(cellar.port)})
        moved = idle.plug("ttyUSB7", "cellar")
        await moved.opened()
        assert set(gone(ingress)) == {str(cellar.port)}
        await moved.hello()
        await until(lambda: gone(ingress) == {})
        moved.unplug()
        await until(lambda: set(gone(ingress)) == {str(moved.port)})
        idle.skipped_us += serial_ingress.GONE_FOR_US_MAX
        await until(lambda: gone(ingress) == {})


async def test_of_many_ports_that_went_the_last_are_remembered(idle: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial_ingress, "GONE_MAX", 2)
    async with plugged(idle), idle.serving() as ingress:
        sensors = [idle.plug(f"ttyUSB{number}", f"s{number}") for number in range(3)]
        for sensor in sensors:
            await sensor.hello()
        for sensor in sensors:
            sensor.unplug()
            await until(lambda port=str(sensor.port): port in gone(ingress))  # type: ignore[misc]
        assert set(gone(ingress)) == {str(sensor.port) for sensor in sensors[1:]}


async def test_when_it_ends_every_descriptor_is_given_back(idle: Bench) -> None:
    sensor = idle.plug()
    # The event loop's own and the thread pool's descriptors are there before.
    await asyncio.to_thread(time.sleep, 0)
    before = open_descriptors()
    async with idle.serving():
        await sensor.hello()
        assert open_descriptors() > before
    # A thread that looks for other programs may still have a directory open.
    await until(lambda: open_descriptors() == before)
    sensor.unplug()


def test_a_port_is_ours_alone(tmp_path: Path) -> None:
    sensor = PtySensor(tmp_path / "ttyUSB0")
    port = open_port(str(sensor.port), 38400)
    with pytest.raises(serial.SerialException) as refusal:
        open_port(str(sensor.port), 38400)
    assert refusal.value.errno == errno.EAGAIN
    # Idle is told from hung up, which reads as empty.
    with pytest.raises(BlockingIOError):
        os.read(port.fileno(), 1)
    port.close()
    sensor.unplug()


# -- sensors that are not ours --------------------------------------------------------------------


def scale(port: Path | str) -> SerialTextSettings:
    return SerialTextSettings(port=str(port), device="scale", format="key=value")


@asynccontextmanager
async def plugged(bench: Bench, *names: str) -> AsyncIterator[list[PtySensor]]:
    sensors = [bench.plug(name) for name in names]
    try:
        yield sensors
    finally:
        for sensor in bench.sensors:
            sensor.unplug()


async def test_a_port_of_text_is_read_as_text_and_by_nobody_else(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0", "ttyUSB1") as (weight, attic):
        async with idle.serving(text=(scale(weight.port),)) as ingress:
            await listed(ingress, weight)
            await attic.hello()
            await weight.write(b"ams=99\ngrams=125\n")
            (reading,), done = await idle.intake.next()
            assert (reading.topic, reading.datum.payload) == ("device/scale/text", b'{"grams":125}')
            assert (reading.subject, reading.datum.event_us) == (str(weight.port), None)
            done(True)
            assert devices(ingress) == {str(weight.port): "scale", str(attic.port): "attic"}
            state = port_state(ingress, weight)
            assert (state["acknowledges"], state["format"], state["refused"]) == (False, "key=value", 0)
            assert state["used_s"] >= 0
            assert "acknowledges" not in port_state(ingress, attic)
        assert ("device-appeared", "scale") in [(kind, device) for kind, device, _ in idle.intake.events]
        assert not weight.listen()
    (appeared,) = [details for kind, device, details in idle.intake.events if device == "scale"]
    assert appeared == {"port": str(weight.port), "format": "key=value", "acknowledges": False}


async def test_text_that_finds_no_room_is_lost_and_counted(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)):
        await weight.opened()
        # Half a line from the time of the opening is no line.
        await weight.write(b"ams=0\ngrams=1\n")
        _, done = await idle.intake.next()
        done(False)
        assert idle.intake.losses == [("scale", "cannot-wait", 1)]
        idle.intake.cannot_store = True
        await weight.write(b"grams=3\n")
        await until(lambda: len(idle.intake.losses) == 2)
        assert idle.intake.losses[1] == ("scale", "cannot-wait", 1)
        assert idle.intake.taken == []


async def test_a_line_that_cannot_be_read_goes_to_the_quarantine_and_is_told_once_a_minute(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)):
        await weight.opened()
        with capture_logs() as logs:
            await weight.write(b"grams=1\nERROR\ngrams=2\n")
            await until(lambda: bool(idle.intake.quarantined))
            ((device, subject, payload, _reason),) = idle.intake.quarantined
            assert (device, subject, payload) == ("scale", str(weight.port), b"ERROR")
            idle.skipped_us += FAULT_REPORT_INTERVAL_US
            await until(lambda: any(line["event"].startswith("serial lines could not be read") for line in logs))
            idle.skipped_us += FAULT_REPORT_INTERVAL_US
            await asyncio.sleep(0.1)
        assert sum(line["event"].startswith("serial lines could not be read") for line in logs) == 1


async def test_a_name_that_comes_later_than_its_port_takes_the_port_over(tmp_path: Path, idle: Bench) -> None:
    """udev makes /dev/ttyUSB0 first, and its link in by-path a moment later."""
    link = tmp_path / "by-path-2"
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(link),)) as ingress:
        await weight.opened()
        await until(lambda: str(weight.port) in str(ingress.state()["ports"]))
        await weight.hello()
        link.symlink_to(os.path.realpath(weight.port))
        await until(lambda: str(link) in str(ingress.state()["ports"]))
        await weight.write(b"grams=1\ngrams=2\n")
        (reading, *_), _ = await idle.intake.next()
        assert reading.topic == "device/scale/text"
        assert list(ingress.state()["ports"]) == [str(link)]  # type: ignore[call-overload]
        assert gone(ingress) == {}


async def test_a_name_that_leads_to_another_port_now_is_followed(tmp_path: Path, idle: Bench) -> None:
    link = tmp_path / "by-id-scale"
    async with plugged(idle, "ttyACM0", "ttyACM1") as (first, second):
        link.symlink_to(os.path.realpath(first.port))
        async with idle.serving(text=(scale(link),)):
            await first.opened()
            link.unlink()
            link.symlink_to(os.path.realpath(second.port))
            await second.opened()
            await first.write(b"grams=1\ngrams=1\n")
            await second.write(b"grams=2\ngrams=2\n")
            readings, _ = await idle.intake.next()
            assert {reading.datum.payload for reading in readings} == {b'{"grams":2}'}


async def test_a_name_of_several_ports_opens_none_of_them(tmp_path: Path, idle: Bench) -> None:
    with capture_logs() as logs:
        text = (scale(f"{tmp_path}/ttyUSB*"),)
        async with plugged(idle, "ttyUSB0", "ttyUSB1"), idle.serving(text=text) as ingress:
            await until(lambda: ingress.state()["unopened"] != {})
            await asyncio.sleep(0.1)
            assert ingress.state()["ports"] == {}
            called = f"2 ports are called so ({tmp_path}/ttyUSB0, {tmp_path}/ttyUSB1), and one sensor has one"
            assert called in str(ingress.state()["unopened"])
    assert sum(line["event"] == "serial port is not opened" for line in logs) == 1


async def test_two_names_of_one_port_are_told_and_the_first_has_it(tmp_path: Path, idle: Bench) -> None:
    async with plugged(idle, "ttyACM0") as (weight,):
        link = tmp_path / "by-path-2"
        link.symlink_to(os.path.realpath(weight.port))
        other = SerialTextSettings(port=str(link), device="other", format="json")
        async with idle.serving(text=(scale(weight.port), other)) as ingress:
            await weight.opened()
            await until(lambda: str(weight.port) in str(ingress.state()["ports"]))
            assert "it leads to the same port as" in ingress.state()["unopened"][str(link)]  # type: ignore[index]


async def test_units_of_modbus_are_asked_and_shown_by_device(idle: Bench) -> None:
    unit = ModbusUnit(unit=17, device="meter", registers=(ModbusRegister(name="volts", address=0),), interval_s=0.1)
    async with plugged(idle, "ttyUSB0") as (bus,):
        line = SerialModbusSettings(port=str(bus.port), units=(unit,), parity="none", timeout_s=0.05, retries=0)
        async with idle.serving(modbus=(line,)) as ingress:
            heard = b""
            while len(heard) < 8:
                with suppress(BlockingIOError):
                    heard += os.read(bus._master, 64)
                await asyncio.sleep(0.002)
            # Read Holding Registers of unit 17, one from 0 (MODBUS Application Protocol V1.1b3, section 6.3).
            assert heard[:6] == bytes((17, 3, 0, 0, 0, 1))
            port = ingress.state()["ports"][str(bus.port)]  # type: ignore[index]
            assert port["acknowledges"] is False
            assert (port["kind"], list(port["units"])) == ("Modbus", ["meter"])
            assert gone(ingress) == {}
            answer = bytes((17, 3, 2, 0, 230))
            while not ingress.state()["ports"][str(bus.port)]["units"]["meter"]["answers"]:  # type: ignore[index]
                with suppress(BlockingIOError):
                    os.read(bus._master, 64)
                    await bus.write(answer + FramerRTU.compute_CRC(answer).to_bytes(2, "big"))
                await asyncio.sleep(0.002)
            bus.unplug()
            await until(lambda: gone(ingress) != {})
            assert gone(ingress)[str(bus.port)]["devices"] == ("meter",)


async def test_one_name_of_a_frame_sensor_and_an_adapter_is_reported(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0", "ttyUSB1") as (weight, other), idle.serving(text=(scale(weight.port),)):
        await other.opened()
        await other.send(Hello(7, 1, 2, 0, 0, "scale", "1.0", ("thermo",)))
        await until(lambda: any(kind == "device-name-shared" for kind, _, _ in idle.intake.events))
    ports = [str(weight.port), str(other.port)]
    assert ("device-name-shared", "scale", {"ports": ports}) in idle.intake.events


@contextmanager
def rival(program: str, port: Path) -> Iterator[int]:
    """Another process, which runs this Python program with a port for `sys.argv[1]`; it is there once it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.communicate()


# -- sensors and lines that fall silent, or say nothing that can be used ---------------------------


def unusable(logs: Sequence[MutableMapping[str, Any]]) -> list[str]:
    return [line["reason"] for line in logs if line["event"] == "serial port gives nothing usable"]


async def test_a_sensor_that_falls_silent_is_told_once_and_when_it_speaks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: Bench
) -> None:
    monkeypatch.setattr(frame_link, "PROBE_FIRST_INTERVAL_US", 20_000)
    settings = SerialSettings(ports=(f"{tmp_path}/ttyUSB*",), scan_interval_s=0.02, probe_interval_s=0.05)
    ingress = SerialIngress(settings, idle.intake, idle.now_us, lambda: 0xC0FFEE)

    def told(kind: str) -> list[dict[str, object]]:
        return [details for each, device, details in idle.intake.events if each == kind and device == "attic"]

    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,), running(ingress):
            await sensor.hello()
            await until(lambda: bool(told("device-died")))
            assert told("device-died") == [{"source": "serial", "port": str(sensor.port), "cause": "no frame for 0 s"}]
            state = port_state(ingress, sensor)
            assert state["silent"] is True
            assert state["trouble"].startswith("SILENT for ")
            assert state["trouble"].endswith(", nothing comes: check power, wiring, ground and baud")
            # As at another baud rate, or with a loose wire.
            await sensor.write(b"\xff" * 1_200)
            await until(lambda: "1.2 kB came that are no frame" in str(port_state(ingress, sensor)["trouble"]))
            await asyncio.sleep(0.2)
            assert len(told("device-died")) == 1
            await sensor.write(b"\0")
            await sensor.send(sensor.data(0))
            await until(lambda: len(told("device-appeared")) == 2)
            assert told("device-appeared")[1] == {"source": "serial", "port": str(sensor.port)}
    (line, *_) = [line for line in logs if line["event"].startswith("serial sensor is silent")]
    assert (line["device"], line["port"], line["log_level"]) == ("attic", str(sensor.port), "warning")
    assert any(line["event"] == "serial sensor is heard again" for line in logs)


async def test_a_gateway_that_was_stopped_for_long_does_not_call_its_sensors_silent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the first PROBE none is due here.
    monkeypatch.setattr(frame_link, "PROBE_FIRST_INTERVAL_US", 3_600_000_000)
    sensor = bench.plug()
    await sensor.hello()
    bench.skipped_us += 600_000_000
    looked = bench.looked
    await until(lambda: bench.looked >= looked + 10)
    assert [kind for kind, _, _ in bench.intake.events] == ["device-appeared"]


async def test_a_port_of_frames_says_when_nothing_comes_and_when_it_is_no_frame(idle: Bench) -> None:
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving() as ingress:
            await listed(ingress, sensor)
            await until(lambda: devices(ingress) == {str(sensor.port): None})
            nothing = "nothing has come from it yet: check power and wiring"
            assert port_state(ingress, sensor)["trouble"] == nothing
            assert port_state(ingress, sensor)["heard_s"] is None
            await asyncio.sleep(0.1)
            assert unusable(logs) == []
            idle.skipped_us += 5_000_000
            await until(lambda: unusable(logs) == [nothing])
            await sensor.write(b"t=21.5\n" * 10)
            told = "bytes come, but no frame of ours (70 B in "
            await until(lambda: port_state(ingress, sensor)["trouble"].startswith(told))
            told = port_state(ingress, sensor)["trouble"]
            assert "it needs [[serial.text]]; else check serial.baud (38400), wiring and ground" in told
            idle.skipped_us += FAULT_REPORT_INTERVAL_US
            await until(lambda: len(unusable(logs)) == 2)
            # Nothing more has come since.
            idle.skipped_us += FAULT_REPORT_INTERVAL_US
            await asyncio.sleep(0.1)
            assert len(unusable(logs)) == 2
            assert not any(line["event"].startswith("serial frames could not") for line in logs)
            await sensor.write(b"\0")
            await sensor.hello()
            await until(lambda: port_state(ingress, sensor)["trouble"] is None)
            assert port_state(ingress, sensor)["used_s"] is not None


async def test_a_sensor_that_is_heard_and_does_not_hear_is_told(idle: Bench) -> None:
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving() as ingress:
            await listed(ingress, sensor)
            # It said HELLO before the gateway was there, and hears nobody ask for another.
            await sensor.send(sensor.data(0))
            await sensor.expect(HelloRequest)
            trouble = port_state(ingress, sensor)["trouble"]
            assert trouble.startswith("frames have come, but no HELLO")
            idle.skipped_us += 5_000_000
            await until(lambda: unusable(logs) == [trouble])
            await sensor.hello()
            await until(lambda: port_state(ingress, sensor)["trouble"] is None)


async def test_a_port_of_text_says_when_nothing_comes_and_when_it_has_no_lines(idle: Bench) -> None:
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)) as ingress:
            await listed(ingress, weight)
            await until(lambda: devices(ingress) == {str(weight.port): "scale"})
            # It may write once a minute.
            assert port_state(ingress, weight)["trouble"] is None
            idle.skipped_us += 60_000_000
            await until(lambda: len(unusable(logs)) == 1)
            assert unusable(logs)[0].startswith("NOTHING HAS COME for 1 min")
            await weight.write(b"\x01\xff" * 60)
            await until(lambda: "without an end of line" in str(port_state(ingress, weight)["trouble"]))
            assert "put it into serial.ports), or the wrong baud" in port_state(ingress, weight)["trouble"]
            idle.skipped_us += 60_000_000
            await until(lambda: len(unusable(logs)) == 2)
            await weight.write("\ngrams: 12°\n".encode())
            await until(lambda: port_state(ingress, weight)["refused"] == 1)
            state = port_state(ingress, weight)
            assert (state["trouble"], state["used_s"]) == (None, None)
            assert state["refused_last"] == {"reason": "no-pairs", "line": "grams: 12°"}


async def test_a_binary_protocol_on_a_port_of_text_is_called_that(idle: Bench) -> None:
    # A sensor of dust: ten bytes from AA C0 to AB; later ones hold ends of lines.
    frames = b"".join(bytes((0xAA, 0xC0, n, 1, n >> 1, 2, 0xA1, 0x60, n + 4, 0xAB)) for n in range(11, 91, 4))
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)) as ingress:
            await listed(ingress, weight)
            await weight.write(frames[:200])
            await until(lambda: "binary protocol" in str(port_state(ingress, weight)["trouble"]))
            trouble = port_state(ingress, weight)["trouble"]
            assert trouble.startswith("NO TEXT COMES: each 10 bytes the same ones come again (AA C0), as in")
            assert "our frames" not in trouble
            idle.skipped_us += 60_000_000
            await until(lambda: unusable(logs) == [trouble])
            await weight.write(frames.replace(b"\x0f", b"\n"))
            await until(lambda: port_state(ingress, weight)["refused"] > 0)
            assert "binary protocol" in port_state(ingress, weight)["trouble"]
            await weight.write(b"\ngrams=12\n")
            await until(lambda: port_state(ingress, weight)["used_s"] is not None)
            assert port_state(ingress, weight)["trouble"] is None


def dust(port: Path | str, format_: str = "sds011") -> SerialFormatSettings:
    return SerialFormatSettings(port=str(port), device="yard", format=format_)


async def test_a_port_with_a_format_gives_readings_and_says_what_is_wrong_with_the_others(idle: Bench) -> None:
    frame = bytes.fromhex("aac000010002a16004ab")
    async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving(formats=(dust(sensor.port),)) as ingress:
        await sensor.opened()
        await listed(ingress, sensor)
        await sensor.write(frame[3:] + frame + frame.replace(b"\x04", b"\x05"))
        (reading,), _ = await idle.intake.next()
        assert (reading.topic, reading.subject) == ("device/yard/sds011", str(sensor.port))
        assert reading.datum.payload == b'{"pm2_5":25.6,"pm10":51.2,"id":"A160"}'
        await until(lambda: port_state(ingress, sensor)["refused"] == 1)
        state = port_state(ingress, sensor)
        assert (state["kind"], state["format"], state["noisy"], state["trouble"]) == ("formats", "sds011", 1, None)
        damaged = ("yard", str(sensor.port), frame.replace(b"\x04", b"\x05"), "frame-checksum")
        await until(lambda: idle.intake.quarantined == [damaged])
    (appeared,) = [details for kind, device, details in idle.intake.events if device == "yard"]
    assert appeared == {"port": str(sensor.port), "format": "sds011", "acknowledges": False}


async def test_a_port_with_the_wrong_format_says_so_once_a_telegram_would_have_come(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving(formats=(dust(sensor.port),)) as ingress:
        await sensor.opened()
        await listed(ingress, sensor)
        await sensor.write(b"t=21.5\r\n" * 9)
        await until(lambda: port_state(ingress, sensor)["noisy"] > 0)
        assert port_state(ingress, sensor)["trouble"] is None
        idle.skipped_us += 60_000_000
        trouble = port_state(ingress, sensor)["trouble"]
        assert trouble.startswith("bytes come, but nothing that sds011 reads (72 B in 1 min")
        hello = encode_frame(Hello(7, INCARNATION, 2, 0, 0, "attic", "1.0", ("thermo",)))
        await sensor.write(b"\0" + hello)
        told = "FRAMES OF OURS COME: remove its [[serial.format]], and write the port into serial.ports"
        await until(lambda: str(port_state(ingress, sensor)["trouble"]).startswith(told))


async def test_a_sensor_with_our_frames_on_a_port_of_text_is_recognised(idle: Bench) -> None:
    hello = encode_frame(Hello(7, INCARNATION, 2, 0, 0, "attic", "1.0", ("thermo",)))
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)) as ingress:
            await weight.opened()
            await listed(ingress, weight)
            # Noise that ends a line, so that the bytes are refused line by line.
            await weight.write(b"\nnoise\n\0" + hello)
            await until(lambda: port_state(ingress, weight)["trouble"] is not None)
            trouble = port_state(ingress, weight)["trouble"]
            assert trouble.startswith(
                "FRAMES OF OURS COME, AND NO TEXT: remove its [[serial.text]], and write the port"
            )
            idle.skipped_us += 5_000_000
            await until(lambda: unusable(logs) == [trouble])
    # Which would send the installer to format, wiring and ground.
    assert [reason for *_, reason in idle.intake.quarantined] == ["no-pairs"]
    assert not any(line["event"].startswith("serial lines could not be read") for line in logs)


async def test_a_line_that_cannot_be_read_is_shown_as_the_quarantine_shows_it(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)) as ingress:
        await weight.opened()
        await listed(ingress, weight)
        await weight.write(b"\n\xbf$\xd5\x03" + b"x" * 80 + b"\n")
        await until(lambda: port_state(ingress, weight)["refused"] == 1)
        line = port_state(ingress, weight)["refused_last"]["line"]
        assert line == r"\xbf$\xd5\x03" + "x" * 46 + "…"


async def test_lines_that_cannot_be_read_are_told_soon_after_the_opening(idle: Bench) -> None:
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)):
            await weight.opened()
            await weight.write(b"\nERROR\n")
            await until(lambda: bool(idle.intake.quarantined))
            idle.skipped_us += 5_000_000
            await until(lambda: any(line["event"].startswith("serial lines could not be read") for line in logs))


async def test_a_sensor_with_a_bad_name_is_shown_and_no_trouble_of_the_wiring(idle: Bench) -> None:
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving() as ingress:
            await listed(ingress, sensor)
            await sensor.send(Hello(7, 1, 2, 0, 0, "a b/c", "1.0", ("thermo",)))
            await until(lambda: bool(idle.intake.events))
            trouble = port_state(ingress, sensor)["trouble"]
            assert trouble.startswith("REFUSED: it calls itself 'a b/c', which is no device name (")
            assert trouble.endswith("): flash it with another")
            idle.skipped_us += FAULT_REPORT_INTERVAL_US
            await asyncio.sleep(0.1)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["serial device refused"]


async def test_a_board_without_an_image_is_told(bench: Bench) -> None:
    with capture_logs() as logs:
        sensor = bench.plug(device="unprovisioned")
        await sensor.hello()
        await until(lambda: any(line["event"].startswith("a board without an EEPROM image") for line in logs))


async def test_a_name_whose_adapter_is_not_there_says_so(tmp_path: Path, idle: Bench) -> None:
    (tmp_path / "ttyUSB0").symlink_to(tmp_path / "gone")
    async with idle.serving() as ingress:
        await until(lambda: "the name is there, its adapter is not" in str(ingress.state()["unopened"]))
        assert "No such file" not in str(ingress.state()["unopened"])


async def test_a_link_that_leads_elsewhere_now_is_not_told_as_one_port_twice(tmp_path: Path, idle: Bench) -> None:
    link = tmp_path / "ttyUSB9"
    async with plugged(idle, "ttyACM0", "ttyACM1") as (first, second):
        link.symlink_to(os.path.realpath(first.port))
        async with idle.serving():
            await first.hello()
            link.unlink()
            link.symlink_to(os.path.realpath(second.port))
            await second.hello()
            await until(lambda: any(kind == "device-name-shared" for kind, _, _ in idle.intake.events))
            ports = sorted([str(link), os.path.realpath(second.port)])
            assert idle.intake.events[-1] == ("device-name-shared", "attic", {"ports": ports})


# -- neighbours -----------------------------------------------------------------------------------


async def test_a_port_of_text_takes_no_more_than_its_baud_carries(idle: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def receive(_line: TextLine, data: bytes, _now_us: int) -> None:
        nonlocal taken
        taken += len(data)

    monkeypatch.setattr(TextLine, "_received", receive)
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)):
        await weight.opened()
        begun = time.monotonic()
        flood = asyncio.create_task(weight.write(b"grams=1\n" * 12_500))
        await asyncio.sleep(1)
        flood.cancel()
        took_s = time.monotonic() - begun
        # 115,200 baud are 11,520 bytes a second. A pause makes up for the excess of a read.
        assert 0 < taken <= took_s * 14_400 + 2 * port_line.READ_BYTES_MAX


@pytest.mark.usefixtures("steady_time")
async def test_a_board_that_is_a_usb_device_is_read_in_time_whatever_its_baud_says(idle: Bench) -> None:
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)):
        await weight.opened()
        begun = time.monotonic()
        # 5 kB/s. At 9,600 baud, a fifth of that would pass. The first window alone would let some 4 kB through.
        for number in range(200):
            await weight.write(b"grams=%041d\n" % (1000 + number) * 2)
            await asyncio.sleep(max(0.0, begun + (number + 1) * 0.02 - time.monotonic()))
        await until(lambda: sum(len(readings) for readings, _ in idle.intake.taken) >= 398)
        # At 1,200 bytes a second it would be 16.
        assert time.monotonic() - begun < 10


async def test_a_flood_is_read_slowly_and_its_neighbour_at_once(bench: Bench) -> None:
    flooding, quiet = bench.plug("ttyUSB0", "flooding"), bench.plug("ttyUSB1", "quiet")
    await flooding.opened()
    await quiet.hello()
    written = 0

    async def flood() -> None:
        nonlocal written
        while True:
            await flooding.write(b"\xff" * 4096)
            written += 4096

    begun = time.monotonic()
    task = asyncio.create_task(flood())
    for sequence in range(20):
        await quiet.send(quiet.data(sequence))
        _, done = await bench.intake.next()
        done(True)
        assert await quiet.expect(Ack) == Ack(7 ^ INCARNATION, sequence + 1, 0)
        await asyncio.sleep(0.02)
    task.cancel()
    took_s = time.monotonic() - begun + port_line.FLOOD_WINDOW_US / 1e6
    # The kernel's own buffer of a terminal comes on top.
    assert written <= took_s * port_line.FLOOD_BYTES_PER_S_MAX + port_line.READ_BYTES_MAX + 65_536


async def test_a_port_that_another_program_has_open_is_told(idle: Bench) -> None:
    careless = "import sys; port = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,):
            with rival(careless, sensor.port) as process:
                async with idle.serving() as ingress:
                    await sensor.hello()
                    await until(lambda: any("another program too" in line["event"] for line in logs))
                    assert f"(process {process}) has it open" in port_state(ingress, sensor)["rivals"]
                    # It is looked at again, and told once.
                    before_us = ingress._faults_reported_us
                    idle.skipped_us += FAULT_REPORT_INTERVAL_US
                    await until(lambda: ingress._faults_reported_us > before_us)
                    await asyncio.sleep(0.1)
    (line,) = [line for line in logs if "another program too" in line["event"]]
    assert f"(process {process}) has it open: stop it, or take the port out of serial.ports" in line["reason"]


async def test_a_program_that_opens_a_port_later_is_seen_and_forgotten_when_it_ends(idle: Bench) -> None:
    careless = "import sys; port = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    async with plugged(idle, "ttyUSB0") as (weight,), idle.serving(text=(scale(weight.port),)) as ingress:
        await listed(ingress, weight)
        await until(lambda: devices(ingress) == {str(weight.port): "scale"})
        assert port_state(ingress, weight)["rivals"] is None
        with rival(careless, weight.port):
            idle.skipped_us += FAULT_REPORT_INTERVAL_US
            await until(lambda: port_state(ingress, weight)["rivals"] is not None)
            assert "stop it, or remove its [[serial.text]]" in port_state(ingress, weight)["rivals"]
        idle.skipped_us += FAULT_REPORT_INTERVAL_US
        await until(lambda: port_state(ingress, weight)["rivals"] is None)


async def test_a_port_that_another_gateway_serves_is_told_once_and_opened_when_it_is_free(idle: Bench) -> None:
    locking = (
        "import sys; from gateway.serial_lines.ports import open_port; port = open_port(sys.argv[1], 9600); "
        "print(flush=True); sys.stdin.read()"
    )
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving() as ingress:
            with rival(locking, sensor.port) as process:
                await until(lambda: ingress.state()["unopened"] != {})
                await asyncio.sleep(0.2)
                (reason,) = ingress.state()["unopened"].values()  # type: ignore[attr-defined]
                assert f"(process {process}) has it open" in reason
            await until(lambda: ingress.state()["unopened"] == {})
            await sensor.hello()
    assert sum(line["event"].startswith("serial port cannot") for line in logs) == 1


async def test_a_right_that_comes_a_moment_after_the_port_is_no_trouble_to_tell(
    idle: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until udev has given a new port to its group, it is root's alone."""
    attempts = 0

    def open_late(name: str, baud: int) -> serial.Serial:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise PermissionError(errno.EACCES, "")
        return open_port(name, baud)

    monkeypatch.setattr(serial_ingress, "open_port", open_late)
    with capture_logs() as logs:
        async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving():
            await sensor.hello()
    assert attempts == 2
    assert not any(line["event"].startswith("serial port cannot") for line in logs)


async def test_more_ports_than_are_served_are_told(idle: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial_ingress, "PORTS_MAX", 1)
    async with plugged(idle, "ttyUSB0", "ttyUSB1") as (first, second), idle.serving() as ingress:
        await first.hello()
        unopened = {str(second.port): "1 ports are open, which is the most that are served"}
        await until(lambda: ingress.state()["unopened"] == unopened)


def test_what_is_not_configured_is_not_imported() -> None:
    program = "import sys, gateway.serial_lines.serial_ingress; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert "serial" in loaded
    assert not loaded & {
        "gateway.serial_lines.text_line",
        "gateway.serial_lines.text_lines",
        "gateway.serial_lines.format_line",
        "gateway.serial_lines.modbus_line",
        "pymodbus",
    }


class CommittingIntake(RecordingIntake):
    """Stores at the next turn of the loop, and knows its readings: as the buffer does, but in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[tuple[str, str | None, int | None], Reading] = {}

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        assert not marks
        for reading in readings:
            self.stored.setdefault((reading.topic, reading.datum.device_boot, reading.datum.device_sequence), reading)
        asyncio.get_running_loop().call_soon(done, True)


@pytest.mark.avr
async def test_real_firmware_and_the_gateway_agree_on_what_was_acknowledged(tmp_path: Path) -> None:
    intake = CommittingIntake()
    settings = SerialSettings(ports=(f"{tmp_path}/tty-*",), scan_interval_s=0.05)
    boards = await asyncio.to_thread(start_boards, tmp_path, 2, interval_ms=50)
    try:
        async with running(SerialIngress(settings, intake, boottime_us, random_nonce)):
            await until(lambda: len(intake.stored) >= 50)
        # The gateway restarts; the sensors have gone on.
        async with running(SerialIngress(settings, intake, boottime_us, random_nonce)):
            await until(lambda: len(intake.stored) >= 150)
            inhibit_sampling(boards)
            await until(lambda: all(settled(account(board)) for board in boards))
    finally:
        await asyncio.to_thread(stop_boards, boards)

    for board in boards:
        ledger = account(board)
        sequences = {sequence for topic, _, sequence in intake.stored if topic == f"device/{board.device}/thermo"}
        assert ledger["acknowledged"] == [[0, ledger["taken"] - 1]]
        assert sequences == set(range(ledger["taken"]))
    assert intake.losses == []
    assert {kind for kind, _, _ in intake.events} == {"device-appeared"}
    timed = [reading for reading in intake.stored.values() if reading.datum.event_us is not None]
    assert len(timed) > len(intake.stored) / 2
    for reading in timed:
        assert reading.datum.event_us is not None
        assert reading.datum.event_us <= reading.datum.received_us


def boottime_us() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def random_nonce() -> int:
    return secrets.randbits(32)


def account(board: Board) -> dict[str, Any]:
    """The firmware's account of its present boot."""
    if not board.ledger.exists():
        return {}
    ledger: dict[str, Any] = json.loads(board.ledger.read_text().splitlines()[-1])
    return ledger


def settled(ledger: dict[str, Any]) -> bool:
    return bool(ledger) and ledger["acknowledged"] == [[0, ledger["taken"] - 1]]
