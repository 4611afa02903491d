"""Which ports a setting means, how a port is opened, and the words if that fails."""

import errno
import fcntl
import grp
import os
import pwd
import stat
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import serial

from gateway.serial_lines import ports, rivals
from gateway.serial_lines.ports import close_port, find, is_usb_cdc, leave_out, open_port, ports_of, why_not_opened


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """The far end of a terminal that stands for a port, and the port's name."""
    far, near = os.openpty()
    tty.setraw(near)
    yield far, os.ttyname(near)
    os.close(far)
    os.close(near)


# -- finding --------------------------------------------------------------------------------------


def test_a_port_with_several_names_is_found_once_by_the_first(tmp_path: Path) -> None:
    port = tmp_path / "ttyUSB0"
    port.touch()
    (tmp_path / "by-id-x").symlink_to(port)
    found = find((f"{tmp_path}/by-id-*", f"{tmp_path}/ttyUSB*", f"{tmp_path}/ttyACM*"))
    assert found.names == {str(port): f"{tmp_path}/by-id-x"}
    assert found.by_pattern == {
        f"{tmp_path}/by-id-*": [f"{tmp_path}/by-id-x"],
        f"{tmp_path}/ttyUSB*": [str(port)],
        f"{tmp_path}/ttyACM*": [],
    }
    assert ports_of(f"{tmp_path}/*") == {str(port): f"{tmp_path}/by-id-x"}


def test_all_means_every_usb_adapter_and_no_port_of_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ttyUSB0", "ttyACM3", "ttyS0", "ttyAMA0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(ports, "USB_PORTS", tuple(str(tmp_path / Path(usb).name) for usb in ports.USB_PORTS))
    assert sorted(find(("all",)).names) == [f"{tmp_path}/ttyACM3", f"{tmp_path}/ttyUSB0"]


# -- opening --------------------------------------------------------------------------------------


def test_a_port_is_opened_raw_ours_alone_and_without_hanging_up_at_its_closing(terminal: tuple[int, str]) -> None:
    far, name = terminal
    port = open_port(name, 9600, data_bits=7, parity="even", stop_bits=2)
    flags, speed = termios.tcgetattr(port.fileno())[2], termios.tcgetattr(port.fileno())[4]
    assert not flags & termios.HUPCL
    assert flags & termios.CSTOPB
    # A terminal keeps no parity, so ask the library for its setting.
    assert (port.parity, port.bytesize) == (serial.PARITY_EVEN, 7)
    assert speed == termios.B9600
    with pytest.raises(serial.SerialException) as refusal:
        open_port(name, 9600)
    assert refusal.value.errno == errno.EAGAIN
    # Idle is told from hung up, which reads as empty.
    with pytest.raises(BlockingIOError):
        os.read(port.fileno(), 1)
    os.write(far, b"\x00\r\n\xff")
    assert os.read(port.fileno(), 10) == b"\x00\r\n\xff"
    close_port(port)
    close_port(open_port(name, 9600))


