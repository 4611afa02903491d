"""Sensors on pseudo-terminals that speak docs/frames.md, many in one process: the load of `ports`.

python -m tests.bench.serial_feeder --directory D --ports 64 --seconds 30 [--rate 10] [--piece-bytes 8]

Each opens a port `D/tty-d000`, `D/tty-d001`, ..., says HELLO until it is answered, and then sends a sample every
1/rate seconds: at its own phase, whatever has been acknowledged, and again after a second without an ACK. After
`--seconds` no more are taken, and what is held is still sent. Without `--piece-bytes` a frame comes in one piece, as a
USB adapter gives it; with 8, in pieces as a UART's FIFO hands them on, at 38400 baud.

Its events are lines of JSON: `connected` when the last HELLO was answered, `done` at the end (see `Fed`).
"""

import argparse
import asyncio
import itertools
import os
import random
import resource
import sys
import tty
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.serial_lines.frames import (
    GATEWAY_CONTENT_BYTES_MAX,
    Ack,
    Data,
    Frame,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    encode_frame,
)

BOOT = 1
HELLO_INTERVAL_S = 1.0
RESEND_S = 1.0
GRACE_S = 15.0
"""Seconds at the end in which held samples may still be sent again."""
BYTES_PER_S = 3_840
READ_BYTES_MAX = 4_096


class Fed(msgspec.Struct, frozen=True):
    """The feeder's account of a run."""

    taken: list[int]
    """Samples of each port: sequences from 0 on."""
    unacknowledged: int
    resent: int
    damaged: int
    """Pieces from the gateway that were no frames."""
    late_ms_max: float
    """Most milliseconds by which a sample was sent late, because the feeder itself did not keep up."""
    ack_p50_ms: float
    """From the last byte of a sample's first frame to the ACK that names it."""
    ack_p99_ms: float
    ack_max_ms: float
    cpu_s: float


def device_name(port: int) -> str:
    """The sensor on a port."""
    return f"d{port:03d}"


def boot_name(port: int) -> str:
    """Its run, as the gateway writes it: boot counter and incarnation."""
    return f"{BOOT}-{_incarnation(port):08x}"


def run_of(port: int) -> int:
    """Name of the run in DATA and ACK."""
    return BOOT ^ _incarnation(port)


def centi_celsius(port: int, sequence: int) -> int:
    """Value that a sensor measures. It is equal in every run, so that arrivals can be compared."""
    return random.Random(port << 32 | sequence).randrange(1_000, 3_000)  # noqa: S311 - repeatable, no secret


def _incarnation(port: int) -> int:
    return 0x5EED0000 + port


@dataclass(slots=True)
class _Held:
    """A sample that is not acknowledged."""

    sample: Data
    first_s: float
    """When its frame's last byte went for the first time; `last_s`: for the last time so far."""
    last_s: float


