"""One constrained MQTT 3.1.1 sensor, without I/O or clock: a small ring, a small window, an honest ledger.

It is written by hand, as firmware for a 2 KB microcontroller would be. It shares no code with the gateway's own MQTT,
so that the two check each other. It publishes with QoS 0, 1 or 2 and never subscribes.
"""

from collections import deque
from enum import Enum
from itertools import islice
from typing import Final

from sluice_sim.fleet_faults import REORDER_BLOCK, Traits
from sluice_sim.fleet_ledger import BootLedger

RING_SAMPLES: Final = 64
"""Samples held that were not sent yet. The oldest is dropped for a new one."""
WINDOW: Final = 4
"""Samples sent and not acknowledged. They are held beside the ring, to be sent again."""
KEEP_ALIVE_S: Final = 60

PINGREQ: Final = b"\xc0\x00"
DISCONNECT: Final = b"\xe0\x00"
_PUBREL: Final = 0x62
_DUP: Final = 0x08

_REFUSALS: Final = {
    1: "it does not speak MQTT 3.1.1",
    2: "it rejects the client identifier",
    3: "it takes no readings at present, or has too many connections",
    4: "wrong user name or password",
    5: "it wants a user name and password",
}


class LinkError(Exception):
    """The connection is of no use: the gateway refused it, or sent a packet that this sensor does not understand."""


class _Sample:
    """A sample that is held, of this boot or, if the ring outlives reboots, of an earlier one."""

    __slots__ = ("boot", "payload", "report", "sequence", "was_sent")

    def __init__(self, boot: BootLedger, sequence: int, payload: bytes) -> None:
        self.boot = boot
        self.sequence = sequence
        self.payload = payload
        self.report: tuple[int, int] | None = None
        """The range in its `lost`."""
        self.was_sent = False


class _Repeat(Enum):
    NEVER = 0
    AT_ONCE = 1
    LATE = 2


class _InFlight:
    """A PUBLISH under its packet identifier, until its exchange is finished."""

    __slots__ = ("is_duplicate", "is_received", "packet_id", "sample")

    def __init__(self, packet_id: int, sample: _Sample, *, is_duplicate: bool) -> None:
        self.packet_id = packet_id
        self.sample = sample
        self.is_duplicate = is_duplicate
        self.is_received = False
        """QoS 2: PUBREC has come, PUBCOMP has not."""


