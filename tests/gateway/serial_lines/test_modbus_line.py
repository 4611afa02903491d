"""Modbus RTU on pseudo-terminals, against pymodbus' server: several units, silence, noise, late answers."""

import asyncio
import os
import random
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import serial
from pymodbus.constants import ExcCodes
from pymodbus.framer import FramerRTU
from pymodbus.server import ModbusSerialServer
from pymodbus.simulator import DataType, SimData, SimDevice
from structlog.testing import capture_logs

from gateway.reading import Mark, Reading, Recalled
from gateway.serial_lines import modbus_answers, modbus_line
from gateway.serial_lines.modbus_line import ModbusLine
from gateway.serial_lines.modbus_registers import REGISTERS_MAX
from gateway.settings import Baud, ModbusRegister, ModbusUnit, SerialModbusSettings
from tests.support.gateways import SLUICE, daemon, free_port, write_config
from tests.support.waiting import patience, until
from tests.test_imports import imported_by

DEADLINE_S = 30.0


@dataclass
class RecordingIntake:
    """Stands for the buffer: readings are committed at once, unless the test says otherwise."""

    readings: list[Reading] = field(default_factory=list)
    losses: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    events: list[tuple[str, str | None]] = field(default_factory=list)
    details: list[dict[str, object]] = field(default_factory=list)
    cannot_store: bool = False
    stores: bool = True

    def take(self, readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        assert not marks
        assert not self.cannot_store
        self.readings += readings
        done(self.stores)

    async def recall(self, device: str, boot: str, held: range) -> Recalled:
        raise NotImplementedError(device, boot)

    async def marks(self, prefix: str) -> dict[str, bytes]:
        raise NotImplementedError(prefix)

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        assert sequences is None
        self.losses[device, reason] += count

    def unreadable(self, device: str, subject: str, payload: bytes, received_us: int, reason: str) -> None:
        raise NotImplementedError(device, subject, payload, received_us, reason)

    def event(self, kind: str, device: str | None, **details: object) -> None:
        self.events.append((kind, device))
        self.details.append(details)

    def of(self, device: str) -> list[dict[str, Any]]:
        """Readings of a device, in order."""
        return [
            msgspec.json.decode(each.datum.payload) for each in self.readings if each.topic == f"device/{device}/modbus"
        ]

    async def next_of(self, device: str, count: int = 1) -> list[dict[str, Any]]:
        """The next `count` readings of a device from now on."""
        before = len(self.of(device))
        await until(lambda: len(self.of(device)) >= before + count)
        return self.of(device)[before:]


class Wire:
    """One end of a line: a pseudo-terminal that a program opens as `port`, and whose far end is here."""

    def __init__(self, port: Path) -> None:
        self.port = port
        self.hear: Callable[[bytes], object] = bytes
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        os.set_blocking(self._master, False)
        port.symlink_to(os.ttyname(self._slave))
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def send(self, data: bytes) -> None:
        with suppress(OSError):
            os.write(self._master, data)

    def unplug(self) -> None:
        self.port.unlink(missing_ok=True)
        if self._master >= 0:
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
            os.close(self._slave)
        self._master = -1

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self.hear(os.read(self._master, 4096))


REQUEST_BYTES = 8
"""Bytes of a request that reads registers: unit, function, address, count, CRC."""


class Puppet:
    """Units as no server is: they answer late, twice, half, or not at all. A holding register holds its address."""

    def __init__(self, wire: Wire) -> None:
        self.asked: list[tuple[int, int]] = []
        """Unit and address of each request."""
        self.functions: list[int] = []
        self.counts: list[int] = []
        """Registers of each request."""
        self.answer: Callable[[bytes], None] = self.send
        """Sends or changes each answer's frame."""
        self.silent: set[tuple[int, int]] = set()
        """Unit and address of requests that find no answer."""
        self.send_raw = wire.send
        wire.hear = self._hear

    def send(self, frame: bytes) -> None:
        self.send_raw(frame)

    def _hear(self, heard: bytes) -> None:
        # Of a request that finds no answer, a busy machine may hand on the second try with the first.
        assert len(heard) % REQUEST_BYTES == 0
        for at in range(0, len(heard), REQUEST_BYTES):
            self._take(heard[at : at + REQUEST_BYTES])

    def _take(self, request: bytes) -> None:
        assert sealed(request[:-2]) == request
        unit, function, address, count = struct.unpack(">BBHH", request[:-2])
        self.asked.append((unit, address))
        self.functions.append(function)
        self.counts.append(count)
        if (unit, address) not in self.silent:
            data = struct.pack(f">{count}H", *range(address, address + count))
            self.answer(sealed(bytes((unit, function, len(data))) + data))


def sealed(frame: bytes) -> bytes:
    return frame + FramerRTU.compute_CRC(frame).to_bytes(2, "big")


def now_us() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def registers(*addresses: int, **members: Any) -> tuple[ModbusRegister, ...]:
    return tuple(ModbusRegister(f"at-{address}", address, **members) for address in addresses)


def brief(state: Mapping[str, Any], device: str) -> dict[str, object]:
    """The state of one unit in a line's state, in short."""
    return {name: state[device][name] for name in ("unit", "answers", "fault")}


def unit(number: int, device: str, *values: ModbusRegister, interval_s: float = 0.05) -> ModbusUnit:
    return ModbusUnit(number, device, values or registers(0), interval_s=interval_s)


@dataclass
class Bench:
    """A line's near end, and the readings that its gateway has handed over."""

    wire: Wire
    intake: RecordingIntake

    @asynccontextmanager
    async def polling(
        self, *units: ModbusUnit, timeout_s: float = 0.5, retries: int = 1, baud: Baud = 115_200
    ) -> AsyncIterator[ModbusLine]:
        settings = SerialModbusSettings(
            str(self.wire.port), units, baud, parity="none", timeout_s=timeout_s, retries=retries
        )
        line = ModbusLine(settings.port, settings, "device/{device}/{stream}", self.intake, now_us)
        await line.open()
        try:
            yield line
        finally:
            line.close()


@pytest.fixture
async def bench(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steady_time: None,  # noqa: ARG001 - its time-outs are short
) -> AsyncIterator[Bench]:
    monkeypatch.setattr(modbus_line, "LATE_S_MAX", 0.4)
    bench = Bench(Wire(tmp_path / "ttyUSB0"), RecordingIntake())
    yield bench
    bench.wire.unplug()


@pytest.fixture
def puppet(bench: Bench) -> Puppet:
    return Puppet(bench.wire)


@asynccontextmanager
async def server(
    bench: Bench,
    *devices: SimDevice,
    to_units: Callable[[bytes], bytes] = bytes,
    to_gateway: Callable[[bytes], bytes] = bytes,
) -> AsyncIterator[None]:
    """pymodbus' server at the far end of the line, with the line's faults."""
    far = Wire(bench.wire.port.with_name("units"))
    units = {device.id for device in devices}
    # The server answers for units that it has not, too; on a line nobody does.
    bench.wire.hear = lambda data: far.send(to_units(data)) if data[0] in units else None
    far.hear = lambda data: bench.wire.send(to_gateway(data))
    serving = ModbusSerialServer(list(devices), port=str(far.port), baudrate=115_200)
    await serving.serve_forever(background=True)
    try:
        yield
    finally:
        await serving.shutdown()  # type: ignore[no-untyped-call]
        far.unplug()


def holding(number: int, *blocks: SimData, **members: Any) -> SimDevice:
    return SimDevice(number, list(blocks), **members)


def block(address: int, *words: int) -> SimData:
    return SimData(address, values=list(words), datatype=DataType.REGISTERS)


@contextmanager
def open_descriptors_stay() -> Iterator[None]:
    def count() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = count()
    yield
    assert count() == before


def words_of(kind: str, number: float, word_order: str) -> list[int]:
    formats = {"u16": ">H", "s16": ">h", "u32": ">I", "s32": ">i", "u64": ">Q", "s64": ">q", "f32": ">f", "f64": ">d"}
    raw = struct.pack(formats[kind], number)
    if word_order == "DCBA":
        raw = raw[::-1]
    words = list(struct.unpack(f"{'<' if word_order == 'BADC' else '>'}{len(raw) // 2}H", raw))
    return words[::-1] if word_order in {"CDAB", "low-first"} else words


async def test_an_energy_meter_and_a_thermometer_on_one_line(bench: Bench) -> None:
    volts, amps = struct.unpack(">2H", struct.pack(">f", 230.2)), struct.unpack(">2H", struct.pack(">f", 0.35))
    meter = unit(
        1,
        "meter",
        ModbusRegister("volts", 0, "input", "f32"),
        ModbusRegister("amps", 6, "input", "f32"),
        interval_s=0.5,
    )
    climate = unit(
        2,
        "climate",
        ModbusRegister("celsius", 1, "input", "s16", scale=0.1),
        ModbusRegister("humidity", 2, "input", "u16", scale=0.1),
        interval_s=0.5,
    )
    with open_descriptors_stay():
        async with (
            server(bench, holding(1, block(0, *volts, 0, 0, 0, 0, *amps)), holding(2, block(1, 0xFFC7, 481))),
            bench.polling(meter, climate) as line,
        ):
            await bench.intake.next_of("meter")
            await bench.intake.next_of("climate")
            state = line.units()
    assert bench.intake.of("meter")[0] == {"volts": 230.2, "amps": 0.35}
    (first, *_) = (each for each in bench.intake.readings if each.topic == "device/climate/modbus")
    assert first.datum.payload == b'{"celsius":-5.7,"humidity":48.1}'
    assert first.subject == str(bench.wire.port)
    assert 0 <= now_us() - first.datum.received_us < DEADLINE_S * 1e6
    assert bench.intake.events == [("device-appeared", "meter"), ("device-appeared", "climate")]
    assert bench.intake.details[1] == {
        "source": "modbus",
        "port": str(bench.wire.port),
        "unit": 2,
        "acknowledges": False,
    }
    assert brief(state, "climate") == {"unit": 2, "answers": True, "fault": None}
    assert line.closed


async def test_a_register_that_has_not_moved_is_left_out_and_a_poll_in_which_none_moved_is_not_sent(
    bench: Bench,
) -> None:
    meter = unit(1, "meter", ModbusRegister("watts", 0, on_change=5), ModbusRegister("amps", 1, on_change=0))
    async with server(bench, holding(1, block(0, 100, 7))), bench.polling(meter) as line:
        assert await bench.intake.next_of("meter") == [{"watts": 100, "amps": 7}]
        (polled,) = line._units
        # The next polls find what the first found.
        for _ in range(3):
            due_s = polled.due_s
            await until(lambda due_s=due_s: polled.due_s > due_s)  # type: ignore[misc]
        assert len(bench.intake.of("meter")) == 1
        # A reading that found no room was not sent.
        bench.intake.stores = False
        polled.changes.forget()
        assert await bench.intake.next_of("meter", 2) == [{"watts": 100, "amps": 7}] * 2
        assert bench.intake.losses["meter", "cannot-wait"] >= 2


async def test_an_inverter_that_sleeps_has_no_values(bench: Bench) -> None:
    values = (
        ModbusRegister("watts", 0, type="u16", null_if=(0xFFFF,)),
        ModbusRegister("celsius", 1, type="s16", scale=0.1, null_if=(0x8000,)),
        ModbusRegister("kwh", 2, type="u32", word_order="low-first", scale=0.01, null_if=(0xFFFFFFFF,)),
        ModbusRegister("amps", 4, type="s32", null_if=(-(2**31),)),
        ModbusRegister("code", 6),
    )
    asleep = block(0, 0xFFFF, 0x8000, 0xFFFF, 0xFFFF, 0x8000, 0, 0xFFFF)
    async with server(bench, holding(1, asleep)), bench.polling(unit(1, "inverter", *values)):
        (said,) = await bench.intake.next_of("inverter")
    assert said == {"watts": None, "celsius": None, "kwh": None, "amps": None, "code": 65_535}


async def test_every_type_in_every_order_of_bytes(bench: Bench) -> None:
    numbers: dict[str, float] = {
        "u16": 65_000,
        "s16": -12_345,
        "u32": 4_000_000_001,
        "s32": -2_000_000_003,
        "u64": 2**63 + 12_345,
        "s64": -(2**62) - 77,
        "f32": 21.53,
        "f64": -1.000000000000001e-200,
    }
    orders = ("ABCD", "CDAB", "BADC", "DCBA", "high-first", "low-first")
    values: list[ModbusRegister] = []
    blocks: list[SimData] = []
    address = 100
    for kind, number in numbers.items():
        for order in orders:
            values.append(
                msgspec.convert(
                    {"name": f"{kind} {order}", "address": address, "type": kind, "word_order": order}, ModbusRegister
                )
            )
            blocks.append(block(address, *words_of(kind, number, order)))
            address += len(blocks[-1].build_registers(block_bits=False))
    async with server(bench, holding(7, *blocks)), bench.polling(unit(7, "all", *values)):
        (said,) = await bench.intake.next_of("all")
    assert said == {f"{kind} {order}": number for kind, number in numbers.items() for order in orders}


async def test_more_registers_than_one_request_holds_and_bits(bench: Bench) -> None:
    bits = [at % 3 == 0 for at in range(320)]
    device = SimDevice(
        3,
        (
            [SimData(0, values=bits, datatype=DataType.BITS)],
            [SimData(0, values=bits, datatype=DataType.BITS)],
            [block(0, *range(1_000, 1_300))],
            [block(0, 0)],
        ),
    )
    values = registers(*range(2 * REGISTERS_MAX + 1))
    coils = tuple(ModbusRegister(f"coil-{at}", at, "coil", "bit") for at in range(5, 300))
    async with server(bench, device), bench.polling(unit(3, "wide", *values, *coils)):
        (said,) = await bench.intake.next_of("wide")
    assert said == {f"at-{at}": 1_000 + at for at in range(251)} | {f"coil-{at}": bits[at] for at in range(5, 300)}


async def test_a_unit_that_is_not_there_costs_the_others_nothing_but_its_timeouts(bench: Bench) -> None:
    with capture_logs() as logs:
        async with (
            server(bench, holding(1, block(0, 11))),
            bench.polling(unit(1, "here"), unit(9, "absent"), timeout_s=0.1) as line,
        ):
            await until(lambda: any(entry.get("device") == "absent" for entry in logs))
            await bench.intake.next_of("here", 3)
            line.report_faults()
            assert brief(line.units(), "absent") == {"unit": 9, "answers": False, "fault": "holding 0: no answer"}
    assert bench.intake.of("here")[-1] == {"at-0": 11}
    assert bench.intake.events == [("device-appeared", "here")]
    (told,) = (entry for entry in logs if entry.get("unit") == 9)
    assert told["event"] == "modbus unit cannot be read; it is asked less often until it can"
    assert any("absent" in entry.get("faults", {}) for entry in logs)


async def test_a_register_that_is_refused_does_not_cost_its_neighbours(bench: Bench) -> None:
    # 20 to 22 are read together; 21 is not there.
    device = holding(1, block(20, 5), SimData(21, datatype=DataType.INVALID), block(22, 7))
    with capture_logs() as logs:
        async with server(bench, device), bench.polling(unit(1, "meter", *registers(20, 21, 22))) as line:
            said = await bench.intake.next_of("meter", 3)
            line.report_faults()
            state = line.units()
    assert said == [{"at-20": 5, "at-22": 7}] * 3
    (faults,) = (entry["faults"]["meter"] for entry in logs if "faults" in entry)
    words = "illegal data address: it has no such register (exception 2)"
    # Together once; from then on it is asked for alone.
    assert faults[f"holding 20 to 22: {words}"] == 1
    assert faults[f"holding 21: {words}"] >= 3
    assert brief(state, "meter") == {"unit": 1, "answers": True, "fault": f"holding 21: {words}"}


async def test_refused_registers_are_named_at_once_and_until_they_are_given(bench: Bench, puppet: Puppet) -> None:
    refusing = {0, 5}

    def refuse(frame: bytes) -> None:
        at = puppet.asked[-1][1]
        told = sealed(bytes((frame[0], frame[1] | 0x80, 4))) if at in refusing and frame[1] == 3 else frame
        puppet.send(told)

    puppet.answer = refuse
    words = "device failure (exception 4)"
    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter", *registers(0, 5, 9)), timeout_s=0.5) as line:
            assert line.units()["meter"] == {
                "unit": 1, "answers": False, "since_us": None, "fault": None, "asked": 3, "refused": {},
            }  # fmt: skip
            await bench.intake.next_of("meter", 4)
            state: Any = line.units()
            assert state["meter"]["refused"] == {"at-0": f"holding 0: {words}", "at-5": f"holding 5: {words}"}
            assert (state["meter"]["answers"], state["meter"]["asked"]) == (True, 3)
            (told,) = (entry for entry in logs if "refused" in entry)
            assert told["refused"] == state["meter"]["refused"]
            assert (told["device"], told["unit"], told["port"]) == ("meter", 1, str(bench.wire.port))
            refusing.clear()
            await until(lambda: bench.intake.of("meter")[-1] == {"at-0": 0, "at-5": 5, "at-9": 9})
            state = line.units()
            assert state["meter"]["refused"] == {}
            refusing.add(0)
            await until(lambda: "at-0" not in bench.intake.of("meter")[-1])
    assert sum("refused" in entry for entry in logs) == 1, "a register that comes and goes floods no log"


async def test_a_unit_that_is_busy_refuses_no_register(bench: Bench, puppet: Puppet) -> None:
    code = 6
    puppet.answer = lambda _frame: puppet.send(sealed(bytes((1, 0x83, code))))
    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter", *registers(0, 1))) as line:

            def state() -> dict[str, Any]:
                return dict[str, Any](line.units())["meter"]  # type: ignore[no-any-return]

            await until(lambda: state()["fault"] is not None)
            assert (state()["fault"], state()["refused"]) == ("holding 0 to 1: busy (exception 6)", {})
            code = 2
            await until(lambda: len(state()["refused"]) == 2)
    assert [list(told["refused"]) for told in logs if "refused" in told] == [["at-0", "at-1"]], "once it does refuse"


async def test_a_unit_that_does_not_answer_is_told_with_since_when(bench: Bench, puppet: Puppet) -> None:
    puppet.silent.add((1, 0))
    begun_us = now_us()
    async with bench.polling(unit(1, "meter"), timeout_s=0.05, retries=0) as line:

        def state() -> dict[str, Any]:
            return dict[str, Any](line.units())["meter"]  # type: ignore[no-any-return]

        await until(lambda: state()["since_us"] is not None)
        since_us = state()["since_us"]
        assert begun_us <= since_us <= now_us()
        await until(lambda: state()["fault"] is not None and len(puppet.asked) > 3)
        assert state()["since_us"] == since_us, "as long as it says nothing"
        puppet.silent.clear()
        await until(lambda: bool(state()["answers"]))
        assert state()["since_us"] is None
        back_us = now_us()
        puppet.silent.add((1, 0))
        await until(lambda: not state()["answers"])
        assert state()["since_us"] >= back_us, "of this silence, not of the first"


async def test_a_unit_that_says_device_failure_of_a_register_that_it_has_not(bench: Bench) -> None:
    async def fail_at_21(_function: int, _start: int, address: int, count: int, *_: object) -> ExcCodes | None:
        return ExcCodes.DEVICE_FAILURE if address <= 21 < address + count else None

    async with (
        server(bench, holding(1, block(20, 5, 6, 7), action=fail_at_21)),
        bench.polling(unit(1, "meter", *registers(20, 21, 22))),
    ):
        await until(lambda: {"at-20": 5, "at-22": 7} in bench.intake.of("meter"))


async def test_a_unit_that_fails_for_once_is_asked_for_all_at_once_again(bench: Bench, puppet: Puppet) -> None:
    failure = sealed(bytes((1, 0x83, 4)))
    puppet.answer = lambda frame: puppet.send(failure if len(puppet.asked) == 1 else frame)
    async with bench.polling(unit(1, "meter", *registers(0, 1))):
        await bench.intake.next_of("meter", 2)
    assert set(puppet.counts) == {2}


async def test_a_busy_unit_is_asked_again(bench: Bench) -> None:
    refusals = [ExcCodes.DEVICE_BUSY, ExcCodes.ACKNOWLEDGE]

    async def busy_at_first(*_request: object) -> ExcCodes | None:
        return refusals.pop() if refusals else None

    async with (
        server(bench, holding(1, block(0, 3), action=busy_at_first)),
        bench.polling(unit(1, "meter", interval_s=600), retries=2),
    ):
        assert await bench.intake.next_of("meter") == [{"at-0": 3}]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ExcCodes.ILLEGAL_FUNCTION, "illegal function: it has no such table (exception 1)"),
        (ExcCodes.ILLEGAL_VALUE, "illegal data value: it does not take this request (exception 3)"),
        (ExcCodes.DEVICE_FAILURE, "device failure (exception 4)"),
    ],
)
async def test_a_refusal_is_told_in_words_and_the_unit_is_there(bench: Bench, code: ExcCodes, words: str) -> None:
    async def refuse(*_request: object) -> ExcCodes | None:
        return code

    async with (
        server(bench, holding(1, block(0, 3), action=refuse)),
        bench.polling(unit(1, "meter")) as line,
    ):
        await until(
            lambda: brief(line.units(), "meter") == {"unit": 1, "answers": True, "fault": f"holding 0: {words}"}
        )
    assert bench.intake.readings == []


