"""One line of Modbus RTU: asks its units for their registers in turn, and hands over what they answer.

Requests and their check come from pymodbus, its client does not: that takes an answer which comes late, to a request
that was given up, for the answer to the next one. RTU numbers neither. Here every answer that can come is to what was
asked last: a request that found no answer is asked again before the unit is asked anything else, and answers to earlier
attempts that may still come are shut out by a fence: a request of another function, which its answer tells.

Sections are those of "MODBUS over Serial Line, Specification and Implementation Guide V1.02", or, with "protocol", of
"MODBUS Application Protocol Specification V1.1b3".
"""

import asyncio
import contextlib
import os
import termios
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from pymodbus.framer import FramerRTU
from pymodbus.pdu import DecodePDU, ModbusPDU
from pymodbus.pdu.bit_message import ReadCoilsRequest, ReadDiscreteInputsRequest
from pymodbus.pdu.register_message import ReadHoldingRegistersRequest, ReadInputRegistersRequest

from gateway.reading import Intake, Reading
from gateway.serial_lines.modbus_answers import ANSWER_BYTES, NO_ANSWER, Answer, find_answer, other_words
from gateway.serial_lines.modbus_registers import Request, decode, fence, halves, payload, requests
from gateway.serial_lines.ports import PortLostError, close_port, open_port, read_port, why_closed
from gateway.serial_lines.topic import topic_of
from gateway.settings import ModbusUnit, SerialModbusSettings

if TYPE_CHECKING:
    import serial

SILENT_TURNS_MAX = 3
"""Turns in a row without any answer, after which a unit counts as gone: noise must not make it come and go."""
IGNORED_TURNS_MAX = 2
"""Turns in a row in which one request finds no answer, before the unit's others go first: some units do not refuse
addresses that they have not, but say nothing."""
PAUSE_S_MAX = 60.0
"""The longest pause between two attempts at a unit that is gone, or its interval where that is longer."""
LATE_S_MAX = 5.0
"""How long after it was given up a request may still be answered."""
BUSY_PAUSE_S = 0.2

