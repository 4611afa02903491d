"""Vectors for the firmware's frames and packets, made in Python.

`python -m tests.support.firmware_vectors` writes the files.

The C code is held against the files (firmware-sim/host/check_vectors.c), and the files against this (the tests).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gateway.mqtt.protocol import PINGRESP, ConnectReturnCode, acknowledgements, connack, publish, suback
from gateway.serial_lines.frames import (
    COMMAND_PAYLOAD_BYTES_MAX,
    GATEWAY_CONTENT_BYTES_MAX,
    SENSOR_CONTENT_BYTES_MAX,
    Ack,
    CommandFrame,
    CommandReply,
    Data,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    encode_frame,
)
from tests.support.firmware_host import VECTORS

U32_MAX: Final = 2**32 - 1
SENT: Final = (
    Hello(1, 0xDEADBEEF, 9, 0, 0, "s1", "sluice-avr 0.1.0", ("thermo",)),
    Hello(U32_MAX, 0, 0xFF, U32_MAX, U32_MAX, "ä" * 16, "f", ("thermo",)),
    Data(1, 0, 0, 0, 0, b'{"celsius":21.53}'),
    Data(U32_MAX, U32_MAX, U32_MAX, U32_MAX, 255, bytes(64)),
    Data(0x01000100, 256, 1, 65536, 0, b""),
    Reply(U32_MAX, 0, 999),
    CommandReply(256, U32_MAX, 1),
)
RECEIVED: Final = (
    *(Ack(1, 0, 0), Ack(U32_MAX, U32_MAX, U32_MAX), Ack(256, 65536, 1 << 31), Probe(0), HelloRequest()),
    *(
        CommandFrame(1, 0, b"led=1"),
        CommandFrame(U32_MAX, 0, bytes(COMMAND_PAYLOAD_BYTES_MAX)),
        CommandFrame(0, 0, b""),
    ),
)
NAMES: Final = ("s1", "d" * 32)


class Sample(NamedTuple):
    """`lost` samples before this one were dropped."""

    boot: int
    incarnation: int
    sequence: int
    tick_ms: int
    lost: int
    hundredths: int

    def payload(self) -> bytes:
        """JSON, as the gateway is to find it."""
        text = f'{{"celsius":{self.hundredths / 100:.2f},"boot":"{self.boot}-{self.incarnation:08x}"'
        text += f',"seq":{self.sequence},"tick":{self.tick_ms}'
        if self.lost:
            text += f',"lost":[{self.sequence - self.lost},{self.sequence - 1}]'
        return f"{text}}}".encode()


SAMPLES: Final = (
    Sample(7, 0x1A2B3C4D, 123, 456789, 0, 2153),
    Sample(1, 0, 0, 0, 0, -5),
    Sample(2, 1, 58, 1, 46, 0),
    Sample(4, 0xFFFFFFFF, 16382, U32_MAX, 1, -32768),
    Sample(U32_MAX, U32_MAX, U32_MAX, U32_MAX, U32_MAX, 32767),
)
RUN_IDS: Final = 2**14 - 1
TOO_LONG: Final = b"too long"
"""Stands for a payload that has more bytes than the firmware looks at."""


def frames() -> str:
    """`sensor CONTENT FRAME` and `gateway CONTENT BYTES`: what the firmware must make, and take or (-) not take."""
    lines = [
        "# sensor CONTENT FRAME | gateway CONTENT BYTES; - is nothing. Written by tests/support/firmware_vectors.py"
    ]
    lines += [f"sensor {each.to_bytes().hex()} {encode_frame(each).hex()}" for each in SENT]
    lines += [f"gateway {each.to_bytes().hex()} {encode_frame(each).hex()}" for each in RECEIVED]
    ack = encode_frame(RECEIVED[2])
    # Joined in the middle; damaged; cut; two frames without the zero between them; longer than the firmware's room.
    lines.append(f"gateway {RECEIVED[2].to_bytes().hex()} {(ack[5:] + ack).hex()}")
    lines += [f"gateway - {damaged.hex()}" for damaged in damages(ack)]
    lines += [f"gateway - {(ack[:-1] + ack).hex()}", f"gateway - {encode_frame(SENT[0]).hex()}", "gateway - 000000"]
    assert len(SENT[0].to_bytes()) > GATEWAY_CONTENT_BYTES_MAX
    assert all(len(each.to_bytes()) <= SENSOR_CONTENT_BYTES_MAX for each in SENT)
    return "\n".join(lines) + "\n"


def damages(frame: bytes) -> Iterator[bytes]:
    """Every frame with one flipped bit, and cut after each byte; a flipped bit may not make two frames of it."""
    for bit in range(8 * (len(frame) - 1)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)
    for length in range(1, len(frame) - 1):
        yield frame[:length] + b"\0"


def field(data: bytes) -> bytes:
    return struct.pack("!H", len(data)) + data


def connect_packet(name: str, secret: str) -> bytes:
    """CONNECT as section 3.1 has it, with the will and the session that the firmware asks for."""
    flags = 0x0C | (0xC0 if secret else 0)
    body = field(b"MQTT") + bytes((4, flags)) + struct.pack("!H", 30) + field(name.encode())
    body += field(f"device/{name}/status".encode()) + field(b'{"status":"lost"}')
    if secret:
        body += field(name.encode()) + field(secret.encode())
    return bytes((0x10, *_remaining(len(body)))) + body


def _remaining(length: int) -> tuple[int, ...]:
    return (length,) if length < 128 else (length % 128 | 128, length // 128)


def publish_packet(name: str, sample: Sample, *, dup: bool) -> bytes:
    """PUBLISH; the packet identifier has the boot counter's lowest bits in front."""
    packet_id = sample.boot % 4 << 14 | sample.sequence % RUN_IDS + 1
    return publish(f"device/{name}/thermo", sample.payload(), 1, packet_id, dup=dup)


