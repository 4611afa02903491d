"""The gateway's side of one serial line as a state machine without I/O: bytes and times in, events and bytes out.

It follows docs/frames.md, "What the gateway does".
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.clock.sensor_clock import DeviceClock
from gateway.clock.sensor_clocks import DeviceClocks
from gateway.reading import WINDOW_SEQUENCES, Datum, Reading, Recalled, name_of_boot
from gateway.record_contract import DEVICE_NAME, NAME_RULE
from gateway.serial_lines.frames import (
    COMMAND_DONE,
    Ack,
    CommandFrame,
    CommandReply,
    Data,
    Frame,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    encode_frame,
)
from gateway.settings import SerialSettings

BITMAP_BITS = 32
"""Sequences past `next` that an ACK can name. DATA beyond them is ignored until the sensor sends it again."""
SEQUENCE_MAX = 2**32 - 2
"""Highest sequence that an ACK's `next` can get past."""
PROBES_FIRST = 5
"""PROBEs soon after a HELLO, so that the first readings get a time too."""
PROBE_FIRST_INTERVAL_US = 700_000
HELLO_REQUEST_INTERVAL_US = 200_000
"""Least time between two HELLO_REQUESTs. A burst of DATA of an unknown run needs one; its answer takes 35 ms."""
BITS_PER_BYTE = 10
WIRE_SHARE = 0.95
"""Share of the time by the baud rate that bytes surely take, as a UART may be some per cent off."""
WIRE_TRIPS = 3
"""Round trips as slow as a wire, after which the port counts as a wire. A single one may be slow for another reason."""
SILENT_OPEN_US = 2_000_000
"""Time from a port's opening until a silent sensor is asked. A sensor that the opening has reset sends HELLO sooner."""

COMMAND_AGAIN_US = 1_000_000
"""Time until an unanswered command is sent again. It doubles each time, as old firmware never answers."""
COMMAND_AGAIN_US_MAX = 60_000_000

REFUSED_HELLO = "refused-hello"
"""Key in `SerialLink.faults` for a HELLO with an invalid name. It is no fault of the line."""

_PROBE_BYTES = len(encode_frame(Probe(0)))


@dataclass(frozen=True, slots=True)
class Identified:
    """A HELLO of a run (one boot of one sensor) that this link did not know."""

    device: str
    boot: str
    """Boot counter and incarnation: `7-1a2b3c4d`."""
    firmware: str
    reset_cause: int
    streams: tuple[str, ...]
    oldest: int
    next: int
    """The sensor holds the sequences from `oldest` up to, but not including, `next`."""


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """A HELLO that cannot be accepted; `reason` is for the installer. A repeated HELLO gives no second event."""

    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """Readings to store; hand this back to `stored` or `not_stored`."""

    sequences: tuple[int, ...]
    readings: tuple[Reading, ...]
    run: "_Run"


@dataclass(frozen=True, slots=True)
class Lost:
    """The sensor's ring dropped `first` to `last` before they reached the gateway."""

    device: str
    boot: str
    first: int
    last: int
    is_sure: bool = True
    """If not, Kafka may have some of them, acknowledged before a crash of the gateway."""


@dataclass(frozen=True, slots=True)
class CommandAnswered:
    """The sensor has answered a command."""

    id: str
    is_done: bool
    """If not, the sensor does not take such a command."""


LinkEvent = Identified | HelloRefused | Received | Lost | CommandAnswered


@dataclass(slots=True)
class _Command:
    """A command on its way."""

    id: str
    device: str
    number: int
    payload: bytes
    due_us: int
    again_us: int = COMMAND_AGAIN_US