def test_a_real_port_is_closed_to_programs_that_ask_for_no_lock(
    terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = fcntl.ioctl

    def ioctl(fd: int, request: int, *arguments: object) -> object:
        asked.append(request)
        return real(fd, request, *arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(ports, "fcntl", SimpleNamespace(ioctl=ioctl))
    close_port(open_port(terminal[1], 9600))
    assert termios.TIOCEXCL not in asked
    monkeypatch.setattr(ports, "_PTY_MAJORS", ())
    port = open_port(terminal[1], 9600)
    assert asked.count(termios.TIOCEXCL) == 1
    close_port(port)
    assert asked[-1] == termios.TIOCNXCL


def test_usb_cdc_is_known_whatever_a_port_is_called(tmp_path: Path) -> None:
    """The device number in Linux' devices.txt decides. Names are given by udev, and by anybody."""
    for name, numbers, is_cdc in (("sensor", (166, 3), True), ("ttyACM0", (188, 0), False), ("pty", (136, 7), False)):
        node = tmp_path / name
        try:
            os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(*numbers))
        except PermissionError:
            pytest.skip("this user may make no device nodes")
        # No hardware is behind it: it is looked at, and not opened.
        fd = os.open(node, os.O_PATH)
        assert is_usb_cdc(fd) is is_cdc
        os.close(fd)


def test_what_nobody_took_is_dropped_before_the_closing(
    terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real port's closing would wait for it, half a minute; a terminal's does not, so that the order is looked at."""
    port = open_port(terminal[1], 9600)
    done: list[object] = []
    monkeypatch.setattr(termios, "tcflush", lambda _fd, queue: done.append(queue))
    monkeypatch.setattr(port, "close", lambda: done.append(port))
    close_port(port)
    monkeypatch.undo()
    port.close()
    assert done == [termios.TCOFLUSH, port]


# -- why it fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOTTY, "it is no serial port: leave it out, or write what matches serial ports only"),
        (errno.EIO, f"{os.strerror(errno.EIO)}: no hardware answers behind this name"),
        (errno.EPERM, f"{os.strerror(errno.EPERM)}: the system forbids it beyond the port's own rights"),
        (errno.ENOENT, "the name is there, its adapter is not (unplugged?)"),
        (errno.ENODEV, "its adapter is not there (unplugged?)"),
    ],
)
def test_an_error_of_the_system_is_explained_and_named_where_that_helps(number: int, words: str) -> None:
    told = why_not_opened(OSError(number, os.strerror(number)), "/dev/ttyUSB0")
    assert told.startswith(words)
    # Setting a terminal's attributes raises an error of its own.
    assert why_not_opened(termios.error(number, os.strerror(number)), "/dev/ttyUSB0") == told


def test_the_remedy_for_a_port_depends_on_the_section_that_names_it() -> None:
    told = why_not_opened(OSError(errno.ENOTTY, ""), "/dev/ttyUSB0", "[[serial.text]]")
    assert told == "it is no serial port: write the port that the sensor is on"
    assert leave_out("serial.ports") == "take the port out of serial.ports"
    assert leave_out("[[serial.modbus]]") == "remove its [[serial.modbus]]"


def test_an_error_without_a_hint_is_the_systems_and_one_without_a_number_the_librarys() -> None:
    assert why_not_opened(OSError(errno.ENOMEM, "x"), "/dev/ttyUSB0") == os.strerror(errno.ENOMEM)
    assert why_not_opened(ValueError("Invalid baud rate: 12345"), "/dev/ttyUSB0") == "Invalid baud rate: 12345"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY])
def test_a_port_that_is_held_by_nobody_knows_whom(
    number: int, terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "running", lambda _program: None)
    told = why_not_opened(OSError(number, ""), terminal[1], "[[serial.text]]")
    assert told == (
        f"another program has the port open (sudo fuser -v {terminal[1]} names it): stop it, or remove its "
        "[[serial.text]]"
    )


def test_a_port_that_modem_manager_most_likely_has(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "running", {"ModemManager": 812}.get)
    told = why_not_opened(OSError(errno.EBUSY, ""), terminal[1])
    assert "most likely ModemManager (process 812) has it open" in told
    assert "sudo systemctl disable --now ModemManager" in told


@pytest.mark.parametrize(
    ("mode", "members", "groups", "words"),
    [
        (0o660, [], [], "sudo usermod -aG dialout sluice, then log in again, or restart the service"),
        (0o660, ["sluice"], [], "sluice was put into its group dialout, but what runs already does not know that"),
        (0o600, ["sluice"], [20], "only its owner may: let root give it to the group dialout"),
    ],
)
def test_who_may_not_open_a_port_is_told_how_to_be_let_in(
    mode: int, members: list[str], groups: list[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(st_mode=stat.S_IFCHR | mode, st_gid=20)
    monkeypatch.setattr(os, "stat", lambda _name: found)
    monkeypatch.setattr(os, "getgroups", lambda: groups)
    monkeypatch.setattr(grp, "getgrgid", lambda _number: SimpleNamespace(gr_name="dialout", gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda _number: SimpleNamespace(pw_name="sluice"))
    told = why_not_opened(OSError(errno.EACCES, ""), "/dev/ttyUSB0")
    monkeypatch.undo()
    assert told.startswith("Permission denied: ")
    assert words in told