async def test_a_gateway_that_answers_for_a_unit_that_does_not(bench: Bench) -> None:
    reached = True

    async def not_reached(*_request: object) -> ExcCodes | None:
        return None if reached else ExcCodes.GATEWAY_NO_RESPONSE

    async with (
        server(bench, holding(1, block(0, 3), action=not_reached)),
        bench.polling(unit(1, "meter")),
    ):
        await bench.intake.next_of("meter")
        reached = False
        await until(lambda: ("device-died", "meter") in bench.intake.events)
    assert bench.intake.details[-1]["cause"] == "holding 0: gateway target failed to respond (exception 11)"


async def test_noise_makes_no_reading_that_was_not_there(bench: Bench) -> None:
    seed = 20_261
    dice = random.Random(seed)  # noqa: S311 - a seed replays it
    flipped = 0

    def noisy(data: bytes) -> bytes:
        nonlocal flipped
        noised = bytearray(data)
        for at in range(len(noised)):
            if dice.random() < 0.02:
                noised[at] ^= 1 << dice.randrange(8)
                flipped += 1
        return bytes(noised)

    words = [0x1234, 0xABCD, 0, 0xFFFF]
    async with (
        server(bench, holding(1, block(0, *words)), holding(2, block(0, 9)), to_units=noisy, to_gateway=noisy),
        bench.polling(unit(1, "meter", *registers(0, 1, 2, 3)), unit(2, "other"), timeout_s=0.1),
    ):
        await bench.intake.next_of("meter", 60)
    assert flipped > 10, seed
    assert bench.intake.of("meter") == [{f"at-{at}": word for at, word in enumerate(words)}] * len(
        bench.intake.of("meter")
    ), seed
    assert {said["at-0"] for said in bench.intake.of("other")} == {9}, seed


