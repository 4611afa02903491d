"""A small MQTT 3.1.1 client for `sluice check`: it sends CONNECT and PUBLISH, and times the answers."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from gateway.mqtt.protocol import publish

_CONNACK: Final = 0x20
_PUBACK: Final = 0x40
_DISCONNECT: Final = b"\xe0\x00"
_PACKET_ID: Final = 1


class NoAnswerError(Exception):
    """The other side closed the connection, said nothing, or does not speak MQTT. The message says which."""


def connect_packet(client_id: str, user: str | None, password: bytes | None) -> bytes:
    """Encode CONNECT with a clean session (section 3.1), which leaves nothing behind.

    Strings must be shorter than 65,536 bytes each.
    """
    flags = 0x02 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    rest = b"\x00\x04MQTT\x04" + struct.pack(">BH", flags, 60) + _string(client_id.encode())
    if user is not None:
        rest += _string(user.encode())
    if password is not None:
        rest += _string(password)
    length = bytearray()
    left = len(rest)
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return b"\x10" + bytes(length) + rest


def _string(value: bytes) -> bytes:
    return struct.pack(">H", len(value)) + value


class Conversation:
    """An open connection. Its methods raise NoAnswerError."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def connect(self, client_id: str, user: str | None, password: bytes | None) -> int:
        """Send CONNECT, and return CONNACK's return code (section 3.2.2.3)."""
        return self._ask(connect_packet(client_id, user, password), _CONNACK)[1]

    def publish(self, topic: str, payload: bytes) -> float:
        """Publish with QoS 1, and return the milliseconds until PUBACK."""
        begun_s = time.monotonic()
        self._ask(publish(topic, payload, 1, _PACKET_ID, dup=False), _PUBACK)
        return (time.monotonic() - begun_s) * 1000

    def _ask(self, packet: bytes, answer: int) -> bytes:
        """Send a packet, and return the answer's two bytes behind its header."""
        received = b""
        try:
            self._link.sendall(packet)
            while len(received) < 4:
                some = self._link.recv(4 - len(received))
                if not some:
                    raise NoAnswerError("it closes the connection instead of answering")
                received += some
        except TimeoutError as error:
            raise NoAnswerError("it takes the connection and says nothing") from error
        except OSError as error:
            raise NoAnswerError(f"the connection breaks ({error.strerror or error})") from error
        if received[:2] != bytes((answer, 2)):
            raise NoAnswerError("its answer is not MQTT 3.1.1")
        return received[2:]


@contextmanager
def conversing(link: socket.socket, timeout_s: float) -> Iterator[Conversation]:
    """Give a conversation on a connection, and close the connection afterwards. Each answer may take `timeout_s`."""
    with link:
        link.settimeout(timeout_s)
        yield Conversation(link)
        with suppress(OSError):
            link.sendall(_DISCONNECT)
