"""EEPROM images of the 8-bit sensors: name, sampling interval, network, and start of the clock."""

import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EEPROM_BYTES: Final = 1024
DEVICE_BYTES_MAX: Final = 32
DEVICE_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{DEVICE_BYTES_MAX - 1}}}")
"""Names that the gateway accepts, and that fit into the EEPROM."""
SAMPLE_INTERVAL_MS_MIN: Final = 10
SAMPLE_INTERVAL_MS_MAX: Final = 86_400_000
CLOCK_MS_MAX: Final = 2**32 - 1
PORT_MAX: Final = 65535

# Offsets and layouts as in firmware/eeprom_layout.h; a CRC-32 follows each.
_CONFIGURATION_OFFSET: Final = 32
_CONFIGURATION: Final = struct.Struct(f"<BB{DEVICE_BYTES_MAX}sI")
_CONFIGURATION_VERSION: Final = 1
_CLOCK_START_OFFSET: Final = 80
_CLOCK_START: Final = struct.Struct("<I")
_NETWORK_OFFSET: Final = 96
_NETWORK: Final = struct.Struct("<BH64s33s64s48s")
_NETWORK_VERSION: Final = 1
_HOST_BYTES_MAX: Final = 63
_SSID_BYTES_MAX: Final = 32
_PASSPHRASE_BYTES_MAX: Final = 63
_SECRET_BYTES_MAX: Final = 47


@dataclass(frozen=True, slots=True)
class Network:
    """The gateway of the MQTT build, and the way to it."""

    host: str = "127.0.0.1"
    """Name or address, 1 to 63 bytes."""
    port: int = 1883
    ssid: str = "sluice"
    """The access point's name, up to 32 bytes; empty if the modem joins by itself."""
    passphrase: str = ""
    """Up to 63 bytes; empty for an open network."""
    secret: str = ""
    """The device's MQTT password, up to 47 bytes; empty for none. Its user name is its device name."""


def provision(
    eeprom: Path,
    device: str,
    sample_interval_ms: int = 1000,
    *,
    network: Network | None = None,
    clock_start_ms: int | None = None,
) -> None:
    """Write the device's name and its sampling interval into an EEPROM image (1024 bytes, made if missing).

    The MQTT build needs `network`. `clock_start_ms` is the start of the sensor's millisecond counter after every reset,
    for tests of its wrap at 2^32. If either is not given, an existing image keeps it. It also keeps the boot counter.
    The image can go to a real board with `avrdude -U eeprom`.
    Raises ValueError if the gateway would refuse the name (`DEVICE_NAME`), or if the interval (10 ms to a day) or
    another value does not fit.
    """
    if not DEVICE_NAME.fullmatch(device):
        raise ValueError(
            f"device name {device!r}: the gateway would refuse it. A name is 1 to {DEVICE_BYTES_MAX} letters (a to z),"
            " digits, '.', '_' or '-', starting with a letter or digit"
        )
    name = device.encode()
    if not SAMPLE_INTERVAL_MS_MIN <= sample_interval_ms <= SAMPLE_INTERVAL_MS_MAX:
        raise ValueError(
            f"sample_interval_ms is {sample_interval_ms};"
            f" {SAMPLE_INTERVAL_MS_MIN} to {SAMPLE_INTERVAL_MS_MAX} is possible"
        )
    image = bytearray(eeprom.read_bytes()) if eeprom.exists() else bytearray(b"\xff" * EEPROM_BYTES)
    if len(image) != EEPROM_BYTES:
        raise ValueError(f"{eeprom.name} has {len(image)} bytes; an ATmega328P's EEPROM has {EEPROM_BYTES}")
    configuration = _CONFIGURATION.pack(_CONFIGURATION_VERSION, len(name), name, sample_interval_ms)
    _put(image, _CONFIGURATION_OFFSET, configuration)
    if network is not None:
        _put(image, _NETWORK_OFFSET, _packed(network))
    if clock_start_ms is not None:
        if not 0 <= clock_start_ms <= CLOCK_MS_MAX:
            raise ValueError(f"clock_start_ms is {clock_start_ms}; 0 to {CLOCK_MS_MAX} is possible")
        _put(image, _CLOCK_START_OFFSET, _CLOCK_START.pack(clock_start_ms))
    written = eeprom.with_name(eeprom.name + ".new")
    written.write_bytes(image)
    written.replace(eeprom)


def _packed(network: Network) -> bytes:
    if not 1 <= network.port <= PORT_MAX:
        raise ValueError(f"the broker's port is {network.port}; 1 to {PORT_MAX} is possible")
    return _NETWORK.pack(
        _NETWORK_VERSION,
        network.port,
        _text("the broker's host", network.host, 1, _HOST_BYTES_MAX),
        _text("the access point's name", network.ssid, 0, _SSID_BYTES_MAX),
        _text("the access point's passphrase", network.passphrase, 0, _PASSPHRASE_BYTES_MAX),
        _text("the device's secret", network.secret, 0, _SECRET_BYTES_MAX),
    )


def _text(what: str, text: str, least: int, most: int) -> bytes:
    encoded = text.encode()
    if not least <= len(encoded) <= most:
        shown = "" if "secret" in what or "passphrase" in what else f" {text!r}"
        raise ValueError(f"{what}{shown} has {len(encoded)} bytes; {least} to {most} fit the EEPROM")
    if any(byte < ord(" ") or byte == 0x7F for byte in encoded):
        raise ValueError(f"{what} has a control character in it: a line end from a file, perhaps. Leave it out")
    return encoded


def _put(image: bytearray, offset: int, content: bytes) -> None:
    content += zlib.crc32(content).to_bytes(4, "little")
    image[offset : offset + len(content)] = content
