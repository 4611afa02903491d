"""The simulated ESP-AT modem (firmware-sim/runner/modem.c), compiled for this machine, over real TCP."""

import ctypes
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_sim.avr_board import PROJECT
from tests.support.waiting import patience

pytestmark = pytest.mark.avr

RUNNER = PROJECT / "firmware-sim" / "runner"
# Instead of the chip and the line: what the chip sends is put in, what it would get is collected, time is set.
HARNESS = """\
#include <string.h>
#include "chip.h"
#include "fault_log.h"
#include "line.h"

static struct timed_byte from_chip[LINE_BYTES_MAX];
static size_t from_chip_count;
static uint64_t now_us;

uint8_t harness_to_chip[1 << 20];
size_t harness_to_chip_count;
size_t harness_room = LINE_BYTES_MAX;
int harness_chip_is_on = 1;
char harness_link[256];

void harness_send(uint8_t byte) { from_chip[from_chip_count++] = (struct timed_byte){now_us, byte}; }
void harness_set_time(uint64_t us) { now_us = us; }

uint64_t chip_us(void) { return now_us; }
bool chip_is_on(void) { return harness_chip_is_on; }
void fault_log_link(const char *words) { strcpy(harness_link, words); }
size_t line_room(void) { return harness_room; }
void line_set_far_baud(double baud) { (void)baud; }
void line_to_chip(const uint8_t *bytes, size_t count, uint64_t since_us)
{
	(void)since_us;
	memcpy(harness_to_chip + harness_to_chip_count, bytes, count);
	harness_to_chip_count += count;
}
size_t line_from_chip(struct timed_byte *heard)
{
	size_t count = from_chip_count;
	memcpy(heard, from_chip, count * sizeof *heard);
	from_chip_count = 0;
	return count;
}
"""
SLICE_MS = 4
PATIENCE_S = 10.0
JOIN = 'AT+CWJAP="attic","pass\\"word"\r\n'


class Modem:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.library.harness_set_time.argtypes = [ctypes.c_uint64]
        self.library.modem_set_wifi.argtypes = [ctypes.c_bool]
        self.now_ms = 0
        self.library.modem_start()

    def wait(self, ms: int) -> None:
        for _ in range(ms // SLICE_MS):
            self.now_ms += SLICE_MS
            self.library.harness_set_time(self.now_ms * 1000)
            self.library.modem_exchange()

    def send(self, text: str) -> None:
        for byte in text.encode():
            self.library.harness_send(byte)
        self.library.modem_exchange()

    def heard(self) -> str:
        """The bytes that the chip got since the last call."""
        count = ctypes.c_size_t.in_dll(self.library, "harness_to_chip_count")
        buffer = (ctypes.c_uint8 * (1 << 20)).in_dll(self.library, "harness_to_chip")
        got = bytes(buffer[: count.value])
        count.value = 0
        return got.decode("latin-1")

    def link(self) -> str:
        """Give what was last noted of its connection."""
        return bytes((ctypes.c_char * 256).in_dll(self.library, "harness_link").value).decode()

    def switch_chip(self, on: int) -> None:
        ctypes.c_int.in_dll(self.library, "harness_chip_is_on").value = on

    def set_room(self, count: int) -> None:
        ctypes.c_size_t.in_dll(self.library, "harness_room").value = count

    def ask(self, command: str, ms: int = 0) -> str:
        """Send a command, let the modem's time pass, and give the answer."""
        self.heard()
        self.send(f"{command}\r\n")
        self.wait(ms)
        return self.heard()

    def expect(self, text: str, within_s: float = PATIENCE_S) -> str:
        """Let modem's time and real time pass until the chip has got the text."""
        got, deadline = "", time.monotonic() + patience(within_s)
        while text not in got:
            assert time.monotonic() < deadline, f"{text!r} did not come; {got!r} did"
            self.wait(SLICE_MS)
            time.sleep(0.001)
            got += self.heard()
        return got

    def ready(self) -> None:
        self.wait(400)
        assert self.ask("ATE0").endswith("\r\nOK\r\n")

    def joined(self) -> None:
        self.ready()
        self.send(JOIN)
        self.wait(600)
        assert self.heard().endswith("WIFI CONNECTED\r\nWIFI GOT IP\r\n\r\nOK\r\n")

    def through(self, server: socket.socket) -> socket.socket:
        """Dial, and let bytes through; the connection as its server has it."""
        self.joined()
        assert self.ask("AT+CIPMODE=1") == "\r\nOK\r\n"
        self.send(f'AT+CIPSTART="TCP","127.0.0.1",{server.getsockname()[1]}\r\n')
        self.expect("CONNECT\r\n\r\nOK\r\n")
        assert self.ask("AT+CIPSEND") == "\r\nOK\r\n\r\n>"
        return accept(server)


def accept(server: socket.socket) -> socket.socket:
    connection = server.accept()[0]
    connection.settimeout(PATIENCE_S)
    return connection


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("modem")
    (directory / "harness.c").write_text(HARNESS)
    library = directory / "modem.so"
    sources = [str(directory / "harness.c"), *(str(RUNNER / part) for part in ("modem.c", "system.c", "uart_bits.c"))]
    flags = ["-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", str(RUNNER)]
    subprocess.run(["gcc", *flags, "-o", str(library), *sources], check=True)
    return library


@pytest.fixture
def modem(source: Path, tmp_path: Path) -> Modem:
    # A library of its own has variables of its own.
    own = tmp_path / "modem.so"
    own.write_bytes(source.read_bytes())
    return Modem(ctypes.CDLL(str(own)))


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE_S)
        yield made