class MqttSensor:
    """A sensor: samples in, packets out, acknowledgements in. It lives through reboots."""

    def __init__(
        self, name: str, boot: str, secret: str | None = None, traits: Traits | None = None, seed: int = 0
    ) -> None:
        self.name = name
        self.traits = Traits() if traits is None else traits
        self.boots = [BootLedger(name, boot, self.traits.qos, seed)]
        self.duplicates = 0
        """Samples sent again in a PUBLISH of their own."""
        self.accepted = False
        """Whether the present connection has its CONNACK."""
        self.can_write = True
        """Whether the connection takes packets. While it does not, samples wait in the ring."""
        self._seed = seed
        self._secret = secret
        self._topic = f"device/{name}/thermo".encode()
        self._ring: deque[_Sample] = deque()
        self._again: deque[_Sample] = deque()
        """Samples sent under a forgotten packet identifier. They go before the ring, and are never dropped."""
        self._in_flight: dict[int, _InFlight] = {}
        """In the order of sending."""
        self._held = 0
        """Samples in flight that are not acknowledged."""
        self._packet_id = 0
        self._received = bytearray()

    @property
    def boot(self) -> BootLedger:
        """The present boot."""
        return self.boots[-1]

    @property
    def waiting(self) -> int:
        """Samples held: not sent, or sent and not acknowledged."""
        return len(self._ring) + len(self._again) + self._held

    @property
    def unfinished(self) -> int:
        """Packets that wait for an answer of the gateway."""
        return len(self._in_flight)

    def sample(self, celsius: float, tick_ms: int = 0) -> bytes:
        """Take a sample; return the bytes to send now, which are none without an accepted connection."""
        if len(self._ring) == RING_SAMPLES:
            oldest = self._ring.popleft()
            oldest.boot.dropped.add(oldest.sequence)
            oldest.boot.unreported.add(oldest.sequence)
        boot = self.boots[-1]
        payload = f'{{"celsius":{celsius:.2f},"boot":"{boot.boot}","seq":{boot.taken},"tick":{tick_ms}}}'.encode()
        self._ring.append(_Sample(boot, boot.taken, payload))
        boot.taken += 1
        return self.go_on()

    def go_on(self) -> bytes:
        """Return the packets that may be sent now."""
        return self._fill_window() if self.accepted else b""

    def reboot(self, boot: str) -> None:
        """Start again under another boot. Packet identifiers are forgotten, and samples too unless the ring is kept."""
        self.disconnected()
        self._forget_exchanges()
        if not self.traits.keeps_ring:
            for sample in (*self._again, *self._ring):
                sample.boot.vanished.add(sample.sequence)
            self._again.clear()
            self._ring.clear()
        self._packet_id = 0
        self.boots.append(BootLedger(self.name, boot, self.traits.qos, self._seed))

    def connect(self) -> bytes:
        """CONNECT for a new connection (section 3.1). Without clean session, unfinished packets go on."""
        self.accepted = False
        self.can_write = True
        self._received.clear()
        flags, payload = 0x02 if self.traits.clean_session else 0x00, _field(self.name.encode())
        if self._secret is not None:
            flags, payload = flags | 0xC0, payload + payload + _field(self._secret.encode())
        return _packet(0x10, _field(b"MQTT") + bytes((4, flags, 0, KEEP_ALIVE_S)) + payload)

    def disconnected(self) -> None:
        """Record that the connection is gone. Unacknowledged samples wait for the next connection."""
        self.accepted = False

    def roam(self) -> None:
        """Go on at another gateway, which knows nothing of the exchanges so far.

        Samples that the former gateway received with QoS 2 stay there. All others are sent again, as on any new
        connection.
        """
        self.disconnected()
        for packet_id in [each.packet_id for each in self._in_flight.values() if each.is_received]:
            del self._in_flight[packet_id]

    def receive(self, data: bytes) -> bytes:
        """Take in the gateway's bytes, split anywhere; return the bytes to send now. Raises `LinkError`."""
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

    def _packet(self, kind: int, body: bytes) -> bytes:
        if self.accepted and len(body) == 2:
            packet_id = int.from_bytes(body, "big")
            if kind == 0x40 and self.traits.qos == 1:
                return self._finish(packet_id)
            if kind == 0x50 and self.traits.qos == 2:
                # An unknown packet is released too, as the gateway waits for it (section 4.3.3).
                return _packet(_PUBREL, body) + self._note_received(packet_id)
            if kind == 0x70 and self.traits.qos == 2:
                return self._complete(packet_id)
        if kind == 0x20 and len(body) >= 2 and not self.accepted:
            if body[1]:
                why = _REFUSALS.get(body[1], f"return code {body[1]}")
                raise LinkError(f"the gateway refused {self.name}: {why}")
            self.accepted = True
            return self._resend() + self._fill_window()
        if kind == 0xD0 and not body:
            return b""
        raise LinkError(f"the gateway sent a packet (0x{kind:02x}) that was not asked for")

    def _resend(self) -> bytes:
        """Packets of an earlier connection, which go first, unchanged, with DUP [MQTT-4.4.0-1].

        With clean session the standard knows no earlier connection: the samples are published anew.
        """
        if self.traits.clean_session:
            self._forget_exchanges()
            return b""
        return b"".join(
            _packet(_PUBREL, each.packet_id.to_bytes(2, "big")) if each.is_received else self._publish(each, _DUP)
            for each in self._in_flight.values()
        )

    def _finish(self, packet_id: int) -> bytes:
        """Take a PUBACK; return the packets that may be sent now."""
        in_flight = self._in_flight.pop(packet_id, None)
        return b"" if in_flight is None else self._acknowledge(in_flight) + self._fill_window()

    def _complete(self, packet_id: int) -> bytes:
        """Take a PUBCOMP; return the packets that may be sent now. Without a PUBREC before, it says nothing."""
        in_flight = self._in_flight.get(packet_id)
        if in_flight is None or not in_flight.is_received:
            return b""
        del self._in_flight[packet_id]
        return self._fill_window()

    def _note_received(self, packet_id: int) -> bytes:
        """Take a PUBREC; return a deliberate repetition of its sample, if any."""
        in_flight = self._in_flight.get(packet_id)
        if in_flight is None or in_flight.is_received:
            return b""
        in_flight.is_received = True
        return self._acknowledge(in_flight)

    def _acknowledge(self, in_flight: _InFlight) -> bytes:
        if in_flight.is_duplicate:
            return b""
        sample = in_flight.sample
        self._held -= 1
        sample.boot.acknowledged.add(sample.sequence)
        _settle_report(sample)
        return self._send(sample, is_duplicate=True) if self._repeat_of(sample) is _Repeat.LATE else b""

    def _fill_window(self) -> bytes:
        packets: list[bytes] = []
        while (self._again or self._ring) and self.can_write and len(self._in_flight) < WINDOW:
            sample = self._next_sample()
            if not sample.was_sent:
                _begin(sample)
            packets.append(self._send(sample, is_duplicate=False))
            repeat = self._repeat_of(sample)
            if repeat is _Repeat.AT_ONCE or (repeat is _Repeat.LATE and not self.traits.qos):
                packets.append(self._send(sample, is_duplicate=True))
        return b"".join(packets)

    def _send(self, sample: _Sample, *, is_duplicate: bool) -> bytes:
        """Publish a sample under a new packet identifier."""
        self.duplicates += is_duplicate
        if not self.traits.qos:
            if not is_duplicate:
                sample.boot.handed_over.add(sample.sequence)
                _settle_report(sample)
            return _packet(0x30, _field(self._topic) + sample.payload)
        in_flight = _InFlight(self._next_packet_id(), sample, is_duplicate=is_duplicate)
        self._in_flight[in_flight.packet_id] = in_flight
        self._held += not is_duplicate
        return self._publish(in_flight)

    def _next_sample(self) -> _Sample:
        """Take the next sample: the oldest, or, if the sensor reorders, one of the oldest one's block."""
        if self._again:
            return self._again.popleft()
        ring = self._ring
        if self.traits.reorders:
            boot, block = ring[0].boot, ring[0].sequence // REORDER_BLOCK
            chosen = min(
                (
                    each
                    for each in islice(ring, REORDER_BLOCK)
                    if each.boot is boot and each.sequence // REORDER_BLOCK == block
                ),
                key=lambda each: self.traits.draw("order", boot.boot, each.sequence),
            )
            ring.remove(chosen)
            return chosen
        return ring.popleft()

    def _repeat_of(self, sample: _Sample) -> _Repeat:
        """Whether a sample is sent twice: at once, or after its acknowledgement, as if this had been lost."""
        if not self.traits.duplicates:
            return _Repeat.NEVER
        drawn = self.traits.draw("repeat", sample.boot.boot, sample.sequence)
        if drawn >= self.traits.duplicates:
            return _Repeat.NEVER
        return _Repeat.LATE if drawn < self.traits.duplicates / 2 else _Repeat.AT_ONCE

    def _forget_exchanges(self) -> None:
        """Forget packet identifiers. Samples that the gateway may lack are published anew, before all others."""
        self._again.extendleft(reversed(self._unacknowledged()))
        self._in_flight.clear()
        self._held = 0

    def _unacknowledged(self) -> list[_Sample]:
        """The samples in flight that the gateway may lack, in the order of sending."""
        return [each.sample for each in self._in_flight.values() if not each.is_duplicate and not each.is_received]

    def _next_packet_id(self) -> int:
        """Return the next identifier without an open exchange [MQTT-2.3.1-2]."""
        while True:
            self._packet_id = self._packet_id % 65535 + 1
            if self._packet_id not in self._in_flight:
                return self._packet_id

    def _publish(self, in_flight: _InFlight, dup: int = 0) -> bytes:
        first = 0x30 | self.traits.qos << 1 | dup
        packet_id = in_flight.packet_id.to_bytes(2, "big")
        return _packet(first, _field(self._topic) + packet_id + in_flight.sample.payload)


def _begin(sample: _Sample) -> None:
    """Record that a sample is sent for the first time. It reports dropped samples that are not reported yet."""
    boot = sample.boot
    sample.was_sent = True
    boot.sent += 1
    if boot.unreported and not boot.report_outstanding:
        boot.report_outstanding = True
        sample.report = first, last = boot.unreported.take_first()
        sample.payload = sample.payload[:-1] + b',"lost":[%d,%d]}' % (first, last)


def _settle_report(sample: _Sample) -> None:
    """Record that a sample has arrived, and its report with it."""
    if sample.report is not None:
        sample.boot.reported.add_range(*sample.report)
        sample.boot.report_outstanding = False
        sample.report = None


def _field(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def _packet(first: int, body: bytes) -> bytes:
    """A packet (section 2.2). Two bytes of remaining length are enough for this sensor's packets."""
    length = len(body)
    encoded = bytes((length,)) if length < 0x80 else bytes((length & 0x7F | 0x80, length >> 7))
    return bytes((first,)) + encoded + body
