"""Reads what a producer and a broker said to each other on one connection, off the wire."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO

from aiokafka.protocol.api import RequestHeader_v1
from aiokafka.protocol.produce import ProduceRequest_v7, ProduceResponse_v7
from aiokafka.record.memory_records import MemoryRecords

Reading = tuple[str, int]
"""Device, and its payload's `n`."""


@dataclass(slots=True)
class ProducerTalk:
    """The bytes of both directions. Batches must not be compressed."""

    _asked: bytearray = field(default_factory=bytearray)
    _answered: bytearray = field(default_factory=bytearray)
    _under_way: dict[int, dict[tuple[str, int], list[Reading]]] = field(default_factory=dict)
    """Readings of requests without an answer, by correlation id, topic and partition."""

    def ask(self, data: bytes) -> None:
        """Take bytes that the producer sent."""
        self._asked += data
        for frame in _frames(self._asked):
            stream = BytesIO(frame)
            api_key, version, correlation_id, _ = RequestHeader_v1.SCHEMA.decode(stream)
            if api_key != ProduceRequest_v7.API_KEY:
                continue
            assert version == ProduceRequest_v7.API_VERSION
            *_, topics = ProduceRequest_v7.SCHEMA.decode(stream)
            self._under_way[correlation_id] = {
                (topic, partition): list(_readings(records))
                for topic, partitions in topics
                for partition, records in partitions
            }

    def answer(self, data: bytes) -> set[Reading]:
        """Take bytes that the producer received. Returns the readings that the broker has acknowledged by them."""
        self._answered += data
        acknowledged: set[Reading] = set()
        for frame in _frames(self._answered):
            stream = BytesIO(frame)
            (correlation_id,) = struct.unpack(">i", stream.read(4))
            readings = self._under_way.pop(correlation_id, None)
            if readings is not None:
                topics, _ = ProduceResponse_v7.SCHEMA.decode(stream)
                for topic, partitions in topics:
                    for partition, code, *_ in partitions:
                        acknowledged.update(() if code else readings[topic, partition])
        return acknowledged


def _frames(stream: bytearray) -> Iterator[bytes]:
    """Take the complete requests or answers off a stream."""
    while len(stream) >= 4 and len(stream) >= (end := 4 + int.from_bytes(stream[:4], "big")):
        yield bytes(stream[4:end])
        del stream[:end]


def _readings(batches: bytes) -> Iterator[Reading]:
    records = MemoryRecords(batches)
    while (batch := records.next_batch()) is not None:
        for record in batch:
            told = json.loads(record.value)
            if "n" in told:
                yield record.key.decode(), int(told["n"])
