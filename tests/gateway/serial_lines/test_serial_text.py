"""Instruments that write text, on pseudo-terminals, through a real gateway process into its buffer."""

import base64
import json
import os
import random
import subprocess
import termios
import tty
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import SLUICE, daemon, free_port
from tests.support.nmea import nmea_checksum
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DEADLINE_S = 30.0


def sentence(content: str, start: str = "$") -> bytes:
    return f"{start}{content}*{nmea_checksum(content.encode()):02X}\r\n".encode()


@dataclass(frozen=True)
class Recording:
    """The lines of an instrument, and the readings that must come of them."""

    settings: str
    """Settings of its `[[serial.text]]`."""
    stream: bytes
    payloads: list[str]
    unreadable: dict[str, int]
    """Lines that are no readings, by reason."""


RECORDINGS = {
    # Opening the port resets the board: it is heard from the middle of a line, and then from its start.
    "dht22": Recording(
        'format = "key:value"',
        b"dity: 41.10 %\tTemperature: 21.40 \xb0C\r\n\0DHTxx test!\r\n"
        b"Humidity: 41.20 %\tTemperature: 21.50 \xb0C\t Heat index: 21.02 \xb0C\r\n"
        b"Failed to read from DHT sensor!\r\nHumidity: nan %\tTemperature: nan \xb0C\r\n"
        b"Humidity: 41.30 %\tTemperature: -1.00 \xb0C\t Heat index: 0.02 \xb0C\r\n",
        [
            '{"Humidity":41.20,"Temperature":21.50,"Heat index":21.02}',
            '{"Humidity":"nan %","Temperature":"nan °C"}',
            '{"Humidity":41.30,"Temperature":-1.00,"Heat index":0.02}',
        ],
        {"no-pairs": 2},
    ),
    "greenhouse": Recording(
        'format = "key=value"\nline_bytes_max = 200\nbaud = 230400',
        b"12 rh=40\n# MH-Z19 ready, waiting 180 s\nco2=412 temp=+21.50 rh=040\nco2= temp=21.6 rh=40\n"
        b"co2=413 co2=414\nco2=4\x0015 temp=21.7\n" + b"z" * 10_000 + b"\nco2=416 temp=21.8 rh=40.5\n",
        ['{"co2":412,"temp":21.50,"rh":40}', '{"co2":null,"temp":21.6,"rh":40}', '{"co2":416,"temp":21.8,"rh":40.5}'],
        {"no-pairs": 1, "repeated-name": 1, "not-text": 1, "line-too-long": 1},
    ),
    "balance": Recording(
        'format = "csv"\ncolumns = ["state", "", "weight"]\nbaud = 2400',
        b"+  0000.00 g\r\nST,GS,+  0012.34 g\r\nUS,GS,-  0000.50 g\r\nOL\r\nST,GS,+  1012.30 g\r\n",
        ['{"state":"ST","weight":12.34}', '{"state":"US","weight":-0.50}', '{"state":"ST","weight":1012.30}'],
        {"column-count": 1},
    ),
    "weather": Recording(
        'format = "csv"\ndelimiter = ";"\ncolumns = ["", "", "", "celsius", "cellar", "humidity", "state"]',
        b"$1;1;;19,8\r\nid;x;y;Celsius;Cellar;Humidity;State\r\n"
        b'$1;1;;20,5;;57;"calm; dry"\r\n$1;1;;-0,50;;57;wet;\r\n$1;1;;20,5;;57;"calm\r\n',
        [
            '{"celsius":20.5,"cellar":null,"humidity":57,"state":"calm; dry"}',
            '{"celsius":-0.50,"cellar":null,"humidity":57,"state":"wet"}',
        ],
        {"csv-quote": 1},
    ),
    "ship": Recording(
        'format = "nmea"\nbaud = 4800\nsentences = { MTW = ["celsius"], WIMWV = ["angle", "", "knots"], '
        'AIVDM = ["", "", "", "", "data"] }',
        sentence("WIMTW,17.4,C")[3:]
        + sentence("WIMTW,17.5,C")
        + sentence("GPGSV,3,1,11,03,03,111,00")
        + sentence("WIMWV,214.8,R,0.1,N,A").replace(b"214", b"215")
        + sentence("WIMWV,214.8,R,0.1,N,A")
        + b"$WIMTW,17.5,C\r\n$WIMT"
        + b"!AIVDM,1,1,,B,177KQJ5000G?tO`K>RA1wUbN0TKH,0*5C\r\n" * 2
        + sentence("YXMTW,17.6,C"),
        [
            '{"sentence":"WIMTW","celsius":17.5}',
            '{"sentence":"WIMWV","angle":214.8,"knots":0.1}',
            '{"sentence":"AIVDM","data":"177KQJ5000G?tO`K>RA1wUbN0TKH"}',
            '{"sentence":"AIVDM","data":"177KQJ5000G?tO`K>RA1wUbN0TKH"}',
            '{"sentence":"YXMTW","celsius":17.6}',
        ],
        {"nmea-checksum": 1, "nmea-without-checksum": 2},
    ),
    # A modem's answer, a sentence that was cut off and a byte of noise in front; and a type that nobody asked for.
    "gps": Recording(
        'format = "nmea"\nsentences = { RMC = ["time"], GGA = ["time"], ROT = ["turn"] }',
        b"\r\n+GPSRD:$GPGGA,000019*72\r\n$GPGGA,0123$GPRMC,000020*65\r\n\xff$GPROT,1*43\r\n$ZZLOC,15,9,314\r\n" * 2,
        [
            '{"sentence":"GPGGA","time":19}',
            '{"sentence":"GPRMC","time":20}',
            '{"sentence":"GPROT","turn":1}',
        ]
        * 2,
        {"nmea-without-checksum": 2},
    ),
    # Units that need declaring, a byte order mark as it starts, identities that look like numbers.
    "station": Recording(
        'format = "key=value"\nunits = ["D", "M", "C", "P", "H"]\ntexts = ["rom", "id"]',
        b"\r\nready\r\n\xef\xbb\xbf0R0,Dm=283D,Sm=1.0M,Ta=21.5C,Ua=40.0P,Pa=999.4H,Rc=0.01M\r\n"
        b"\xef\xbb\xbfrom=28FF\r\nrom=28E10\r\nrom=2800\r\nid=007 v=1\r\n",
        [
            '{"Dm":283,"Sm":1.0,"Ta":21.5,"Ua":40.0,"Pa":999.4,"Rc":0.01}',
            '{"rom":"28FF"}',
            '{"rom":"28E10"}',
            '{"rom":"2800"}',
            '{"id":"007","v":1}',
        ],
        {"no-pairs": 1},
    ),
    "esp": Recording(
        'format = "json"\nbaud = 115200\nstream = "air"',
        b':21.4}\r\n\x1b[0;32mI (312) boot: ok\x1b[0m\r\n{"t": 21.50, "n": [1, {"a": null}]}\r\n{"t": 21.5\r\n'
        b'{"t": 2, "t": 3}\r\n{"t":"21.6 \xc2\xb0C"}\n',
        ['{"t": 21.50, "n": [1, {"a": null}]}', '{"t":"21.6 °C"}'],
        {"not-json": 2, "repeated-name": 1},
    ),
    # A binary protocol, or the wrong baud rate: no end of a line for long, then noise with some.
    "binary": Recording(
        'format = "nmea"\nbaud = 921600',
        bytes(range(128, 256)) * 400
        + b"\n"
        + bytes(byte for byte in random.Random(6).randbytes(20_000) if byte not in b"\r\n$!")  # noqa: S311
        + b"\n\xff\xfe\n\x80\n",
        [],
        {"line-too-long": 2, "nmea-start": 2},
    ),
}


