"""A consumer that knows nothing of Sluice: `python -m tests.bench.plain_consumer BOOTSTRAP TOPIC PARTITION...`.

It says "ready", waits for a line, reads its partitions to their ends, and prints what it found as JSON.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.record_contract import HEADERS

SEQUENCE = HEADERS.index("ce_lanesequence")
ANSWER_MS = 1_000


@dataclass(frozen=True, slots=True)
class Read:
    """What one consumer read."""

    records: int
    keys: int
    out_of_order: int
    """Records that came after a later one of their key."""
    begun_s: float
    ended_s: float
    """By CLOCK_MONOTONIC, which all processes of a machine share."""


async def read(bootstrap: str, topic: str, partitions: Sequence[int]) -> Read:
    """Read partitions from their beginnings to their ends."""
    places = [TopicPartition(topic, number) for number in partitions]
    last: dict[bytes, int] = {}
    records = out_of_order = 0
    async with AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False) as consumer:
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        await consumer.seek_to_beginning(*places)
        print("ready", flush=True)  # noqa: T201 - the parent reads it
        sys.stdin.readline()
        begun_s = time.monotonic()
        left = {place for place in places if ends[place]}
        while left:
            for place, some in (await consumer.getmany(timeout_ms=ANSWER_MS)).items():
                records += len(some)
                for record in some:
                    sequence = int(record.headers[SEQUENCE][1])
                    out_of_order += sequence < last.get(record.key, -1)
                    last[record.key] = sequence
                if some[-1].offset + 1 >= ends[place]:
                    left.discard(place)
        return Read(records, len(last), out_of_order, begun_s, time.monotonic())


if __name__ == "__main__":
    _, server, name, *numbers = sys.argv
    print(json.dumps(asdict(asyncio.run(read(server, name, [int(number) for number in numbers])))))  # noqa: T201
