"""Serial ports of this box: which ones a setting means now, how one is opened, and in words why it cannot be."""

import errno
import fcntl
import glob
import grp
import os
import pwd
import stat
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import serial

from gateway.serial_lines.rivals import held_words
from gateway.settings import Parity

ALL: Final = "all"
"""In `serial.ports`: every USB adapter. Ports of the board itself are not among them: one may be the console."""
USB_PORTS: Final = ("/dev/ttyUSB*", "/dev/ttyACM*")
"""Where Linux puts USB adapters: those with a driver of their own, and boards that are USB devices themselves."""
LOOK_ALIKES: Final = (
    "adapters of one make without a serial number have one name in /dev/serial/by-id; name them by the socket that "
    "they are plugged into (/dev/serial/by-path/...)"
)
_PTY_MAJORS: Final = range(136, 144)
"""Linux' Documentation/admin-guide/devices.txt."""
_CDC_MAJORS: Final = frozenset({166})
"""The same: `ttyACM*`, under whatever name."""
FRAMES: Final = "serial.ports"
"""The setting that a port is served for, where it has no section of its own."""
_GONE: Final = "its adapter is gone (unplugged, or no power)"
_GONE_ERRORS: Final = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV})
"""What reading and writing end in where an adapter is pulled out."""
_HINTS = {
    errno.EIO: "no hardware answers behind this name (/dev/ttyS0 to ttyS31 are there without any), or the adapter "
    "hangs: leave it out of [serial], or plug the adapter in anew",
    errno.EPERM: "the system forbids it beyond the port's own rights: give a container the port (--device), or a "
    "service the right to it (DeviceAllow)",
    errno.ENOENT: "the name is there, its adapter is not (unplugged?): plug it in; it is opened then",
    errno.ENODEV: "its adapter is not there (unplugged?): plug it in; it is opened then",
    errno.ENXIO: "its adapter is not there (unplugged?), or has no driver: plug it in anew",
}
_SAY_IT_ALL = frozenset({errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTTY, errno.EAGAIN, errno.EBUSY})
"""Errors of which the system's own words would only puzzle."""
_PARITIES: Final[dict[Parity, str]] = {
    "none": serial.PARITY_NONE,
    "even": serial.PARITY_EVEN,
    "odd": serial.PARITY_ODD,
}
_HELD = frozenset({errno.EAGAIN, errno.EBUSY})
"""EAGAIN of our own lock (flock), EBUSY of a program that took the port for itself (TIOCEXCL)."""


class PortsFound(NamedTuple):
    """What `serial.ports` finds now."""

    names: dict[str, str]
    """Real path to the name that it was found by first."""
    by_pattern: dict[str, list[str]]


def find(patterns: Sequence[str]) -> PortsFound:
    """Look for the ports that paths, globs or `all` mean now."""
    found = PortsFound({}, {})
    for pattern in patterns:
        names = found.by_pattern[pattern] = names_of(pattern)
        for name in names:
            found.names.setdefault(os.path.realpath(name), name)
    return found


def names_of(pattern: str) -> list[str]:
    """The names that are there for a path, a glob or `all`; several may lead to one port."""
    parts = USB_PORTS if pattern == ALL else (pattern,)
    return sorted(name for part in parts for name in glob.glob(part))  # noqa: PTH207 - Path.glob takes none absolute


def ports_of(pattern: str) -> dict[str, str]:
    """Real path to name, of what a path or glob means now: each port once."""
    return find((pattern,)).names


def is_path(pattern: str) -> bool:
    """Whether this is one port that is written out: that it is not there is a mistake."""
    return pattern != ALL and glob.escape(pattern) == pattern


def awaited_words(pattern: str) -> str:
    """That `all` or a glob finds nothing, which may be as it should."""
    if pattern == ALL:
        return "no USB adapter is plugged in now; it may come later"
    return f"nothing is called {pattern} now; it may come later"


def open_port(
    name: str, baud: int, *, data_bits: int = 8, parity: Parity = "none", stop_bits: int = 1
) -> serial.Serial:
    """Open a port raw, for us alone, without blocking reads; `close_port` gives it back.

    Raises OSError, ValueError or termios.error.
    """
    port = serial.Serial(
        name, baud, data_bits, _PARITIES[parity], stop_bits, timeout=0, write_timeout=0, exclusive=True
    )
    try:
        attributes: list[Any] = termios.tcgetattr(port.fileno())
        # With HUPCL, closing drops DTR, and the next opening resets an Arduino and what it holds unsent.
        attributes[2] &= ~termios.HUPCL
        # With pyserial's VMIN 0, an idle port reads as empty as one that hung up.
        attributes[6][termios.VMIN] = 1
        termios.tcsetattr(port.fileno(), termios.TCSANOW, attributes)
        if not _is_pseudo_terminal(port.fileno()):
            # The lock of `exclusive` binds only programs that ask for it, and `cat` would take our bytes.
            fcntl.ioctl(port.fileno(), termios.TIOCEXCL)
    except BaseException:
        close_port(port)
        raise
    return port


