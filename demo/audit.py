"""Compares, sensor by sensor, the acknowledged readings with those in Kafka and in the table.

`audit` and `run_findings` are pure. The functions below them read what they compare.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aiokafka import AIOKafkaConsumer

from demo.chronicle import Chronicle
from demo.demo_settings import DemoSettings
from demo.kafka_ends import KafkaEnds
from gateway.health.survey import natural_order

LATE_US = 10_000_000
"""Microseconds from its event time to Kafka after which a reading counts as late."""

EXAMPLES_MAX = 20
"""Missing or doubled readings that are named one by one; all are counted."""
SILENT_NAMED_MAX = 5
"""Sensors without an acknowledged reading that are named; all are counted."""
CUT_SETTLES_US = 2_000_000
"""Microseconds after the cut in which earlier records may still be appended: the broker may be short of CPU."""
BUFFERED_OUTAGE_S_MIN = 3
"""Seconds of outage in which every sensor, at one reading a second, has at least one reading in the buffer."""

Identity = tuple[str, str, int]
"""Device, device boot and sequence of one reading, wherever it stands."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """One sensor's own account of one of its boots."""

    device: str
    boot: str
    sent: int
    """Readings sent at least once."""
    acknowledged: tuple[tuple[int, int], ...]
    """Ranges of acknowledged sequences, both ends included."""
    dropped: tuple[tuple[int, int], ...] = ()
    """Ranges of sequences given up for lack of room, before they were acknowledged."""
    taken: int = 0

    @property
    def acknowledged_count(self) -> int:
        return _count(self.acknowledged)

    @property
    def waiting(self) -> int:
        """Readings that were taken, and neither acknowledged nor dropped."""
        return max(0, self.taken - self.acknowledged_count - _count(self.dropped))


@dataclass(frozen=True, slots=True)
class KafkaReading:
    """One record of a `device-*` topic."""

    id: str
    """`ce_id`: all copies that the forwarder sent have the same."""
    device: str
    boot: str
    sequence: int
    event_us: int
    """`ce_time`, microseconds since 1970."""
    appended_us: int
    """Time at which the broker appended it: the record's own timestamp, in microseconds since 1970."""

    @property
    def identity(self) -> Identity:
        return (self.device, self.boot, self.sequence)


@dataclass(frozen=True, slots=True)
class TableReading:
    """One row of `readings`."""

    device: str
    boot: str
    sequence: int
    metric: str
    event_us: int
    value: float
    error_us: int
    """Bound of the error of `event_us`."""
    quality: str
    """Way in which `event_us` was obtained."""

    @property
    def identity(self) -> Identity:
        return (self.device, self.boot, self.sequence)


@dataclass(frozen=True, slots=True)
class SensorAudit:
    """Figures of one sensor, or of all."""

    device: str
    sent: int
    acknowledged: int
    in_kafka: int
    """Distinct readings in Kafka."""
    in_readings: int
    """Distinct readings in `readings`."""
    missing: int
    """Acknowledged readings that are not in `readings`."""
    doubled: int
    """Readings that stand more than once in `readings`, with the same metric."""

    @property
    def figures(self) -> tuple[int, ...]:
        return self.sent, self.acknowledged, self.in_kafka, self.in_readings, self.missing, self.doubled


@dataclass(frozen=True, slots=True)
class Audit:
    """Outcome of the comparison."""

    sensors: tuple[SensorAudit, ...]
    """Sensors by device name, numbers in it counted as numbers."""
    late_readings: int
    """Distinct readings appended to Kafka more than `LATE_US` after their event time."""
    copies: int
    """Records in Kafka beyond the first of their identity."""
    strangers: int
    """Distinct readings, in Kafka or in the table, of a boot that no ledger knows."""
    examples: tuple[str, ...]
    """Some missing and doubled readings, in words."""
    ledgered: int
    """Sensors that left a ledger."""
    silent: tuple[str, ...]
    """Sensors with a ledger and without an acknowledged reading, in the order of `sensors`."""
    waiting: int
    """Readings that sensors held unacknowledged at the end. Those of earlier boots went with the reset."""

    @property
    def total(self) -> SensorAudit:
        figures = zip((0,) * 6, *(each.figures for each in self.sensors), strict=True)
        return SensorAudit("all sensors", *map(sum, figures))

    @property
    def findings(self) -> tuple[str, ...]:
        """Faults in words; empty if all is well."""
        total = self.total
        found = []
        if total.missing:
            words = "acknowledged reading is" if total.missing == 1 else "acknowledged readings are"
            found.append(f"{total.missing:,} {words} not in `readings`")
        if total.doubled:
            words = "reading stands" if total.doubled == 1 else "readings stand"
            found.append(f"{total.doubled:,} {words} more than once in `readings`")
        if not total.acknowledged:
            found.append("no reading was acknowledged, so this run shows nothing")
        elif self.silent:
            words = "sensor" if len(self.silent) == 1 else "sensors"
            names = ", ".join(self.silent[:SILENT_NAMED_MAX])
            if len(self.silent) > SILENT_NAMED_MAX:
                names += f" and {len(self.silent) - SILENT_NAMED_MAX:,} more"
            found.append(f"{len(self.silent):,} {words} had no reading acknowledged: {names}")
        if self.strangers:
            words = "reading belongs" if self.strangers == 1 else "readings belong"
            found.append(f"{self.strangers:,} {words} to no boot of a sensor that was started")
        return tuple(found)


