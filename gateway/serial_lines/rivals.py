"""Finds other programs that have serial ports open, and says what the usual ones do and how to stop them.

ModemManager tries new ports for modems, brltty takes adapters for Braille displays, and a login console waits on
the port that the kernel speaks on. Nothing here opens a port.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.host.processes import is_among, name_of, opened_by, processes, running, terminal_of

MODEM_MANAGER = "ModemManager"
BRLTTY = "brltty"
_LOGINS = frozenset({"agetty", "getty", "login", "bash", "sh"})
"""Programs that have a port as their controlling terminal if somebody may log in on it."""
_BRLTTY_RULES = (Path("/usr/lib/udev/rules.d/85-brltty.rules"), Path("/lib/udev/rules.d/85-brltty.rules"))
_UDEV = Path("/run/udev/data")
_CONSOLES = Path("/sys/class/tty/console/active")
_COMMAND_LINE = Path("/proc/cmdline")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The USB adapter behind a port, as the kernel describes it."""

    port: str
    vendor: int
    product: int
    serial_number: str | None
    socket: str
    """Its socket, as the kernel counts (`1-1.2`). All ports of one adapter have one socket."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a port open."""

    process: int
    program: str

    def __str__(self) -> str:
        return f"{self.program} (process {self.process})"


def adapters() -> list[Adapter]:
    """The USB adapters that are plugged in, sorted by port."""
    from serial.tools.list_ports import comports  # noqa: PLC0415 - only if there are serial lines

    found = sorted(comports(), key=lambda port: port.device)
    return [
        Adapter(port.device, port.vid, port.pid, port.serial_number or None, (port.location or "").partition(":")[0])
        for port in found
        if port.vid is not None
    ]


def holders(ports: Collection[str]) -> dict[str, list[Holder]]:
    """Other processes that have these ports open, by real path.

    Where this user may not see what a process has open, its controlling terminal tells.
    """
    numbers = {number: port for port in ports if (number := _device_number(port))}
    found: dict[str, list[Holder]] = {}
    for process in processes():
        if process == os.getpid():
            continue
        if opened := opened_by(process):
            held = {port for port in ports if is_among(opened, port)}
        else:
            held = {numbers[number] for number in (terminal_of(process),) if number in numbers}
        for port in held:
            found.setdefault(port, []).append(Holder(process, name_of(process)))
    return found


def rivals(ports: Mapping[str, str]) -> dict[str, str]:
    """Words for who else speaks or listens on open ports, and what to do, by real path.

    `ports` has, by real path, words for how to stop serving each port (`leave_out` in `ports.py`).
    """
    found = {port: who_words(held, port, ports[port]) for port, held in holders(ports).items()}
    for port in ports:
        if port not in found and is_console(port):
            found[port] = f"the kernel writes its messages there: {login_words(port)}"
    return found


def _device_number(port: str) -> int:
    try:
        return os.stat(port).st_rdev  # noqa: PTH116 - a name of glob's
    except OSError:
        return 0


def held_words(port: str, or_else: str) -> str:
    """Words for who has a port (given by its real path), and what to do; `or_else` leaves the port to them."""
    held = holders((port,)).get(port, [])
    if held:
        return who_words(held, port, or_else)
    manager = running(MODEM_MANAGER)
    if manager is not None:
        return f"most likely {Holder(manager, MODEM_MANAGER)} has it open: {modem_manager_words(port)}"
    return f"another program has the port open (sudo fuser -v {port} names it): stop it, or {or_else}"


def who_words(held: Collection[Holder], port: str, or_else: str) -> str:
    """Words for what these processes do on a port, and what to do; `or_else` leaves the port to them."""
    programs = {holder.program for holder in held}
    who = f"{' and '.join(map(str, held))} {'has' if len(held) == 1 else 'have'} it open"
    if MODEM_MANAGER in programs:
        return f"{who}: {modem_manager_words(port)}"
    if programs & _LOGINS:
        return f"{who}: {login_words(port)}"
    return f"{who}: stop {'it' if len(held) == 1 else 'them'}, or {or_else}"


def modem_manager_words(port: str) -> str:
    """Words for what ModemManager does to a port, and how to stop it: for this adapter, or at all."""
    adapter = next((adapter for adapter in adapters() if adapter.port == port), None)
    everywhere = "where this box has no modem, sudo systemctl disable --now ModemManager"
    does = "it opens new ports to try them for modems, which resets an Arduino and mixes into its bytes"
    if adapter is None:
        return f"{does}; {everywhere}"
    rule = (
        f'ATTRS{{idVendor}}=="{adapter.vendor:04x}", ATTRS{{idProduct}}=="{adapter.product:04x}", '
        'ENV{ID_MM_DEVICE_IGNORE}="1"'
    )
    return (
        f"{does}; {everywhere}; else put the line {rule} into /etc/udev/rules.d/99-sluice.rules, then sudo udevadm "
        "control --reload, sudo systemctl restart ModemManager, and plug the adapter in anew"
    )


def is_spared_by_modem_manager(port: str) -> bool:
    """Whether this box's udev rules keep ModemManager from a port, given by its real path."""
    number = _device_number(port)
    try:
        properties = Path(_UDEV, f"c{os.major(number)}:{os.minor(number)}").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(f"E:{name}=1" in properties for name in ("ID_MM_DEVICE_IGNORE", "ID_MM_PORT_IGNORE"))


def login_words(port: str) -> str:
    """Words for what a login console does on a port, and how to stop it."""
    name = Path(port).name
    return (
        "a login console answers the sensor there, and takes its bytes; sudo systemctl disable --now "
        f"serial-getty@{name}.service, and take console={name} (or serial0) out of the kernel's command line "
        "(/boot/firmware/cmdline.txt on a Raspberry Pi: raspi-config, Interface Options, Serial Port; "
        "/etc/default/grub elsewhere), then restart the box"
    )


def is_console(port: str) -> bool:
    """Whether the kernel writes its messages on a port, given by its real path."""
    name = Path(port).name
    try:
        if name in _CONSOLES.read_text(encoding="ascii").split():
            return True
    except OSError:
        pass
    try:
        words = _COMMAND_LINE.read_text(errors="replace").split()
    except OSError:
        return False
    consoles = (word.removeprefix("console=").partition(",")[0] for word in words if word.startswith("console="))
    # A Raspberry Pi calls the port serial0, which is a link to it.
    return any(os.path.realpath(f"/dev/{console}") == port for console in consoles)


def brltty_words() -> str | None:
    """Words for what brltty does to adapters, and how to stop it; None if it is not on this box."""
    if running(BRLTTY) is None and not any(rules.exists() for rules in _BRLTTY_RULES):
        return None
    return (
        "brltty is on this box, which takes some adapters (CH340, CP210x, FT232, PL2303) for Braille displays: their "
        "ports vanish seconds after they are plugged in (dmesg: `usbfs: interface 0 claimed by ... while 'brltty' "
        "sets config #1`); where nobody reads Braille here, sudo apt remove brltty, and plug the adapter in anew"
    )
