"""Keeps the clocks of all sensors that send a tick, by run (one boot of one sensor), in memory and in the buffer.

The clocks are kept as marks, in commits that store readings, so they survive a restart of the daemon. A restart of the
box voids them: CLOCK_BOOTTIME begins anew.
"""

from collections.abc import Iterator, Mapping

import msgspec
import structlog

from gateway.clock.oscillators import Kind
from gateway.clock.sensor_clock import DeviceClock
from gateway.clock.slews import Slews
from gateway.reading import Mark

SENSOR_CLOCK_MARKS = "clock/device/"
RUNS_MAX = 10_000
"""Clocks kept in memory, at most four kilobytes each. The least recently used go first."""
SAVE_INTERVAL_US = 10_000_000
SAVED_AT_ONCE_MAX = 50
"""Clocks written in one commit, once in SAVE_INTERVAL_US. Each writes half a kilobyte to the card."""
SAVED_AGAIN_US = 300_000_000
"""Least time between two writes of one clock. Its older state is just as true, only less exact."""
_UNREADABLE = "the saved clock of a sensor cannot be read: the clock is learnt anew"

log = structlog.get_logger()


class Run:
    """One boot of one sensor, and its clock."""

    __slots__ = ("_clock", "_saved", "_saved_version", "_slews", "boot", "device", "kind", "save_due_us", "stream")

    def __init__(  # noqa: PLR0913, PLR0917 - what it is of
        self, device: str, stream: str, boot: str, kind: Kind, slews: Slews, saved: bytes | None = None
    ) -> None:
        """`saved` is the clock as kept. It is decoded only when it is needed, as that takes half a millisecond."""
        self.device = device
        self.stream = stream
        """Empty if the device numbers all its samples together; else the topic whose samples have their own numbers."""
        self.boot = boot
        self.kind: Kind = kind
        self.save_due_us = 0
        self._slews = slews
        self._saved = saved
        self._saved_version = 0
        self._clock: DeviceClock | None = None

    @property
    def clock(self) -> DeviceClock:
        """The run's clock. It knows nothing if nothing was learnt, or if the kept clock cannot be read."""
        if self._clock is None:
            self._clock = self._recalled()
            self._saved, self._saved_version = None, self._clock.fit.version
        return self._clock

    @property
    def has_news(self) -> bool:
        """Whether more was learnt than is kept."""
        return self._clock is not None and self._clock.fit.version != self._saved_version

    @property
    def mark(self) -> str:
        """Key of the clock in the buffer. The sensor's next boot overwrites the clock of the former one."""
        return f"{SENSOR_CLOCK_MARKS}{self.device}/{self.stream}"

    def save(self) -> bytes:
        """The clock, encoded to be kept."""
        self._saved_version = self.clock.fit.version
        return self.clock.to_bytes()

    def _recalled(self) -> DeviceClock:
        if self._saved is not None:
            try:
                return DeviceClock.from_bytes(self._saved, self.kind, self._slews)
            except ValueError as error:
                log.warning(_UNREADABLE, device=self.device, error=str(error))
        return DeviceClock(self.kind, self._slews)


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    gateway_boot: str
    device: str
    stream: str
    boot: str
    kind: Kind
    clock: bytes


class DeviceClocks:
    """All sensors' clocks in one boot of the gateway."""

    def __init__(self, gateway_boot: str = "", runs_max: int = RUNS_MAX) -> None:
        self._gateway_boot = gateway_boot
        self.slews = Slews()
        """Slewing of the gateway's own clock, shared by all clocks."""
        self._runs_max = runs_max
        self._runs: dict[tuple[str, str, str], Run] = {}
        """The most recently used run is last."""
        self._kept: dict[str, str] = {}
        """Marks on disk, each with its sensor's boot."""
        self._forgotten: list[Mark] = []
        """Deletions of marks whose runs left memory, so that the disk is bounded too."""
        self.save_due_us = 0
        """CLOCK_BOOTTIME before which `marks` need not be called."""

    def of(self, device: str, boot: str, kind: Kind = "rc", stream: str = "") -> DeviceClock:
        """The clock of a run. The clock of a new run knows nothing."""
        run = self._runs.pop((device, stream, boot), None)
        if run is None or run.kind != kind:
            self._make_room()
            run = Run(device, stream, boot, kind, self.slews)
        self._runs[device, stream, boot] = run
        return run.clock

    def find(self, device: str, boot: str, stream: str = "") -> DeviceClock | None:
        """The clock of a run, if it is known."""
        run = self._runs.get((device, stream, boot))
        return None if run is None else run.clock

    def find_of(self, device: str, boot: str, stream: str) -> DeviceClock | None:
        """The clock of a reading's tick: that of its stream, or else that of its device."""
        return self.find(device, boot, stream) or self.find(device, boot)

    def runs(self) -> Iterator[Run]:
        """All runs, the most recently used last."""
        return iter(self._runs.values())

    def newest_runs(self) -> Iterator[Run]:
        """The most recently used run of each device, or of each of its streams."""
        return iter({(run.device, run.stream): run for run in self._runs.values()}.values())

    def marks(self, now_us: int, *, all_of_them: bool = False) -> list[Mark]:
        """Marks for the next commit, of clocks to keep and clocks to delete. Set `all_of_them` at the daemon's end."""
        self.save_due_us = now_us + SAVE_INTERVAL_US
        due = [run for run in self.newest_runs() if run.has_news]
        if not all_of_them:
            due = sorted((run for run in due if run.save_due_us <= now_us), key=lambda run: run.save_due_us)
            due = due[:SAVED_AT_ONCE_MAX]
        marks, self._forgotten = self._forgotten, []
        for run in due:
            run.save_due_us = now_us + SAVED_AGAIN_US
            self._kept[run.mark] = run.boot
            saved = _Saved(self._gateway_boot, run.device, run.stream, run.boot, run.kind, run.save())
            marks.append(Mark(run.mark, msgspec.msgpack.encode(saved)))
        return marks

    def restore(self, marks: Mapping[str, bytes]) -> list[Mark]:
        """Go on with the clocks that an earlier start in this boot kept. Returns deletions of all other marks."""
        forgotten = []
        for key, value in marks.items():
            found = saved_run(value, self.slews)
            if found is None:
                log.warning(_UNREADABLE, mark=key)
            if found is None or found[0] != self._gateway_boot or len(self._runs) >= self._runs_max:
                forgotten.append(Mark(key, None))
                continue
            run = found[1]
            self._runs[run.device, run.stream, run.boot] = run
            self._kept[run.mark] = run.boot
        return forgotten

    def _make_room(self) -> None:
        while len(self._runs) >= self._runs_max:
            run = self._runs.pop(next(iter(self._runs)))
            if self._kept.get(run.mark) == run.boot:
                del self._kept[run.mark]
                self._forgotten.append(Mark(run.mark, None))


def saved_run(value: bytes, slews: Slews | None = None) -> tuple[str, Run] | None:
    """The gateway's boot and the run that a mark holds; None if the mark cannot be read."""
    try:
        saved = msgspec.msgpack.decode(value, type=_Saved)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    slews = Slews() if slews is None else slews
    return saved.gateway_boot, Run(saved.device, saved.stream, saved.boot, saved.kind, slews, saved.clock)