class SerialLink:
    """One line from the opening of its port to its closing.

    Feed it by `receive`. After each `receive`, `stored` and `not_stored`, and at `due_us`, write the bytes of
    `data_to_send`. All times are CLOCK_BOOTTIME in microseconds. No input raises.
    """

    __slots__ = (
        "_ack_wanted",
        "_clocks",
        "_command",
        "_decoder",
        "_heard_us",
        "_hello_requested_us",
        "_hello_wanted",
        "_ignored",
        "_oscillator",
        "_port",
        "_probe",
        "_probe_due_us",
        "_probe_interval_us",
        "_probes_first",
        "_probes_unanswered",
        "_refused_hello",
        "_run",
        "_topic",
        "_wire_byte_us",
        "_wire_trips",
    )

    def __init__(self, port: str, settings: SerialSettings, opened_us: int, clocks: DeviceClocks | None = None) -> None:
        """`clocks` are shared by all lines, as a sensor may come back on another line."""
        self._port = port
        self._clocks = DeviceClocks() if clocks is None else clocks
        self._oscillator = settings.oscillator
        self._wire_byte_us = BITS_PER_BYTE / settings.baud * 1e6 * WIRE_SHARE
        """Least time of a byte on the wire; 0 if the port may be faster than its baud rate, and so is no wire."""
        self._wire_trips = 0
        self._topic = settings.topic
        self._probe_interval_us = round(settings.probe_interval_s * 1e6)
        self._decoder = FrameDecoder()
        self._ignored: Counter[str] = Counter()
        self._run: _Run | None = None
        self._refused_hello: Hello | None = None
        self._ack_wanted = False
        self._hello_wanted = False
        self._hello_requested_us: int | None = None
        self._probe: tuple[int, int] | None = None
        self._probes_first = 0
        self._probes_unanswered = 0
        self._command: _Command | None = None
        self._heard_us: int | None = None
        self._probe_due_us = opened_us + SILENT_OPEN_US

    def claim_no_wire(self) -> None:
        """Assume nothing of how long bytes take on this port: bounds are then as wide as round trips are long.

        Otherwise slow round trips count as a wire until one is too quick for it. On a busy machine that comes late.
        """
        self._wire_byte_us = 0.0

    @property
    def device(self) -> str | None:
        """The sensor at the other end; None before a HELLO was accepted."""
        return self._run.hello.device if self._run else None

    @property
    def due_us(self) -> int:
        """When `data_to_send` next has a PROBE, a HELLO_REQUEST into silence, or a command."""
        return self._probe_due_us if self._command is None else min(self._probe_due_us, self._command.due_us)

    @property
    def heard_us(self) -> int | None:
        """When the sensor's last whole frame came, whatever became of it; None if none came."""
        return self._heard_us

    @property
    def probes_unanswered(self) -> int:
        """PROBEs since the sensor's last whole frame."""
        return self._probes_unanswered

    @property
    def probe_interval_us(self) -> int:
        """Time between two PROBEs, except the first few."""
        return self._probe_interval_us

    @property
    def refusal(self) -> str | None:
        """Why the sensor's HELLO cannot be accepted; None if it can."""
        return _why_refused(self._refused_hello) if self._refused_hello is not None else None

    @property
    def faults(self) -> Counter[str]:
        """Counts of frames that could not be used, by cause. The sensor sends them again."""
        return self._ignored + Counter({defect.value: n for defect, n in self._decoder.defects.items()})

    def receive(self, data: bytes, now_us: int) -> list[LinkEvent]:
        """Take in the next bytes, split anywhere."""
        events: list[LinkEvent] = []
        arrived: list[tuple[int, Reading]] = []
        for frame in self._decoder.feed(data):
            events += self._receive_frame(frame, now_us, arrived)
        return events + self._hand_over(arrived)

    def stored(self, received: Received) -> list[LinkEvent]:
        """The readings have a durable copy: acknowledge them."""
        # A sensor that has restarted since does not wait for the ACK of its former run.
        self._ack_wanted = self._ack_wanted or received.run is self._run
        return received.run.settle(received.sequences, received.sequences)

    def not_stored(self, received: Received) -> list[LinkEvent]:
        """The readings were not stored: they are taken in when the sensor sends them again."""
        return received.run.settle(received.sequences, ())

    def recall(self, identified: Identified, recalled: Recalled) -> list[LinkEvent]:
        """Take in the buffer's knowledge of an `Identified` run, from earlier links or starts of the gateway.

        Samples that the sensor no longer holds are lost if they were neither stored nor reported as lost. The knowledge
        serves loss reports alone. All DATA is stored, as a sensor whose boot counter failed has new samples under old
        sequences. Until this call, no loss of the run is reported.
        """
        run = self._run if self.knows(identified) else None
        # Samples that came since belong to this life of the run.
        end = identified.next if run is None else max(identified.next, run.highest + 1)
        # A sequence that has gone back begins another life of the run. Nothing is known of that life.
        stored, first = recalled.stored, recalled.told_below
        if max(stored, default=-1) >= end:
            stored, first = frozenset(), identified.oldest
        elif first > identified.next:
            first = min(stored, default=identified.oldest)
        # Samples that the sensor took after this HELLO came to nobody before.
        known_from = min(recalled.known_from, identified.next)
        # Further back, samples that the windows do not name may have been stored and forgotten.
        first = max(first, max(stored, default=-1) + 1 - WINDOW_SEQUENCES)
        losses: list[LinkEvent] = [
            Lost(identified.device, identified.boot, *span)
            for span in spans_lost(first, identified.oldest, stored, known_from)
        ]
        if run is not None:
            losses += run.recall(stored, known_from)
        return losses

    def knows(self, identified: Identified) -> bool:
        """Whether this run is the one at the other end now."""
        run = self._run
        return run is not None and run.boot == identified.boot and run.hello.device == identified.device

    @property
    def command_id(self) -> str | None:
        """The command that is on its way; None if there is none."""
        return None if self._command is None else self._command.id

    def command(self, command_id: str, payload: bytes, now_us: int) -> None:
        """Send a command to the sensor again and again, until it answers. There must be a sensor, and no other command.

        The number of a command follows from its id. So a sensor that gets it from the next start of the gateway too
        carries it out once.
        """
        assert self._run is not None and self._command is None  # noqa: PT018, S101 - as the docstring says
        number = zlib.crc32(command_id.encode())
        self._command = _Command(command_id, self._run.hello.device, number, payload, now_us)

    def withdraw(self) -> None:
        """Send the command no more."""
        self._command = None

    def data_to_send(self, now_us: int, nonce: int) -> bytes:
        """Bytes to write now: at most one PROBE (with `nonce`, 32 random bits), ACK, HELLO_REQUEST and command."""
        frames: list[Frame] = []
        run = self._run
        if now_us >= self._probe_due_us:
            if run is None:
                self._hello_wanted = True
            else:
                # Before the ACK, which makes the sensor send: its readings then find a fitted clock.
                frames.append(Probe(nonce))
                self._probes_unanswered += 1
                self._probe = (nonce, now_us)
            self._probes_first = max(0, self._probes_first - 1)
            interval_us = PROBE_FIRST_INTERVAL_US if self._probes_first else self._probe_interval_us
            self._probe_due_us = now_us + interval_us
        if self._ack_wanted and run is not None:
            frames.append(run.ack())
        self._ack_wanted = False
        if self._hello_wanted and self._may_request_hello(now_us):
            frames.append(HelloRequest())
            self._hello_requested_us = now_us
        self._hello_wanted = False
        command = self._command
        if command is not None and run is not None and now_us >= command.due_us:
            frames.append(CommandFrame(run.hello.run, command.number, command.payload))
            command.due_us = now_us + command.again_us
            command.again_us = min(2 * command.again_us, COMMAND_AGAIN_US_MAX)
        return b"".join(encode_frame(frame) for frame in frames)

    def _may_request_hello(self, now_us: int) -> bool:
        last_us = self._hello_requested_us
        return last_us is None or now_us - last_us >= HELLO_REQUEST_INTERVAL_US

    def _hand_over(self, arrived: list[tuple[int, Reading]]) -> list[LinkEvent]:
        if not arrived or self._run is None:
            return []
        sequences, readings = zip(*arrived, strict=True)
        arrived.clear()
        return [Received(sequences, readings, self._run)]

    def _receive_frame(self, frame: Frame, now_us: int, arrived: list[tuple[int, Reading]]) -> list[LinkEvent]:
        if isinstance(frame, Hello | Data | Reply | CommandReply):
            self._heard_us = now_us
            self._probes_unanswered = 0
        match frame:
            case Hello():
                # Readings of the former run come before the new run.
                return self._hand_over(arrived) + self._receive_hello(frame, now_us)
            case Data():
                return self._receive_data(frame, now_us, arrived)
            case Reply():
                self._receive_reply(frame, now_us)
            case CommandReply():
                return self._receive_command_reply(frame)
            case _:
                # A gateway's frames come if receive and transmit are shorted, or if two gateways are wired.
                self._ignored["gateway-frame"] += 1
        return []

    def _receive_command_reply(self, reply: CommandReply) -> list[LinkEvent]:
        command, run = self._command, self._run
        if command is None or run is None or (reply.run, reply.number) != (run.hello.run, command.number):
            # A second answer, most likely.
            self._ignored["unexpected-command-reply"] += 1
            return []
        self._command = None
        return [CommandAnswered(command.id, reply.result == COMMAND_DONE)]

    def _receive_hello(self, hello: Hello, now_us: int) -> list[LinkEvent]:
        reason = _why_refused(hello)
        if reason is not None:
            self._ignored[REFUSED_HELLO] += 1
            known = self._refused_hello is not None and _identity(self._refused_hello) == _identity(hello)
            self._refused_hello = hello
            # This sensor is connected now. Its DATA must not pass for that of the sensor before.
            self._run = self._command = None
            return [] if known else [HelloRefused(reason)]
        self._refused_hello = None
        self._ack_wanted = True
        if self._run is not None and self._run.goes_on_with(hello):
            return self._run.drop_below(hello.oldest)
        self._run = _Run(hello, self._topic, self._clock_of(hello))
        if self._command is not None and self._command.device != hello.device:
            self._command = None
        elif self._command is not None:
            # Its restart may have lost the command.
            self._command.due_us, self._command.again_us = now_us, COMMAND_AGAIN_US
        self._probe = None
        self._probes_first = PROBES_FIRST
        self._probe_due_us = now_us
        return [
            Identified(
                hello.device,
                self._run.boot,
                hello.firmware,
                hello.reset_cause,
                hello.streams,
                hello.oldest,
                hello.next,
            )
        ]

    def _clock_of(self, hello: Hello) -> DeviceClock:
        clock = self._clocks.of(hello.device, boot_name(hello), self._oscillator)
        if hello.next <= clock.last_sequence:
            # The sensor's boot counter failed: its samples are new, and so is its tick.
            clock.restart()
        return clock

    def _receive_data(self, data: Data, now_us: int, arrived: list[tuple[int, Reading]]) -> list[LinkEvent]:
        run = self._run
        if run is None or data.run != run.hello.run:
            refused = self._refused_hello
            if refused is None or data.run != refused.run:
                self._hello_wanted = True
            return []
        # A sensor that sends a sequence still held it, whatever its `oldest` says.
        losses = run.drop_below(min(data.oldest, data.sequence))
        match run.judge(data.sequence):
            case _Place.NEW:
                run.committing.add(data.sequence)
                arrived.append((data.sequence, self._reading(run, data, now_us)))
            case _Place.DURABLE:
                self._ack_wanted = True
            case _Place.BEYOND:
                self._ignored["beyond-window"] += 1
                self._ack_wanted = True
            case _Place.COMMITTING:
                # Its ACK follows its durable copy.
                pass
        return losses

    def _reading(self, run: "_Run", data: Data, now_us: int) -> Reading:
        if not run.clock.check_order(data.sequence, data.tick_ms, now_us):
            # The sensor has restarted, and neither its boot counter nor its sequence shows it.
            self._probe_due_us = now_us
            self._hello_wanted = True
        estimate = run.clock.estimate(data.tick_ms, now_us)
        event_us, event_error_us = (None, 0) if estimate is None else estimate
        return Reading(
            run.topic(data.stream),
            self._port,
            Datum(
                received_us=now_us,
                event_us=event_us,
                event_error_us=event_error_us,
                tick_ms=data.tick_ms,
                device_boot=run.boot,
                device_sequence=data.sequence,
                payload=data.payload,
            ),
        )

    def _receive_reply(self, reply: Reply, now_us: int) -> None:
        if self._run is None or self._probe is None or reply.nonce != self._probe[0]:
            self._ignored["unexpected-reply"] += 1
            return
        _, sent_us = self._probe
        self._probe = None
        # Looked up again, so that clocks of connected sensors are never the least recently used.
        self._run.clock = self._clocks.of(self._run.hello.device, self._run.boot, self._oscillator)
        # The sensor read its tick when the PROBE's last byte had come, and then sent all of the REPLY.
        out_us = self._wire_byte_us * _PROBE_BYTES
        back_us = self._wire_byte_us * len(encode_frame(reply))
        if now_us - sent_us < out_us + back_us:
            # Faster than a wire: native USB, or a tunnel.
            if self._wire_trips >= WIRE_TRIPS:
                # The clock was learnt on the assumption of a wire.
                self._run.clock.restart()
            self._wire_byte_us = 0.0
        self._wire_trips += 1
        if self._wire_trips <= WIRE_TRIPS or not self._wire_byte_us:
            out_us = back_us = 0.0
        if not self._run.clock.probed(sent_us + int(out_us), now_us - int(back_us), reply.tick_ms, reply.tick_us):
            # The tick jumped: most likely the sensor has restarted and its HELLO was lost.
            self._hello_wanted = True
            self._probe_due_us = now_us


