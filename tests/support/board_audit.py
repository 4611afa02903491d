"""Compares what simulated boards know of their samples with what stands in Kafka: missing, wrong, mistimed, made up.

Pure functions: `known_of` reads a board's ledger and samples, `in_kafka` and `lost_in` take what a consumer gave.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from aiokafka import ConsumerRecord

EXAMPLES_MAX = 5
"""Examples that are named of each kind of fault."""
SENSOR_DROPPED = "sensor-ring-overflow"
_SPAN = ("count", "first_sequence", "last_sequence")


class Sample(NamedTuple):
    """One measurement of one run of a board."""

    device: str
    boot: str
    """Boot counter and incarnation: `7-1a2b3c4d`."""
    sequence: int


@dataclass(slots=True)
class Known:
    """The boards' account: the value and time of each sample that they took, and its fate."""

    centi_celsius: dict[Sample, int] = field(default_factory=dict)
    taken_us: dict[Sample, int] = field(default_factory=dict)
    """CLOCK_BOOTTIME, in truth; of boards whose times are to be judged."""
    acknowledged: set[Sample] = field(default_factory=set)
    dropped: set[Sample] = field(default_factory=set)
    ended: set[tuple[str, str]] = field(default_factory=set)
    """Runs (device, boot) that a reset has ended: what they had not told yet of what they dropped went with it."""

    def add(self, other: "Known") -> None:
        """Take in another board's."""
        self.centi_celsius |= other.centi_celsius
        self.taken_us |= other.taken_us
        self.acknowledged |= other.acknowledged
        self.dropped |= other.dropped
        self.ended |= other.ended


class Told(NamedTuple):
    """The loss records of one run: the number of lost samples, and the first and last sequence."""

    samples: int
    first: int
    last: int

    def and_also(self, other: "Told") -> "Told":
        """Both together."""
        return Told(self.samples + other.samples, min(self.first, other.first), max(self.last, other.last))


class Arrived(NamedTuple):
    """A record of a sample in Kafka."""

    sample: Sample
    ce_id: str
    centi_celsius: int
    estimated: tuple[int, int] | None = None
    """When it was taken as the gateway found by its tick, and the bound of that time's error; microseconds."""


@dataclass(frozen=True, slots=True)
class Account:
    """Result of a comparison. Faults are sentences. A kind without faults is empty."""

    acknowledged: int
    arrived: int
    """Samples that stand in Kafka, acknowledged or not."""
    missing: tuple[str, ...]
    """Acknowledged, and not in Kafka."""
    wrong: tuple[str, ...]
    """In Kafka with another value than was measured."""
    mistimed: tuple[str, ...]
    """In Kafka with an estimated time that is further from the true one than its bound says."""
    twice: tuple[str, ...]
    """In Kafka under two ids. Only boot and sequence tell that they are one."""
    made_up: tuple[str, ...]
    """In Kafka, and never measured."""
    unexplained: tuple[str, ...]
    """Runs of which the ring dropped more than Kafka has and loss records tell of, or less."""
    uncounted: tuple[str, ...]
    """Samples that loss records call perhaps lost."""

    @property
    def faults(self) -> tuple[str, ...]:
        return (*self.faults_of_killed, *self.twice, *self.uncounted)

    @property
    def faults_of_killed(self) -> tuple[str, ...]:
        """The faults if the gateway was killed: a sample that Kafka had, and no sensor was told of, comes again.

        And which samples only Kafka had, nobody knows any more.
        """
        return (*self.missing, *self.wrong, *self.mistimed, *self.made_up, *self.unexplained)

    def __str__(self) -> str:
        lines = [f"{self.acknowledged} acknowledged, {self.arrived} in Kafka"]
        for kind in ("missing", "wrong", "mistimed", "twice", "made_up", "unexplained", "uncounted"):
            faults = getattr(self, kind)
            lines += [f"{kind}: {len(faults)}", *(f"  {fault}" for fault in faults[:EXAMPLES_MAX])]
        return "\n".join(lines)


def known_of(ledger: str, samples: str) -> Known:
    """Read a board's ledger (a JSON line for each boot) and its samples (CSV; docs/firmware.md)."""
    known = Known()
    device_of: dict[str, str] = {}
    runs = [json.loads(line) for line in ledger.splitlines()]
    known.ended.update((line["device"], line["boot"]) for line in runs[:-1])
    for line in runs:
        device = device_of[line["boot"]] = line["device"]
        for name, kept in (("acknowledged", known.acknowledged), ("dropped", known.dropped)):
            for first, last in line[name]:
                kept.update(Sample(device, line["boot"], sequence) for sequence in range(first, last + 1))
    # A line that is just being written is left out.
    for row in csv.DictReader(io.StringIO(samples[: samples.rfind("\n") + 1])):
        sample = Sample(device_of[row["boot"]], row["boot"], int(row["sequence"]))
        known.centi_celsius[sample] = int(row["centi_celsius"])
        known.taken_us[sample] = int(row["boottime_us"])
    return known


