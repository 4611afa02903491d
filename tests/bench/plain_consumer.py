"""A consumer that knows nothing of Sluice: `plain_consumer BOOTSTRAP TOPIC GROUP WAIT PARTITION...`.

It says "ready", waits for a line, reads its partitions from where its group left off to their ends, and prints what it
found as JSON. It waits WAIT seconds for each record, as for a database, and then commits.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.record_contract import HEADER_NAMES

SEQUENCE = HEADER_NAMES.index("ce_lanesequence")
RECORDS_MAX = 100
"""Records that are committed together."""
ANSWER_MS = 1_000


@dataclass(frozen=True, slots=True)
class Read:
    """What one consumer read."""

    records: int
    keys: int
    out_of_order: int
    """Records that came after a later one of their key, or twice."""
    begun_s: float
    ended_s: float
    """By CLOCK_MONOTONIC, which all processes of a machine share."""


async def read(bootstrap: str, topic: str, group: str, wait_s: float, partitions: Sequence[int]) -> Read:
    """Read partitions from where `group` left off to their ends."""
    places = [TopicPartition(topic, number) for number in partitions]
    last: dict[bytes, int] = {}
    records = out_of_order = 0
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        print("ready", flush=True)  # noqa: T201 - the parent reads it
        await asyncio.to_thread(sys.stdin.readline)
        begun_s = time.monotonic()
        left = {place for place in places if await consumer.position(place) < ends[place]}
        while left:
            for place, some in (await consumer.getmany(timeout_ms=ANSWER_MS, max_records=RECORDS_MAX)).items():
                for record in some:
                    sequence = int(record.headers[SEQUENCE][1])
                    out_of_order += sequence <= last.get(record.key, -1)
                    last[record.key] = sequence
                await asyncio.sleep(wait_s * len(some))
                await consumer.commit({place: some[-1].offset + 1})
                records += len(some)
                if some[-1].offset + 1 >= ends[place]:
                    left.discard(place)
        return Read(records, len(last), out_of_order, begun_s, time.monotonic())


if __name__ == "__main__":
    _, server, name, group_name, wait, *numbers = sys.argv
    found = asyncio.run(read(server, name, group_name, float(wait), [int(number) for number in numbers]))
    print(json.dumps(asdict(found)))  # noqa: T201