@pytest.mark.parametrize("seed", range(3))
async def test_a_late_answer_is_never_taken_for_the_next_request(
    bench: Bench, puppet: Puppet, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(modbus_line, "LATE_S_MAX", 0.4)
    # Three requests of one form to one unit: nothing in their answers tells which one is answered.
    dice = random.Random(seed)  # noqa: S311 - a seed replays it
    loop = asyncio.get_running_loop()
    free_s = 0.0

    def late(frame: bytes) -> None:
        nonlocal free_s
        # In order, as units answer; at times later than is waited for.
        free_s = max(free_s + 0.001, loop.time() + dice.choice((0.0, 0.0, 0.15, 0.25)))
        loop.call_at(free_s, puppet.send, frame)

    puppet.answer = late
    values = registers(0, 100, 200)
    with capture_logs() as logs:
        async with bench.polling(unit(1, "slow", *values), unit(2, "quick"), timeout_s=0.1, retries=2) as line:
            await until(lambda: sum(len(said) for said in bench.intake.of("slow")) >= 20)
            line.report_faults()
    for said in bench.intake.of("slow"):
        assert all(name == f"at-{value}" for name, value in said.items()), seed
    assert any("no answer" in str(entry.get("faults")) for entry in logs), seed
    assert {value for said in bench.intake.of("quick") for value in said.values()} == {0}


async def test_a_request_that_finds_no_answer_is_asked_again_before_another(bench: Bench, puppet: Puppet) -> None:
    dropped = 0

    def drop_twice(frame: bytes) -> None:
        nonlocal dropped
        if frame[3:-2] == bytes((0, 100)) and dropped < 2:
            dropped += 1
        else:
            puppet.send(frame)

    puppet.answer = drop_twice
    async with bench.polling(unit(1, "meter", *registers(0, 100)), timeout_s=0.1, retries=0):
        await until(lambda: {"at-0": 0, "at-100": 100} in bench.intake.of("meter"))
    assert puppet.asked[:4] == [(1, 0), (1, 100), (1, 100), (1, 100)]
    assert bench.intake.of("meter")[0] == {"at-0": 0}


async def test_a_fence_parts_an_answer_that_may_still_come_from_the_next_request(bench: Bench, puppet: Puppet) -> None:
    loop = asyncio.get_running_loop()
    free_s = 0.0

    def first_is_late(frame: bytes) -> None:
        nonlocal free_s
        free_s = max(free_s + 0.001, loop.time() + (0 if free_s else 0.3))
        loop.call_at(free_s, puppet.send, frame)

    puppet.answer = first_is_late
    async with bench.polling(unit(1, "meter", *registers(0, 100), interval_s=600), timeout_s=0.2, retries=3):
        assert await bench.intake.next_of("meter") == [{"at-0": 0, "at-100": 100}]
    assert puppet.asked[-3:] == [(1, 0), (1, 0), (1, 100)]
    assert puppet.functions[-3:] == [3, 4, 3]


def in_order(puppet: Puppet, delay_s: Callable[[int], float], step_s: float = 0.001) -> None:
    """Answer in order, after a time that depends on the request's address, and at least `step_s` apart."""
    loop = asyncio.get_running_loop()
    free_s = 0.0

    def answer(frame: bytes) -> None:
        nonlocal free_s
        free_s = max(free_s + step_s, loop.time() + delay_s(puppet.asked[-1][1]))
        loop.call_at(free_s, puppet.send, frame)

    puppet.answer = answer


@pytest.mark.parametrize(("code", "says"), [(6, [{"at-0": 0}]), (2, [{"at-0": 0, "at-100": 100}])])
async def test_a_fence_that_is_refused_is_one_but_a_busy_unit_may_yet_answer_what_was_asked_before(
    bench: Bench, puppet: Puppet, code: int, says: list[dict[str, int]]
) -> None:
    answers = 0

    def drop_the_first_and_refuse_the_fence(frame: bytes) -> None:
        nonlocal answers
        answers += 1
        if answers == 3:
            assert puppet.functions[-1] == 4
            puppet.send(sealed(bytes((1, 0x84, code))))
        elif answers > 1:
            puppet.send(frame)

    puppet.answer = drop_the_first_and_refuse_the_fence
    async with bench.polling(unit(1, "meter", *registers(0, 100), interval_s=600), timeout_s=0.1):
        assert await bench.intake.next_of("meter") == says


async def test_a_late_refusal_of_what_was_asked_before_is_not_taken_for_that_of_the_fence(
    bench: Bench, puppet: Puppet
) -> None:
    # It is at something else at first, then quick; and it has no register 0.
    in_order(puppet, lambda _address: 0.02 if len(puppet.asked) > 1 else 0.3, 0.02)
    in_time = puppet.answer
    puppet.answer = lambda frame: in_time(
        frame if puppet.asked[-1][1] else sealed(bytes((1, 0x80 | puppet.functions[-1], 2)))
    )
    async with bench.polling(unit(1, "meter", *registers(0, 100, 200), interval_s=600), timeout_s=0.2):
        assert await bench.intake.next_of("meter") == [{"at-100": 100, "at-200": 200}]


def lateness_s(fault: object, request: str = "holding 0") -> float:
    """Seconds by which an answer is reported to be late; 0 if something else is reported."""
    found = re.fullmatch(rf"{request}: answers late \(([0-9.]+) s\): raise timeout_s above that", str(fault))
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("retries", [0, 1, 2], ids=["once", "an-answer-to-each-of-two", "an-answer-to-each-of-three"])
async def test_an_answer_that_comes_late_is_told_with_how_late(bench: Bench, puppet: Puppet, retries: int) -> None:
    # In the second case the answer to the first attempt comes to the second, so soon that it looks in time.
    in_order(puppet, lambda _address: 0.35)
    # On a busy machine two answers may come at once. A later turn tells then how late they are.
    async with bench.polling(
        unit(1, "meter", interval_s=3), timeout_s=0.2 if retries < 2 else 0.1, retries=retries
    ) as line:
        await until(lambda: lateness_s(brief(line.units(), "meter")["fault"]) >= 0.34)
        assert len(puppet.asked) % (1 + retries) == 0
        await asyncio.sleep(0.2)
        assert lateness_s(brief(line.units(), "meter")["fault"]) < 0.5
        with capture_logs() as logs:
            line.report_faults()
    (faults,) = (entry["faults"]["meter"] for entry in logs)
    assert max(map(lateness_s, faults)) >= 0.34, "the log tells it as the status does"


async def test_a_unit_whose_answers_are_all_late_is_given_up_for_that(bench: Bench, puppet: Puppet) -> None:
    in_order(puppet, lambda _address: 0.2)
    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter", interval_s=0.4), timeout_s=0.05, retries=0) as line:
            await until(lambda: any("cannot be read" in entry["event"] for entry in logs))
            (told,) = (entry["fault"] for entry in logs if "fault" in entry)
            assert lateness_s(told) >= 0.19
            # Without power it says nothing at all, and that is told before long.
            puppet.answer = lambda _frame: None
            await until(lambda: brief(line.units(), "meter")["fault"] == "holding 0: no answer")
    assert bench.intake.readings == []


async def test_a_late_answer_is_told_of_its_own_unit_while_another_is_asked(bench: Bench, puppet: Puppet) -> None:
    loop = asyncio.get_running_loop()

    def late_or_never(frame: bytes) -> None:
        if frame[0] == 1:
            loop.call_later(0.3, puppet.send, frame)

    puppet.answer = late_or_never
    units = (unit(1, "slow", interval_s=600), unit(2, "silent", interval_s=600))
    async with bench.polling(*units, timeout_s=0.2, retries=0) as line:
        await until(lambda: puppet.asked == [(1, 0), (2, 0)])
        await until(lambda: brief(line.units(), "silent")["fault"] is not None)
        assert brief(line.units(), "silent")["fault"] == "holding 0: no answer"
        assert lateness_s(brief(line.units(), "slow")["fault"]) >= 0.29


async def test_a_late_answer_is_told_before_the_fence(bench: Bench, puppet: Puppet) -> None:
    in_order(puppet, lambda _address: 0.3)
    async with bench.polling(unit(1, "meter", *registers(0, 100), interval_s=3), timeout_s=0.2) as line:
        assert await bench.intake.next_of("meter") == [{"at-0": 0}]
        # The second answer comes at about the time at which the fence is given up.
        await until(lambda: lateness_s(brief(line.units(), "meter")["fault"]) >= 0.29)
    assert puppet.functions[:3] == [3, 3, 4]


async def test_a_request_that_is_lost_makes_no_later_answer_late(bench: Bench, puppet: Puppet) -> None:
    puppet.answer = lambda frame: puppet.send(frame) if len(puppet.asked) % 3 else None
    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter"), timeout_s=0.1) as line:
            await bench.intake.next_of("meter", 12)
            line.report_faults()
    assert [list(entry["faults"]["meter"]) for entry in logs if "faults" in entry] == [["holding 0: no answer"]]


async def test_an_attempt_may_yet_be_answered_after_the_answer_to_an_earlier_one(bench: Bench, puppet: Puppet) -> None:
    in_order(puppet, lambda address: 0.55 if address else 0)
    async with bench.polling(unit(1, "meter", *registers(0, 100), interval_s=0.9), timeout_s=0.2, retries=3):
        await until(lambda: sum("at-0" in said for said in bench.intake.of("meter")) >= 3)
    for said in bench.intake.of("meter"):
        assert all(name == f"at-{value}" for name, value in said.items())


async def test_an_answer_to_what_was_asked_before_the_port_was_opened_is_taken_for_nothing(
    bench: Bench, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = unit(1, "meter", *registers(0, 100), interval_s=600)
    # On a busy machine, the kernel hands on later bytes even later.
    timeout_s = patience(0.2)
    monkeypatch.setattr(modbus_line, "LATE_S_MAX", 2 * timeout_s)
    in_order(puppet, lambda address: 1.5 * timeout_s if address else 0)
    async with bench.polling(meter, timeout_s=timeout_s, retries=0):
        await until(lambda: (1, 100) in puppet.asked)
    in_order(puppet, lambda _address: 0.75 * timeout_s)
    async with bench.polling(meter, timeout_s=timeout_s):
        assert await bench.intake.next_of("meter") == [{"at-0": 0, "at-100": 100}]


@pytest.mark.alone
async def test_an_answer_that_was_here_in_time_counts_although_the_gateway_was_held_up(
    bench: Bench, puppet: Puppet
) -> None:
    def answer(frame: bytes) -> None:
        puppet.send(frame)
        until_s = time.monotonic() + 0.3
        while time.monotonic() < until_s:
            time.sleep(0.001)

    puppet.answer = answer
    async with bench.polling(unit(1, "meter", interval_s=600), timeout_s=0.2, retries=0):
        assert await bench.intake.next_of("meter") == [{"at-0": 0}]


async def test_an_adapter_that_hears_itself(bench: Bench, puppet: Puppet) -> None:
    hear = bench.wire.hear

    def echo(request: bytes) -> None:
        bench.wire.send(request)
        hear(request)

    bench.wire.hear = echo
    puppet.silent.add((2, 0))
    async with bench.polling(unit(1, "meter", *registers(0, 1)), unit(2, "silent"), timeout_s=0.1) as line:
        assert await bench.intake.next_of("meter", 3) == [{"at-0": 0, "at-1": 1}] * 3
        await until(
            lambda: brief(line.units(), "silent") == {"unit": 2, "answers": False, "fault": "holding 0: no answer"}
        )


async def test_however_much_noise_stands_around_an_answer_it_is_found(bench: Bench, puppet: Puppet) -> None:
    # As of a line without bias resistors, on which nobody speaks for a moment. Some of it looks like an answer.
    noise = (b"\x01\x03\x04" + b"\xff\x00" * 5) * 90

    def answer(frame: bytes) -> None:
        for at in range(0, len(noise), 130):
            puppet.send(noise[at : at + 130])
        puppet.send(frame + b"\x00")

    puppet.answer = answer
    async with bench.polling(unit(1, "meter", *registers(0, 1)), retries=0) as line:
        assert await bench.intake.next_of("meter", 3) == [{"at-0": 0, "at-1": 1}] * 3
        assert brief(line.units(), "meter")["fault"] is None


async def test_endless_noise_is_searched_for_an_answer_up_to_a_bound(
    bench: Bench, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, sent_bytes = 0, 0
    is_whole = modbus_answers._is_whole

    def counted(frame: bytes) -> bool:
        nonlocal checks
        checks += 1
        return is_whole(frame)

    async def send_noise() -> None:
        nonlocal sent_bytes
        while True:
            puppet.send(b"\x01\x03\x02" * 300)  # the beginning of an answer, again and again
            sent_bytes += 900
            await asyncio.sleep(0)

    monkeypatch.setattr(modbus_answers, "_is_whole", counted)
    puppet.silent.add((1, 0))
    async with bench.polling(unit(1, "meter"), timeout_s=1, retries=0) as line:
        await until(lambda: puppet.asked)
        noise = asyncio.create_task(send_noise())
        await until(lambda: brief(line.units(), "meter")["fault"])
        noise.cancel()
        assert brief(line.units(), "meter")["fault"] == "holding 0: its answer was damaged"
        assert checks <= modbus_line._SEARCHED_BYTES_MAX < sent_bytes
        puppet.silent.clear()
        assert await bench.intake.next_of("meter") == [{"at-0": 0}]


async def test_noise_and_a_late_answer_of_another_unit_before_the_answer(bench: Bench, puppet: Puppet) -> None:
    other = sealed(bytes((9, 3, 2, 0, 77)))
    puppet.answer = lambda frame: puppet.send(b"\x00\xff" + other + frame + b"\x00")
    async with bench.polling(unit(1, "meter")):
        assert await bench.intake.next_of("meter", 2) == [{"at-0": 0}] * 2


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (sealed(bytes((1, 3, 4, 0, 1, 0, 2))), "its answer has 9 bytes instead of 7"),
        (sealed(bytes((1, 4, 2, 0, 77))), "it answered function 4 (input), and 3 (holding) was asked"),
        (b"\x00" + sealed(bytes((9, 3, 2, 0, 77))) + b"\x00", "unit 9 answered instead"),
        (sealed(bytes((1, 3, 2, 0, 77)))[:-1] + b"\x00", "its answer was damaged"),
        (b"\x00", "no answer, only noise"),
    ],
)
async def test_what_came_instead_of_an_answer_is_told(bench: Bench, puppet: Puppet, frame: bytes, words: str) -> None:
    puppet.answer = lambda _frame: puppet.send(frame)
    with capture_logs() as logs:
        # Our clock stands still while we are held up, but not while the kernel holds up our bytes.
        async with bench.polling(unit(1, "meter"), retries=0) as line:

            def fault() -> str:
                return str(line.units()["meter"]["fault"])  # type: ignore[index]

            await until(lambda: any("cannot be read" in entry["event"] for entry in logs))
            assert fault().startswith(f"holding 0: {words}")
            line.report_faults()
    (told,) = (entry for entry in logs if entry.get("unit") == 1)
    assert told["fault"].startswith(f"holding 0: {words}")
    (faults,) = (entry["faults"]["meter"] for entry in logs if "faults" in entry)
    assert all(each.startswith(f"holding 0: {words}") for each in faults)
    assert bench.intake.readings == []


async def test_a_refusal_for_no_reason_is_one(bench: Bench, puppet: Puppet) -> None:
    puppet.answer = lambda frame: puppet.send(sealed(bytes((1, 0x83, 0))) if frame[1] == 3 else frame)
    async with bench.polling(unit(1, "meter", ModbusRegister("a", 0), ModbusRegister("b", 0, "input"))) as line:
        assert await bench.intake.next_of("meter", 2) == [{"b": 0}] * 2
        assert line.units()["meter"]["refused"] == {  # type: ignore[index]
            "a": "holding 0: refused for a reason of its own (exception 0)"
        }


async def test_a_line_of_many_faults_makes_a_short_report(bench: Bench, puppet: Puppet) -> None:
    puppet.answer = lambda _frame: puppet.send(sealed(bytes((len(puppet.asked) % 200 + 2, 3, 2, 0, 77))))
    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter"), timeout_s=0.02, retries=10) as line:
            await until(lambda: len(puppet.asked) > 21)
            line.report_faults()
    faults = logs[0]["faults"]["meter"]
    assert len(faults) == 17
    assert faults["other faults"] >= 4


async def test_unplugged_in_the_middle_of_an_answer(bench: Bench, puppet: Puppet) -> None:
    puppet.answer = lambda frame: puppet.send(frame[:4])
    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter", *registers(0, 1), interval_s=600)) as line:
            await until(lambda: bool(puppet.asked))
            await asyncio.sleep(0.02)
            bench.wire.unplug()
            await until(lambda: line.closed)
            line.report_faults()
            line.close("twice")
    assert bench.intake.readings == []
    assert [entry["event"] for entry in logs] == ["serial port closed; it is opened again when it is back"]


async def test_a_port_that_fails_as_it_is_written_to_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int, _queue: int) -> None:
        raise termios.error(5, "Input/output error")

    with capture_logs() as logs:
        async with bench.polling(unit(1, "meter", interval_s=600), timeout_s=0.1) as line:
            monkeypatch.setattr(termios, "tcflush", fail)
            await until(lambda: line.closed)
    assert [entry["reason"] for entry in logs] == ["writing failed: Input/output error"]


