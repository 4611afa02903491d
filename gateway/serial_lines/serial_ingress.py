"""Serves sensors on serial lines: opens ports as they come and go, each for the kind that the settings name."""

import asyncio
import fnmatch
import termios
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from gateway.clock.sensor_clocks import DeviceClocks
from gateway.reading import SerialIntake
from gateway.serial_lines.frame_link import SerialLink
from gateway.serial_lines.kinds import Line, Section, sections
from gateway.serial_lines.port_line import FrameLine, PortLine, RingLosses
from gateway.serial_lines.ports import (
    ALL,
    FRAMES,
    LOOK_ALIKES,
    USB_PORTS,
    awaited_words,
    find,
    is_path,
    leave_out,
    open_port,
    ports_of,
    why_not_opened,
)
from gateway.serial_lines.rivals import brltty_words, rivals
from gateway.serial_lines.serial_commands import SerialCommands
from gateway.settings import SerialSettings

PORTS_MAX = 128
"""Ports open at once. A glob that matches a whole directory must not take every descriptor."""
FAULT_REPORT_INTERVAL_US = 60_000_000
EXPLAINED_FOR_US = 60_000_000
"""Time until the reason is looked up anew for a port that cannot be opened. The port is tried at every scan."""
GONE_MAX = 16
"""Ports that are remembered after they were served and went; the oldest are forgotten."""
GONE_FOR_US_MAX = 86_400_000_000
_OWN_NAMES = (
    "their readings mix; give each its own name: to a sensor with our frames by flashing another, to others by device "
    "in their section"
)
_ONE_NAME = f"one device name on several serial ports: {_OWN_NAMES}"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A port that should be open, by the name that found it."""

    name: str
    section: Section | None
    """The section of its sensors; None for sensors with our frames."""


@dataclass(frozen=True, slots=True)
class _Open:
    line: Line
    section: Section | None


@dataclass(frozen=True, slots=True)
class _Unopened:
    """A port that is there but cannot be served."""

    name: str
    error: str
    reason: str
    """What the error means, in an installer's words."""
    explained_us: int
    logged: str
    """The last reason in the log; empty if there is none."""


@dataclass(frozen=True, slots=True)
class _Gone:
    """A port that was served and is gone."""

    devices: tuple[str, ...]
    """The devices that were heard on it."""
    since_us: int