# --- Commands


def test_after_power_on_it_babbles_says_ready_and_echoes(modem: Modem) -> None:
    modem.send("AT\r\n")
    modem.wait(400)
    babble = modem.heard()
    assert babble.endswith("\r\nready\r\n")
    assert len(babble) > 10, "the boot ROM speaks at another speed"
    assert "OK" not in babble, "nothing is heard before it is ready"
    assert modem.ask("AT") == "AT\r\n\r\nOK\r\n"
    assert modem.ask("ATE0") == "ATE0\r\n\r\nOK\r\n"
    assert modem.ask("AT+CWMODE=1") == "\r\nOK\r\n"


@pytest.mark.parametrize(
    "command",
    [
        "AT+NONSENSE",
        "AT+CWMODE=9",
        "+++",
        'AT+CWJAP="attic"',
        'AT+CWJAP="","secret"',
        'AT+CWJAP="attic","secret',
        'AT+CIPSTART="UDP","127.0.0.1",1883',
        'AT+CIPSTART="TCP","127.0.0.1",0',
        'AT+CIPSTART="TCP","127.0.0.1",70000',
        'AT+CIPSTART="TCP","127.0.0.1",1883,x',
        "AT+CIPCLOSE",
        "AT" + "x" * 1000,
    ],
)
def test_what_it_does_not_understand_is_an_error(modem: Modem, command: str) -> None:
    modem.ready()
    assert modem.ask(command) == "\r\nERROR\r\n"
    assert modem.ask("AT") == "\r\nOK\r\n"


def test_joining_takes_time_and_meanwhile_it_is_busy(modem: Modem) -> None:
    modem.ready()
    modem.send(JOIN)
    assert modem.ask("AT") == "\r\nbusy p...\r\n"
    modem.wait(600)
    assert modem.heard() == "WIFI CONNECTED\r\nWIFI GOT IP\r\n\r\nOK\r\n"


def test_without_an_access_point_joining_fails_and_dialling_has_no_address(modem: Modem) -> None:
    modem.library.modem_set_wifi(False)
    modem.ready()
    modem.send(JOIN)
    modem.wait(600)
    assert modem.heard() == "+CWJAP:3\r\n\r\nERROR\r\n"
    assert modem.ask('AT+CIPSTART="TCP","127.0.0.1",1883') == "no ip\r\n\r\nERROR\r\n"