def subscribe_packet(name: str) -> bytes:
    """SUBSCRIBE to the device's commands with QoS 1; no PUBLISH has its packet identifier."""
    body = struct.pack("!H", 1 << 14) + field(f"command/{name}/#".encode()) + b"\x01"
    return bytes((0x82, *_remaining(len(body)))) + body


def mqtt() -> str:
    """`connect`, `publish` and `received` lines, as the first of the file says."""
    lines = [
        (
            "# connect PACKET NAME SECRET | publish PACKET NAME BOOT INCARNATION DUP SEQUENCE TICK LOST HUNDREDTHS"
            " | subscribe PACKET NAME | puback PACKET NUMBER | received BYTES EVENT NUMBER PAYLOAD."
            " Written by tests/support/firmware_vectors.py"
        )
    ]
    for name in NAMES:
        lines += [
            f"connect {connect_packet(name, secret).hex()} {name.encode().hex()} {secret.encode().hex() or '-'}"
            for secret in ("", "Zx81", "s" * 47)
        ]
        lines += [
            f"publish {publish_packet(name, sample, dup=dup).hex()} {name.encode().hex()} {sample.boot}"
            f" {sample.incarnation} {dup:d} {sample.sequence} {sample.tick_ms} {sample.lost} {sample.hundredths}"
            for sample in SAMPLES
            for dup in (False, True)
        ]
        lines.append(f"subscribe {subscribe_packet(name).hex()} {name.encode().hex()}")
    lines += [f"puback {acknowledgements([number]).hex()} {number}" for number in (1, 256, 65535)]
    lines += [
        f"received {data.hex()} {event} {number} {payload.hex() or '-'}"
        for data, event, number, payload in (
            (connack(ConnectReturnCode.ACCEPTED), "connack", 0, b""),
            (connack(ConnectReturnCode.ACCEPTED, session_present=True), "connack", 0, b""),
            (connack(ConnectReturnCode.NOT_AUTHORIZED), "connack", 5, b""),
            (acknowledgements([1]), "puback", 1, b""),
            (acknowledgements([1, 65535]), "puback", 65535, b""),
            (PINGRESP, "pingresp", 0, b""),
            # Whatever it says, it is no reason to give the connection up.
            (suback(1 << 14, [1]), "nothing", 0, b""),
            (suback(1 << 14, [0x80]), "nothing", 0, b""),
            (publish("command/s1/set", b"led=1", 1, 258, dup=False), "command", 258, b"led=1"),
            (publish("command/s1/set", b"led=1", 1, 65535, dup=True), "command", 65535, b"led=1"),
            (publish("command/s1", b"led=0", 0, 0, dup=False), "command", 0, b"led=0"),
            (publish("c", b"", 1, 1, dup=False), "command", 1, b""),
            (publish("c" * 300, b"12345678", 1, 1, dup=False), "command", 1, b"12345678"),
            (publish("c", b"123456789", 1, 1, dup=False), "command", 1, TOO_LONG),
            (publish("x", bytes(300), 0, 0, dup=False), "command", 0, TOO_LONG),
            # It goes on for 256 MB.
            (b"\x30\xff\xff\xff\x7f" + bytes(20), "nothing", 0, b""),
            (publish("x", bytes(300), 0, 0, dup=False) + acknowledgements([258]), "puback", 258, b""),
            # Cut off by its length: in the topic's length, in the topic, in the identifier.
            (b"\x30\x00" + PINGRESP, "pingresp", 0, b""),
            (b"\x32\x01\x00" + PINGRESP, "pingresp", 0, b""),
            (b"\x32\x03\x00\x02c" + PINGRESP, "pingresp", 0, b""),
            (b"\x32\x04\x00\x01c\x00" + PINGRESP, "pingresp", 0, b""),
            (b"\x30\xff\xff\xff\xff", "malformed", 0, b""),
            (b"\x20\x02\x02\x00", "malformed", 0, b""),
            (b"\x20\x03", "malformed", 0, b""),
            (b"\x40\x00", "malformed", 0, b""),
            (b"\x41\x02", "malformed", 0, b""),
            (b"\xd0\x01", "malformed", 0, b""),
            (b"\x90\x02", "malformed", 0, b""),
            (b"ready", "malformed", 0, b""),
            (b"HTTP/1.1 400 Bad Request\r\n", "malformed", 0, b""),
        )
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path = VECTORS) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "frames.txt").write_text(frames(), encoding="utf-8")
    (folder / "mqtt.txt").write_text(mqtt(), encoding="utf-8")


if __name__ == "__main__":
    write()