class SerialIngress:
    """All ports of `[serial]`.

    `now_us` gives CLOCK_BOOTTIME in microseconds, `nonce` 32 random bits for a probe.
    """

    def __init__(
        self,
        settings: SerialSettings,
        intake: SerialIntake,
        now_us: Callable[[], int],
        nonce: Callable[[], int],
        clocks: DeviceClocks | None = None,
    ) -> None:
        self._settings = settings
        self._intake = intake
        self._losses = RingLosses(intake)
        self.commands = SerialCommands(self._lines)
        """Passes commands from the cloud on."""
        self._now_us = now_us
        self._nonce = nonce
        self._clocks = DeviceClocks() if clocks is None else clocks
        # By real path, as one port may have several names.
        self._open: dict[str, _Open] = {}
        self._unopened: dict[str, _Unopened] = {}
        # By name, the last gone at the end. Without it, nobody would miss a port that only a glob named.
        self._gone: dict[str, _Gone] = {}
        # By name: ports that are not opened because the settings do not say clearly what for.
        self._conflicts: dict[str, str] = {}
        # Paths and globs of the settings that find nothing.
        self._missing: set[str] = set()
        self._shared_devices: dict[str, list[str]] = {}
        # By real path: what other programs do on open ports.
        self._rivals: dict[str, str] = {}
        self._faults_reported_us = now_us()

    async def run(self) -> None:
        """Serve the ports until cancelled; then close them all."""
        try:
            while True:
                await self._scan()
                await asyncio.sleep(self._settings.scan_interval_s)
        finally:
            for each in self._open.values():
                each.line.close()

    def state(self) -> dict[str, object]:
        """The state of all ports, for `sluice status`."""
        now_us = self._now_us()
        return {
            "ports": {
                name: {
                    "kind": None if (section := self._open[path].section) is None else section.kind.words,
                    **self._open[path].line.state(),
                    "rivals": self._rivals.get(path),
                    "shared": self._shared_words(name),
                }
                for path, name in self._names().items()
            },
            "unopened": self._conflicts | {each.name: each.reason for each in self._unopened.values()},
            "missing": sorted(filter(is_path, self._missing)),
            # `all` and globs, which may find something later.
            "awaited": {name: awaited_words(name) for name in sorted(self._missing) if not is_path(name)},
            "gone": {
                name: {"gone_s": round((now_us - gone.since_us) / 1e6, 1), "devices": gone.devices}
                for name, gone in self._gone.items()
            },
        }

    def _lines(self) -> list[Line]:
        return [each.line for each in self._open.values() if not each.line.closed]

    def _names(self) -> dict[str, str]:
        """Names of the open lines by real path, each name once."""
        names: dict[str, str] = {}
        for path, each in self._open.items():
            if not each.line.closed:
                # A link of /dev/serial/by-id may have led to another port when that port was opened.
                names[path] = path if each.line.name in names.values() else each.line.name
        return names

    async def _scan(self) -> None:
        served = {each.line.name for each in self._open.values()}
        self._forget_closed()
        present = _present_ports(self._settings)
        await self._report_missing(present.by_pattern, served)
        self._report_conflicts(present.conflicts)
        self._unopened = {path: each for path, each in self._unopened.items() if path in present.wanted}
        self._hand_over(present.wanted)
        opened = [
            path for path, each in present.wanted.items() if path not in self._open and await self._serve(path, each)
        ]
        self._report_shared_devices()
        now_us = self._now_us()
        self._forget_gone({each.name for each in present.wanted.values()}, now_us)
        for each in self._open.values():
            if isinstance(each.line, PortLine) and not each.line.closed:
                each.line.log_trouble(now_us)
        is_due = now_us - self._faults_reported_us >= FAULT_REPORT_INTERVAL_US
        if is_due:
            self._faults_reported_us = now_us
            for each in self._open.values():
                each.line.report_faults()
        if opened or is_due:
            await self._look_for_rivals()

    def _forget_closed(self) -> None:
        now_us = self._now_us()
        for each in self._open.values():
            if each.line.closed and (devices := each.line.heard):
                self._gone.pop(each.line.name, None)
                self._gone[each.line.name] = _Gone(tuple(devices), now_us)
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._open = {path: each for path, each in self._open.items() if not each.line.closed}

    def _forget_gone(self, there: Container[str], now_us: int) -> None:
        """Forget gone ports that are there again, whose sensors are heard elsewhere, or that went long ago."""
        heard = {device for each in self._open.values() if not each.line.closed for device in each.line.heard}
        self._gone = {
            name: gone
            for name, gone in self._gone.items()
            if name not in there and not heard.issuperset(gone.devices) and now_us - gone.since_us < GONE_FOR_US_MAX
        }

    async def _report_missing(self, found: Mapping[str, Collection[str]], served: Collection[str]) -> None:
        """Log missing ports once. If a port was served until now, the log has its closing instead."""
        missing = {pattern for pattern, names in found.items() if not names}
        for pattern in sorted(missing - self._missing):
            parts = USB_PORTS if pattern == ALL else (pattern,)
            if not any(fnmatch.fnmatchcase(name, part) for name in served for part in parts):
                brltty = await asyncio.to_thread(brltty_words)
                perhaps = {} if brltty is None else {"perhaps": brltty}
                if brltty is None and not is_path(pattern):
                    log.info("no such serial port yet: it is opened when it is there", port=pattern)
                    continue
                log.warning(
                    "no such serial port: it is opened when it is there; plug it in, or mend [serial] "
                    "(`sluice check` lists what is there)",
                    port=pattern,
                    **perhaps,
                )
        self._missing = missing

    def _report_conflicts(self, conflicts: Mapping[str, str]) -> None:
        for name, reason in conflicts.items():
            if self._conflicts.get(name) != reason:
                log.warning("serial port is not opened", port=name, reason=reason)
        self._conflicts = dict(conflicts)

    def _hand_over(self, wanted: Mapping[str, _Wanted]) -> None:
        """Close ports that belong to other sections now: a name may come after its port, or lead to another port."""
        for path, each in list(self._open.items()):
            now = wanted.get(path)
            if now is None:
                moved = each.section is not None and any(other.section == each.section for other in wanted.values())
            else:
                moved = now.section != each.section
            if moved:
                log.info(
                    "serial port closed: its name leads to another port now, or it is named for another sensor",
                    port=each.line.name,
                )
                each.line.close()
                # The gateway closed it, so `_forget_closed` must not remember it as gone.
                del self._open[path]
        self._forget_closed()

    async def _serve(self, path: str, wanted: _Wanted) -> bool:
        """Open a port. If that fails, return False; the failure is logged and shown."""
        try:
            line = await self._line(wanted)
        except (OSError, ValueError, termios.error) as error:
            await self._cannot_open(path, wanted, error)
            return False
        self._unopened.pop(path, None)
        self._open[path] = _Open(line, wanted.section)
        return True

    async def _line(self, wanted: _Wanted) -> Line:
        """Open a port. Raises OSError, ValueError or termios.error."""
        if len(self._open) >= PORTS_MAX:
            raise OSError(f"{PORTS_MAX} ports are open, which is the most that are served")
        name, section, settings = wanted.name, wanted.section, self._settings
        if section is None:
            # In a thread: a driver may wait for its adapter, and the other lines should not.
            port = await asyncio.to_thread(open_port, name, settings.baud)
            link = SerialLink(name, settings, self._now_us(), self._clocks)
            answered = self.commands.answered
            line: Line = FrameLine(port, link, self._intake, self._losses, self._now_us, self._nonce, answered)
        else:
            open_line = section.kind.opener()
            line = await open_line(name, section.settings, settings.topic, self._intake, self._now_us)
        log.info("serial port opened", port=name, baud=(settings if section is None else section.settings).baud)
        return line

    async def _cannot_open(self, path: str, wanted: _Wanted, error: BaseException) -> None:
        name, known, now_us = wanted.name, self._unopened.get(path), self._now_us()
        if known is None or known.error != str(error) or now_us - known.explained_us >= EXPLAINED_FOR_US:
            # In a thread, and not at every scan: it reads the processes of this box.
            header = _header(wanted.section)
            reason, explained_us = await asyncio.to_thread(why_not_opened, error, name, header), now_us
        else:
            reason, explained_us = known.reason, known.explained_us
        logged = known.logged if known is not None else ""
        # Not at the first try: udev gives a new port to its group a moment after it has made it.
        if known is not None and logged != reason:
            logged = reason
            log.warning("serial port cannot be opened; it is tried at every scan", port=name, reason=reason)
        self._unopened[path] = _Unopened(name, str(error), reason, explained_us, logged)

    async def _look_for_rivals(self) -> None:
        """Log which other programs have a port open. In a thread, as it reads the processes of this box."""
        ports = {path: leave_out(_header(each.section)) for path, each in self._open.items() if not each.line.closed}
        found = await asyncio.to_thread(rivals, ports) if ports else {}
        for path, reason in found.items():
            if self._rivals.get(path) != reason:
                log.warning(
                    "serial port is open in another program too: each gets a part of the bytes",
                    port=self._open[path].line.name,
                    reason=reason,
                )
        self._rivals = found

    def _report_shared_devices(self) -> None:
        """Log once that two sensors have one name, as their readings mix under one key."""
        ports_of_device: dict[str, list[str]] = {}
        for path, name in self._names().items():
            for device in self._open[path].line.devices:
                ports_of_device.setdefault(device, []).append(name)
        shared = {device: sorted(ports) for device, ports in ports_of_device.items() if len(ports) > 1}
        for device, ports in shared.items():
            if self._shared_devices.get(device) != ports:
                log.warning(
                    _ONE_NAME,
                    device=device,
                    ports=ports,
                )
                self._intake.event("device-name-shared", device, ports=ports)
        self._shared_devices = shared

    def _shared_words(self, name: str) -> str | None:
        """Words for a port's devices that are on other ports too, and what to do; None if there are none."""
        also = [
            f"{device} is on {', '.join(other for other in ports if other != name)} too"
            for device, ports in self._shared_devices.items()
            if name in ports
        ]
        return f"{', '.join(also)}: {_OWN_NAMES}" if also else None