def test_dialling_where_nobody_listens_is_closed_and_an_error(modem: Modem, server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.close()
    modem.joined()
    modem.send(f'AT+CIPSTART="TCP","127.0.0.1",{port}\r\n')
    modem.expect("CLOSED\r\n\r\nERROR\r\n")


def test_a_second_connection_is_refused_and_the_first_can_be_closed(modem: Modem, server: socket.socket) -> None:
    modem.joined()
    dial = f'AT+CIPSTART="TCP","127.0.0.1",{server.getsockname()[1]},30'
    modem.send(f"{dial}\r\n")
    modem.expect("CONNECT\r\n\r\nOK\r\n")
    with accept(server) as connection:
        assert modem.ask(dial) == "ALREADY CONNECTED\r\n\r\nERROR\r\n"
        assert modem.ask("AT+CIPSEND") == "link is not valid\r\n\r\nERROR\r\n", "AT+CIPMODE=1 was not given"
        connection.sendall(b"early")
        modem.expect("\r\n+IPD,5:early")
        assert modem.ask("AT+CIPCLOSE") == "CLOSED\r\n\r\nOK\r\n"
        assert connection.recv(10) == b""


def test_the_far_end_that_hangs_up_is_told_in_command_mode(modem: Modem, server: socket.socket) -> None:
    modem.joined()
    modem.send(f'AT+CIPSTART="TCP","127.0.0.1",{server.getsockname()[1]}\r\n')
    modem.expect("OK\r\n")
    accept(server).close()
    modem.expect("CLOSED\r\n")


# --- Transparent transmission


def test_bytes_go_through_both_ways_whatever_they_are(modem: Modem, server: socket.socket) -> None:
    with modem.through(server) as connection:
        every = bytes(range(256))
        for byte in every:
            modem.library.harness_send(byte)
        modem.wait(8)
        got = b""
        while len(got) < len(every):
            got += connection.recv(1000)
        assert got == every
        connection.sendall(every)
        assert modem.expect("\xff") == every.decode("latin-1")


def test_the_network_waits_while_the_line_is_full(modem: Modem, server: socket.socket) -> None:
    with modem.through(server) as connection:
        modem.set_room(100)
        connection.sendall(b"x" * 5000)
        modem.wait(100)
        assert modem.heard() == ""
        modem.set_room(4096)
        connection.sendall(b"!")
        assert len(modem.expect("!")) == 5001


def escape(modem: Modem, before_ms: int = 24, after_ms: int = 24, pluses: str = "+++") -> None:
    modem.wait(before_ms)
    modem.send(pluses)
    modem.wait(after_ms)


def test_three_pluses_in_silence_end_it_and_a_second_later_commands_are_heard(
    modem: Modem, server: socket.socket
) -> None:
    with modem.through(server):
        escape(modem)
        assert modem.ask("AT", 900) == "", "too early"
        modem.wait(200)
        assert modem.ask("AT") == "\r\nOK\r\n"
        assert modem.ask("AT+CIPSEND") == "\r\nOK\r\n\r\n>", "the connection is still there"


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "pluses", "following"),
    [(24, 8, "+++", "x"), (0, 24, "+++", ""), (24, 24, "++", ""), (24, 24, "++++", ""), (24, 24, "+++x", "")],
)
def test_pluses_among_data_are_data(  # noqa: PLR0913, PLR0917 - four of them are one case
    modem: Modem, server: socket.socket, before_ms: int, after_ms: int, pluses: str, following: str
) -> None:
    with modem.through(server) as connection:
        modem.wait(24)
        modem.send("data")
        escape(modem, before_ms, after_ms, pluses)
        modem.send(following)
        modem.wait(40)
        expected = f"data{pluses}{following}".encode()
        got = b""
        while len(got) < len(expected):
            got += connection.recv(1000)
        assert got == expected


def test_a_broken_connection_is_dialled_again_and_the_chip_is_not_told(modem: Modem, server: socket.socket) -> None:
    modem.through(server).close()
    modem.wait(100)
    modem.send("lost, and nobody knows")
    modem.wait(1200)
    with accept(server) as connection:
        deadline = time.monotonic() + patience(PATIENCE_S)
        connection.setblocking(False)
        got = b""
        while not got and time.monotonic() < deadline:
            modem.send("heard")
            modem.wait(8)
            try:
                got = connection.recv(100)
            except BlockingIOError:
                time.sleep(0.01)
        assert got.startswith(b"heard")
    assert modem.heard() == ""


# --- Radio and power


def test_the_radio_that_goes_leaves_the_server_waiting_and_comes_back_by_itself(
    modem: Modem, server: socket.socket
) -> None:
    with modem.through(server) as first:
        modem.library.modem_set_wifi(False)
        modem.send("lost")
        modem.wait(2000)
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.recv(10)
        modem.library.modem_set_wifi(True)
        modem.wait(2000)
        accept(server).close()
        with pytest.raises(BlockingIOError):
            first.recv(10)
    assert modem.heard() == "", "the chip is not told while bytes go through"


