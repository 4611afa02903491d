"""The clocks of all sensors that send a tick: by run (one boot of one sensor), in memory and in the buffer.

What was learnt is kept as marks, in commits that store readings, so that a restart of the daemon goes on with it. After
a restart of the box it is void: CLOCK_BOOTTIME began anew.
"""

from collections.abc import Iterator, Mapping

import msgspec
import structlog

from gateway.clock_device import DeviceClock, Kind
from gateway.reading import Mark

MARKS = "clock/device/"
RUNS_MAX = 10_000
"""Clocks that are kept in memory, four kilobytes each at the most; those that were used least lately go first."""
SAVE_INTERVAL_US = 10_000_000
SAVED_AT_ONCE_MAX = 50
"""Clocks written in one commit, no oftener than that: each is half a kilobyte for the card."""
SAVED_AGAIN_US = 300_000_000
"""One clock is written no oftener: an older state of it is as true, and less exact."""

log = structlog.get_logger()


class Run(msgspec.Struct):
    """One boot of one sensor, and its clock."""

    device: str
    stream: str
    """Empty where the device counts its samples through; else the topic whose samples are counted by themselves."""
    boot: str
    clock: DeviceClock
    saved_version: int = 0
    save_due_us: int = 0


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    gateway_boot: str
    device: str
    stream: str
    boot: str
    kind: Kind
    clock: bytes


class DeviceClocks:
    """All of one boot of the gateway."""

    def __init__(self, gateway_boot: str = "", runs_max: int = RUNS_MAX) -> None:
        self._gateway_boot = gateway_boot
        self._runs_max = runs_max
        self._runs: dict[tuple[str, str, str], Run] = {}
        """The one that was asked for last at the end."""
        self.save_due_us = 0
        """CLOCK_BOOTTIME: until then `marks` has nothing to say."""

    def of(self, device: str, boot: str, kind: Kind = "rc", stream: str = "") -> DeviceClock:
        """The clock of a run; one that knows nothing where the run is new."""
        run = self._runs.pop((device, stream, boot), None)
        if run is None or run.clock.kind != kind:
            if len(self._runs) >= self._runs_max:
                del self._runs[next(iter(self._runs))]
            run = Run(device, stream, boot, DeviceClock(kind))
        self._runs[device, stream, boot] = run
        return run.clock

    def find(self, device: str, boot: str, stream: str = "") -> DeviceClock | None:
        """The clock of a run, if it is known."""
        run = self._runs.get((device, stream, boot))
        return None if run is None else run.clock

    def runs(self) -> Iterator[Run]:
        """All of them, the one that was asked for last at the end."""
        return iter(self._runs.values())

    def marks(self, now_us: int, *, all_of_them: bool = False) -> list[Mark]:
        """What the next commit is to keep of what was learnt; all of it at the end."""
        self.save_due_us = now_us + SAVE_INTERVAL_US
        newest = {(run.device, run.stream): run for run in self._runs.values()}.values()
        due = [run for run in newest if run.clock.version != run.saved_version]
        if not all_of_them:
            due = sorted((run for run in due if run.save_due_us <= now_us), key=lambda run: run.save_due_us)
            due = due[:SAVED_AT_ONCE_MAX]
        for run in due:
            run.saved_version, run.save_due_us = run.clock.version, now_us + SAVED_AGAIN_US
        return [Mark(f"{MARKS}{run.device}/{run.stream}", self._encoded(run)) for run in due]

    def restore(self, marks: Mapping[str, bytes]) -> list[Mark]:
        """Go on with what an earlier start in this boot had learnt; give what is to be forgotten, as of other boots."""
        forgotten = []
        for key, value in marks.items():
            try:
                saved = msgspec.msgpack.decode(value, type=_Saved)
                if saved.gateway_boot != self._gateway_boot:
                    forgotten.append(Mark(key, None))
                    continue
                clock = DeviceClock.from_bytes(saved.clock, saved.kind)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                log.warning("what was known of a sensor's clock cannot be read: it is learnt anew", error=str(error))
                forgotten.append(Mark(key, None))
                continue
            run = Run(saved.device, saved.stream, saved.boot, clock, clock.version)
            self._runs[run.device, run.stream, run.boot] = run
        return forgotten

    def _encoded(self, run: Run) -> bytes:
        clock = run.clock
        saved = _Saved(self._gateway_boot, run.device, run.stream, run.boot, clock.kind, clock.to_bytes())
        return msgspec.msgpack.encode(saved)
