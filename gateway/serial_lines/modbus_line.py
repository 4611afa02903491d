"""One line of Modbus RTU: asks its units for their registers in turn, and hands over the values.

Requests and their CRC come from pymodbus. Its client is not used: it takes a late answer, to a request that was given
up, for the answer to the next request. RTU numbers neither. Here every answer that can come belongs to the last
request. If a request finds no answer, it is asked again before the unit is asked anything else. If answers to earlier
attempts may still come, a fence shuts them out: a request of another function, which its answer names.

Sections are those of "MODBUS over Serial Line, Specification and Implementation Guide V1.02", or, with "protocol", of
"MODBUS Application Protocol Specification V1.1b3".
"""

import asyncio
import contextlib
import os
import termios
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog
from pymodbus.framer import FramerRTU
from pymodbus.pdu import DecodePDU, ModbusPDU
from pymodbus.pdu.bit_message import ReadCoilsRequest, ReadDiscreteInputsRequest
from pymodbus.pdu.register_message import ReadHoldingRegistersRequest, ReadInputRegistersRequest

from gateway.reading import Datum, Intake, Reading
from gateway.serial_lines.changes import Changes
from gateway.serial_lines.modbus_answers import ANSWER_BYTES, NO_ANSWER, Answer, find_answer, other_words
from gateway.serial_lines.modbus_registers import Request, decode, fence, halves, payload, requests
from gateway.serial_lines.ports import PortLostError, close_port, open_port, read_port, why_closed
from gateway.serial_lines.topic import topic_of
from gateway.settings import ModbusUnit, SerialModbusSettings

if TYPE_CHECKING:
    import serial

SILENT_TURNS_MAX = 3
"""Turns in a row without any answer, after which a unit counts as gone. Noise must not make it come and go."""
IGNORED_TURNS_MAX = 2
"""Turns in a row without an answer to one request, after which the unit's other requests go first. Some units do not
refuse a missing address, but say nothing."""
PAUSE_S_MAX = 60.0
"""Longest pause between two attempts at a unit that is gone. If its interval is longer, the interval counts."""
LATE_S_MAX = 5.0
"""Seconds after a request was given up in which its answer may still come."""
BUSY_PAUSE_S = 0.2

_KEPT_BYTES_MAX = 1_024
"""Bytes since a request that are kept beside the next read: its echo, noise, and the beginning of its answer, which has
at most 255 bytes."""
_READ_BYTES_MAX = 4_096
_SEARCHED_BYTES_MAX = 16_384
"""Bytes after one request that are searched, as the check of each possible frame costs time."""
_ATTEMPTS_KNOWN_MAX = 16
"""Last attempts at one request whose answers are awaited."""
_FAULTS_MAX = 16
"""Different faults of a unit in one report."""
_NOT_IN_TIME = frozenset((5, 6))
_WRONG_REGISTER = frozenset((2, 3))
_DEVICE_FAILURE = 4
_NOT_REACHED = frozenset((10, 11))
_EXCEPTIONS = {
    1: "illegal function: it has no such table",
    2: "illegal data address: it has no such register",
    3: "illegal data value: it does not take this request",
    4: "device failure",
    5: "acknowledged, but it needs longer",
    6: "busy",
    7: "negative acknowledge: it cannot do this",
    8: "memory parity error",
    10: "gateway path unavailable",
    11: "gateway target failed to respond",
}
"""Exception codes in words (protocol, section 7)."""
_REQUESTS: dict[str, type[ModbusPDU]] = {
    "coil": ReadCoilsRequest,
    "discrete": ReadDiscreteInputsRequest,
    "holding": ReadHoldingRegistersRequest,
    "input": ReadInputRegistersRequest,
}
_FRAMER = FramerRTU(DecodePDU(is_server=False))

log = structlog.get_logger()