def test_in_command_mode_the_chip_is_told_of_the_radio(modem: Modem) -> None:
    modem.joined()
    modem.library.modem_set_wifi(False)
    assert modem.heard() == "WIFI DISCONNECT\r\n"
    modem.library.modem_set_wifi(True)
    modem.wait(1200)
    assert modem.heard() == "WIFI CONNECTED\r\nWIFI GOT IP\r\n"


@pytest.mark.parametrize("how", ["power", "AT+RST"])
def test_a_restart_forgets_all_but_the_access_point(modem: Modem, server: socket.socket, how: str) -> None:
    with modem.through(server) as connection:
        if how == "AT+RST":
            escape(modem, after_ms=1100)
            assert modem.ask("AT+RST").startswith("\r\nOK\r\n")
        else:
            modem.library.modem_restart()
        modem.wait(320)
        assert modem.heard().endswith("\r\nready\r\n")
        modem.wait(600)
        assert modem.heard() == "WIFI CONNECTED\r\nWIFI GOT IP\r\n"
        assert modem.ask("AT") == "AT\r\n\r\nOK\r\n"
        assert modem.ask("AT+CIPSEND").endswith("ERROR\r\n")
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(10)


def test_without_power_it_is_silent_and_it_starts_with_the_chip(modem: Modem, server: socket.socket) -> None:
    with modem.through(server) as connection:
        modem.library.modem_power_off()
        modem.switch_chip(0)
        modem.library.modem_set_wifi(False)
        modem.library.modem_restart()
        modem.library.modem_set_wifi(True)
        modem.wait(2000)
        assert modem.heard() == ""
        modem.switch_chip(1)
        modem.wait(200)
        assert not modem.heard().endswith("ready\r\n"), "it starts now, not when the power went"
        modem.wait(200)
        assert modem.heard().endswith("\r\nready\r\n")
        modem.wait(600)
        assert modem.heard() == "WIFI CONNECTED\r\nWIFI GOT IP\r\n", "it knows the access point"
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(10)


# --- What it notes of its connection


@pytest.mark.parametrize(
    ("answer", "noted"),
    [
        (b"\x20\x02\x00\x00", "the connection ended"),
        (b"\x20\x02\x01\x00\x40\x02\x00\x01", "the connection ended"),
        (b"\x20\x02\x00\x03", "it takes no readings at present, or has too many connections"),
        (b"\x20\x02\x00\x04", "wrong user name or password"),
        (b"\x20\x02\x00\x05", "it wants a user name and password"),
        (b"\x20\x02\x00\x87", "it refuses"),
        (b"HTTP/1.1 400", "it answers with something else than MQTT"),
        (b"\x20\x02", "the connection ended without an answer to CONNECT"),
        (b"", "the connection ended without an answer to CONNECT"),
    ],
)
def test_whether_a_gateway_lets_it_in_is_noted(modem: Modem, server: socket.socket, answer: bytes, noted: str) -> None:
    connection = modem.through(server)
    for byte in answer:
        connection.sendall(bytes((byte,)))
        modem.expect(chr(byte))
    if answer[3:4] == b"\x00":
        assert modem.link() == "let in"
    connection.close()
    expected = f"127.0.0.1:{server.getsockname()[1]}: {noted}"
    deadline = time.monotonic() + patience(PATIENCE_S)
    while modem.link() != expected:
        assert time.monotonic() < deadline, modem.link()
        modem.wait(SLICE_MS)
    modem.wait(100)
    assert modem.link() == expected, "a refusal stays the last word"


def test_a_closed_port_is_noted(modem: Modem, server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.close()
    modem.joined()
    modem.send(f'AT+CIPSTART="TCP","127.0.0.1",{port}\r\n')
    modem.expect("ERROR\r\n")
    assert modem.link() == f"127.0.0.1:{port}: Connection refused"
    # No server is asked for a name with so long a part.
    modem.send(f'AT+CIPSTART="TCP","no\\"{70 * "x"}",1883\r\n')
    modem.expect("ERROR\r\n")
    assert modem.link().startswith(f"no?{70 * 'x'}:1883: "), "as JSON can have it"
