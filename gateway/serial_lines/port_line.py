"""One open serial port: moves bytes between its descriptor and its link, and events from the link to the intake.

Each read only records two times. Each scan and `sluice status` turn them into words.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import serial
import structlog

from gateway.command import DeviceCommand
from gateway.host.latest import Latest
from gateway.host.terminal_text import size, span
from gateway.reading import SENSOR_DROPPED, BufferFileError, Intake, SerialIntake
from gateway.serial_lines.frame_link import (
    REFUSED_HELLO,
    CommandAnswered,
    HelloRefused,
    Identified,
    LinkEvent,
    Lost,
    Received,
    SerialLink,
)
from gateway.serial_lines.frames import Defect
from gateway.serial_lines.ports import PortLostError, close_port, is_usb_cdc, read_port, why_closed

CommandAnswer = Callable[[CommandAnswered], None]
"""Told how a sensor has answered a command."""
RUNS_MAX = 1_000
"""Runs (boots of sensors) whose last reported loss is remembered; the oldest is forgotten."""


class RingLosses:
    """Reports what serial sensors' rings dropped: each span once, whichever line finds it out.

    If a port is opened anew, or a sensor moves to another port, the line begins from the buffer's knowledge of the run.
    It then finds losses again that an earlier line reported.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._told_below = Latest[tuple[str, str], int](RUNS_MAX)

    def begin(self, identified: Identified) -> None:
        """Begin with a run. If its sequence has gone back, losses reported so far are of another life of the run."""
        run = identified.device, identified.boot
        if self._told_below.get(run, 0) > identified.next:
            del self._told_below[run]

    def tell(self, lost: Lost) -> None:
        """Report a loss, except what was reported already. On each line, losses of a run come in ascending order."""
        run = lost.device, lost.boot
        first = max(lost.first, self._told_below.get(run, 0))
        self._told_below[run] = max(first, lost.last + 1)
        if first <= lost.last:
            count = lost.last - first + 1 if lost.is_sure else 0
            self._intake.lost(lost.device, SENSOR_DROPPED, count, (lost.boot, first, lost.last))


READ_BYTES_MAX = 4096
"""Bytes that one line may bring before the others get their turn."""
FLOOD_BYTES_PER_S_MAX = 130_000
"""Bytes a second that a line may bring: more than the fastest adapter carries, and little work. If more come, reading
pauses, and the flood waits in the kernel."""
FLOOD_WINDOW_US = 100_000
"""Time over which a flood is counted. It is longer on a slow line: bytes that waited for a busy loop are no flood."""
TROUBLE_FIRST_US = 5_000_000
"""Time from a port's opening until its trouble is logged. A sensor says HELLO, or is asked, sooner."""
TROUBLE_INTERVAL_US = 60_000_000
PROBES_UNANSWERED_MAX = 3
"""PROBEs without any frame after them, over as many intervals, after which a sensor is silent."""
UNPROVISIONED = "unprovisioned"
"""The firmware's name for a chip whose EEPROM holds no name."""
RECALL_RETRY_S = 1.0
"""Seconds between two tries to recall a run while the buffer cannot be read. Losses of the run wait for it."""
_TIMER_S_MIN = 0.001
_UNSET = -1

log = structlog.get_logger()