class _Unit:
    """One unit's turns: its requests, when they are due, and their results."""

    def __init__(self, settings: ModbusUnit, topic: str, due_s: float) -> None:
        self.settings = settings
        self.device: str = settings.device
        self.topic = topic_of(topic, settings.device, settings.stream)
        self.plan = list(requests(settings.registers))
        deadbands = {each.name: each.on_change for each in settings.registers if each.on_change is not None}
        self.changes = Changes(deadbands, settings.silence_s_max)
        self.due_s = due_s
        self.answers = False
        self.silent_since_us: int | None = None
        """CLOCK_BOOTTIME of the first of the turns in a row without any answer."""
        self.silent_turns = 0
        self.fault: str | None = None
        """Last fault of its last turn."""
        self.turn_fault: str | None = None
        self.faults: Counter[str] = Counter()
        """Faults since the last report."""
        self.refused: dict[str, str] = {}
        """By register name, why the unit refused it when it was asked last."""
        self.refusals_told: set[str] = set()
        """Registers whose refusal is in the log."""
        self.ignored: Counter[Request] = Counter()
        """Turns in a row without an answer to a request."""
        self.refusals: Counter[Request] = Counter()
        """Turns in a row in which a request was refused."""
        self.asked: Request | None = None
        """The last request to it."""
        self.asked_frame = b""
        self.sent_s: deque[float] = deque(maxlen=_ATTEMPTS_KNOWN_MAX)
        """When each attempt at `asked` was wholly on the line."""
        self.answered_s: deque[float] = deque(maxlen=_ATTEMPTS_KNOWN_MAX)
        """When the answers to those attempts began."""
        self.late = ""
        """Words for how late an answer came since the turn began; empty if none came late."""
        self.late_before = ""
        """`late` of the turn before, up to the beginning of this one."""
        self.owing_until_s = 0.0
        """Time until which it may still answer an earlier attempt at `asked`."""
        self.resting_until_s = 0.0
        """Time until which it is asked nothing, because it may still answer."""

    def record_fault(self, fault: str) -> None:
        self.turn_fault = fault
        self.count(fault)

    def count(self, fault: str, times: int = 1) -> None:
        told = fault in self.faults or len(self.faults) < _FAULTS_MAX
        self.faults[fault if told else "other faults"] += times

    def ask(self, request: Request, now_s: float) -> bytes:
        """Begin a request and return its frame. Earlier attempts count on if their answers may still come."""
        if self.asked != request or now_s >= self.owing_until_s:
            self.sent_s.clear()
            self.answered_s.clear()
        if self.asked != request:
            self.asked = request
            self.asked_frame = _frame(self.settings.unit, request)
        return self.asked_frame

    def begin_turn(self) -> None:
        self.turn_fault = None
        self.late_before, self.late = self.late, ""

    def end_turn(self) -> None:
        """Set the turn's fault for the status."""
        self.fault = self.late or self.turn_fault
        if self.fault is not None and NO_ANSWER in self.fault and self.late_before:
            # The unit is not silent: its answers to this turn's requests are still to come.
            self.fault = self.late_before

    def answered_late(self, timeout_s: float) -> None:
        """Report how late the answers are, after one came that was no longer waited for."""
        if len(self.answered_s) > len(self.sent_s):
            # More answers than requests: the unit repeats itself, so the delay is unknown.
            return
        # Units answer in order. So the last answers are to the last attempts, or to earlier ones and even later.
        waits_s = (
            came_s - sent_s for came_s, sent_s in zip(reversed(self.answered_s), reversed(self.sent_s), strict=False)
        )
        wait_s = max(waits_s)
        if wait_s <= timeout_s:
            return
        words = f"{self.asked}: answers late ({wait_s:.2g} s): raise timeout_s above that"
        # The words so far told a shorter delay, as answers were still to come.
        self.count(words, self.faults.pop(self.late, 0) or 1)
        self.late = self.fault = words
        if len(self.answered_s) == len(self.sent_s):
            # All attempts are answered. Later answers must not be measured by them.
            self.sent_s.clear()
            self.answered_s.clear()

    def postpone(self, request: Request) -> None:
        """Begin the next turn with an unanswered request, or end it with a request that never finds an answer."""
        at = self.plan.index(request)
        if self.ignored[request] >= IGNORED_TURNS_MAX:
            at += 1
        self.plan = self.plan[at:] + self.plan[:at]

    def split(self, request: Request, exception: int) -> tuple[Request, ...]:
        """Split a refused request for all later turns. Returns the parts; none if splitting would not help."""
        self.refusals[request] += 1
        # Some units say "device failure" for a missing register, others while they start.
        lasting = exception == _DEVICE_FAILURE and self.refusals[request] >= IGNORED_TURNS_MAX
        parts = halves(request) if lasting or exception in _WRONG_REGISTER else ()
        if parts:
            at = self.plan.index(request)
            self.plan[at : at + 1] = parts
        return parts

    def schedule(self, now_s: float) -> None:
        """Set when the unit is asked next: in step with its interval, or later and later once it is gone."""
        interval_s = self.settings.interval_s
        if self.silent_turns >= SILENT_TURNS_MAX:
            pause_s = interval_s * 2.0 ** min(self.silent_turns - SILENT_TURNS_MAX + 1, 30)
            self.due_s = now_s + min(pause_s, max(PAUSE_S_MAX, interval_s))
        else:
            # Turns that the line had no time for are left out, not made up for.
            self.due_s = max(self.due_s + interval_s, now_s)
        self.due_s = max(self.due_s, self.resting_until_s)


