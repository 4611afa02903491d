"""Whether windows are final, computed in plain Python from all that is in `log` at once. No Spark in here.

Written from docs/tables.md and docs/kafka-records.md: sets of numbers and of losses, nothing kept from before.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

UNKNOWN_US = 2**63 - 1
ALWAYS = float("inf")
ON_ITS_WAY_US = 10_000_000
NO_READINGS = {"event-refused", "gateway-events-dropped", "will-not-reported"}


class Reading(NamedTuple):
    """A good reading that stands in `log`."""

    device: str
    stream: str
    boot: str | None
    number: int | None
    time_us: int
    error_us: int
    gateway: str
    counter: str = ""


class Loss(NamedTuple):
    """A loss record; what is None it does not say."""

    gateway: str
    told_us: int
    told_error_us: int
    told_boot: str
    told_boottime_us: int
    device: str | None
    reason: str
    lost: int
    boot: str
    first_boottime_us: int
    last_boottime_us: int
    device_boot: str | None
    first_sequence: int | None
    last_sequence: int | None


QUARANTINE = "gateway-quarantine"
"""The topic that nobody waits for."""


class Waiting(NamedTuple):
    """Rows that still wait, according to a heartbeat."""

    rows: int
    from_us: int | None
    to_us: int | None


class Beat(NamedTuple):
    """A heartbeat."""

    gateway: str
    buffer: str
    time_us: int
    error_us: int
    boot: str
    boottime_us: int
    offsets: Mapping[str, Mapping[int, int]]
    pending: list[Waiting]
    quarantined: list[Waiting]
    promises: bool


@dataclass(slots=True)
class Site:
    """All that was read of one namespace; heartbeats in Kafka's order."""

    readings: list[Reading] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    set_aside: set[tuple[str, str]] = field(default_factory=set)
    """Gateway and buffer."""
    held: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    retired_from_us: dict[str, int] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    """Topics; of others it is told that nobody reads them."""


class GapRow(NamedTuple):
    """One row of `gaps`."""

    device: str
    stream: str | None
    counter: str | None
    boot: str
    first: int
    last: int
    explained: bool


class Hole(NamedTuple):
    """Numbers of a counter that are missing, and between which times they were taken."""

    device: str
    boot: str
    stream: str | None
    counter: str | None
    first: int
    last: int
    from_us: float
    to_us: float

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class Counter(NamedTuple):
    """One counter of a device in one boot."""

    device: str
    boot: str
    stream: str | None
    counter: str | None
    streams: set[str]
    numbers: dict[int, Reading]

    def ends(self) -> list[int]:
        return sorted(n for n in self.numbers if n - 1 not in self.numbers or n + 1 not in self.numbers)


def earliest(time_us: int, error_us: int) -> float:
    return -ALWAYS if error_us == UNKNOWN_US else time_us - error_us


def latest(time_us: int, error_us: int) -> float:
    return ALWAYS if error_us == UNKNOWN_US else time_us + error_us


def counters(site: Site) -> list[Counter]:
    """One for all streams of a boot, or those that readings name where a number is in two of them."""
    boots: dict[tuple[str, str], list[Reading]] = defaultdict(list)
    for reading in site.readings:
        if reading.boot is not None and reading.number is not None:
            boots[reading.device, reading.boot].append(reading)
    found = []
    for (device, boot), readings in boots.items():
        numbers = [reading.number for reading in readings]
        if len(set(numbers)) == len(numbers):
            streams = {reading.stream for reading in readings}
            found.append(Counter(device, boot, None, None, streams, counted(readings)))
            continue
        for stream, name in sorted({(reading.stream, reading.counter) for reading in readings}):
            own = [reading for reading in readings if (reading.stream, reading.counter) == (stream, name)]
            found.append(Counter(device, boot, stream, name or None, {stream}, counted(own)))
    return found


def counted(readings: Iterable[Reading]) -> dict[int, Reading]:
    return {reading.number: reading for reading in readings if reading.number is not None}


def holes(counter: Counter) -> list[Hole]:
    """Numbers that are missing between the first and the last one."""
    ends = counter.ends()
    missing = [n + 1 for n in ends if n + 1 not in counter.numbers and n != ends[-1]]
    found = []
    for first in missing:
        last = min(n for n in ends if n > first) - 1
        before = [counter.numbers[n] for n in ends if n < first]
        after = [counter.numbers[n] for n in ends if n > last]
        span = [
            max(earliest(reading.time_us, reading.error_us) for reading in before),
            min(latest(reading.time_us, reading.error_us) for reading in after),
        ]
        found.append(Hole(*counter[:2], counter.stream, counter.counter, first, last, min(span), max(span)))
    return found


