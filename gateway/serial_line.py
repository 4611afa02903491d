"""One open serial port: moves bytes between its descriptor and its link, and events from there to the intake."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import serial
import structlog

from gateway.buffer_schema import BufferFileError
from gateway.reading import SerialIntake
from gateway.serial_link import HelloRefused, Identified, LinkEvent, Lost, Received, SerialLink
from gateway.serial_losses import RingLosses
from gateway.serial_ports import close_port

READ_BYTES_MAX = 4096
"""What one line may put in before the others get their turn."""
FLOOD_WINDOW_US = 100_000
FLOOD_BYTES_MAX = 13_000
"""What a line may put in within a window: 130 kB/s, more than the fastest adapter carries, and little to work through.
Beyond it the line is read on in the next window, and what floods it waits in the kernel."""
RECALL_RETRY_S = 1.0
"""While the buffer cannot be read; losses of the run wait for it."""
_TIMER_S_MIN = 0.001
_UNSET = -1

log = structlog.get_logger()


class PortLine(ABC):
    """One open port, from its opening to its closing: reads what comes, and of a flood only what others can bear."""

    def __init__(self, port: serial.Serial, intake: SerialIntake, now_us: Callable[[], int]) -> None:
        self.name: str = port.name
        self.closed = False
        self._port = port
        self._fd: int = port.fileno()
        self._intake = intake
        self._now_us = now_us
        self._loop = asyncio.get_running_loop()
        self._reported: Counter[str] = Counter()
        self._window_us = 0
        self._window_bytes = 0
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._read)

    @property
    @abstractmethod
    def device(self) -> str | None:
        """Who is at the other end, as far as it is known."""

    @abstractmethod
    def state(self) -> dict[str, object]:
        """What `sluice status` tells of it."""

    @abstractmethod
    def report_faults(self) -> None:
        """Log what could not be used since the last report."""

    @abstractmethod
    def _received(self, data: bytes, now_us: int) -> None: ...

    def close(self, reason: str = "") -> None:
        """Give the port back; `reason` is what it ended by, where we did not choose to."""
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
            data = os.read(self._fd, READ_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"reading failed: {error.strerror}")
            return
        if not data:
            self.close("it hung up")
            return
        now_us = self._now_us()
        if now_us - self._window_us >= FLOOD_WINDOW_US:
            self._window_us, self._window_bytes = now_us, 0
        self._window_bytes += len(data)
        if self._window_bytes >= FLOOD_BYTES_MAX:
            self._loop.remove_reader(self._fd)
            rest_us = self._window_us + FLOOD_WINDOW_US - now_us
            self._pause = self._loop.call_later(rest_us / 1e6, self._loop.add_reader, self._fd, self._read)
        self._received(data, now_us)

    def _faults_since(self, faults: Counter[str]) -> dict[str, int]:
        """What has been added to a counter since this was asked last."""
        since = faults - self._reported
        self._reported = Counter(faults)
        return dict(since)


class FrameLine(PortLine):
    """A port whose sensor speaks our frames: what it sends is acknowledged after its commit."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a line lives on
        self,
        port: serial.Serial,
        link: SerialLink,
        intake: SerialIntake,
        losses: RingLosses,
        now_us: Callable[[], int],
        nonce: Callable[[], int],
    ) -> None:
        super().__init__(port, intake, now_us)
        self._link = link
        self._losses = losses
        self._nonce = nonce
        self._recalls: set[asyncio.Task[None]] = set()
        self._unsent = b""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_us = _UNSET
        self._write()

    @property
    def device(self) -> str | None:
        """Who said HELLO; None before that."""
        return self._link.device

    def state(self) -> dict[str, object]:
        """See `PortLine.state`."""
        return {"device": self.device}

    def close(self, reason: str = "") -> None:
        """See `PortLine.close`."""
        if self._timer is not None:
            self._timer.cancel()
        for recall in self._recalls:
            recall.cancel()
        super().close(reason)

    def report_faults(self) -> None:
        """Log what could not be used since the last report. None of it is lost: the sensor sends it again."""
        faults = self._faults_since(self._link.faults)
        if faults:
            log.warning(
                "serial frames could not be used: check wiring, ground and baud rate",
                port=self.name,
                device=self.device,
                faults=faults,
            )

    def _received(self, data: bytes, now_us: int) -> None:
        self._handle(self._link.receive(data, now_us))
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
                    self._begin_recall(event)
                case HelloRefused():
                    log.warning("serial device refused", port=self.name, reason=event.reason)
                    self._intake.event("device-refused", None, port=self.name, reason=event.reason)

    def _begin_recall(self, identified: Identified) -> None:
        recall = self._loop.create_task(self._recall(identified))
        self._recalls.add(recall)
        recall.add_done_callback(self._recalls.discard)

    async def _recall(self, identified: Identified) -> None:
        """Ask the buffer what it has of this run, so that what was dropped while nobody listened is known."""
        while True:
            try:
                recalled = await self._intake.recall(identified.device, identified.boot)
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
        settle = self._link.stored if stored else self._link.refused
        self._handle(settle(received))
        self._write()

    def _write(self) -> None:
        """Write what the link has to say now, and come back when it is due."""
        if self.closed or self._unsent:
            return
        now_us = self._now_us()
        # Random bits are for a probe, which is sent when it is due: they cost more than all else here.
        nonce = self._nonce() if now_us >= self._link.due_us else 0
        self._unsent = self._link.data_to_send(now_us, nonce)
        if self._unsent:
            self._send()
        self._set_timer()

    def _send(self) -> None:
        """Write as far as the port takes it; what is left goes when it takes more."""
        try:
            self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(f"writing failed: {error.strerror}")
            return
        if self._unsent:
            # One write's worth waits here. The link is asked again after it, and says then what holds then.
            self._loop.add_writer(self._fd, self._send_rest)

    def _send_rest(self) -> None:
        self._loop.remove_writer(self._fd)
        self._send()
        self._write()

    def _set_timer(self) -> None:
        """Come back when the link is due: set anew only where that has changed, for this is called for each frame."""
        due_us = self._link.due_us
        if self.closed or due_us == self._timer_due_us:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_us = due_us
        delay_s = max((due_us - self._now_us()) / 1e6, _TIMER_S_MIN)
        self._timer = self._loop.call_later(delay_s, self._due)

    def _due(self) -> None:
        # A timer may be early by its clock's grain: then it is set again.
        self._timer_due_us = _UNSET
        self._write()