def in_kafka(records: Iterable[ConsumerRecord]) -> list[Arrived]:
    """Records of the boards' topics. Raises KeyError or ValueError for one that is no sample of a board."""
    arrived = []
    for record in records:
        headers = {name: value.decode() for name, value in record.headers}
        celsius = json.loads(record.value, parse_float=Decimal)["celsius"]
        sample = Sample(record.key.decode(), headers["ce_deviceboot"], int(headers["ce_devicesequence"]))
        estimated = None
        if headers["ce_timequality"] == "estimated":
            estimated = int(headers["ce_boottime"]), int(headers["ce_timeerror"])
        arrived.append(Arrived(sample, headers["ce_id"], int(celsius * 100), estimated))
    return arrived


def lost_in(events: Iterable[ConsumerRecord]) -> dict[tuple[str, str], Told]:
    """Samples that rings dropped, by loss records, by device and its boot. Repeated records count once."""
    lost: dict[tuple[str, str], Told] = {}
    seen = set()
    for record in events:
        headers = {name: value.decode() for name, value in record.headers}
        body = json.loads(record.value)
        if body.get("reason") == SENSOR_DROPPED and body["count"] and headers["ce_id"] not in seen:
            seen.add(headers["ce_id"])
            run, told = (body["device"], body["device_boot"]), Told(*(body[name] for name in _SPAN))
            lost[run] = lost[run].and_also(told) if run in lost else told
    return lost


def perhaps_lost_in(events: Iterable[ConsumerRecord]) -> set[Sample]:
    """Samples that rings may have dropped, by loss records without a count."""
    bodies = [json.loads(record.value) for record in events]
    return {
        Sample(body["device"], body["device_boot"], sequence)
        for body in bodies
        if body.get("reason") == SENSOR_DROPPED and not body["count"]
        for sequence in range(body["first_sequence"], body["last_sequence"] + 1)
    }


def heard_in(events: Iterable[ConsumerRecord]) -> dict[tuple[str, str], int]:
    """The oldest sequence that a serial sensor held when it was first heard, by device and its boot.

    What it had dropped before is in no loss record: nobody knows that no other gateway has it.
    """
    heard: dict[tuple[str, str], int] = {}
    for record in events:
        body = json.loads(record.value)
        if "oldest" in body:
            run = body["device"], body["boot"]
            heard[run] = min(heard.get(run, body["oldest"]), body["oldest"])
    return heard


def settle(
    known: Known,
    arrived: Iterable[Arrived],
    lost: Mapping[tuple[str, str], Told],
    heard: Mapping[tuple[str, str], int],
    perhaps_lost: Collection[Sample] = frozenset(),
) -> Account:
    """Compare. Raises ValueError where nothing was acknowledged."""
    if not known.acknowledged:
        raise ValueError("no board got any acknowledgement: there is nothing to compare")
    ids: dict[Sample, set[str]] = defaultdict(set)
    wrong, mistimed, made_up = [], [], []
    for each in arrived:
        ids[each.sample].add(each.ce_id)
        measured = known.centi_celsius.get(each.sample)
        if measured is None:
            made_up.append(f"{each.sample}")
        elif measured != each.centi_celsius:
            wrong.append(f"{each.sample} is {each.centi_celsius}, was measured as {measured}")
        off_us = _off_us(each, known.taken_us)
        if off_us is not None and off_us > 0:
            mistimed.append(f"{each.sample} was taken {off_us} us outside its bound: {each.estimated}")
    gone: dict[tuple[str, str], Told] = {}
    for sample in known.dropped - ids.keys() - set(perhaps_lost):
        run, told = (sample.device, sample.boot), Told(1, sample.sequence, sample.sequence)
        if sample.sequence >= heard.get(run, 0):
            gone[run] = gone[run].and_also(told) if run in gone else told
    return Account(
        acknowledged=len(known.acknowledged),
        arrived=len(ids),
        missing=tuple(f"{each} was acknowledged" for each in sorted(known.acknowledged - ids.keys())),
        wrong=tuple(wrong),
        mistimed=tuple(mistimed),
        twice=tuple(f"{each} has {', '.join(sorted(own))}" for each, own in ids.items() if len(own) > 1),
        made_up=tuple(made_up),
        unexplained=tuple(
            f"of {run} {gone.get(run)} were dropped, and loss records tell of {lost.get(run)}"
            for run in sorted(gone.keys() | lost.keys())
            if not _explains(lost.get(run), gone.get(run), ended=run in known.ended)
        ),
        uncounted=tuple(f"{each} is perhaps lost" for each in sorted(perhaps_lost)),
    )


def _off_us(arrived: Arrived, taken_us: Mapping[Sample, int]) -> int | None:
    """Distance of a sample from the bound of its time; 0 or less means within. None if there is nothing to compare."""
    if arrived.estimated is None or arrived.sample not in taken_us:
        return None
    event_us, error_us = arrived.estimated
    return abs(event_us - taken_us[arrived.sample]) - error_us


def _explains(told: Told | None, gone: Told | None, *, ended: bool) -> bool:
    """Whether loss records tell of all that is gone, and of nothing else; of a run that has ended, of a part of it."""
    if told is None or gone is None:
        return told == gone or (told is None and ended)
    return told == gone or (
        ended and told.samples < gone.samples and gone.first <= told.first and told.last <= gone.last
    )