_KEPT_BYTES_MAX = 1_024
"""What is kept of what came since a request, beside what comes next: its echo, noise, and the beginning of its answer,
which has 255 bytes at the most."""
_READ_BYTES_MAX = 4_096
_SEARCHED_BYTES_MAX = 16_384
"""Of what comes after one request, what is looked at. The check of each frame that may begin in it costs time."""
_ATTEMPTS_KNOWN_MAX = 16
"""Attempts at one request whose answers are awaited: the last ones."""
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
    """One unit's turns: what it is asked, when, and what came of it."""

    def __init__(self, settings: ModbusUnit, topic: str, due_s: float) -> None:
        self.settings = settings
        self.device: str = settings.device
        self.topic = topic_of(topic, settings.device, settings.stream)
        self.plan = list(requests(settings.registers))
        self.due_s = due_s
        self.answers = False
        self.silent_since_us: int | None = None
        """CLOCK_BOOTTIME of the first turn in a row in which nothing was answered."""
        self.silent_turns = 0
        self.fault: str | None = None
        """What went wrong last in its last turn."""
        self.turn_fault: str | None = None
        self.faults: Counter[str] = Counter()
        """What went wrong since the last report."""
        self.refused: dict[str, str] = {}
        """Why it does not give a register, by name: as it was asked last."""
        self.refusals_told: set[str] = set()
        """Registers whose refusal is in the log."""
        self.ignored: Counter[Request] = Counter()
        """Turns in a row in which a request found no answer."""
        self.refusals: Counter[Request] = Counter()
        """Turns in a row in which a request was refused."""
        self.asked: Request | None = None
        """What it was asked last."""
        self.asked_frame = b""
        self.sent_s: deque[float] = deque(maxlen=_ATTEMPTS_KNOWN_MAX)
        """When each attempt at that was on the line, whole."""
        self.answered_s: deque[float] = deque(maxlen=_ATTEMPTS_KNOWN_MAX)
        """When answers to those came, without what their bytes take on the line."""
        self.late = ""
        """How late an answer came since its turn began, in words; empty where none did."""
        self.late_before = ""
        """How late one came in the turn before, and until this one."""
        self.owing_until_s = 0.0
        """Until when it may still answer an earlier attempt at that."""
        self.resting_until_s = 0.0
        """Until when it is asked nothing, for that reason."""

    def note(self, fault: str) -> None:
        self.turn_fault = fault
        self.count(fault)

    def count(self, fault: str, times: int = 1) -> None:
        told = fault in self.faults or len(self.faults) < _FAULTS_MAX
        self.faults[fault if told else "other faults"] += times

    def ask(self, request: Request, now_s: float) -> bytes:
        """Begin to ask for something; its frame. Attempts before count on where their answers may still come."""
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
        """Set what went wrong in it, as the status tells it."""
        self.fault = self.late or self.turn_fault
        if self.fault is not None and NO_ANSWER in self.fault and self.late_before:
            # It is not silent: its answers to this turn's requests are still to come.
            self.fault = self.late_before

    def answered_late(self, timeout_s: float) -> None:
        """Tell how late the answers are, once one came that nobody waited for any more."""
        if len(self.answered_s) > len(self.sent_s):
            # More answers than requests: it repeats itself, and nothing is known of when.
            return
        # Units answer in order. So the last answers are to the last attempts, or to earlier ones and later still.
        waits_s = (
            came_s - sent_s for came_s, sent_s in zip(reversed(self.answered_s), reversed(self.sent_s), strict=False)
        )
        wait_s = max(waits_s)
        if wait_s <= timeout_s:
            return
        words = f"{self.asked}: answers late ({wait_s:.2g} s): raise timeout_s above that"
        # What was told of this turn was less: it had attempts whose answers were still to come.
        self.count(words, self.faults.pop(self.late, 0) or 1)
        self.late = self.fault = words
        if len(self.answered_s) == len(self.sent_s):
            # All are answered. What comes later must not be measured by them.
            self.sent_s.clear()
            self.answered_s.clear()

    def postpone(self, request: Request) -> None:
        """Begin the next turn with a request that is not through; or end it with one that never finds an answer."""
        at = self.plan.index(request)
        if self.ignored[request] >= IGNORED_TURNS_MAX:
            at += 1
        self.plan = self.plan[at:] + self.plan[:at]

    def split(self, request: Request, exception: int) -> tuple[Request, ...]:
        """Ask in parts, from now on, for what is refused as a whole; the parts, none where that would not help."""
        self.refusals[request] += 1
        # Some units say "device failure" of a register that they have not; others while they start.
        lasting = exception == _DEVICE_FAILURE and self.refusals[request] >= IGNORED_TURNS_MAX
        parts = halves(request) if lasting or exception in _WRONG_REGISTER else ()
        if parts:
            at = self.plan.index(request)
            self.plan[at : at + 1] = parts
        return parts

    def schedule(self, now_s: float) -> None:
        """Set when it is asked next: in step with its interval, later and later once it is gone."""
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
        # Whoever had the port before (we, until it was closed) may have asked, and the answer be under way.
        begin_s = self._loop.time() + settings.timeout_s + LATE_S_MAX
        self._units = [_Unit(unit, topic, begin_s) for unit in settings.units]
        # A start bit, eight of data, parity where there is one, stop bits (section 2.5.1).
        self._character_s = (9 + (settings.parity != "none") + settings.stop_bits) / settings.baud
        # Between two frames; above 19200 baud it is fixed (section 2.5.1.1).
        self._silence_s = 3.5 * self._character_s if settings.baud <= 19_200 else 0.001_75
        self._port: serial.Serial | None = None
        self._fd = -1
        self._received = b""
        self._searched = 0
        """How much of that holds no whole answer to what is awaited."""
        self._heard = 0
        """How many bytes came since the last request."""
        self._late_until = 0
        """Where in that the last late answer ends."""
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
        """Give the port back; `reason` is what it ended by, where we did not choose to."""
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
        """As the settings name them."""
        return [unit.device for unit in self._units]

    @property
    def heard(self) -> list[str]:
        """The devices that answered at the last."""
        return [unit.device for unit in self._units if unit.answers]

    def state(self) -> dict[str, object]:
        """What `sluice status` tells of it."""
        return {"units": self.units(), "acknowledges": False}

    def units(self) -> dict[str, object]:
        """What `sluice status` tells of its units, by device.

        `since_us` is CLOCK_BOOTTIME since when one does not answer (None: it answers, or was not asked yet), `asked`
        how many registers it is asked for, `refused` says by name why it does not give one.
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
        """Log what units did not answer, or not well, since the last report."""
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
        """Ask each unit when it is due, the one that is due for longest first, until cancelled or the port fails."""
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
            # The event loop reports it; the port is opened anew.
            self.close("polling failed")
            raise defect

    async def _turn(self, unit: _Unit) -> None:
        """Ask a unit for all of its registers, and hand over those that it gives."""
        if self._intake.cannot_store:
            self._intake.lost(unit.device, "cannot-wait")
            return
        unit.begin_turn()
        if self._loop.time() > unit.due_s + unit.settings.interval_s:
            unit.note("asked late: the line is too slow for all intervals, or waits for units that do not answer")
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
                # One of its registers may not be there: that must not cost the others.
                parts = unit.split(request, answer.exception)
                pending[:0] = parts
                # "Busy" says nothing of a register; as what went wrong last it is told all the same.
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
        """What a unit answers to a request, asked again where needed; None where nothing came of it."""
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
                # It may be the answer to an earlier attempt, and that to this one follow.
                unit.owing_until_s = self._loop.time() + self._settings.timeout_s + LATE_S_MAX
            if answer.exception is not None:
                unit.note(_refusal_words(request, answer.exception))
            if answer.exception not in _NOT_IN_TIME:
                break
        if answer is None or answer.exception in _NOT_REACHED:
            unit.ignored[request] += 1
            return None
        return answer

    async def _fenced(self, unit: _Unit) -> bool:
        """Make sure that a unit answers nothing any more that it was asked before; False where it may."""
        if unit.asked is None or self._loop.time() >= unit.owing_until_s:
            return True
        between = fence(unit.asked)
        answer = await self._exchange(unit, _frame(unit.settings.unit, between), between)
        # A unit that says "busy" may be at work on what it was asked before.
        if answer is not None and answer.exception not in _NOT_IN_TIME | _NOT_REACHED:
            unit.owing_until_s = 0.0
            return True
        # The answer to the fence may be late itself: only time helps.
        unit.owing_until_s = self._loop.time() + LATE_S_MAX
        return False

    async def _exchange(self, unit: _Unit, frame: bytes, request: Request) -> Answer | None:
        """Send a request and wait for its answer. Raises OSError or termios.error where the port fails."""
        if not await self._line_is_silent():
            unit.note("the line is never silent: something else sends on it")
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
            unit.note("the adapter takes no output")
            return None
        self._active_s = self._loop.time() + len(frame) * self._character_s
        if request == unit.asked:
            unit.sent_s.append(self._active_s)
        self._awaited = unit, request
        answer = await self._answer(frame, request)
        self._awaited = None
        if answer is None:
            # Late answers, of this unit or another, are told as that: they are nothing that came instead.
            unit.note(f"{request}: {other_words(self._received[self._late_until :], frame, request)}")
        elif request == unit.asked:
            self._answer_came(unit, answer)
        return answer

    async def _answer(self, frame: bytes, request: Request) -> Answer | None:
        """Wait for the answer to what was sent; None where it does not come in time."""
        # What the answer itself takes comes on top, and so that of its echo.
        answer_s = (len(frame) + ANSWER_BYTES + request.data_bytes) * self._character_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._active_s + self._settings.timeout_s + answer_s):
                while (answer := find_answer(self._received, frame, request, self._searched)) is None:
                    self._searched = len(self._received)
                    self._arrived.clear()
                    await self._arrived.wait()
                return answer
        # It may have been here in time, and this process not have had its turn until now.
        return find_answer(self._received, frame, request, self._searched)

    def _answer_came(self, unit: _Unit, answer: Answer) -> None:
        """Keep when a unit answered what it was asked last."""
        self._late_until = len(self._received)
        unit.answered_s.append(self._active_s - (ANSWER_BYTES + len(answer.data)) * self._character_s)

    def _find_late_answer(self, searched: int) -> None:
        """See whether an answer came to a request that was given up. It counts for how late it is, and for no value.

        So many of the received bytes held none before.
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
        """Wait until nobody has sent for as long as separates two frames; False where that does not come."""
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
        # The answer is found behind any noise up to that: the oldest bytes go.
        gone = max(0, len(self._received) - _KEPT_BYTES_MAX)
        self._searched = max(0, self._searched - gone)
        self._late_until = max(0, self._late_until - gone)
        before = len(self._received) - gone
        self._received = self._received[gone:] + data
        self._find_late_answer(before)
        self._arrived.set()

    def _take(self, unit: _Unit, values: dict[str, str], received_us: int) -> None:
        reading = Reading(unit.topic, self.name, payload(unit.settings.registers, values), received_us)
        self._intake.take([reading], lambda stored: None if stored else self._intake.lost(unit.device, "cannot-wait"))

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
        """Log, once of each, which registers a unit refuses; the report of faults sums up those that it goes on to."""
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
