"""Compares what sensors were told with what stands in Kafka: nothing missing, in order by device, one id for a reading.

Pure functions: `acknowledged_in` reads the fleet's ledger, `in_kafka` takes what a consumer gave, `audit` compares.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from aiokafka import ConsumerRecord

EXAMPLES_MAX = 5
"""Examples that are named of each kind of fault."""


class Reading(NamedTuple):
    """A sensor's reading as the sensor knows it."""

    device: str
    boot: str
    sequence: int


class Place(NamedTuple):
    """Place of a record in Kafka."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A reading in Kafka."""

    reading: Reading
    ce_id: str
    lane: str
    lane_sequence: int
    place: Place


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of a comparison. Faults are sentences. A kind without faults is empty."""

    acknowledged: int
    """Readings that sensors got an acknowledgement for."""
    delivered: int
    """Readings that stand in Kafka, acknowledged or not."""
    repeated: int
    """Records beyond the first of their `ce_id`: resends, which every consumer recognises."""
    missing: tuple[str, ...]
    """Acknowledged readings that are not in Kafka."""
    out_of_order: tuple[str, ...]
    """First occurrences that stand behind a later one of their device and lane."""
    under_two_ids: tuple[str, ...]
    """Readings under more than one `ce_id`: nobody can tell that they are one."""
    under_one_id: tuple[str, ...]
    """Different readings under one `ce_id`: all but one would be thrown away."""

    @property
    def faults(self) -> tuple[str, ...]:
        return (*self.missing, *self.out_of_order, *self.under_two_ids, *self.under_one_id)

    def __str__(self) -> str:
        kinds = {
            "missing": self.missing,
            "out of order": self.out_of_order,
            "under two ids": self.under_two_ids,
            "under one id": self.under_one_id,
        }
        lines = [f"{self.acknowledged} acknowledged, {self.delivered} in Kafka, {self.repeated} records repeated"]
        for kind, faults in kinds.items():
            lines.append(f"{kind}: {len(faults)}")
            lines += [f"  {fault}" for fault in faults[:EXAMPLES_MAX]]
        return "\n".join(lines)


def acknowledged_in(ledger: str) -> set[Reading]:
    """The acknowledged readings of a ledger as `sluice-sim fleet` writes it: one JSON line for each sensor."""
    return {
        Reading(line["device"], line["boot"], sequence)
        for line in map(json.loads, ledger.splitlines())
        for first, last in line["acknowledged"]
        for sequence in range(first, last + 1)
    }


def in_kafka(records: Iterable[ConsumerRecord]) -> list[Delivery]:
    """Records of the sensors' topics as deliveries. Raises KeyError for one without a device's boot and sequence."""
    deliveries = []
    for record in records:
        headers = {name: value.decode() for name, value in record.headers}
        deliveries.append(
            Delivery(
                Reading(record.key.decode(), headers["ce_deviceboot"], int(headers["ce_devicesequence"])),
                headers["ce_id"],
                headers["ce_lane"],
                int(headers["ce_lanesequence"]),
                Place(record.topic, record.partition, record.offset),
            )
        )
    return deliveries


def audit(acknowledged: set[Reading], deliveries: Iterable[Delivery]) -> Audit:
    """Compare; deliveries may come in any order. Raises ValueError where nothing was acknowledged."""
    if not acknowledged:
        raise ValueError("no sensor got any acknowledgement: there is nothing to compare")
    in_order = sorted(deliveries, key=lambda delivery: delivery.place)
    first: dict[str, Delivery] = {}
    ids: dict[Reading, list[str]] = defaultdict(list)
    under_one_id = []
    out_of_order = []
    last: dict[tuple[str, int, str, str], Delivery] = {}
    for delivery in in_order:
        known = first.setdefault(delivery.ce_id, delivery)
        if known is not delivery:
            if known.reading != delivery.reading:
                under_one_id.append(f"{delivery.ce_id} is {known.reading} and {delivery.reading}")
            continue
        ids[delivery.reading].append(delivery.ce_id)
        of = (delivery.place.topic, delivery.place.partition, delivery.lane, delivery.reading.device)
        before = last.get(of)
        if before is not None and not _follows(before, delivery):
            out_of_order.append(f"{_words(delivery)} stands behind {_words(before)}")
        else:
            last[of] = delivery
    return Audit(
        acknowledged=len(acknowledged),
        delivered=len(ids),
        repeated=len(in_order) - len(first),
        missing=tuple(f"{reading} was acknowledged" for reading in sorted(acknowledged - ids.keys())),
        out_of_order=tuple(out_of_order),
        under_two_ids=tuple(f"{reading} has {', '.join(own)}" for reading, own in ids.items() if len(own) > 1),
        under_one_id=tuple(under_one_id),
    )


def _follows(before: Delivery, after: Delivery) -> bool:
    """Whether the lane says so, and the device too; a device that was started anew counts from 0."""
    same_boot = before.reading.boot == after.reading.boot
    return before.lane_sequence < after.lane_sequence and (
        not same_boot or before.reading.sequence < after.reading.sequence
    )


def _words(delivery: Delivery) -> str:
    topic, partition, offset = delivery.place
    device, boot, sequence = delivery.reading
    return f"{device}/{boot}/{sequence} (lane {delivery.lane}/{delivery.lane_sequence}, {topic}-{partition}@{offset})"
