"""What this box tells of itself for `sluice setup`: a name to propose, and what is plugged into its serial ports."""

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
"""Of a serial number or digest: enough to tell the boxes of a site apart, and few enough to read out on the phone."""
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


class Port(NamedTuple):
    """A serial port that is there."""

    name: str
    what: str
    """What is plugged in, as far as it says so."""


def proposed_id(device_tree: Path = _DEVICE_TREE, machine_id: Path = _MACHINE_ID) -> str:
    """A name for this box that its twin has not: by the board's serial number, else by the installation's.

    A copied card has the same machine-id as the card that it was made from; a board's serial number it has not.
    """
    serial = _word(device_tree / "serial-number")
    if serial.strip("0"):
        board = "rpi" if _word(device_tree / "model").startswith("Raspberry") else "gateway"
        return f"{board}-{serial.lower()[-_DIGITS:]}"
    host = _NO_NAME.sub("-", socket.gethostname().partition(".")[0])[:40].strip("-._") or "gateway"
    machine = _word(machine_id)
    if not machine:
        return host
    # machine-id(5): it is nobody's business itself, and only what is made of it may be shown.
    return f"{host}-{hashlib.sha256(b'sluice ' + machine.encode()).hexdigest()[:_DIGITS]}"


def _word(path: Path) -> str:
    try:
        text = path.read_bytes()[:200].decode("ascii", "ignore")
    except OSError:
        return ""
    return _NO_NAME.sub("", text.strip("\0 \n"))


def ports() -> list[Port]:
    """The serial ports of this box, USB adapters first; none is opened for it."""
    from serial.tools import list_ports  # noqa: PLC0415 - only setup looks at them in this way

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
    """Whether this box knows the time; not where the kernel does not say, as in some containers."""
    try:
        return read_wall_clock(gateway).synced
    except OSError:
        return False


def virtualization() -> str:
    """What this box is where it is none of its own, as `container (lxc)`; empty where it is, or nothing tells."""
    for option, what in (("--container", "container"), ("--vm", "virtual machine")):
        with suppress(OSError, subprocess.TimeoutExpired):
            words = ["systemd-detect-virt", option]
            done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603 - our own
            if done.returncode == 0:
                return f"{what} ({done.stdout.strip()})"
    return ""
