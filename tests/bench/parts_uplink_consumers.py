"""Simulates many gateways with the fleet's sensors: consumers share their records, go away, and catch up.

Records are encoded, batched and sent as a gateway does it, each gateway over connections of its own. There is no MQTT
connection and no buffer between them: one gateway alone has its own bench.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.bench.context import Bench, say
from tests.bench.parts_uplink_scale import Site
from tests.bench.plain_consumer import Read
from tests.bench.processes import NotMeasuredError
from tests.bench.report import ROOT, Result
from tests.support.kafka_admin import create_topic, delete_topic

CONSUMERS = (1, 2)
READ_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The size of a simulation."""

    gateways: int
    sensors: int
    """Of each gateway."""
    rounds: int
    """Readings of each sensor."""
    wait_s: float
    """Seconds that a consumer waits for each record, as for a database. It computes for less, so two cores are enough
    to see whether two consumers hinder one another."""
    partitions: tuple[int, ...] = (1, 2, 4)

    @property
    def readings(self) -> int:
        """All readings."""
        return self.gateways * self.sensors * self.rounds


WHOLE, QUICK = Fleet(40, 500, 6, 0.000_2), Fleet(4, 50, 4, 0.005)


async def consumers(bench: Bench) -> list[Result]:
    """Simulate many gateways; one or two consumers read 1, 2 and 4 partitions, and catch up after they were away."""
    return await simulate(bench.kafka.bootstrap, QUICK if bench.quick else WHOLE)


async def simulate(bootstrap: str, fleet: Fleet) -> list[Result]:
    """Measure a fleet. Raises NotMeasuredError if a record is missing, or if order or shares are not kept."""
    results, per_s = [], 0.0
    for partitions in fleet.partitions:
        async with _gateways(bootstrap, fleet, partitions) as gateways:
            await gateways.send(range(fleet.rounds))
            for count in CONSUMERS:
                found = await _read(gateways, f"{count}-consumers", _shares(partitions, count))
                check(found, fleet.readings, fleet.gateways * fleet.sensors)
                per_s = _per_s(found)
                say(f"consumers: {partitions} partitions, {count} consumers: {per_s:,.0f} readings a second")
                name = f"consumers_read_per_s_{partitions}_partitions_{count}_consumers"
                results.append(Result(name, per_s, "readings/s"))
    results.append(await _caught_up(bootstrap, fleet, max(fleet.partitions)))
    return results


async def _caught_up(bootstrap: str, fleet: Fleet, partitions: int) -> Result:
    """Kill all consumers while they read, let the gateways send on, and start other consumers."""
    shares, group, half = _shares(partitions, max(CONSUMERS)), "killed", fleet.rounds // 2
    async with _gateways(bootstrap, fleet, partitions) as gateways:
        await gateways.send(range(half))
        killed = [await _started(gateways, group, share) for share in shares]
        for process in killed:
            _go(process)
        async with asyncio.timeout(READ_S_MAX):
            while not await _committed(gateways, group, partitions):
                await asyncio.sleep(0.05)
        for process in killed:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
        read = await _committed(gateways, group, partitions)
        await gateways.send(range(half, fleet.rounds))
        found = await _read(gateways, group, shares)
    if read >= fleet.readings * half // fleet.rounds:
        raise NotMeasuredError("the consumers had read everything before they were killed; let them wait longer")
    check(found, fleet.readings - read, fleet.gateways * fleet.sensors)
    note = f"{fleet.readings - read:,} readings waited"
    return Result("consumers_catch_up_per_s", _per_s(found), "readings/s", None, note)


def check(found: Sequence[Read], readings: int, devices: int) -> None:
    """Raise NotMeasuredError if consumers lack readings, share a device, or had its readings out of order."""
    if sum(each.records for each in found) != readings or sum(each.keys for each in found) != devices:
        raise NotMeasuredError(f"{readings:,} readings of {devices:,} devices were sent, and others read: {found}")
    if any(each.out_of_order for each in found):
        raise NotMeasuredError(f"a device's readings came out of order: {found}")


def _per_s(found: Sequence[Read]) -> float:
    seconds = max(each.ended_s for each in found) - min(each.begun_s for each in found)
    return sum(each.records for each in found) / seconds


# -- gateways -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gateways:
    bootstrap: str
    topic: str
    wait_s: float
    ways: Sequence[tuple[Site, AIOKafkaProducer]]

    async def send(self, rounds: range) -> None:
        """Have each sensor measure so often, until Kafka has all readings."""
        for round_ in rounds:
            sent = [
                await producer.send_batch(batch, self.topic, partition=partition)
                for site, producer in self.ways
                for partition, batch in site.batches(round_).items()
            ]
            await asyncio.gather(*sent)


@asynccontextmanager
async def _gateways(bootstrap: str, fleet: Fleet, partitions: int) -> AsyncIterator[_Gateways]:
    """Gateways that write to a topic of their own. It is deleted when they end."""
    topic = f"simulated-{partitions}"
    await create_topic(bootstrap, topic, partitions)
    sites = [Site(number, topic, partitions, fleet.sensors) for number in range(fleet.gateways)]
    async with AsyncExitStack() as stack:
        ways = []
        for site in sites:
            producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
            ways.append((site, await stack.enter_async_context(producer)))
        yield _Gateways(bootstrap, topic, fleet.wait_s, ways)
    await delete_topic(bootstrap, topic)


# -- consumers ------------------------------------------------------------------------------------


def _shares(partitions: int, consumers: int) -> list[range]:
    """The partitions of each consumer. With more consumers than partitions, some have none, and are left out."""
    return [share for number in range(consumers) if (share := range(number, partitions, consumers))]


async def _read(gateways: _Gateways, group: str, shares: Sequence[range]) -> list[Read]:
    """Let consumers read all that was sent, each in a process of its own."""
    async with asyncio.timeout(READ_S_MAX):
        processes = [await _started(gateways, group, share) for share in shares]
        for process in processes:
            _go(process)
        answers = [(await process.communicate())[0] for process in processes]
    return [Read(**json.loads(answer)) for answer in answers]


async def _started(gateways: _Gateways, group: str, partitions: range) -> Process:
    arguments = [gateways.bootstrap, gateways.topic, group, str(gateways.wait_s), *map(str, partitions)]
    command = [sys.executable, "-m", "tests.bench.plain_consumer", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT)
    assert process.stdout is not None
    if await process.stdout.readline() != b"ready\n":
        raise NotMeasuredError("a consumer does not start: its error stands above")
    return process


def _go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")


async def _committed(gateways: _Gateways, group: str, partitions: int) -> int:
    """Records that a group has read and committed."""
    consumer = AIOKafkaConsumer(bootstrap_servers=gateways.bootstrap, group_id=group, enable_auto_commit=False)
    async with consumer:
        places = [TopicPartition(gateways.topic, number) for number in range(partitions)]
        consumer.assign(places)
        return sum([await consumer.committed(place) or 0 for place in places])