def audit(ledgers: Iterable[Ledger], records: Iterable[KafkaReading], readings: Iterable[TableReading]) -> Audit:
    """Compare the ledgers with Kafka and the table. The ledgers of one sensor come in the order of its boots.

    An unacknowledged reading in Kafka is no fault: its acknowledgement was lost, not the reading.
    """
    sent: Counter[str] = Counter()
    acknowledged: defaultdict[str, set[Identity]] = defaultdict(set)
    boots: set[tuple[str, str]] = set()
    last: dict[str, Ledger] = {}
    for ledger in ledgers:
        last[ledger.device] = ledger
        sent[ledger.device] += ledger.sent
        boots.add((ledger.device, ledger.boot))
        acknowledged[ledger.device].update(
            (ledger.device, ledger.boot, sequence)
            for first, last in ledger.acknowledged
            for sequence in range(first, last + 1)
        )

    in_kafka: defaultdict[str, set[Identity]] = defaultdict(set)
    late: set[Identity] = set()
    seen: set[Identity] = set()
    count = 0
    for record in sorted(records, key=lambda record: record.appended_us):
        count += 1
        if record.identity not in seen and record.appended_us - record.event_us > LATE_US:
            late.add(record.identity)
        seen.add(record.identity)
        in_kafka[record.device].add(record.identity)

    in_table: defaultdict[str, set[Identity]] = defaultdict(set)
    rows: Counter[tuple[Identity, str]] = Counter()
    for reading in readings:
        in_table[reading.device].add(reading.identity)
        rows[(reading.identity, reading.metric)] += 1
    doubled: defaultdict[str, set[Identity]] = defaultdict(set)
    for (identity, _), times in rows.items():
        if times > 1:
            doubled[identity[0]].add(identity)

    missing = {device: acknowledged[device] - in_table[device] for device in acknowledged}
    known = set().union(*in_kafka.values(), *in_table.values())
    return Audit(
        sensors=tuple(
            SensorAudit(
                device,
                sent[device],
                len(acknowledged[device]),
                len(in_kafka[device]),
                len(in_table[device]),
                len(missing.get(device, ())),
                len(doubled[device]),
            )
            for device in sorted({*sent, *in_kafka, *in_table}, key=natural_order)
        ),
        late_readings=len(late),
        copies=count - len(seen),
        strangers=sum(1 for identity in known if identity[:2] not in boots),
        examples=tuple(_examples(missing, in_kafka, doubled)),
        ledgered=len(last),
        silent=tuple(sorted((device for device in last if not acknowledged[device]), key=natural_order)),
        waiting=sum(ledger.waiting for ledger in last.values()),
    )


def run_findings(
    result: Audit, settings: DemoSettings, chronicle: Chronicle, records: Iterable[KafkaReading]
) -> tuple[str, ...]:
    """Find what is wrong with a run: with the comparison, with who took part, and with the outage."""
    found = list(result.findings)
    started = settings.sensors + settings.boards
    if result.ledgered < started:
        found.append(f"{started - result.ledgered:,} of {started:,} sensors left no ledger")
    # Lateness does not tell: a reading may wait for other reasons, such as its sensor's unknown clock.
    silent_from_us = chronicle.cut_us + CUT_SETTLES_US
    if leaked := sum(silent_from_us <= record.appended_us < chronicle.restored_us for record in records):
        words = "reading" if leaked == 1 else "readings"
        found.append(f"{leaked:,} {words} reached Kafka while the path to it was cut")
    peak = chronicle.outage_peak
    if settings.outage_seconds >= BUFFERED_OUTAGE_S_MIN and peak < started:
        found.append(f"the outage cut too little: at most {peak:,} readings of {started:,} sensors waited")
    return tuple(found)