class _PresentPorts(NamedTuple):
    """The ports that are there now, as the settings want them."""

    wanted: dict[str, _Wanted]
    """By real path."""
    by_pattern: dict[str, list[str]]
    """The names found for each path or glob of the settings."""
    conflicts: dict[str, str]
    """Names for which no port can be chosen, and why."""


def _present_ports(settings: SerialSettings) -> _PresentPorts:
    """Find the ports that the settings name. Sections come first, as their ports do not belong to `serial.ports`."""
    present = _PresentPorts({}, {}, {})
    named: set[str] = set()
    for section in sections(settings):
        pattern = section.settings.port
        ports = ports_of(pattern)
        present.by_pattern[pattern] = list(ports.values())
        named |= ports.keys()
        if len(ports) > 1:
            called = f"{len(ports)} ports are called so ({', '.join(sorted(ports.values()))})"
            present.conflicts[pattern] = f"{called}, and one sensor has one: write one; {LOOK_ALIKES}"
            continue
        for path, name in ports.items():
            if path in present.wanted:
                other = present.wanted[path].name
                present.conflicts[name] = f"it leads to the same port as {other}, which is named for another sensor"
            else:
                present.wanted[path] = _Wanted(name, section)
    found = find(settings.ports)
    present.by_pattern.update(found.by_pattern)
    for path, name in found.names.items():
        if path not in named:
            present.wanted[path] = _Wanted(name, None)
    return present


def _header(section: Section | None) -> str:
    """The setting that names a port, as it stands in the file."""
    return FRAMES if section is None else section.kind.header