async def test_a_defect_is_reported_and_gives_the_port_back(
    bench: Bench, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_details: object) -> None:
        raise ZeroDivisionError

    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    monkeypatch.setattr(bench.intake, "event", fail)
    async with bench.polling(unit(1, "meter"), timeout_s=0.1) as line:
        await until(lambda: line.closed)
    assert puppet.asked == [(1, 0)]
    await until(lambda: bool(reports))
    assert isinstance(reports[0]["exception"], ZeroDivisionError)


async def test_a_unit_that_goes_and_comes_back(bench: Bench, puppet: Puppet) -> None:
    async with bench.polling(unit(1, "meter"), timeout_s=0.05, retries=0) as line:
        await bench.intake.next_of("meter")
        puppet.silent.add((1, 0))
        await until(lambda: ("device-died", "meter") in bench.intake.events)
        assert brief(line.units(), "meter") == {"unit": 1, "answers": False, "fault": "holding 0: no answer"}
        readings = len(bench.intake.readings)
        puppet.silent.clear()
        await until(lambda: len(bench.intake.events) == 3)
        await until(lambda: len(bench.intake.readings) > readings)
    kinds = ["device-appeared", "device-died", "device-appeared"]
    assert bench.intake.events == [(kind, "meter") for kind in kinds]
    assert bench.intake.losses == Counter()


