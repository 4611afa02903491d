"""Sensors on serial lines: opens ports as they come and go, and moves bytes between each and its SerialLink."""

import asyncio
import contextlib
import errno
import fnmatch
import glob
import os
import termios
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import serial
import structlog

from gateway.reading import Intake
from gateway.serial_link import HelloRefused, Identified, LinkEvent, Lost, Received, SerialLink
from gateway.settings import SerialSettings

PORTS_MAX = 128
"""Ports open at once: a glob that matches a whole directory must not take every descriptor."""
READ_BYTES_MAX = 4096
"""What one line may put in before the others get their turn."""
FAULT_REPORT_INTERVAL_US = 60_000_000

_TIMER_S_MIN = 0.001
_IN_USE = "another program has the port open: stop it, or take the port out of serial.ports"
_HINTS = {
    errno.EACCES: "put the user that sluice runs as into the group that owns the port (`dialout` on Debian)",
    errno.EAGAIN: _IN_USE,
    errno.EBUSY: _IN_USE,
    errno.ENOTTY: "serial.ports must match serial ports only",
}

log = structlog.get_logger()


class SerialIngress:
    """All ports of `[serial]`.

    `now_us` gives CLOCK_BOOTTIME in microseconds, `nonce` 32 random bits for a probe.
    """

    def __init__(
        self, settings: SerialSettings, intake: Intake, now_us: Callable[[], int], nonce: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._intake = intake
        self._now_us = now_us
        self._nonce = nonce
        # By real path, for one port may have several names.
        self._lines: dict[str, _Line] = {}
        # By real path: a port's name and why it cannot be opened, so that this is said once and not at every scan.
        self._unopened: dict[str, tuple[str, str]] = {}
        # Of `serial.ports`: those that nothing is found for.
        self._missing: set[str] = set()
        self._shared_devices: dict[str, list[str]] = {}
        self._faults_reported_us = now_us()

    async def run(self) -> None:
        """Serve the ports until cancelled; then close them all."""
        try:
            while True:
                await self._scan()
                await asyncio.sleep(self._settings.scan_interval_s)
        finally:
            for line in self._lines.values():
                line.close()

    def state(self) -> dict[str, object]:
        """What `sluice status` tells of it."""
        lines = [line for line in self._lines.values() if not line.closed]
        return {
            "ports": {line.name: {"device": line.device} for line in lines},
            "unopened": dict(self._unopened.values()),
            "missing": sorted(self._missing),
        }

    async def _scan(self) -> None:
        served = {line.name for line in self._lines.values()}
        self._lines = {path: line for path, line in self._lines.items() if not line.closed}
        found = _expand(self._settings.ports)
        self._report_missing(found.by_pattern, served)
        self._unopened = {path: told for path, told in self._unopened.items() if path in found.names}
        for path, name in found.names.items():
            if path not in self._lines:
                await self._open(path, name)
        self._report_shared_devices()
        if self._now_us() - self._faults_reported_us >= FAULT_REPORT_INTERVAL_US:
            self._faults_reported_us = self._now_us()
            for line in self._lines.values():
                line.report_faults()

    def _report_missing(self, found: dict[str, list[str]], served: set[str]) -> None:
        """Say once what is not there; of a port that was served until now, its closing tells that."""
        missing = {pattern for pattern, names in found.items() if not names}
        for pattern in sorted(missing - self._missing):
            if not any(fnmatch.fnmatchcase(name, pattern) for name in served):
                log.warning(
                    "no such serial port: it is opened when it is there; plug it in, or mend serial.ports "
                    "(`sluice check` lists what is there)",
                    port=pattern,
                )
        self._missing = missing

    async def _open(self, path: str, name: str) -> None:
        if len(self._lines) >= PORTS_MAX:
            self._cannot_open(path, name, f"{PORTS_MAX} ports are open, which is the most that are served")
            return
        try:
            # In a thread: a driver may wait for its adapter, and the other lines should not.
            port = await asyncio.to_thread(open_port, name, self._settings.baud)
        except (OSError, ValueError, termios.error) as error:
            self._cannot_open(path, name, _explain(error))
            return
        self._unopened.pop(path, None)
        log.info("serial port opened", port=name, baud=self._settings.baud)
        link = SerialLink(name, self._settings, self._now_us())
        self._lines[path] = _Line(port, link, self._intake, self._now_us, self._nonce)

    def _cannot_open(self, path: str, name: str, reason: str) -> None:
        if self._unopened.get(path) != (name, reason):
            self._unopened[path] = (name, reason)
            log.warning("serial port cannot be opened; it is tried at every scan", port=name, reason=reason)

    def _report_shared_devices(self) -> None:
        """Two boards flashed with one name would mix their readings under one key: say so, once."""
        ports_of: dict[str, list[str]] = {}
        for line in self._lines.values():
            if line.device is not None and not line.closed:
                ports_of.setdefault(line.device, []).append(line.name)
        shared = {device: sorted(ports) for device, ports in ports_of.items() if len(ports) > 1}
        for device, ports in shared.items():
            if self._shared_devices.get(device) != ports:
                log.warning(
                    "one device name on several serial ports: their readings mix; flash each with its own name",
                    device=device,
                    ports=ports,
                )
                self._intake.event("device-name-shared", device, ports=ports)
        self._shared_devices = shared


class _Line:
    """One open port, from its opening to its closing."""

    def __init__(
        self,
        port: serial.Serial,
        link: SerialLink,
        intake: Intake,
        now_us: Callable[[], int],
        nonce: Callable[[], int],
    ) -> None:
        self.name: str = port.name
        self.closed = False
        self._port = port
        self._fd: int = port.fileno()
        self._intake = intake
        self._now_us = now_us
        self._nonce = nonce
        self._link = link
        self._unsent = b""
        self._reported: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._read)
        self._write()

    @property
    def device(self) -> str | None:
        return self._link.device

    def close(self, reason: str = "") -> None:
        """Give the port back; `reason` is what it ended by, where we did not choose to."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self.report_faults()
        # Closing a terminal waits for its output, half a minute where nobody takes it.
        with contextlib.suppress(termios.error):
            termios.tcflush(self._fd, termios.TCOFLUSH)
        self._port.close()
        if reason:
            log.warning(
                "serial port closed; it is opened again when it is back",
                port=self.name,
                device=self.device,
                reason=reason,
            )

    def report_faults(self) -> None:
        """Log what could not be used since the last report. None of it is lost: the sensor sends it again."""
        faults = self._link.faults
        since = faults - self._reported
        self._reported = faults
        if since:
            log.warning(
                "serial frames could not be used: check wiring, ground and baud rate",
                port=self.name,
                device=self.device,
                faults=dict(since),
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
        self._handle(self._link.receive(data, self._now_us()))
        self._write()

    def _handle(self, events: Sequence[LinkEvent]) -> None:
        for event in events:
            match event:
                case Received():
                    self._intake.take(event.readings, partial(self._committed, event))
                case Lost():
                    count = event.last - event.first + 1
                    self._intake.lost(
                        event.device, "sensor-ring-overflow", count, (event.boot, event.first, event.last)
                    )
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
                case HelloRefused():
                    log.warning("serial device refused", port=self.name, reason=event.reason)
                    self._intake.event("device-refused", None, port=self.name, reason=event.reason)

    def _committed(self, received: Received, stored: bool) -> None:  # noqa: FBT001 - the form of Intake's `done`
        settle = self._link.stored if stored else self._link.refused
        self._handle(settle(received))
        self._write()

    def _write(self) -> None:
        """Write what the link has to say as far as the port takes it; come back when it takes more, or is due."""
        if self.closed:
            return
        while True:
            if not self._unsent:
                self._unsent = self._link.data_to_send(self._now_us(), self._nonce())
            if not self._unsent:
                break
            try:
                self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
            except BlockingIOError:
                # One write's worth waits here. The link is asked again after it, and says then what holds then.
                self._loop.add_writer(self._fd, self._write)
                return
            except OSError as error:
                self.close(f"writing failed: {error.strerror}")
                return
        self._loop.remove_writer(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        delay_s = (self._link.due_us - self._now_us()) / 1e6
        self._timer = self._loop.call_later(max(delay_s, _TIMER_S_MIN), self._write)


def open_port(name: str, baud: int) -> serial.Serial:
    """Open a port raw, for us alone, without blocking reads. Raises OSError, ValueError or termios.error."""
    port = serial.Serial(name, baud, timeout=0, write_timeout=0, exclusive=True)
    try:
        attributes: list[Any] = termios.tcgetattr(port.fileno())
        # With HUPCL, closing drops DTR, and the next opening resets an Arduino and what it holds unsent.
        attributes[2] &= ~termios.HUPCL
        # With pyserial's VMIN 0, an idle port reads as empty as one that hung up.
        attributes[6][termios.VMIN] = 1
        termios.tcsetattr(port.fileno(), termios.TCSANOW, attributes)
    except BaseException:
        port.close()
        raise
    return port


class _Found(NamedTuple):
    """What `serial.ports` finds now."""

    names: dict[str, str]
    """Real path to the name that it was found by first."""
    by_pattern: dict[str, list[str]]


def _expand(patterns: Sequence[str]) -> _Found:
    found = _Found({}, {})
    for pattern in patterns:
        names = found.by_pattern[pattern] = sorted(glob.glob(pattern))  # noqa: PTH207 - Path.glob takes none absolute
        for name in names:
            found.names.setdefault(os.path.realpath(name), name)
    return found


def _explain(error: BaseException) -> str:
    number = _errno(error)
    cause = error.__context__
    if number is None and cause is not None and str(cause) in str(error):
        # pyserial puts some of the system's errors into a text, and raises that while it handles them.
        number = _errno(cause)
    if number is None:
        return str(error)
    hint = _HINTS.get(number)
    return f"{os.strerror(number)}: {hint}" if hint else os.strerror(number)


def _errno(error: BaseException) -> int | None:
    """The system's number of an error; termios.error is no OSError."""
    if isinstance(error, termios.error):
        return int(error.args[0])
    return error.errno if isinstance(error, OSError) else None