class Instrument:
    """The far end of a pseudo-terminal, whose near end is found under `port`."""

    def __init__(self, port: Path) -> None:
        self._port = port
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        attributes = termios.tcgetattr(self._slave)
        attributes[2] |= termios.HUPCL
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        port.symlink_to(os.ttyname(self._slave))

    def wait_until_opened(self) -> None:
        """Wait until the gateway has opened the port. Clearing HUPCL is its last step."""
        wait_until(lambda: not termios.tcgetattr(self._slave)[2] & termios.HUPCL)

    def write(self, stream: bytes) -> None:
        """In pieces of any length: no reading comes in one."""
        lengths = random.Random(len(stream))  # noqa: S311 - a seed, not a secret
        while stream:
            stream = stream[os.write(self._master, stream[: lengths.randint(1, 400)]) :]

    def unplug(self) -> None:
        self._port.unlink()
        os.close(self._master)
        os.close(self._slave)


@dataclass
class Site:
    """A gateway whose Kafka is away, and the directory of its ports."""

    directory: Path
    mqtt_port: int

    @property
    def config(self) -> Path:
        return self.directory / "gateway.toml"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with daemon(self.config, self.mqtt_port) as process:
            yield process

    def port(self, device: str) -> Path:
        return self.directory / f"tty-{device}"

    def sluice(self, *command: str) -> str:
        words: list[str | Path] = [SLUICE, *command, "--config", self.config]
        ended = subprocess.run(words, check=True, stdout=subprocess.PIPE, encoding="utf-8", timeout=DEADLINE_S)
        return ended.stdout

    def readings(self) -> dict[str, list[dict[str, Any]]]:
        """Readings that wait to be forwarded, by device. The gateway's own events wait among them."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.sluice("buffer", "export").splitlines():
            row = json.loads(line)
            if row["type"] == "sluice.reading":
                found.setdefault(row["device"], []).append(row)
        return found

    def payloads(self) -> dict[str, list[str]]:
        return {device: [row["payload"] for row in rows] for device, rows in self.readings().items()}

    def quarantined(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.sluice("buffer", "export", "--quarantine").splitlines()]

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.sluice("status", "--json"))
        return told


def site(directory: Path, recordings: dict[str, Recording]) -> Site:
    mqtt_port = free_port()
    sensors = "\n".join(
        f'[[serial.text]]\nport = "{directory}/tty-{device}"\ndevice = "{device}"\n{recording.settings}'
        for device, recording in recordings.items()
    )
    made = Site(directory, mqtt_port)
    made.config.write_text(
        f"""\