async def test_a_unit_that_misses_a_turn_is_not_gone(bench: Bench, puppet: Puppet) -> None:
    answers = 0

    def miss_some(frame: bytes) -> None:
        nonlocal answers
        answers += 1
        if answers % 3 == 0:
            puppet.send(frame)

    puppet.answer = miss_some
    async with bench.polling(unit(1, "meter"), timeout_s=0.1, retries=0):
        await bench.intake.next_of("meter", 4)
    assert bench.intake.events == [("device-appeared", "meter")]


async def test_a_silent_unit_is_asked_less_and_less_and_starves_nobody(bench: Bench, puppet: Puppet) -> None:
    puppet.silent |= {(1, 0), (2, 0)}
    async with bench.polling(unit(1, "a"), unit(2, "b"), unit(3, "c"), timeout_s=0.05):
        await bench.intake.next_of("c", 80)
    asked = Counter(number for number, _ in puppet.asked)
    # Turn by turn it would be asked twice for each time that the other is.
    assert asked[1] < asked[3] / 2
    assert asked[2] < asked[3] / 2
    # Between the turns of silent ones the other has its own.
    turns = [number for number, _ in puppet.asked]
    gaps = [at for at, number in enumerate(turns) if number == 3]
    assert max(after - before for before, after in pairwise(gaps)) <= 5