class Sensor:
    """One sensor, and the line to it."""

    def __init__(self, number: int, directory: Path, interval_s: float, piece_bytes: int) -> None:
        self.introduced = asyncio.Event()
        self.taken = 0
        self.resent = 0
        self.late_s_max = 0.0
        self.latencies_s: list[float] = []
        self.decoder = FrameDecoder(GATEWAY_CONTENT_BYTES_MAX)
        self._number = number
        self._interval_s = interval_s
        self._piece_bytes = piece_bytes
        self._held: dict[int, _Held] = {}
        self._line_free_at = 0.0
        self._closed = False
        self._loop = asyncio.get_running_loop()
        # The near end stays open: without one, the far end would count as hung up until the gateway comes.
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        os.set_blocking(self._master, False)
        self._loop.add_reader(self._master, self._read)
        self._link = directory / f"tty-{device_name(number)}"
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(os.ttyname(self._slave))

    @property
    def held(self) -> int:
        """Samples that are not acknowledged."""
        return len(self._held)

    def close(self) -> None:
        """Unplug it."""
        self._closed = True
        self._loop.remove_reader(self._master)
        self._link.unlink(missing_ok=True)
        os.close(self._master)
        os.close(self._slave)

    async def introduce(self) -> None:
        """HELLO until it is answered."""
        while not self.introduced.is_set():
            self._say_hello()
            with suppress(TimeoutError):
                async with asyncio.timeout(HELLO_INTERVAL_S):
                    await self.introduced.wait()

    async def measure(self, begin: float, samples: int) -> None:
        """Take `samples` samples, the first at `begin` of the loop's time, and wait for their acknowledgement."""
        for number in range(samples):
            due = begin + number * self._interval_s
            await asyncio.sleep(due - self._loop.time())
            self._resend()
            self.late_s_max = max(self.late_s_max, self._loop.time() - due)
            self._take()
        end = self._loop.time() + GRACE_S
        while self._held and self._loop.time() < end:
            await asyncio.sleep(RESEND_S / 4)
            self._resend()

    def _take(self) -> None:
        sequence = self.taken
        tick_ms, _ = self._tick()
        self.taken += 1
        oldest = min(self._held, default=sequence)
        sample = Data(run_of(self._number), sequence, oldest, tick_ms, 0, self._payload(sequence))
        sent_s = self._send(sample)
        self._held[sequence] = _Held(sample, sent_s, sent_s)

    def _payload(self, sequence: int) -> bytes:
        whole, hundredths = divmod(centi_celsius(self._number, sequence), 100)
        return b'{"celsius":%d.%02d}' % (whole, hundredths)

    def _resend(self) -> None:
        now = self._loop.time()
        for held in self._held.values():
            if held.last_s < now - RESEND_S:
                self.resent += 1
                held.last_s = self._send(held.sample)

    def _say_hello(self) -> None:
        oldest = min(self._held, default=self.taken)
        name = device_name(self._number)
        self._send(Hello(BOOT, _incarnation(self._number), 1, oldest, self.taken, name, "feeder", ("thermo",)))

    def _send(self, frame: Frame) -> float:
        """Write a frame, all at once or as the line's speed lets it pass; give the time of its last byte."""
        data = encode_frame(frame)
        now = self._loop.time()
        if not self._piece_bytes:
            self._write(data)
            return now
        at = max(now, self._line_free_at)
        for begin in range(0, len(data), self._piece_bytes):
            piece = data[begin : begin + self._piece_bytes]
            at += len(piece) / BYTES_PER_S
            self._loop.call_at(at, self._write, piece)
        self._line_free_at = at
        return at

    def _write(self, data: bytes) -> None:
        # Bytes that nobody reads are lost, as on a line. A piece may be due when all is over.
        if not self._closed:
            with suppress(BlockingIOError):
                os.write(self._master, data)

    def _tick(self) -> tuple[int, int]:
        """The sensor's clock: milliseconds, and microseconds beside them."""
        ms, us = divmod(int(self._loop.time() * 1e6), 1000)
        return ms % 2**32, us

    def _read(self) -> None:
        for frame in self.decoder.feed(os.read(self._master, READ_BYTES_MAX)):
            match frame:
                case Ack():
                    self._acknowledge(frame)
                case Probe():
                    self._send(Reply(frame.nonce, *self._tick()))
                case HelloRequest():
                    self._say_hello()

    def _acknowledge(self, ack: Ack) -> None:
        if ack.run != run_of(self._number):
            return
        self.introduced.set()
        now = self._loop.time()
        named = [n for n in self._held if n < ack.next or (n > ack.next and ack.bitmap >> (n - ack.next - 1) & 1)]
        for sequence in named:
            self.latencies_s.append(now - self._held.pop(sequence).first_s)


async def feed(  # noqa: PLR0913, PLR0917 - the options
    directory: Path,
    ports: int,
    seconds: float,
    rate: float = 10.0,
    piece_bytes: int = 0,
    connected: Callable[[], None] = lambda: None,
) -> Fed:
    """Run the sensors from the first HELLO to the last ACK; `connected` is called when the last HELLO was answered."""
    directory.mkdir(parents=True, exist_ok=True)
    sensors = [Sensor(number, directory, 1 / rate, piece_bytes) for number in range(ports)]
    try:
        async with asyncio.TaskGroup() as introductions:
            for sensor in sensors:
                introductions.create_task(sensor.introduce())
        connected()
        begin = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as measurements:
            for number, sensor in enumerate(sensors):
                phase = begin + number / ports / rate
                measurements.create_task(sensor.measure(phase, round(seconds * rate)))
    finally:
        for sensor in sensors:
            sensor.close()
    latencies_ms = sorted(s * 1000 for s in itertools.chain.from_iterable(each.latencies_s for each in sensors))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Fed(
        taken=[sensor.taken for sensor in sensors],
        unacknowledged=sum(sensor.held for sensor in sensors),
        resent=sum(sensor.resent for sensor in sensors),
        damaged=sum(sensor.decoder.defects.total() for sensor in sensors),
        late_ms_max=round(max(sensor.late_s_max for sensor in sensors) * 1000, 3),
        ack_p50_ms=_quantile(latencies_ms, 0.5),
        ack_p99_ms=_quantile(latencies_ms, 0.99),
        ack_max_ms=_quantile(latencies_ms, 1),
        cpu_s=round(used.ru_utime + used.ru_stime, 3),
    )


def _quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) if ordered else 0.0


def _say(event: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the options, feed, and report the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--ports", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--piece-bytes", type=int, default=0)
    asked = parser.parse_args()
    running = feed(
        asked.directory,
        asked.ports,
        asked.seconds,
        asked.rate,
        asked.piece_bytes,
        connected=lambda: _say({"event": "connected"}),
    )
    fed = asyncio.run(running)
    _say({"event": "done"} | msgspec.structs.asdict(fed))


if __name__ == "__main__":
    main()