async def open_line(
    name: str, settings: SerialModbusSettings, topic: str, intake: Intake, now_us: Callable[[], int]
) -> "ModbusLine":
    """See `gateway.serial_lines.kinds.Open`."""
    line = ModbusLine(name, settings, topic, intake, now_us)
    await line.open()
    return line


class ModbusLine:
    """An open line, from `open` to `close`.

    `topic` is `serial.topic`, with `{device}` and `{stream}`; `now_us` gives CLOCK_BOOTTIME in microseconds.
    """

    def __init__(
        self, port: str, settings: SerialModbusSettings, topic: str, intake: Intake, now_us: Callable[[], int]
    ) -> None:
        self.name = port
        self.closed = False
        self._settings = settings
        self._intake = intake
        self._now_us = now_us
        self._loop = asyncio.get_running_loop()
        # The former user of the port (perhaps this gateway) may have asked, and the answer may be under way.
        begin_s = self._loop.time() + settings.timeout_s + LATE_S_MAX
        self._units = [_Unit(unit, topic, begin_s) for unit in settings.units]
        # A start bit, eight of data, parity if any, stop bits (section 2.5.1).
        self._character_s = (9 + (settings.parity != "none") + settings.stop_bits) / settings.baud
        # The silence between two frames. Above 19200 baud it is fixed (section 2.5.1.1).
        self._silence_s = 3.5 * self._character_s if settings.baud <= 19_200 else 0.001_75
        self._port: serial.Serial | None = None
        self._fd = -1
        self._received = b""
        self._searched = 0
        """Bytes of `_received` that hold no whole answer to the awaited request."""
        self._heard = 0
        """Bytes that came since the last request."""
        self._late_until = 0
        """End of the last answer in `_received`."""
        self._awaited: tuple[_Unit, Request] | None = None
        self._arrived = asyncio.Event()
        # When the last byte was on the line, ours or another's.
        self._active_s = self._loop.time()
        self._poll_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the port and begin to poll. Raises OSError, ValueError or termios.error."""
        settings = self._settings
        # In a thread: a driver may wait for its adapter, and the other lines should not.
        port = await asyncio.to_thread(
            open_port, self.name, settings.baud, parity=settings.parity, stop_bits=settings.stop_bits
        )
        self._port = port
        self._fd = port.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._poll_task = self._loop.create_task(self._poll(), name=f"modbus {self.name}")
        self._poll_task.add_done_callback(self._ended)

    def close(self, reason: str = "") -> None:
        """Give the port back; `reason` says why, if the gateway did not choose to."""
        if self.closed:
            return
        self.closed = True
        self.report_faults()
        if self._poll_task is not None:
            self._poll_task.cancel()
        if self._port is not None:
            self._loop.remove_reader(self._fd)
            close_port(self._port)
        if reason:
            log.warning(
                "serial port closed; it is opened again when it is back",
                port=self.name,
                devices=self.devices,
                reason=reason,
            )

    @property
    def devices(self) -> list[str]:
        """The devices that the settings name."""
        return [unit.device for unit in self._units]

    @property
    def heard(self) -> list[str]:
        """The devices that answer now."""
        return [unit.device for unit in self._units if unit.answers]

    def state(self) -> dict[str, object]:
        """The line's state, for `sluice status`."""
        return {"units": self.units(), "acknowledges": False}

    def units(self) -> dict[str, object]:
        """The state of its units by device, for `sluice status`.

        `since_us` is the CLOCK_BOOTTIME since which a unit does not answer; None if it answers or was not asked yet.
        `asked` is the number of its registers. `refused` says by register name why the unit refuses it.
        """
        return {
            unit.device: {
                "unit": unit.settings.unit,
                "answers": unit.answers,
                "since_us": None if unit.answers else unit.silent_since_us,
                "fault": unit.fault,
                "asked": len(unit.settings.registers),
                "refused": dict(unit.refused),
            }
            for unit in self._units
        }

    def report_faults(self) -> None:
        """Log missing and bad answers of units since the last report."""
        faults = {unit.device: dict(unit.faults) for unit in self._units if unit.faults}
        for unit in self._units:
            unit.faults.clear()
        if faults:
            log.warning(
                "modbus units could not be read as configured: where there is no answer, check their power, A and B, "
                "baud, parity and unit number; where damaged, termination and cable; where refused, the registers in "
                "their manual",
                port=self.name,
                faults=faults,
            )

    async def _poll(self) -> None:
        """Ask each unit when it is due, the longest due first, until cancelled or the port fails."""
        try:
            while True:
                unit = min(self._units, key=lambda each: each.due_s)
                await asyncio.sleep(unit.due_s - self._loop.time())
                await self._turn(unit)
                unit.schedule(self._loop.time())
        except termios.error as error:
            self.close(f"writing failed: {os.strerror(error.args[0])}")
        except OSError as error:
            self.close(why_closed("writing", error))

    def _ended(self, poll_task: asyncio.Task[None]) -> None:
        if not poll_task.cancelled() and (defect := poll_task.exception()) is not None:
            # The event loop reports the defect; the port is opened anew.
            self.close("polling failed")
            raise defect

    async def _turn(self, unit: _Unit) -> None:
        """Ask a unit for all of its registers, and hand over the values that it gives."""
        if self._intake.cannot_store:
            self._intake.lost(unit.device, "cannot-wait")
            return
        unit.begin_turn()
        if self._loop.time() > unit.due_s + unit.settings.interval_s:
            unit.record_fault(
                "asked late: the line is too slow for all intervals, or waits for units that do not answer"
            )
        values: dict[str, str] = {}
        received_us = 0
        answered = False
        pending = list(unit.plan)
        while pending:
            request = pending.pop(0)
            answer = await self._ask(unit, request)
            if answer is None:
                unit.postpone(request)
                break
            answered = True
            self._answered(unit, request)
            if answer.exception is None:
                given = decode(request, answer.data)
                values |= given
                received_us = self._now_us()
                unit.refusals.pop(request, None)
                for name in given:
                    unit.refused.pop(name, None)
            else:
                # One of the registers may be missing, which must not cost the others.
                parts = unit.split(request, answer.exception)
                pending[:0] = parts
                # "Busy" says nothing about a register, but it is reported as the turn's fault.
                if not parts and answer.exception not in _NOT_IN_TIME:
                    words = _refusal_words(request, answer.exception)
                    unit.refused |= {value.name: words for value in request.values}
        unit.end_turn()
        self._tell_refusals(unit)
        if not answered:
            self._silent(unit)
        if values:
            self._take(unit, values, received_us)

    async def _ask(self, unit: _Unit, request: Request) -> Answer | None:
        """Ask a unit, again if needed, and return its answer; None if it was not reached."""
        if unit.asked != request and not await self._fenced(unit):
            unit.resting_until_s = unit.owing_until_s
            return None
        frame = unit.ask(request, self._loop.time())
        answer = None
        for _attempt in range(1 if unit.ignored[request] >= IGNORED_TURNS_MAX else 1 + self._settings.retries):
            if answer is not None:
                await asyncio.sleep(BUSY_PAUSE_S)
            answer = await self._exchange(unit, frame, request)
            if answer is None:
                unit.owing_until_s = self._loop.time() + LATE_S_MAX
                continue
            if self._loop.time() < unit.owing_until_s:
                # It may be the answer to an earlier attempt, and the answer to this one may follow.
                unit.owing_until_s = self._loop.time() + self._settings.timeout_s + LATE_S_MAX
            if answer.exception is not None:
                unit.record_fault(_refusal_words(request, answer.exception))
            if answer.exception not in _NOT_IN_TIME:
                break
        if answer is None or answer.exception in _NOT_REACHED:
            unit.ignored[request] += 1
            return None
        return answer

    async def _fenced(self, unit: _Unit) -> bool:
        """Make sure that a unit no longer answers an earlier request; return False if it still may."""
        if unit.asked is None or self._loop.time() >= unit.owing_until_s:
            return True
        between = fence(unit.asked)
        answer = await self._exchange(unit, _frame(unit.settings.unit, between), between)
        # A unit that says "busy" may be at work on the earlier request.
        if answer is not None and answer.exception not in _NOT_IN_TIME | _NOT_REACHED:
            unit.owing_until_s = 0.0
            return True
        # The answer to the fence may be late itself: only time helps.
        unit.owing_until_s = self._loop.time() + LATE_S_MAX
        return False

    async def _exchange(self, unit: _Unit, frame: bytes, request: Request) -> Answer | None:
        """Send a request and wait for its answer. Raises OSError or termios.error if the port fails."""
        if not await self._line_is_silent():
            unit.record_fault("the line is never silent: something else sends on it")
            return None
        termios.tcflush(self._fd, termios.TCIFLUSH)
        self._received = b""
        self._searched = self._late_until = self._heard = 0
        try:
            written = os.write(self._fd, frame)
        except BlockingIOError:
            written = 0
        if written < len(frame):
            termios.tcflush(self._fd, termios.TCOFLUSH)
            unit.record_fault("the adapter takes no output")
            return None
        self._active_s = self._loop.time() + len(frame) * self._character_s
        if request == unit.asked:
            unit.sent_s.append(self._active_s)
        self._awaited = unit, request
        answer = await self._answer(frame, request)
        self._awaited = None
        if answer is None:
            # Late answers, of any unit, are reported as late answers, not as what came instead.
            unit.record_fault(f"{request}: {other_words(self._received[self._late_until :], frame, request)}")
        elif request == unit.asked:
            self._answer_came(unit, answer)
        return answer

    async def _answer(self, frame: bytes, request: Request) -> Answer | None:
        """Wait for the answer to a request; None if it does not come in time."""
        # The bytes of the answer and of the echo take time, too.
        answer_s = (len(frame) + ANSWER_BYTES + request.data_bytes) * self._character_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._active_s + self._settings.timeout_s + answer_s):
                while (answer := find_answer(self._received, frame, request, self._searched)) is None:
                    self._searched = len(self._received)
                    self._arrived.clear()
                    await self._arrived.wait()
                return answer
        # The answer may have come in time, while this process had no turn.
        return find_answer(self._received, frame, request, self._searched)

    def _answer_came(self, unit: _Unit, answer: Answer) -> None:
        """Remember when a unit answered its last request."""
        self._late_until = len(self._received)
        unit.answered_s.append(self._active_s - (ANSWER_BYTES + len(answer.data)) * self._character_s)

    def _find_late_answer(self, searched: int) -> None:
        """Look for an answer to a request that was given up. It shows how late answers are, and gives no value.

        The first `searched` bytes of `_received` held no such answer.
        """
        for unit in self._units:
            if unit.asked is None or self._awaited == (unit, unit.asked) or self._loop.time() >= unit.owing_until_s:
                continue
            since = max(0, searched - self._late_until)
            answer = find_answer(self._received[self._late_until :], unit.asked_frame, unit.asked, since)
            if answer is not None and answer.exception not in _NOT_REACHED:
                self._answer_came(unit, answer)
                unit.answered_late(self._settings.timeout_s)

    async def _line_is_silent(self) -> bool:
        """Wait until nobody has sent for as long as separates two frames; return False if that never happens."""
        give_up_s = self._loop.time() + self._silence_s + self._settings.timeout_s
        while (wait_s := self._active_s + self._silence_s - self._loop.time()) > 0:
            if self._loop.time() > give_up_s:
                return False
            await asyncio.sleep(wait_s)
        return True

    def _read(self) -> None:
        try:
            data = read_port(self._fd, _READ_BYTES_MAX)
        except PortLostError as error:
            self.close(str(error))
            return
        if not data:
            return
        self._active_s = max(self._active_s, self._loop.time())
        self._heard += len(data)
        if self._heard > _SEARCHED_BYTES_MAX:
            return
        # The oldest bytes go. An answer is still found behind `_KEPT_BYTES_MAX` of noise.
        gone = max(0, len(self._received) - _KEPT_BYTES_MAX)
        self._searched = max(0, self._searched - gone)
        self._late_until = max(0, self._late_until - gone)
        before = len(self._received) - gone
        self._received = self._received[gone:] + data
        self._find_late_answer(before)
        self._arrived.set()

    def _take(self, unit: _Unit, values: dict[str, str], received_us: int) -> None:
        moved = unit.changes.moved(payload(unit.settings.registers, values), received_us)
        if moved is not None:
            reading = Reading(unit.topic, self.name, Datum(received_us=received_us, payload=moved))
            self._intake.take([reading], partial(self._settled, unit))

    def _settled(self, unit: _Unit, stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
        if not stored:
            unit.changes.forget()
            self._intake.lost(unit.device, "cannot-wait")

    def _answered(self, unit: _Unit, request: Request) -> None:
        unit.silent_turns = 0
        unit.silent_since_us = None
        unit.ignored.pop(request, None)
        if unit.answers:
            return
        unit.answers = True
        log.info("modbus unit answers", port=self.name, unit=unit.settings.unit, device=unit.device)
        self._intake.event(
            "device-appeared",
            unit.device,
            source="modbus",
            port=self.name,
            unit=unit.settings.unit,
            acknowledges=False,
        )

    def _tell_refusals(self, unit: _Unit) -> None:
        """Log each register that a unit refuses, once. The report of faults sums up the further refusals."""
        new = {name: words for name, words in unit.refused.items() if name not in unit.refusals_told}
        if not new:
            return
        unit.refusals_told |= new.keys()
        log.warning(
            "modbus unit refuses registers: compare their table and address with its manual (addresses count from 0: "
            "a manual's 40001 or 30001 is 0)",
            port=self.name,
            unit=unit.settings.unit,
            device=unit.device,
            refused=new,
        )

    def _silent(self, unit: _Unit) -> None:
        unit.silent_turns += 1
        if unit.silent_since_us is None:
            unit.silent_since_us = self._now_us()
        if unit.silent_turns != SILENT_TURNS_MAX:
            return
        log.warning(
            "modbus unit cannot be read; it is asked less often until it can",
            port=self.name,
            unit=unit.settings.unit,
            device=unit.device,
            fault=unit.fault,
        )
        if unit.answers:
            unit.answers = False
            self._intake.event(
                "device-died", unit.device, source="modbus", port=self.name, unit=unit.settings.unit, cause=unit.fault
            )


def _refusal_words(request: Request, exception: int) -> str:
    words = _EXCEPTIONS.get(exception, "refused for a reason of its own")
    return f"{request}: {words} (exception {exception})"


def _frame(unit: int, request: Request) -> bytes:
    message = _REQUESTS[request.table](dev_id=unit, address=request.address, count=request.count)
    frame: bytes = _FRAMER.buildFrame(message)
    return frame