class PortLine(ABC):
    """One open port, from its opening to its closing. It reads a flood no faster than the other lines can bear."""

    def __init__(
        self,
        port: serial.Serial,
        intake: SerialIntake,
        now_us: Callable[[], int],
        bytes_per_s_max: float = FLOOD_BYTES_PER_S_MAX,
    ) -> None:
        """`bytes_per_s_max` is what the line can carry, if that is known."""
        self.name: str = port.name
        self.closed = False
        self._port = port
        self._fd: int = port.fileno()
        self._intake = intake
        self._now_us = now_us
        self._loop = asyncio.get_running_loop()
        self._reported: Counter[str] = Counter()
        self._opened_us = now_us()
        # When bytes came last, when they could be used last (None: never), and how many came since then.
        self._heard_us: int | None = None
        self._used_us: int | None = None
        self._unused_bytes = 0
        self._trouble_due_us = self._opened_us + TROUBLE_FIRST_US
        self._trouble_told_bytes = _UNSET
        self._is_new = True
        bytes_per_s = min(bytes_per_s_max, FLOOD_BYTES_PER_S_MAX)
        self._flood_bytes_max = max(READ_BYTES_MAX, round(bytes_per_s * FLOOD_WINDOW_US / 1e6))
        self._flood_window_us = round(self._flood_bytes_max / bytes_per_s * 1e6)
        self._window_us = 0
        self._window_bytes = 0
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._read)

    @property
    @abstractmethod
    def device(self) -> str | None:
        """The sensor at the other end; None if it is unknown."""

    @property
    def devices(self) -> tuple[str, ...]:
        """`device`, if it is known."""
        return () if self.device is None else (self.device,)

    @property
    def heard(self) -> tuple[str, ...]:
        """`devices`, if something usable came since the port was opened."""
        return () if self._used_us is None else self.devices

    def state(self) -> dict[str, object]:
        """The line's state, for `sluice status`. Times are seconds ago; None means never since the port was opened."""
        now_us = self._now_us()
        return {
            "device": self.device,
            "heard_s": _age_s(self._heard_us, now_us),
            "used_s": _age_s(self._used_us, now_us),
            "trouble": self.trouble(now_us),
        }

    @abstractmethod
    def trouble(self, now_us: int) -> str | None:
        """Words for a line that brings nothing, or nothing usable, and what to do; None if all is well."""

    @abstractmethod
    def report_faults(self) -> None:
        """Log input that could not be used since the last report."""

    def log_trouble(self, now_us: int) -> None:
        """Log the trouble: soon after the opening, then once a minute while more unusable bytes come."""
        trouble = self.trouble(now_us)
        if trouble is None:
            self._trouble_told_bytes = _UNSET
        elif now_us >= self._trouble_due_us and self._unused_bytes != self._trouble_told_bytes:
            self._trouble_due_us = now_us + TROUBLE_INTERVAL_US
            self._trouble_told_bytes = self._unused_bytes
            log.warning("serial port gives nothing usable", port=self.name, reason=trouble)
        if self._is_new and now_us - self._opened_us >= TROUBLE_FIRST_US:
            self._is_new = False
            self.report_faults()

    def _use(self, now_us: int) -> None:
        """Record that the bytes so far could be used."""
        self._used_us = now_us
        self._unused_bytes = 0

    def _unused_words(self, now_us: int) -> str:
        """Words for how much came since something could be used."""
        since_us = self._opened_us if self._used_us is None else self._used_us
        return f"{size(self._unused_bytes)} in {span((now_us - since_us) / 1e6)}"

    @abstractmethod
    def _received(self, data: bytes, now_us: int) -> None: ...

    def close(self, reason: str = "") -> None:
        """Give the port back; `reason` says why, if the gateway did not choose to."""
        if self.closed:
            return
        self.closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self.report_faults()
        close_port(self._port)
        if reason:
            log.warning(
                "serial port closed; it is opened again when it is back",
                port=self.name,
                device=self.device,
                reason=reason,
            )

    def _read(self) -> None:
        try:
            data = read_port(self._fd, READ_BYTES_MAX)
        except PortLostError as error:
            self.close(str(error))
            return
        if not data:
            return
        now_us = self._now_us()
        self._heard_us = now_us
        self._unused_bytes += len(data)
        if now_us - self._window_us >= self._flood_window_us:
            self._window_us, self._window_bytes = now_us, 0
        self._window_bytes += len(data)
        if self._window_bytes >= self._flood_bytes_max:
            self._loop.remove_reader(self._fd)
            # If the last read brought more than a window's worth, the pause is longer.
            paid_us = self._flood_window_us * self._window_bytes // self._flood_bytes_max
            rest_us = self._window_us + paid_us - now_us
            self._pause = self._loop.call_later(rest_us / 1e6, self._loop.add_reader, self._fd, self._read)
        self._received(data, now_us)

    def _faults_since(self, faults: Counter[str]) -> dict[str, int]:
        """Faults that were counted since the last call."""
        since = faults - self._reported
        self._reported = Counter(faults)
        return dict(since)


