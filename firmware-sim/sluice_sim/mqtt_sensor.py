"""One constrained MQTT 3.1.1 sensor, without I/O or clock: a small ring, a small window, an honest ledger.

Written by hand, as firmware for a 2 KB microcontroller would be, and apart from the gateway's own MQTT code, so
that the two check each other. It speaks QoS 1 and never subscribes.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Final

RING_SAMPLES: Final = 64
"""Samples held that were not sent yet; the oldest is dropped for a new one."""
WINDOW: Final = 4
"""Samples sent and not acknowledged; they are held beside the ring, to be sent again."""
KEEP_ALIVE_S: Final = 60

PINGREQ: Final = b"\xc0\x00"
DISCONNECT: Final = b"\xe0\x00"

_REFUSALS: Final = {
    1: "it does not speak MQTT 3.1.1",
    2: "it rejects the client identifier",
    3: "it takes no readings at present, or has too many connections",
    4: "wrong user name or password",
    5: "it wants a user name and password",
}


class LinkError(Exception):
    """The connection is of no use: the gateway refused it, or sent what this sensor does not understand."""


class SequenceRanges:
    """A set of sequence numbers as closed, sorted, disjoint ranges."""

    __slots__ = ("_firsts", "_lasts", "count")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self.count = 0

    def add(self, sequence: int) -> None:
        """Add one number; one that is there already changes nothing."""
        firsts, lasts = self._firsts, self._lasts
        at = bisect_right(firsts, sequence)
        if at and sequence <= lasts[at - 1]:
            return
        self.count += 1
        joins_before = at > 0 and lasts[at - 1] == sequence - 1
        joins_after = at < len(firsts) and firsts[at] == sequence + 1
        if joins_before and joins_after:
            lasts[at - 1] = lasts.pop(at)
            del firsts[at]
        elif joins_before:
            lasts[at - 1] = sequence
        elif joins_after:
            firsts[at] = sequence
        else:
            firsts.insert(at, sequence)
            lasts.insert(at, sequence)

    def pairs(self) -> list[list[int]]:
        """Give the ranges as [first, last], both included."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]


@dataclass(slots=True)
class _InFlight:
    packet_id: int
    sequence: int
    payload: bytes


class MqttSensor:
    """A sensor from one start to its end: samples in, packets out, acknowledgements in."""

    def __init__(self, name: str, boot: str, secret: str | None = None) -> None:
        self.name = name
        self.boot = boot
        self.taken = 0
        self.sent = 0
        """Samples sent at least once."""
        self.acknowledged = SequenceRanges()
        self.dropped = SequenceRanges()
        self.accepted = False
        """Whether the present connection has its CONNACK."""
        self._secret = secret
        self._topic = f"device/{name}/thermo".encode()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._window: deque[_InFlight] = deque()
        self._packet_id = 0
        self._received = bytearray()

    @property
    def waiting(self) -> int:
        """Samples held: not sent, or sent and not acknowledged."""
        return len(self._ring) + len(self._window)

    @property
    def unacknowledged(self) -> int:
        """Samples sent and not acknowledged."""
        return len(self._window)

    def sample(self, celsius: float) -> bytes:
        """Take a sample; give what to send now, which is nothing without an accepted connection."""
        if len(self._ring) == RING_SAMPLES:
            self.dropped.add(self._ring.popleft()[0])
        payload = f'{{"celsius":{celsius:.2f},"boot":"{self.boot}","seq":{self.taken}}}'.encode()
        self._ring.append((self.taken, payload))
        self.taken += 1
        return self._fill_window() if self.accepted else b""

    def connect(self) -> bytes:
        """CONNECT for a new connection (section 3.1), which keeps the session: unfinished packets go on."""
        self.accepted = False
        self._received.clear()
        flags, payload = 0x00, _field(self.name.encode())
        if self._secret is not None:
            flags, payload = 0xC0, payload + payload + _field(self._secret.encode())
        return _packet(0x10, _field(b"MQTT") + bytes((4, flags, 0, KEEP_ALIVE_S)) + payload)

    def disconnected(self) -> None:
        """Note that the connection is gone; what was not acknowledged waits for the next one."""
        self.accepted = False

    def receive(self, data: bytes) -> bytes:
        """Take what the gateway sent, in any split; give what to send now. Raises `LinkError`."""
        self._received += data
        answer = b""
        while len(self._received) >= 2:
            kind, length = self._received[0], self._received[1]
            if length > 3:
                # Of all that a server sends to this sensor, the longest is a CONNACK of MQTT 5.
                raise LinkError(f"the gateway sent a packet (0x{kind:02x}) that was not asked for")
            if len(self._received) < 2 + length:
                break
            body = bytes(self._received[2 : 2 + length])
            del self._received[: 2 + length]
            answer += self._packet(kind, body)
        return answer

    def ledger(self) -> dict[str, object]:
        """Give what this start of the sensor knows, as one line of the ledger says it."""
        return {
            "device": self.name,
            "boot": self.boot,
            "taken": self.taken,
            "sent": self.sent,
            "acknowledged": self.acknowledged.pairs(),
            "dropped": self.dropped.pairs(),
        }

    def _packet(self, kind: int, body: bytes) -> bytes:
        if kind == 0x40 and len(body) == 2 and self.accepted:
            self._acknowledge(int.from_bytes(body, "big"))
            return self._fill_window()
        if kind == 0x20 and len(body) >= 2 and not self.accepted:
            if body[1]:
                why = _REFUSALS.get(body[1], f"return code {body[1]}")
                raise LinkError(f"the gateway refused {self.name}: {why}")
            self.accepted = True
            # What was sent on an earlier connection goes first, as it was, with DUP [MQTT-4.4.0-1].
            again = b"".join(self._publish(0x3A, sample) for sample in self._window)
            return again + self._fill_window()
        if kind == 0xD0 and not body:
            return b""
        raise LinkError(f"the gateway sent a packet (0x{kind:02x}) that was not asked for")

    def _acknowledge(self, packet_id: int) -> None:
        for sample in self._window:
            if sample.packet_id == packet_id:
                self._window.remove(sample)
                self.acknowledged.add(sample.sequence)
                return

    def _fill_window(self) -> bytes:
        packets = []
        while self._ring and len(self._window) < WINDOW:
            sequence, payload = self._ring.popleft()
            sample = _InFlight(self._next_packet_id(), sequence, payload)
            self._window.append(sample)
            self.sent += 1
            packets.append(self._publish(0x32, sample))
        return b"".join(packets)

    def _next_packet_id(self) -> int:
        """Give the next identifier that no unacknowledged packet has [MQTT-2.3.1-2]."""
        used = {sample.packet_id for sample in self._window}
        while True:
            self._packet_id = self._packet_id % 65535 + 1
            if self._packet_id not in used:
                return self._packet_id

    def _publish(self, first: int, sample: _InFlight) -> bytes:
        return _packet(first, _field(self._topic) + sample.packet_id.to_bytes(2, "big") + sample.payload)


def _field(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def _packet(first: int, body: bytes) -> bytes:
    """Section 2.2. Two bytes of remaining length are enough for all that this sensor sends."""
    length = len(body)
    encoded = bytes((length,)) if length < 0x80 else bytes((length & 0x7F | 0x80, length >> 7))
    return bytes((first,)) + encoded + body
