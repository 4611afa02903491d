"""Serial ports of this box: finds those that a setting means, opens them, and says why one cannot be opened."""

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
"""In `serial.ports`, every USB adapter. The board's own ports are not included, as one may be the console."""
USB_PORTS: Final = ("/dev/ttyUSB*", "/dev/ttyACM*")
"""Linux' names for USB adapters with a driver of their own, and for boards that are USB devices themselves."""
LOOK_ALIKES: Final = (
    "adapters of one make without a serial number have one name in /dev/serial/by-id; name them by the socket that "
    "they are plugged into (/dev/serial/by-path/...)"
)
_PTY_MAJORS: Final = range(136, 144)
"""Pseudo-terminals, by Linux' Documentation/admin-guide/devices.txt."""
_CDC_MAJORS: Final = frozenset({166})
"""`ttyACM*`, whatever the port's name, by that document too."""
FRAMES: Final = "serial.ports"
"""The setting that names a port without a section of its own."""
_GONE: Final = "its adapter is gone (unplugged, or no power)"
_GONE_ERRORS: Final = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV})
"""Errors of reading and writing after an adapter was pulled out."""
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
"""Errors for which the system's own words would only puzzle."""
_PARITIES: Final[dict[Parity, str]] = {
    "none": serial.PARITY_NONE,
    "even": serial.PARITY_EVEN,
    "odd": serial.PARITY_ODD,
}
_HELD = frozenset({errno.EAGAIN, errno.EBUSY})
"""Errors if another program has the port: EAGAIN by its lock (flock), EBUSY by its exclusive use (TIOCEXCL)."""


class PortsFound(NamedTuple):
    """Ports that `serial.ports` finds now."""

    names: dict[str, str]
    """By real path, the name that found the port first."""
    by_pattern: dict[str, list[str]]


def find(patterns: Sequence[str]) -> PortsFound:
    """Find the ports that paths, globs or `all` mean now."""
    found = PortsFound({}, {})
    for pattern in patterns:
        names = found.by_pattern[pattern] = names_of(pattern)
        for name in names:
            found.names.setdefault(os.path.realpath(name), name)
    return found


def names_of(pattern: str) -> list[str]:
    """Names that exist for a path, a glob or `all`. Several names may lead to one port."""
    parts = USB_PORTS if pattern == ALL else (pattern,)
    return sorted(name for part in parts for name in glob.glob(part))  # noqa: PTH207 - Path.glob takes none absolute


def ports_of(pattern: str) -> dict[str, str]:
    """Ports that a path or glob means now, each once: real path to name."""
    return find((pattern,)).names


def is_path(pattern: str) -> bool:
    """Whether a pattern is the path of one port. If that port is missing, it is a mistake."""
    return pattern != ALL and glob.escape(pattern) == pattern


def awaited_words(pattern: str) -> str:
    """Words for `all` or a glob that finds nothing, which may be intended."""
    if pattern == ALL:
        return "no USB adapter is plugged in now; it may come later"
    return f"nothing is called {pattern} now; it may come later"


def open_port(
    name: str, baud: int, *, data_bits: int = 8, parity: Parity = "none", stop_bits: int = 1
) -> serial.Serial:
    """Open a port raw, for this process alone, with reads that do not block; `close_port` gives it back.

    Raises OSError, ValueError or termios.error.
    """
    port = serial.Serial(
        name, baud, data_bits, _PARITIES[parity], stop_bits, timeout=0, write_timeout=0, exclusive=True
    )
    try:
        attributes: list[Any] = termios.tcgetattr(port.fileno())
        # With HUPCL, closing drops DTR. The next opening then resets an Arduino, which loses its unsent samples.
        attributes[2] &= ~termios.HUPCL
        # With pyserial's VMIN 0, reading an idle port looks like reading one that hung up.
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
    """Give a port back at once. Output that is not sent yet is dropped."""
    # Closing a terminal waits for its output, for half a minute if nobody takes it.
    with suppress(termios.error):
        termios.tcflush(port.fileno(), termios.TCOFLUSH)
    # If another program has the port open too, it would stay closed to others.
    with suppress(OSError):
        fcntl.ioctl(port.fileno(), termios.TIOCNXCL)
    port.close()


def _is_pseudo_terminal(fd: int) -> bool:
    """Whether a port is a pseudo-terminal. TIOCEXCL stays on it if its opener is killed: nobody could open it again."""
    return os.major(os.fstat(fd).st_rdev) in _PTY_MAJORS


def is_usb_cdc(fd: int) -> bool:
    """Whether a port is `ttyACM*`, whose baud rate may be a mere number.

    It is one if the board is a USB device itself, but not if an adapter shows up so (an Arduino Uno's).
    """
    return os.major(os.fstat(fd).st_rdev) in _CDC_MAJORS


class PortLostError(OSError):
    """A port cannot be read any more; the message says why."""


def read_port(fd: int, bytes_max: int) -> bytes:
    """Bytes that an open port has now, perhaps none. Raises PortLostError."""
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
    """Words for an error of an open port; `doing` is reading or writing."""
    return _GONE if error.errno in _GONE_ERRORS else f"{doing} failed: {error.strerror}"


def why_not_opened(error: BaseException, name: str, section: str = FRAMES) -> str:
    """Words for an error of `open_port`, and what to do. Too slow for the event loop: it reads the processes.

    `section` is the setting that names the port: `FRAMES`, or the header of its section.
    """
    number = _errno(error)
    cause = error.__context__
    if number is None and cause is not None and str(cause) in str(error):
        # pyserial turns some of the system's errors into a text, and raises it while it handles them.
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
    """Words for how to stop serving a port."""
    return f"take the port out of {FRAMES}" if section == FRAMES else f"remove its {section}"


def no_port_words(section: str) -> str:
    """Words for a name that leads to something else than a port, and what to write."""
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
    """Words for how this user gets the right to open a port: mostly by a group, `dialout` on Debian."""
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