async def test_a_quick_unit_does_not_keep_a_slow_one_from_its_turn(bench: Bench, puppet: Puppet) -> None:
    # Its answers take longer than its interval: it is always due.
    loop = asyncio.get_running_loop()

    def answer(frame: bytes) -> None:
        loop.call_later(0.1 if frame[0] == 1 else 0, puppet.send, frame)

    puppet.answer = answer
    async with bench.polling(unit(1, "greedy"), unit(2, "modest", interval_s=0.3)):
        await bench.intake.next_of("modest", 5)
    assert len(bench.intake.of("greedy")) > 5


async def test_a_request_that_is_ignored_does_not_cost_the_others(
    bench: Bench, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modbus_line, "LATE_S_MAX", 0.2)
    puppet.silent.add((1, 0))
    async with bench.polling(unit(1, "meter", *registers(0, 100, 200)), timeout_s=0.05) as line:
        said = await bench.intake.next_of("meter", 3)
        assert brief(line.units(), "meter") == {"unit": 1, "answers": True, "fault": "holding 0: no answer"}
    assert said == [{"at-100": 100, "at-200": 200}] * 3
    assert bench.intake.events == [("device-appeared", "meter")]


async def test_while_the_buffer_takes_nothing_nobody_is_asked(
    bench: Bench, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = bench.intake.take

    def take_and_hold(readings: Sequence[Reading], done: Callable[[bool], None], marks: Sequence[Mark] = ()) -> None:
        # At the end of a turn: at another moment an answer may be on its way.
        take(readings, done, marks)
        bench.intake.cannot_store = True

    monkeypatch.setattr(bench.intake, "take", take_and_hold)
    async with bench.polling(unit(1, "meter"), timeout_s=0.2):
        await bench.intake.next_of("meter")
        await until(lambda: bench.intake.losses["meter", "cannot-wait"] >= 3)
        asked = len(puppet.asked)
        await until(lambda: bench.intake.losses["meter", "cannot-wait"] >= 6)
        assert len(puppet.asked) == asked
        bench.intake.cannot_store = False
        await bench.intake.next_of("meter")
        assert puppet.asked[asked:]


async def test_a_reading_that_is_not_stored_is_counted(bench: Bench, puppet: Puppet) -> None:
    bench.intake.stores = False
    async with bench.polling(unit(1, "meter"), timeout_s=0.2):
        await bench.intake.next_of("meter", 2)
    assert bench.intake.losses == {("meter", "cannot-wait"): len(puppet.asked)}


@pytest.mark.alone
async def test_a_line_that_is_never_silent_is_not_spoken_on(bench: Bench, puppet: Puppet) -> None:
    quiet = threading.Event()

    pauses_s = [0.0]

    def babble() -> None:
        # By the kernel's clock: how long the line was silent, whatever held up this process.
        sent_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        while not quiet.wait(0.002):
            bench.wire.send(b"\x55" * 64)
            now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
            pauses_s.append(now_s - sent_s)
            sent_s = now_s

    # A thread: where this loop has no turn for a while, the line is not silent for that.
    task = asyncio.create_task(asyncio.to_thread(babble))
    async with bench.polling(unit(1, "meter"), timeout_s=0.1, baud=300) as line:
        fault = "the line is never silent: something else sends on it"
        try:
            await until(lambda: brief(line.units(), "meter") == {"unit": 1, "answers": False, "fault": fault})
            # Three and a half characters. If the thread had no turn for that time, the line was silent.
            assert puppet.asked == [] or max(pauses_s) > 0.1
        finally:
            quiet.set()
        await task
        assert await bench.intake.next_of("meter") == [{"at-0": 0}]


@pytest.mark.parametrize("configured", ["none", "even", "odd"])
async def test_the_port_is_opened_as_configured(bench: Bench, monkeypatch: pytest.MonkeyPatch, configured: str) -> None:
    def opens(name: str, baud: int, *, parity: str, stop_bits: int) -> serial.Serial:
        assert (name, baud, parity, stop_bits) == (str(bench.wire.port), 19_200, configured, 2)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(modbus_line, "open_port", opens)
    described = {
        "port": str(bench.wire.port),
        "units": [{"unit": 1, "device": "meter", "registers": []}],
        "baud": 19_200,
        "parity": configured,
        "stop_bits": 2,
    }
    settings = msgspec.convert(described, SerialModbusSettings)
    line = ModbusLine(settings.port, settings, "device/{device}/{stream}", bench.intake, now_us)
    with pytest.raises(PermissionError):
        await line.open()
    line.close()


METER = """
[serial]
scan_interval_s = 0.05

[[serial.modbus]]
port = "{port}"
baud = 9600
parity = "none"

[[serial.modbus.units]]
unit = 1
device = "meter"
interval_s = 0.1
registers = [
  {{ name = "volts", address = 0, table = "input", type = "f32" }},
  {{ name = "amps", address = 6, table = "input", type = "f32" }},
]

[[serial.modbus.units]]
unit = 2
device = "climate"
stream = "air"
interval_s = 0.1
registers = [
  {{ name = "celsius", address = 1, table = "input", type = "s16", scale = 0.1 }},
  {{ name = "humidity", address = 2, table = "input", scale = 0.1 }},
]
"""


def test_a_gateway_without_modbus_does_not_load_its_library() -> None:
    assert "pymodbus" not in imported_by(
        "gateway.serial_lines.serial_ingress", "gateway.pipeline", "gateway.commands.check.kafka"
    )


def test_of_the_library_neither_client_nor_server_is_loaded() -> None:
    program = "import sys, gateway.serial_lines.modbus_line; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program]).decode().split()
    assert not {"pymodbus.client", "pymodbus.server"} & set(loaded)


@pytest.mark.slow
async def test_through_a_real_gateway_into_its_buffer(bench: Bench, tmp_path: Path) -> None:
    mqtt_port = free_port()
    config = write_config(tmp_path, "127.0.0.1:1", mqtt_port, "test", METER.format(port=bench.wire.port))

    async def sluice(*command: str) -> str:
        words: list[str | Path] = [SLUICE, *command, "--config", config]
        # In a thread: the units answer on this loop.
        return await asyncio.to_thread(lambda: subprocess.check_output(words, timeout=DEADLINE_S).decode())

    async def stored() -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {"meter": [], "climate": []}
        for row in map(msgspec.json.decode, (await sluice("buffer", "export")).splitlines()):
            if row["type"] == "sluice.reading":
                found[row["device"]].append(row)
        return found

    async def wait_for(count: int) -> dict[str, list[dict[str, Any]]]:
        async with asyncio.timeout(DEADLINE_S):
            while min(map(len, (found := await stored()).values())) < count:
                await asyncio.sleep(0.5)
        return found

    volts, amps = words_of("f32", 230.2, "high-first"), words_of("f32", 0.35, "high-first")
    meter = holding(1, block(0, *volts, 0, 0, 0, 0, *amps))
    async with server(bench, meter, holding(2, block(1, 0xFFC7, 481))):
        with daemon(config, mqtt_port):
            found = await wait_for(3)
            status = msgspec.json.decode(await sluice("status", "--json"))
            # Gone, and back as another port of the same name.
            hear, port = bench.wire.hear, bench.wire.port
            bench.wire.unplug()
            bench.wire = Wire(port)
            bench.wire.hear = hear
            await wait_for(1 + max(map(len, (await stored()).values())))
    assert {row["payload"] for row in found["meter"]} == {'{"volts":230.2,"amps":0.35}'}
    assert {row["payload"] for row in found["climate"]} == {'{"celsius":-5.7,"humidity":48.1}'}
    assert {row["subject"] for rows in found.values() for row in rows} == {str(port)}
    (told,) = status["daemon"]["serial"]["ports"].values()
    for unit in told["units"].values():
        # A busy machine asks late.
        assert (unit.pop("fault") or "asked late").startswith("asked late")
    assert told["units"] == {
        "meter": {"unit": 1, "answers": True, "since_us": None, "asked": 2, "refused": {}},
        "climate": {"unit": 2, "answers": True, "since_us": None, "asked": 2, "refused": {}},
    }
    assert told["acknowledges"] is False