def close_port(port: serial.Serial) -> None:
    """Give a port back, at once: what it has not sent is dropped."""
    # Closing a terminal waits for its output, half a minute where nobody takes it.
    with suppress(termios.error):
        termios.tcflush(port.fileno(), termios.TCOFLUSH)
    # Where somebody else has it open too, it would stay closed to others.
    with suppress(OSError):
        fcntl.ioctl(port.fileno(), termios.TIOCNXCL)
    port.close()


def _is_pseudo_terminal(fd: int) -> bool:
    """Of these, the far end keeps what was set when its opener is killed: nobody could open it again."""
    return os.major(os.fstat(fd).st_rdev) in _PTY_MAJORS


def is_usb_cdc(fd: int) -> bool:
    """Whether a port is `ttyACM*`, whose baud rate may be a mere number.

    Of a board that is a USB device itself it is; of an adapter that shows itself so (an Arduino Uno's) it is not.
    """
    return os.major(os.fstat(fd).st_rdev) in _CDC_MAJORS


class PortLostError(OSError):
    """A port can be read no more; the message says why."""


def read_port(fd: int, bytes_max: int) -> bytes:
    """What an open port has now: perhaps nothing. Raises PortLostError."""
    try:
        data = os.read(fd, bytes_max)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise PortLostError(why_closed("reading", error)) from error
    if not data:
        raise PortLostError(_GONE)
    return data


def why_closed(doing: str, error: OSError) -> str:
    """What an error of an open port means; `doing` is reading or writing."""
    return _GONE if error.errno in _GONE_ERRORS else f"{doing} failed: {error.strerror}"


def why_not_opened(error: BaseException, name: str, section: str = FRAMES) -> str:
    """What an error of `open_port` means, and what to do. Not for the event loop: it looks at the processes.

    `section` is the setting that names the port: `FRAMES`, or the header of its section.
    """
    number = _errno(error)
    cause = error.__context__
    if number is None and cause is not None and str(cause) in str(error):
        # pyserial puts some of the system's errors into a text, and raises that while it handles them.
        number = _errno(cause)
    if number is None:
        return str(error)
    hint = _HINTS.get(number)
    if number in _HELD:
        hint = held_words(os.path.realpath(name), leave_out(section))
    elif number == errno.ENOTTY:
        hint = no_port_words(section)
    elif number == errno.EACCES:
        hint = how_to_be_let_in(name)
    if not hint:
        return os.strerror(number)
    return hint if number in _SAY_IT_ALL else f"{os.strerror(number)}: {hint}"


def leave_out(section: str) -> str:
    """How a port is no longer served."""
    return f"take the port out of {FRAMES}" if section == FRAMES else f"remove its {section}"


def no_port_words(section: str) -> str:
    """What is wrong with a name behind which there is something else, and what to write."""
    instead = (
        "leave it out, or write what matches serial ports only"
        if section == FRAMES
        else "write the port that the sensor is on"
    )
    return f"it is no serial port: {instead}"


def _errno(error: BaseException) -> int | None:
    """The system's number of an error; termios.error is no OSError."""
    if isinstance(error, termios.error):
        return int(error.args[0])
    return error.errno if isinstance(error, OSError) else None


def how_to_be_let_in(name: str) -> str:
    """How this user gets the right to open a port: mostly by a group, `dialout` on Debian."""
    try:
        port = os.stat(name)  # noqa: PTH116 - a name of glob's
        group = grp.getgrgid(port.st_gid)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except (OSError, KeyError):
        return "let root give it to a group that the user that sluice runs as is in"
    if ~port.st_mode & (stat.S_IRGRP | stat.S_IWGRP) or not port.st_gid:
        return "only its owner may: let root give it to the group dialout (chgrp dialout, chmod g+rw)"
    if user in group.gr_mem and port.st_gid not in os.getgroups():
        return (
            f"{user} was put into its group {group.gr_name}, but what runs already does not know that: log in again, "
            "or restart the service"
        )
    return (
        f"put the user into its group: sudo usermod -aG {group.gr_name} {user}, then log in again, or restart the "
        f"service (in its unit, SupplementaryGroups={group.gr_name} does the same)"
    )