def lost_between(site: Site, loss: Loss) -> tuple[float, float]:
    """When what was lost was taken, by all that is known of its boot's clock."""
    known = [(beat.boottime_us, beat.time_us, beat.error_us) for beat in site.beats if is_surest(site, loss, beat)]
    if loss.told_boot == loss.boot:
        known.append((loss.told_boottime_us, loss.told_us, loss.told_error_us))
    told = latest(loss.told_us, loss.told_error_us)

    def at(boottime_us: int) -> tuple[int, int]:
        # Half a millisecond a second away.
        ways = [
            (error_us - (-abs(boottime_us - there_us) // 2_000), time_us + boottime_us - there_us)
            for there_us, time_us, error_us in known
            if error_us != UNKNOWN_US
        ]
        return min([*ways, (UNKNOWN_US, 0)])

    first, last = at(loss.first_boottime_us), at(loss.last_boottime_us)
    to_us = min(latest(last[1], last[0]), told)
    return min(earliest(first[1], first[0]), to_us), to_us


def is_surest(site: Site, loss: Loss, beat: Beat) -> bool:
    """True for the heartbeat of a boot that knew the time best. If several did, the first counts."""
    same = [other for other in site.beats if (other.gateway, other.boot) == (loss.gateway, loss.boot)]
    return beat is min(same, key=lambda other: (other.error_us, other.boottime_us), default=None)


def of_readings(site: Site) -> list[Loss]:
    return [loss for loss in site.losses if loss.reason not in NO_READINGS]


def explained(site: Site, device: str) -> set[Hole]:
    """The holes of a device that counted losses explain."""
    missing = [hole for counter in counters(site) if counter.device == device for hole in holes(counter)]
    losses = [loss for loss in of_readings(site) if loss.device == device]
    by_numbers = {hole for hole in missing if explained_by_numbers(hole, missing, losses)}
    left = [hole for hole in missing if hole not in by_numbers]
    timed = [
        (lost_between(site, loss), loss) for loss in losses if loss.device_boot is None or loss.first_sequence is None
    ]
    return by_numbers | {hole for hole in left if explained_by_time(hole, left, timed)}


def told_of(site: Site, device: str) -> set[Hole]:
    """The holes of a device that losses explain, if losses that nobody could count tell of all their numbers."""
    known = [counter for counter in counters(site) if counter.device == device]
    boots = [counter.boot for counter in known]
    missing = [hole for counter in known for hole in holes(counter)]
    losses = [loss for loss in of_readings(site) if loss.device == device]

    def is_told(hole: Hole) -> bool:
        uncounted = [loss for loss in losses if loss.device_boot == hole.boot and not loss.lost]
        numbers = {number for loss in uncounted for number in numbers_of(loss)}
        return boots.count(hole.boot) == 1 and explained_by_numbers(hole, missing, losses, numbers)

    return explained(site, device) | {hole for hole in missing if is_told(hole)}


def numbers_of(loss: Loss) -> set[int]:
    """The numbers of a loss."""
    return set() if loss.first_sequence is None else set(range(loss.first_sequence, (loss.last_sequence or 0) + 1))


def explained_by_numbers(
    hole: Hole, missing: list[Hole], losses: list[Loss], others: Container[int] = frozenset()
) -> bool:
    """Whether counted losses explain all numbers of a hole but `others`."""
    numbered = [loss for loss in losses if loss.device_boot == hole.boot and numbers_of(loss) and loss.lost]

    def is_missing(number: int) -> int:
        return sum(other.boot == hole.boot and other.first <= number <= other.last for other in missing)

    def speaks_of(number: int) -> bool:
        """Whether a loss that overlaps others tells of this number, and all that are missing there are lost."""
        together = [loss for loss in numbered if number in numbers_of(loss)]
        while more := [
            loss
            for loss in numbered
            if loss not in together and any(numbers_of(loss) & numbers_of(one) for one in together)
        ]:
            together += more
        # The same record twice is two losses.
        together = [loss for loss in numbered if loss in together]
        numbers = {n for loss in together for n in numbers_of(loss)}
        return bool(together) and sum(loss.lost for loss in together) >= sum(is_missing(n) for n in numbers)

    return all(number in others or speaks_of(number) for number in range(hole.first, hole.last + 1))


def explained_by_time(hole: Hole, left: list[Hole], timed: list[tuple[tuple[float, float], Loss]]) -> bool:
    def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[1] and other[0] <= one[1]

    spans = [((other.from_us, other.to_us), other.size, 0) for other in left]
    spans += [(span, 0, loss.lost) for span, loss in timed]
    group = {index for index, (span, _, _) in enumerate(spans) if span == (hole.from_us, hole.to_us)}
    while (
        more := {index for index, one in enumerate(spans) if any(overlap(one[0], spans[other][0]) for other in group)}
        - group
    ):
        group |= more
    near = [
        loss.lost
        for span, loss in timed
        if overlap(span, (hole.from_us, hole.to_us)) and loss.device_boot in {None, hole.boot}
    ]
    enough_in_all = sum(spans[index][2] for index in group) >= sum(spans[index][1] for index in group)
    return sum(near) >= hole.size and enough_in_all and bool(near)


def gaps(site: Site) -> list[GapRow]:
    rows = []
    for counter in counters(site):
        known = told_of(site, counter.device)
        rows += [
            GapRow(hole.device, hole.stream, hole.counter, hole.boot, hole.first, hole.last, hole in known)
            for hole in holes(counter)
        ]
    return sorted(rows, key=lambda row: (row.device, row.stream or "", row.counter or "", *row[3:]))


def status(site: Site, device: str, stream: str, start_us: int, end_us: int) -> tuple[str, str | None]:
    """Status and basis of one window."""
    own = [counter for counter in counters(site) if counter.device == device and stream in counter.streams]
    known = explained(site, device)

    def may_lie_in(hole: Hole) -> bool:
        return hole.from_us < end_us and hole.to_us > start_us

    # Of a boot all counters must: of another one something may still come.
    failing = {counter.boot for counter in own if not proves(counter, known, start_us, end_us)}
    proven = [counter for counter in own if counter.boot not in failing]
    if proven:
        lossy = any(hole in known and may_lie_in(hole) for counter in proven for hole in holes(counter))
        return "complete_with_loss" if lossy else "complete", "sequence"
    near = [hole for counter in own for hole in holes(counter) if may_lie_in(hole)]
    if any(hole not in told_of(site, device) for hole in near):
        return "provisional", "sequence"
    heard = [r.time_us for r in site.readings if (r.device, r.stream) == (device, stream) and r.error_us != UNKNOWN_US]
    if not any(time_us >= end_us for time_us in heard):
        return "provisional", None
    serving = {reading.gateway for reading in site.readings if reading.device == device}
    if not all(has_come_past(site, gateway, start_us, end_us) for gateway in serving):
        return "provisional", "watermark"
    lost = False
    for loss in of_readings(site):
        if loss.device == device or (loss.device is None and loss.gateway in serving):
            from_us, to_us = lost_between(site, loss)
            lost |= from_us < end_us and to_us >= start_us
    return "complete_with_loss" if lost or near else "complete", "watermark"


def proves(counter: Counter, known: set[Hole], start_us: int, end_us: int) -> bool:
    """Whether the numbers go from before the window to after it, but for holes that are explained."""
    for first in counter.ends():
        for last in counter.ends():
            begin, end = counter.numbers[first], counter.numbers[last]
            is_first, is_last = first - 1 not in counter.numbers, last + 1 not in counter.numbers
            between = [hole for hole in holes(counter) if first < hole.first and hole.last < last]
            if (
                first <= last
                and is_first
                and is_last
                and latest(begin.time_us, begin.error_us) <= start_us
                and earliest(end.time_us, end.error_us) >= end_us
                and all(hole in known for hole in between)
            ):
                return True
    return False


def counts(site: Site, beat: Beat) -> bool:
    return all(
        offset <= site.held.get(topic, {}).get(partition, 0)
        for topic, partitions in beat.offsets.items()
        for partition, offset in partitions.items()
        if topic != QUARANTINE
    )


def has_come_past(site: Site, gateway: str, start_us: int, end_us: int) -> bool:
    """Whether a gateway has nothing more of a window."""
    if site.retired_from_us.get(gateway, ALWAYS) <= start_us:
        return True
    buffers = {beat.buffer for beat in site.beats if beat.gateway == gateway}
    in_use = sorted(buffer for buffer in buffers if (gateway, buffer) not in site.set_aside)
    return bool(in_use) and all(buffer_has(site, gateway, buffer, start_us, end_us) for buffer in in_use)


def buffer_has(site: Site, gateway: str, buffer: str, start_us: int, end_us: int) -> bool:
    of_gateway = [beat for beat in site.beats if beat.gateway == gateway]
    own = [place for place, beat in enumerate(of_gateway) if beat.buffer == buffer]
    since = [latest(beat.time_us, beat.error_us) for beat in of_gateway[own[-1] + 1 :] if beat.error_us != UNKNOWN_US]
    if since and since[0] <= start_us:
        return True
    told = [of_gateway[place] for place in own if counts(site, of_gateway[place])]
    if not told or not told[-1].promises:
        return False
    beat = told[-1]
    waits = [
        (span.from_us is None or span.from_us < end_us)
        and (span.to_us is None or span.to_us + ON_ITS_WAY_US >= start_us)
        for span in [*beat.pending, *beat.quarantined]
    ]
    return not any(waits) and earliest(beat.time_us, beat.error_us) >= end_us + ON_ITS_WAY_US


def statuses(
    site: Site, windows: Iterable[tuple[str, str, int, int]]
) -> dict[tuple[str, str, int, int], tuple[str, str | None]]:
    return {window: status(site, *window) for window in windows}