class _Place(Enum):
    NEW = "new"
    COMMITTING = "committing"
    DURABLE = "durable"
    """Has a durable copy, or is known to be lost: acknowledged again, not stored again."""
    BEYOND = "beyond"


class _Run:
    """One boot of one sensor on this link: the sequences with a durable copy, and the sensor's clock."""

    __slots__ = (
        "_device_topic",
        "_durable",
        "_known_from",
        "_oldest",
        "_stored_before",
        "_topics",
        "_undecided",
        "boot",
        "clock",
        "committing",
        "hello",
        "next",
    )

    def __init__(self, hello: Hello, topic: str, clock: DeviceClock) -> None:
        self.hello = hello
        self.boot = boot_name(hello)
        self.clock = clock
        self._device_topic = topic.replace("{device}", hello.device)
        self._topics = tuple(self._device_topic.replace("{stream}", name) for name in hello.streams)
        # Earlier samples are unknown here: an earlier link, or an earlier start of the gateway, may have stored them.
        self.next = self._oldest = hello.oldest
        # It may also have stored samples that its bitmaps named, and that the sensor then let go. Until those are
        # recalled, skipped spans wait here: the first sequence, and the one after the last.
        self._stored_before: frozenset[int] | None = None
        self._known_from = 0
        self._undecided: list[tuple[int, int]] = []
        self._durable: set[int] = set()
        self.committing: set[int] = set()

    def goes_on_with(self, hello: Hello) -> bool:
        """Whether this HELLO is of this run.

        If the sensor's sequence has gone back, it is not: the boot counter failed, and the samples are new.
        """
        return _identity(hello) == _identity(self.hello) and hello.next > self.highest

    @property
    def highest(self) -> int:
        """Highest sequence that has come, or is known to be lost."""
        return max((self.next - 1, *self._durable, *self.committing))

    def recall(self, stored: frozenset[int], known_from: int) -> list[LinkEvent]:
        """Take in all sequences that earlier links stored: if the sensor drops them, nothing is lost.

        Below `known_from`, they may have stored more.
        """
        self._stored_before, self._known_from = stored, known_from
        undecided, self._undecided = self._undecided, []
        return [lost for first, end in undecided for lost in self._lost(first, end)]

    def topic(self, stream: int) -> str:
        """The topic of a stream. If HELLO did not name the stream, it is called by its number: `stream-7`."""
        if stream < len(self._topics):
            return self._topics[stream]
        return self._device_topic.replace("{stream}", f"stream-{stream}")

    def judge(self, sequence: int) -> _Place:
        if sequence < self.next or sequence in self._durable:
            return _Place.DURABLE
        if sequence in self.committing:
            return _Place.COMMITTING
        if sequence > min(self.next + BITMAP_BITS, SEQUENCE_MAX):
            return _Place.BEYOND
        return _Place.NEW

    def settle(self, sequences: tuple[int, ...], durable: tuple[int, ...]) -> list[LinkEvent]:
        """It is decided what becomes of `sequences`: `durable` of them are stored."""
        self.committing.difference_update(sequences)
        self._durable.update(durable)
        return self._advance()

    def drop_below(self, oldest: int) -> list[LinkEvent]:
        """The sensor holds nothing below `oldest` any more: sequences that are neither here nor under way are lost."""
        self._oldest = max(self._oldest, oldest)
        return self._advance()

    def ack(self) -> Ack:
        bitmap = sum(1 << (sequence - self.next - 1) for sequence in self._durable)
        return Ack(self.hello.run, self.next, bitmap)

    def _advance(self) -> list[LinkEvent]:
        """Move `next` past sequences stored or lost, and return new losses. Lost ranges take one step each."""
        losses: list[LinkEvent] = []
        while self.next not in self.committing:
            if self.next in self._durable:
                self._durable.remove(self.next)
                self.next += 1
            elif self.next < self._oldest:
                end = min((s for s in self._durable | self.committing if s < self._oldest), default=self._oldest)
                losses += self._lost(self.next, end)
                self.next = end
            else:
                break
        return losses

    def _lost(self, first: int, end: int) -> Sequence[Lost]:
        """The spans from `first` up to, but not including, `end` that no earlier link stored; none until `recall`."""
        if self._stored_before is not None:
            spans = spans_lost(first, end, self._stored_before, self._known_from)
            return [Lost(self.hello.device, self.boot, *span) for span in spans]
        if self._undecided and self._undecided[-1][1] == first:
            first, _ = self._undecided.pop()
        self._undecided.append((first, end))
        return []


def spans_lost(first: int, end: int, stored: frozenset[int], known_from: int = 0) -> Iterator[tuple[int, int, bool]]:
    """The spans from `first` up to, but not including, `end` that are not in `stored`.

    Each has its first and last sequence, and whether it is surely lost. Below `known_from` it may be stored.
    """
    for known in (*sorted(s for s in stored if first <= s < end), end):
        sure = max(first, min(known, known_from))
        if first < sure:
            yield first, sure - 1, False
        if sure < known:
            yield sure, known - 1, True
        first = known + 1


def boot_name(hello: Hello) -> str:
    """The run's name: `7-1a2b3c4d`."""
    return name_of_boot(hello.boot, hello.incarnation)


def _identity(hello: Hello) -> tuple[object, ...]:
    return hello.device, hello.boot, hello.incarnation, hello.streams


def _why_refused(hello: Hello) -> str | None:
    for what, name in (("device", hello.device), *(("stream", stream) for stream in hello.streams)):
        if not DEVICE_NAME.fullmatch(name):
            calls = "itself" if what == "device" else "a stream"
            return f"it calls {calls} {name!r}, which is no {what} name ({NAME_RULE}): flash it with another"
    return None
