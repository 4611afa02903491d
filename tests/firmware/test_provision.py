"""EEPROM images have the layout of firmware/eeprom_layout.h, and values that do not fit are refused in words."""

import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from gateway.record_contract import DEVICE_NAME as GATEWAY_DEVICE_NAME
from sluice_sim.avr_board import PROJECT
from sluice_sim.provision import CLOCK_MS_MAX, DEVICE_BYTES_MAX, DEVICE_NAME, EEPROM_BYTES, Network, provision

NETWORK = Network("gateway.local", 1884, "attic", 'pass"word', "sécret")
# Reads an image by the firmware's own layout.
READER = r"""
#include <stdio.h>
#include <string.h>
#include "eeprom_layout.h"
int main(int count, char **arguments)
{
	unsigned char image[1024];
	struct configuration c;
	struct clock_start t;
	struct network n;
	if (count != 2 || fread(image, 1, sizeof image, fopen(arguments[1], "rb")) != sizeof image)
		return 1;
	memcpy(&c, image + EEPROM_CONFIGURATION, sizeof c);
	memcpy(&t, image + EEPROM_CLOCK_START, sizeof t);
	memcpy(&n, image + EEPROM_NETWORK, sizeof n);
	printf("%u %u %.*s %u %u\n", c.version == CONFIGURATION_VERSION, c.device_length, c.device_length, c.device,
		c.sample_interval_ms, c.crc);
	printf("%u %u\n", t.ms, t.crc);
	printf("%u %u %s %s %s %s %u\n", n.version == NETWORK_VERSION, n.port, n.host, n.ssid, n.passphrase, n.secret,
		n.crc);
	return 0;
}
"""


@pytest.mark.avr
def test_the_firmwares_layout_finds_everything(tmp_path: Path) -> None:
    image, source, reader = tmp_path / "s1.eeprom", tmp_path / "reader.c", tmp_path / "reader"
    provision(image, "s1", 250, network=NETWORK, clock_start_ms=CLOCK_MS_MAX)
    source.write_text(READER)
    include = str(PROJECT / "firmware-sim" / "firmware")
    subprocess.run(["gcc", "-fshort-enums", "-I", include, "-o", str(reader), str(source)], check=True)
    said = subprocess.run([str(reader), str(image)], capture_output=True, text=True, check=True).stdout
    configuration = struct.pack("<BB32sI", 1, 2, b"s1", 250)
    network = struct.pack("<BH64s33s64s48s", 1, 1884, b"gateway.local", b"attic", b'pass"word', "sécret".encode())
    clock_start = struct.pack("<I", CLOCK_MS_MAX)
    assert said.splitlines() == [
        f"1 2 s1 250 {zlib.crc32(configuration)}",
        f"{CLOCK_MS_MAX} {zlib.crc32(clock_start)}",
        f'1 1884 gateway.local attic pass"word sécret {zlib.crc32(network)}',
    ]


def test_what_is_not_given_stays(tmp_path: Path) -> None:
    image = tmp_path / "s1.eeprom"
    provision(image, "s1", network=NETWORK, clock_start_ms=5)
    before = bytearray(image.read_bytes())
    before[0:4] = b"boot"
    image.write_bytes(before)
    provision(image, "s2")
    after = image.read_bytes()
    assert len(after) == EEPROM_BYTES
    assert after[:32] == before[:32]
    assert after[32:80] != before[32:80]
    assert after[80:] == before[80:]


@pytest.mark.parametrize(
    ("device", "network", "clock_start_ms", "words"),
    [
        ("", None, None, "device name '': the gateway would refuse it"),
        ("a b/c", None, None, r"1 to 32 letters \(a to z\), digits, '.', '_' or '-', starting with a letter or digit"),
        ("é", None, None, "refuse"),
        ("s1\n", None, None, "refuse"),
        ("s" * 33, None, None, "1 to 32"),
        ("s1", Network(ssid="from a file\n"), None, "control character"),
        ("s1", Network("h" * 64), None, "host"),
        ("s1", Network("host", 0), None, "port is 0; 1 to 65535"),
        ("s1", Network("host", ssid="s" * 33), None, "33 bytes; 0 to 32"),
        ("s1", None, -1, "clock_start_ms"),
        ("s1", None, CLOCK_MS_MAX + 1, "clock_start_ms"),
    ],
)
def test_what_does_not_fit_is_refused_and_writes_nothing(
    tmp_path: Path, device: str, network: Network | None, clock_start_ms: int | None, words: str
) -> None:
    image = tmp_path / "s1.eeprom"
    with pytest.raises(ValueError, match=words):
        provision(image, device, network=network, clock_start_ms=clock_start_ms)
    assert not image.exists()


@pytest.mark.parametrize("network", [Network(passphrase="hush" * 20), Network(secret="hush" * 20)])
def test_a_secret_that_is_too_long_is_not_shown(tmp_path: Path, network: Network) -> None:
    with pytest.raises(ValueError, match="80 bytes") as refused:
        provision(tmp_path / "s1.eeprom", "s1", network=network)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["s1", "S-1.a_b", "0", "-s", ".s", "s 1", "s/1", "é", "", "s1\n", "s" * DEVICE_BYTES_MAX]
)
def test_a_name_is_what_the_gateway_takes_for_one(name: str) -> None:
    assert bool(DEVICE_NAME.fullmatch(name)) == bool(GATEWAY_DEVICE_NAME.fullmatch(name))