[gateway]
id = "gw1"
clock = "system"

[buffer]
path = "{directory}/buffer.db"

[mqtt_listener]
port = {mqtt_port}
anonymous = true

[kafka]
bootstrap = ["127.0.0.1:1"]

[serial]
scan_interval_s = 0.05
{sensors}

[[routes]]
topic = "device/{{device}}/{{stream}}"
kafka = "device-{{stream}}"
"""
    )
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All instruments at once, each having written its recording."""
    made = site(tmp_path_factory.mktemp("text"), RECORDINGS)
    instruments = {device: Instrument(made.port(device)) for device in RECORDINGS}
    with made.running():
        for device, recording in RECORDINGS.items():
            instruments[device].wait_until_opened()
            instruments[device].write(recording.stream)
        lines = sum(len(each.payloads) + sum(each.unreadable.values()) for each in RECORDINGS.values())
        wait_until(lambda: count(made.payloads()) + unreadable(made.status()).total() >= lines)
        yield made
    for instrument in instruments.values():
        instrument.unplug()


@pytest.fixture(scope="module")
def payloads(recorded: Site) -> dict[str, list[str]]:
    """Payloads of all instruments, read once."""
    return recorded.payloads()


def count(payloads: dict[str, list[str]]) -> int:
    return sum(map(len, payloads.values()))


def unreadable(status: dict[str, Any]) -> Counter[str]:
    """Lines that are in the quarantine, and lines that are only counted, by reason."""
    return Counter(status["quarantine_reasons"]) + Counter(status["losses"])


