"""Reads this box's hardware for `sluice setup`: a name to propose, serial ports, clock and virtualization."""

import hashlib
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from gateway.clock.kernel_clock import read_wall_clock
from gateway.settings import GatewaySettings

_DEVICE_TREE: Final = Path("/proc/device-tree")
_MACHINE_ID: Final = Path("/etc/machine-id")
_DIGITS: Final = 8
"""Digits of a serial number or digest in a proposed name. They tell a site's boxes apart, and can be read out."""
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Port(NamedTuple):
    """A serial port of this box."""

    name: str
    what: str
    """Description of the adapter that is plugged in, as far as the adapter gives one."""


def proposed_id(device_tree: Path = _DEVICE_TREE, machine_id: Path = _MACHINE_ID) -> str:
    """Propose a unique name for this box, by the board's serial number, else by the machine-id.

    The serial number comes first, because a copied card has the machine-id of its original.
    """
    serial = _word(device_tree / "serial-number")
    if serial.strip("0"):
        board = "rpi" if _word(device_tree / "model").startswith("Raspberry") else "gateway"
        return f"{board}-{serial.lower()[-_DIGITS:]}"
    host = _NO_NAME.sub("-", socket.gethostname().partition(".")[0])[:40].strip("-._") or "gateway"
    machine = _word(machine_id)
    if not machine:
        return host
    # The machine-id itself is confidential (machine-id(5)). Only a hash of it may be shown.
    return f"{host}-{hashlib.sha256(b'sluice ' + machine.encode()).hexdigest()[:_DIGITS]}"


def _word(path: Path) -> str:
    try:
        text = path.read_bytes()[:200].decode("ascii", "ignore")
    except OSError:
        return ""
    return _NO_NAME.sub("", text.strip("\0 \n"))


def ports() -> list[Port]:
    """List the serial ports of this box, USB adapters first, without opening them."""
    from serial.tools import list_ports  # noqa: PLC0415 - only setup lists them in this way

    found = []
    for port in list_ports.comports():
        usb = port.vid is not None
        makers = " ".join(dict.fromkeys(filter(None, (port.manufacturer, port.product))))
        numbers = f"USB {port.vid:04x}:{port.pid:04x}" if usb else ""
        serial = f"serial {port.serial_number}" if port.serial_number else ""
        what = ", ".join(filter(None, (makers, numbers, serial))) or "of the board itself; may be its console"
        found.append((not usb, Port(port.device, what)))
    return [port for _, port in sorted(found)]


def is_clock_synced(gateway: GatewaySettings) -> bool:
    """Tell whether this box's clock is synced. False if the kernel does not say, as in some containers."""
    try:
        return read_wall_clock(gateway).synced
    except OSError:
        return False


def virtualization() -> str:
    """Kind of virtualization, such as `container (lxc)`; empty for a real machine, or if it is not known."""
    for option, what in (("--container", "container"), ("--vm", "virtual machine")):
        with suppress(OSError, subprocess.TimeoutExpired):
            words = ["systemd-detect-virt", option]
            done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603 - our own
            if done.returncode == 0:
                return f"{what} ({done.stdout.strip()})"
    return ""
