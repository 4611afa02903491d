"""Sites as Hypothesis draws them: small, each by itself, and many of them packed into one run of the job."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from tests.support.spark_oracle import KafkaRecord
from tests.support.spark_records import NOON, changed, reading, reading_headers

GATEWAYS, DEVICES = 3, 3
PARTITIONS = 2
"""Partitions of each site, once its topic has grown. Before, it has one."""
FAR = (datetime(2106, 2, 7, tzinfo=UTC), datetime(2000, 1, 1, tzinfo=UTC))
"""Clocks that ran over, or were never set."""

_GATEWAY, _DEVICE = st.integers(0, GATEWAYS - 1), st.integers(0, DEVICES - 1)
_SECOND = st.integers(0, 240)
_EARLIER = st.integers(0, 30)
_STEPS = st.one_of(
    st.tuples(st.just("measure"), _DEVICE, _GATEWAY, _SECOND),
    st.tuples(st.just("measure"), _DEVICE, _GATEWAY, _SECOND),
    st.tuples(st.just("send again"), _EARLIER, st.booleans()),
    st.tuples(st.just("roam"), _EARLIER, _GATEWAY),
    st.tuples(st.just("reset"), _DEVICE),
    st.tuples(st.just("far time"), _DEVICE, _GATEWAY, st.sampled_from(FAR)),
    st.tuples(st.just("unreadable"), _DEVICE, _GATEWAY),
    st.tuples(st.just("go"), _GATEWAY),
    st.tuples(st.just("come back"), _GATEWAY, st.integers(1, 40)),
    st.tuples(st.just("grow")),
)
Step = tuple[object, ...]


def sites(count: int) -> st.SearchStrategy[list[list[KafkaRecord]]]:
    """`count` independent sites. Each has its records in the order in which Kafka took them in."""
    weeks = st.lists(_STEPS, min_size=12, max_size=40)
    return st.lists(weeks, min_size=count, max_size=count).map(
        lambda found: [_Site(number).lived(steps) for number, steps in enumerate(found)]
    )


def batches_of(rng: random.Random, records: Sequence[KafkaRecord], count: int) -> list[list[KafkaRecord]]:
    """A split into batches, partitions at paces of their own; within a batch in any order."""
    places = {(record.topic, record.partition) for record in records}
    last = {place: sorted(rng.randrange(len(records)) for _ in range(count - 1)) for place in places}
    batches: list[list[KafkaRecord]] = [[] for _ in range(count)]
    for record in records:
        cuts = last[record.topic, record.partition]
        batches[sum(cut <= record.offset * len(places) for cut in cuts)].append(record)
    for batch in batches:
        rng.shuffle(batch)
    return batches


@dataclass(slots=True)
class _Site:
    number: int
    sent: list[KafkaRecord] = field(default_factory=list)
    """All that a gateway ever sent, in Kafka or on its way."""
    taken_in: list[KafkaRecord] = field(default_factory=list)
    held: dict[int, list[KafkaRecord]] = field(default_factory=dict)
    """Records that wait, by gateway that is away."""
    boots: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    """Next sequence of each device, in its present boot."""
    lanes: dict[int, int] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    partitions: int = 1
    now: datetime = NOON + timedelta(minutes=5)
    """Kafka's clock."""

    def lived(self, steps: Sequence[Step]) -> list[KafkaRecord]:
        for step in steps:
            self._do(*step)
        for gateway in list(self.held):
            self._come_back(gateway, 1)
        return self.taken_in

    def _do(self, what: object, *how: object) -> None:
        match (what, *how):
            case ("measure", int(device), int(gateway), int(second)):
                self._measure(device, gateway, NOON + timedelta(seconds=second))
            case ("send again", int(earlier), bool(in_doubt)) if self.sent:
                record = self.sent[-1 - earlier % len(self.sent)]
                doubt = [("ce_doubt", b"redelivered")] if in_doubt else []
                named = {name for name, _ in record.headers or []}
                headers = (record.headers or []) + (doubt if "ce_doubt" not in named else [])
                self._send(_gateway_of(record), replace(record, headers=headers))
            case ("roam", int(earlier), int(gateway)) if self.sent:
                self._roam(self.sent[-1 - earlier % len(self.sent)], gateway)
            case ("reset", int(device)):
                self.boots[device] = self.boots.get(device, 0) + 1
                self.sequences[device] = 0
            case ("far time", int(device), int(gateway), datetime() as time):
                self._measure(device, gateway, time)
            case ("unreadable", int(device), int(gateway)):
                self._measure(device, gateway, NOON, b'{"t": 2')
            case ("go", int(gateway)):
                self.held.setdefault(gateway, [])
            case ("come back", int(gateway), int(days)) if gateway in self.held:
                self._come_back(gateway, days)
            case ("grow",):
                self.partitions = PARTITIONS

    def _measure(self, device: int, gateway: int, time: datetime, payload: bytes | None = None) -> None:
        sequence = self.sequences.get(device, 0)
        self.sequences[device] = sequence + 1
        # The last device counts nothing.
        counted = f"{self.boots.get(device, 0)}-1a2b3c4d" if device < DEVICES - 1 else None
        headers = reading_headers(time=time, namespace=f"site-{self.number}", device_boot=counted)
        if counted is not None:
            headers = changed(headers, "ce_devicesequence", str(sequence))
        payload = payload or f'{{"t": {sequence}.{self.number}}}'.encode()
        self._send(gateway, self._named(reading(payload, headers, key=f"{device}".encode()), gateway))

    def _roam(self, record: KafkaRecord, gateway: int) -> None:
        """A sensor that got no acknowledgement gives the same reading to another gateway."""
        if _gateway_of(record) != gateway:
            self._send(gateway, self._named(record, gateway))

    def _named(self, record: KafkaRecord, gateway: int) -> KafkaRecord:
        """The record as a gateway has stored it, under a number of its own."""
        number = self.lanes.get(gateway, 0)
        self.lanes[gateway] = number + 1
        buffer, lane = f"{gateway:02x}{self.number:02x}" * 4, f"{self.number:012x}"
        headers = record.headers or []
        for name, text in (
            ("ce_id", f"{buffer}-{lane}-{number}"),
            ("ce_source", f"/site-{self.number}/gw-{gateway}"),
            ("ce_lane", lane),
            ("ce_lanesequence", str(number)),
        ):
            headers = changed(headers, name, text)
        return replace(record, headers=headers)

    def _send(self, gateway: int, record: KafkaRecord) -> None:
        self.sent.append(record)
        if gateway in self.held:
            self.held[gateway].append(record)
        else:
            self._take_in(record)

    def _come_back(self, gateway: int, days: int) -> None:
        self.now += timedelta(days=days)
        for record in self.held.pop(gateway):
            self._take_in(record)

    def _take_in(self, record: KafkaRecord) -> None:
        partition = self.number * PARTITIONS + int(record.key or b"0") % self.partitions
        offset = self.offsets.get(partition, 0)
        self.offsets[partition] = offset + 1
        self.now += timedelta(seconds=1)
        self.taken_in.append(replace(record, partition=partition, offset=offset, timestamp=self.now))


def _gateway_of(record: KafkaRecord) -> int:
    source = dict(record.headers or [])["ce_source"] or b""
    return int(source.rsplit(b"-", 1)[-1])
