"""Other programs that take serial ports: who has one open, and how the usual ones are stopped."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from serial.tools import list_ports

from gateway.host.processes import opened_by
from gateway.serial_lines.rivals import (
    Adapter,
    Holder,
    adapters,
    brltty_words,
    held_words,
    holders,
    is_console,
    is_spared_by_modem_manager,
    modem_manager_words,
    rivals,
    who_words,
)

OR_ELSE = "take the port out of serial.ports"
OWN_TERMINALS = (
    *("unshare", "--mount", "--pid", "--fork", "setsid", "sh", "-ec"),
    *('mount -t devpts -o newinstance none /dev/pts; exec "$@"', "sh"),
)
"""What a container does to have terminals of its own."""
CH340 = Adapter("/dev/ttyUSB0", 0x1A86, 0x7523, None, "1-1.2")


@pytest.fixture
def port() -> Iterator[str]:
    far, near = os.openpty()
    yield os.ttyname(near)
    os.close(far)
    os.close(near)


@contextmanager
def process(program: str, *arguments: str, within: tuple[str, ...] = ()) -> Iterator[int]:
    """A process that runs this Python program; it is there once it prints. `within` is a command that executes it."""
    command = [
        *within,
        sys.executable,
        "-c",
        f"import os, sys\n{program}\nprint(flush=True); sys.stdin.read()",
        *arguments,
    ]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout is not None
    started.stdout.readline()
    try:
        yield started.pid
    finally:
        started.communicate()


def test_other_processes_that_have_a_port_open_are_named(port: str) -> None:
    assert holders((port,)) == {}
    with process("port = open(sys.argv[1])", port) as pid:
        assert [holder.process for holder in holders((port, "/dev/null"))[port]] == [pid]
        assert f"(process {pid}) has it open: stop it, or {OR_ELSE}" in held_words(port, OR_ELSE)


def test_a_login_is_seen_by_its_terminal_whatever_it_shows_of_its_files(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login console is root's. Only root may see its open files, but everybody may see its terminal."""
    monkeypatch.setattr("gateway.serial_lines.rivals.opened_by", lambda _process: {})
    # The first terminal that the leader of a session opens becomes its own.
    with process("os.open(sys.argv[1], os.O_RDWR)", port) as pid:
        assert [holder.process for holder in holders((port,))[port]] == [pid]


def test_a_process_that_has_ended_has_no_port_open(port: str) -> None:
    child = "os._exit(0) if os.fork() == 0 else os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)"
    with process(f"end = os.open(sys.argv[1], os.O_RDWR); {child}; os.close(end)", port) as pid:
        (ended,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert Path(f"/proc/{ended}/stat").read_text().split()[6] != "0", "it keeps its terminal"
        assert int(ended) not in [holder.process for holder in holders((port,)).get(port, ())]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("files", ["seen", "hidden"])
def test_a_terminal_of_the_same_name_in_a_container_is_another(
    port: str, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = int(Path(port).name)
    opens = f"ends = [os.openpty() for _ in range({number + 1})]; os.open(sys.argv[1], os.O_RDWR)"
    with process(opens, port, within=OWN_TERMINALS) as pid:
        (inner,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert port in opened_by(int(inner))
        if files == "hidden":
            monkeypatch.setattr("gateway.serial_lines.rivals.opened_by", lambda _process: {})
        assert holders((port,)) == {}


def test_what_to_do_depends_on_the_program() -> None:
    told = who_words([Holder(7, "agetty")], "/dev/ttyAMA0", OR_ELSE)
    assert told.startswith("agetty (process 7) has it open: a login console answers the sensor there")
    assert "serial-getty@ttyAMA0.service" in told
    assert "console=ttyAMA0" in told
    assert who_words([Holder(7, "minicom"), Holder(8, "screen")], "/dev/ttyUSB0", OR_ELSE) == (
        f"minicom (process 7) and screen (process 8) have it open: stop them, or {OR_ELSE}"
    )


def test_modem_manager_is_kept_from_one_make_of_adapters_or_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.serial_lines.rivals.adapters", lambda: [CH340])
    told = who_words([Holder(812, "ModemManager")], "/dev/ttyUSB0", OR_ELSE)
    assert told.startswith("ModemManager (process 812) has it open: it opens new ports to try them for modems")
    assert 'ATTRS{idVendor}=="1a86", ATTRS{idProduct}=="7523", ENV{ID_MM_DEVICE_IGNORE}="1"' in told
    assert "sudo systemctl disable --now ModemManager" in told
    assert "idVendor" not in modem_manager_words("/dev/ttyS0")


def test_a_port_that_udevs_rules_keep_from_modem_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.serial_lines.rivals._UDEV", tmp_path)
    assert not is_spared_by_modem_manager("/dev/null")
    (tmp_path / "c1:3").write_text("S:serial/by-id/x\nE:ID_BUS=usb\n")
    assert not is_spared_by_modem_manager("/dev/null")
    (tmp_path / "c1:3").write_text("E:ID_BUS=usb\nE:ID_MM_DEVICE_IGNORE=1\n")
    assert is_spared_by_modem_manager("/dev/null")


def test_the_consoles_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active, command_line = tmp_path / "active", tmp_path / "cmdline"
    monkeypatch.setattr("gateway.serial_lines.rivals._CONSOLES", active)
    monkeypatch.setattr("gateway.serial_lines.rivals._COMMAND_LINE", command_line)
    assert not is_console("/dev/ttyAMA0")
    active.write_text("tty0 ttyAMA0\n")
    assert is_console("/dev/ttyAMA0")
    assert not is_console("/dev/ttyAMA1")
    # Without sysfs, as in some containers.
    active.unlink()
    command_line.write_text("root=/dev/sda1 console=tty1 console=ttyS1,115200n8 quiet\n")
    assert is_console("/dev/ttyS1")
    assert not is_console("/dev/ttyS0")


def test_a_console_that_nobody_has_open_has_a_rival_all_the_same(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rivals({port: OR_ELSE}) == {}
    monkeypatch.setattr("gateway.serial_lines.rivals.is_console", lambda _port: True)
    assert rivals({port: OR_ELSE})[port].startswith("the kernel writes its messages there: a login console answers")
    with process("port = open(sys.argv[1])", port) as pid:
        assert f"(process {pid}) has it open: stop it, or {OR_ELSE}" in rivals({port: OR_ELSE})[port]


def test_brltty_is_known_by_its_rules_or_when_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "85-brltty.rules"
    monkeypatch.setattr("gateway.serial_lines.rivals._BRLTTY_RULES", (rules,))
    assert brltty_words() is None
    rules.touch()
    assert "sudo apt remove brltty" in str(brltty_words())
    rules.unlink()
    monkeypatch.setattr("gateway.serial_lines.rivals.running", {"brltty": 5}.get)
    assert "sudo apt remove brltty" in str(brltty_words())


def test_adapters_are_what_is_on_usb(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        SimpleNamespace(device="/dev/ttyUSB1", vid=0x0403, pid=0x6011, serial_number="FT1", location="1-1.4:1.2"),
        SimpleNamespace(device="/dev/ttyS0", vid=None, pid=None, serial_number=None, location=None),
        SimpleNamespace(device="/dev/ttyUSB0", vid=0x1A86, pid=0x7523, serial_number="", location="1-1.2"),
    ]
    monkeypatch.setattr(list_ports, "comports", lambda: found)
    assert adapters() == [CH340, Adapter("/dev/ttyUSB1", 0x0403, 0x6011, "FT1", "1-1.4")]