@pytest.mark.parametrize("device", RECORDINGS)
def test_readings_are_stored_in_order_with_the_digits_that_their_instrument_wrote(
    payloads: dict[str, list[str]], device: str
) -> None:
    assert payloads.get(device, []) == RECORDINGS[device].payloads


def test_every_line_that_is_no_reading_is_kept_or_counted(recorded: Site) -> None:
    reasons: Counter[str] = Counter()
    for recording in RECORDINGS.values():
        reasons.update(recording.unreadable)
    status = recorded.status()
    assert unreadable(status) == reasons
    lost = {row["device"]: row["lost"] for row in json.loads(recorded.sluice("buffer", "ls", "--json"))["devices"]}
    kept = Counter(row["device"] for row in recorded.quarantined())
    for device, recording in RECORDINGS.items():
        # One in a second, and each of these came within less: but how long a busy machine takes is its own affair.
        assert kept[device] >= 1
        assert kept[device] + lost[device] == sum(recording.unreadable.values())
    assert status["losses"]


def test_the_quarantine_has_lines_as_they_came(recorded: Site) -> None:
    first = {row["device"]: row for row in reversed(recorded.quarantined())}
    assert (first["dht22"]["payload"], first["dht22"]["reason"]) == ("\0DHTxx test!", "no-pairs")
    assert first["dht22"]["subject"] == str(recorded.port("dht22"))
    assert base64.b64decode(first["binary"]["payload_base64"]) == bytes(range(128, 256)) * 8


def test_a_reading_is_stored_under_its_route_with_the_time_of_its_receipt(recorded: Site) -> None:
    readings = recorded.readings()
    reading = readings["esp"][0]
    assert (reading["topic"], reading["key"], reading["subject"]) == ("device-air", "esp", str(recorded.port("esp")))
    assert (reading["time_quality"], reading["device_boot"], reading["device_sequence"]) == ("received", None, None)
    assert readings["dht22"][0]["topic"] == "device-text"


def test_the_gateway_says_that_they_cannot_be_acknowledged(recorded: Site) -> None:
    ports = recorded.status()["daemon"]["serial"]["ports"]
    assert {told["device"]: told["acknowledges"] for told in ports.values()} == dict.fromkeys(RECORDINGS, False)
    events = [json.loads(line) for line in recorded.sluice("buffer", "export").splitlines()]
    appeared = [json.loads(event["payload"]) for event in events if event["type"] == "sluice.gateway.device-appeared"]
    assert {event["device"]: event["acknowledges"] for event in appeared} == {
        device: False for device, recording in RECORDINGS.items() if recording.payloads
    }


def test_unplugged_in_the_middle_of_a_line_and_a_gateway_killed(tmp_path: Path) -> None:
    made = site(tmp_path, {"attic": Recording('format = "key=value"', b"", [], {})})
    with made.running() as process:
        sensor = Instrument(made.port("attic"))
        sensor.wait_until_opened()
        sensor.write(b"\nt=1 h=40\nt=2")
        wait_until(lambda: made.payloads() == {"attic": ['{"t":1,"h":40}']})
        sensor.unplug()
        sensor = Instrument(made.port("attic"))
        sensor.wait_until_opened()
        # The line that was cut off, and the one that is joined in its middle, do not become one.
        sensor.write(b"9 h=40\nt=3 h=40\n")
        wait_until(lambda: len(made.payloads()["attic"]) == 2)
        process.kill()
        process.wait()
    sensor.write(b"t=4 h=40\nt=5")
    with made.running():
        wait_until(lambda: str(made.port("attic")) in made.status()["daemon"]["serial"]["ports"])
        sensor.write(b" h=40\nt=6 h=40\n")
        wait_until(lambda: made.payloads()["attic"][-1] == '{"t":6,"h":40}')
        assert made.payloads()["attic"][:2] == ['{"t":1,"h":40}', '{"t":3,"h":40}']
        assert not unreadable(made.status())
    sensor.unplug()