def verdict(total: SensorAudit, findings: Sequence[str]) -> str:
    """Write the line that people look at. It says what is wrong if its two numbers do not."""
    numbers = f"missing {total.missing}, duplicates {total.doubled}"
    return f"{numbers}, but: {'; '.join(findings)}" if findings and not total.missing + total.doubled else numbers


def _examples(
    missing: dict[str, set[Identity]],
    in_kafka: dict[str, set[Identity]],
    doubled: dict[str, set[Identity]],
) -> Iterator[str]:
    for identity in sorted(set().union(*missing.values()))[:EXAMPLES_MAX]:
        device, boot, sequence = identity
        where = "is in Kafka but not in `readings`" if identity in in_kafka[device] else "is not even in Kafka"
        yield f"{device}, boot {boot}, sequence {sequence}: acknowledged, {where}"
    for device, boot, sequence in sorted(set().union(*doubled.values()))[:EXAMPLES_MAX]:
        yield f"{device}, boot {boot}, sequence {sequence}: more than once in `readings`"


def audit_lines(shown: Sequence[SensorAudit], total: SensorAudit) -> list[str]:
    """Write the table for people, as plain text."""
    head = ("sensor", "sent", "acknowledged", "in Kafka", "in readings", "missing", "doubled")
    body = [(each.device, *(f"{number:,}" for number in each.figures)) for each in (*shown, total)]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    rule = "  ".join("-" * width for width in widths)
    return [_line(head, widths), rule, *(_line(row, widths) for row in body[:-1]), rule, _line(body[-1], widths)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((name, *numbers))


def shown_sensors(result: Audit, boards: Iterable[str], fleet_count: int = 5) -> list[SensorAudit]:
    """Choose sensors for the screen: every board, then of the fleet those with findings, else the first few."""
    always = set(boards)
    fleet = [sensor for sensor in result.sensors if sensor.device not in always]
    # A stable sort: sensors without a finding keep their order.
    fleet.sort(key=lambda sensor: sensor.missing + sensor.doubled, reverse=True)
    return [sensor for sensor in result.sensors if sensor.device in always] + fleet[:fleet_count]


def read_ledgers(path: Path) -> list[Ledger]:
    """Read the ledgers in a JSON-lines file of the fleet or of a firmware runner, in its order."""
    ledgers = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        ledgers.append(
            Ledger(
                entry["device"],
                entry["boot"],
                int(entry["sent"]),
                _ranges(entry["acknowledged"]),
                _ranges(entry["dropped"]),
                int(entry["taken"]),
            )
        )
    return ledgers


def _ranges(pairs: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, last) for first, last in pairs)


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


async def read_kafka(bootstrap: str, topic_prefix: str = "device-") -> list[KafkaReading]:
    """Read every record of the topics with this prefix, from the beginning to their ends at the call.

    Raises:
        KeyError, ValueError: a record lacks something that docs/kafka-records.md demands.
    """
    records: list[KafkaReading] = []
    async with KafkaEnds(bootstrap, topic_prefix) as kafka:
        ends = await kafka.read()
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        pending = {partition for partition, end in ends.items() if end > 0}
        consumer.assign(pending)
        while pending:
            fetched = await consumer.getmany(*pending, timeout_ms=1_000, max_records=10_000)
            for partition, batch in fetched.items():
                records.extend(
                    _kafka_reading(record.key, record.headers, record.timestamp)
                    for record in batch
                    if record.offset < ends[partition]
                )
            pending = {partition for partition in pending if await consumer.position(partition) < ends[partition]}
    return records


def _kafka_reading(key: bytes, headers: Sequence[tuple[str, bytes]], timestamp_ms: int) -> KafkaReading:
    header = {name: value.decode() for name, value in headers}
    return KafkaReading(
        id=header["ce_id"],
        device=key.decode(),
        boot=header["ce_deviceboot"],
        sequence=int(header["ce_devicesequence"]),
        event_us=_microseconds(datetime.fromisoformat(header["ce_time"])),
        appended_us=timestamp_ms * 1_000,
    )


def _microseconds(time: datetime) -> int:
    """Convert to microseconds since 1970, exactly: a float of seconds has no room for all of them."""
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def read_table(path: Path) -> list[TableReading]:
    """Read the rows of `readings` that `demo.readings_export` wrote."""
    return [TableReading(*json.loads(line)) for line in path.read_text().splitlines()]