class FrameLine(PortLine):
    """A port whose sensor speaks our frames. Its readings are acknowledged after their commit."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a line lives on
        self,
        port: serial.Serial,
        link: SerialLink,
        intake: SerialIntake,
        losses: RingLosses,
        now_us: Callable[[], int],
        nonce: Callable[[], int],
        answered: CommandAnswer,
    ) -> None:
        super().__init__(port, intake, now_us)
        self._answered = answered
        self._link = link
        self._losses = losses
        self._nonce = nonce
        self._recalls: set[asyncio.Task[None]] = set()
        self._unsent = b""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_us = _UNSET
        self._silent = False
        if is_usb_cdc(self._fd):
            link.claim_no_wire()
        self._write()

    @property
    def device(self) -> str | None:
        """The sensor that said HELLO; None before that."""
        return self._link.device

    @property
    def command_id(self) -> str | None:
        """The command that is on its way; None if there is none."""
        return self._link.command_id

    def command(self, command: DeviceCommand) -> None:
        """Send a command to the sensor until it answers. There must be no other, and the sensor must be known."""
        self._link.command(command.id, command.payload, self._now_us())
        self._write()

    def withdraw_command(self) -> None:
        """Send the command no more."""
        self._link.withdraw()

    def state(self) -> dict[str, object]:
        """See `PortLine.state`."""
        return super().state() | {"silent": self._silent}

    def trouble(self, now_us: int) -> str | None:
        """See `PortLine.trouble`."""
        if self._link.refusal is not None:
            return f"REFUSED: {self._link.refusal}"
        if self._silent and self._used_us is not None:
            ago = span((now_us - self._used_us) / 1e6)
            return f"SILENT for {ago}, {self._silence_words()}: check power, wiring, ground and baud"
        if self.device is not None:
            return None
        if self._used_us is not None:
            return (
                "frames have come, but no HELLO, though it is asked for one, so that nothing is stored: check the wire "
                "from here to it (its RX)"
            )
        if not self._unused_bytes:
            return "nothing has come from it yet: check power and wiring"
        return (
            f"bytes come, but no frame of ours ({self._unused_words(now_us)}): if the sensor writes text, it needs "
            f"[[serial.text]]; else check serial.baud ({self._port.baudrate}), wiring and ground. Another binary "
            "protocol cannot be read here"
        )

    def log_trouble(self, now_us: int) -> None:
        """See `PortLine.log_trouble`. Also report a sensor that has fallen silent."""
        # A refusal is logged when it comes, and silence once.
        if self._link.refusal is not None or self._silent:
            return
        super().log_trouble(now_us)
        if self._has_fallen_silent(now_us):
            self._silent = True
            cause = f"no frame for {span(PROBES_UNANSWERED_MAX * self._link.probe_interval_us / 1e6)}"
            log.warning(
                "serial sensor is silent: check its power, wiring, ground and baud",
                port=self.name,
                device=self.device,
                reason=f"{cause}, {self._silence_words()}",
            )
            self._intake.event("device-died", self.device, source="serial", port=self.name, cause=cause)

    def _has_fallen_silent(self, now_us: int) -> bool:
        """Whether enough PROBEs found no answer. Time alone does not tell: a stopped gateway sends no PROBEs."""
        if self.device is None or self._used_us is None or self._link.probes_unanswered < PROBES_UNANSWERED_MAX:
            return False
        return now_us - self._used_us >= PROBES_UNANSWERED_MAX * self._link.probe_interval_us

    def _silence_words(self) -> str:
        return f"{size(self._unused_bytes)} came that are no frame" if self._unused_bytes else "nothing comes"

    def _end_silence(self, events: Sequence[LinkEvent]) -> None:
        self._silent = False
        # A new run, or another sensor, is reported anyway.
        if not any(isinstance(event, Identified | HelloRefused) for event in events):
            log.info("serial sensor is heard again", port=self.name, device=self.device)
            self._intake.event("device-appeared", self.device, source="serial", port=self.name)

    def close(self, reason: str = "") -> None:
        """See `PortLine.close`."""
        if self._timer is not None:
            self._timer.cancel()
        for recall in self._recalls:
            recall.cancel()
        super().close(reason)

    def report_faults(self) -> None:
        """Log frames that could not be used since the last report. None is lost: the sensor sends them again."""
        faults = self._faults_since(self._link.faults)
        # A refused HELLO is no fault of the line, and was logged when it came.
        faults.pop(REFUSED_HELLO, None)
        if noisy := faults.pop(Defect.NOISE.value, 0):
            log.info(
                "noise, or damaged frames, came beside serial frames, which were read",
                port=self.name,
                device=self.device,
                times=noisy,
            )
        # If nothing else comes, `log_trouble` has said so.
        if faults and self._trouble_told_bytes == _UNSET:
            log.warning(
                "serial frames could not be used: check wiring, ground and baud rate",
                port=self.name,
                device=self.device,
                faults=faults,
            )

    def _received(self, data: bytes, now_us: int) -> None:
        events = self._link.receive(data, now_us)
        if self._link.heard_us == now_us:
            self._use(now_us)
            if self._silent:
                self._end_silence(events)
        self._handle(events)
        self._write()

    def _handle(self, events: Sequence[LinkEvent]) -> None:
        for event in events:
            match event:
                case Received():
                    self._intake.take(event.readings, partial(self._committed, event))
                case Lost():
                    self._losses.tell(event)
                case Identified():
                    log.info("serial device appeared", port=self.name, device=event.device, boot=event.boot)
                    self._intake.event(
                        "device-appeared",
                        event.device,
                        port=self.name,
                        firmware=event.firmware,
                        reset_cause=event.reset_cause,
                        boot=event.boot,
                        oldest=event.oldest,
                        next=event.next,
                    )
                    if event.device == UNPROVISIONED:
                        log.warning(
                            "a board without an EEPROM image calls itself 'unprovisioned', as any other would: write "
                            "one (docs/firmware.md)",
                            port=self.name,
                        )
                    self._begin_recall(event)
                case HelloRefused():
                    log.warning("serial device refused", port=self.name, reason=event.reason)
                    self._intake.event("device-refused", None, port=self.name, reason=event.reason)
                case CommandAnswered():
                    self._answered(event)

    def _begin_recall(self, identified: Identified) -> None:
        recall = self._loop.create_task(self._recall(identified))
        self._recalls.add(recall)
        recall.add_done_callback(self._recalls.discard)

    async def _recall(self, identified: Identified) -> None:
        """Ask the buffer what it has of this run, to find what the sensor dropped while nobody listened."""
        while True:
            try:
                held = range(identified.oldest, identified.next)
                recalled = await self._intake.recall(identified.device, identified.boot, held)
            except BufferFileError as error:
                if not self._link.knows(identified):
                    log.warning("what a sensor dropped before is not known", device=identified.device, error=str(error))
                    return
                await asyncio.sleep(RECALL_RETRY_S)
            else:
                self._losses.begin(identified)
                self._handle(self._link.recall(identified, recalled))
                return

    def _committed(self, received: Received, stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
        settle = self._link.stored if stored else self._link.not_stored
        self._handle(settle(received))
        self._write()

    def _write(self) -> None:
        """Write the link's bytes, and come back when it is due."""
        if self.closed or self._unsent:
            return
        now_us = self._now_us()
        # Random bits cost more than all else here, and only a PROBE that is due needs them.
        nonce = self._nonce() if now_us >= self._link.due_us else 0
        self._unsent = self._link.data_to_send(now_us, nonce)
        if self._unsent:
            self._send()
        self._set_timer()

    def _send(self) -> None:
        """Write as much as the port takes. The rest goes when the port takes more."""
        try:
            self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(why_closed("writing", error))
            return
        if self._unsent:
            # Only the bytes of one write wait here. After it the link is asked again, as its state may have changed.
            self._loop.add_writer(self._fd, self._send_rest)

    def _send_rest(self) -> None:
        self._loop.remove_writer(self._fd)
        self._send()
        self._write()

    def _set_timer(self) -> None:
        """Come back when the link is due. The timer is set only if that has changed, as each frame calls this."""
        due_us = self._link.due_us
        if self.closed or due_us == self._timer_due_us:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_us = due_us
        delay_s = max((due_us - self._now_us()) / 1e6, _TIMER_S_MIN)
        self._timer = self._loop.call_later(delay_s, self._due)

    def _due(self) -> None:
        # A timer may be early by its clock's grain. Then it is set again.
        self._timer_due_us = _UNSET
        self._write()


def _age_s(then_us: int | None, now_us: int) -> float | None:
    return None if then_us is None else round((now_us - then_us) / 1e6, 1)
