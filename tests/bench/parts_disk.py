"""How many bytes the gateway writes to disk, and how long a sensor waits for its PUBACK."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.buffer.file import SIGN_OF_LIFE_S
from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.load import run_load
from tests.bench.loop_disk import LoopDisk, loop_disk
from tests.bench.processes import Measured, NotMeasuredError, gateway, secrets_path, write_gateway
from tests.bench.report import Result, file_system

CONNECTIONS = 100
UNREACHABLE = "127.0.0.1:1"
DAY_S = 86_400
SETTLE_S = 2.5
"""Seconds after which what belongs to earlier readings is on disk: deletions wait for one."""
PERIOD_S = int(SIGN_OF_LIFE_S) + 20
"""Seconds in which a gateway also stores what it stores every 15 minutes, such as the windows of all sensors."""


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes written so far, as two counters have them."""

    process: int
    """By the kernel's count for the gateway's process: pages that it dirtied."""
    disk: int | None
    """By ext4's own count, with its journal; None where the gateway has no file system of its own."""

    def since(self, before: "Written") -> "Written":
        """Bytes written between two moments."""
        both = self.disk is not None and before.disk is not None
        return Written(self.process - before.process, (self.disk or 0) - (before.disk or 0) if both else None)


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway with the disk of its buffer."""

    sluice: Measured
    disk: LoopDisk | None
    kind: str
    """Type of that disk's file system."""

    def written(self) -> Written:
        return Written(self.sluice.disk_bytes, None if self.disk is None else self.disk.written_bytes)


async def latency(bench: Bench) -> list[Result]:
    """From PUBLISH to PUBACK at 1,000 readings a second: by default, and with the disk first and three delays."""
    seconds, warmup = bench.pick(33, 5), bench.pick(3, 2)
    results = []
    ways: list[tuple[str, str, str | None, str | None]] = [("", "", "<= 40", "<= 100")]
    ways += [(f"_delay_{ms}", f"disk_first = true\ncommit_delay_ms = {ms}", None, None) for ms in (0, 20, 250)]
    for name, buffer, target_p50, target_p99 in ways:
        topic = f"latency{name.replace('_', '-')}-thermo"
        async with _site(bench, bench.directory / "latency", topic, buffer) as site:
            secrets = secrets_path(site.sluice.directory)
            done = await run_load(
                site.sluice.port,
                connections=CONNECTIONS,
                rate=1_000,
                seconds=seconds,
                warmup=warmup,
                secrets=secrets,
            )
        told = f"{done.p50_ms}, {done.p99_ms}, {done.p999_ms}, {done.max_ms}"
        say(f"latency{name}: p50, p99, p99.9, max: {told} ms")
        note = f"{seconds - warmup} s; p50, p99, p99.9, max: {told}"
        results += [
            Result(f"puback_p50_ms{name}", done.p50_ms, "ms", target_p50),
            Result(f"puback_p99_ms{name}", done.p99_ms, "ms", target_p99, note),
            Result(f"puback_p999_ms{name}", done.p999_ms, "ms"),
        ]
    return results


async def disk(bench: Bench) -> list[Result]:
    """Bytes written to disk for each reading: Kafka up, Kafka away, and with the disk first."""
    results = []
    first = "disk_first = true\ncommit_delay_ms = 0"
    for name, rate, whole_s, reached, buffer, target in (
        # Few readings share what is stored by the clock, so its span has such a commit.
        ("at_1", 1, PERIOD_S, True, "", "<= 100"),
        ("at_100", 100, 30, True, "", "<= 20"),
        ("at_1000", 1_000, 30, True, "", None),
        ("at_10000", 10_000, 20, True, "", None),
        ("offline_at_1", 1, 60, False, "", "<= 13000"),
        ("offline_at_100", 100, 30, False, "", "<= 1000"),
        ("offline_at_1000", 1_000, 30, False, "", None),
        ("disk_first_at_1", 1, 60, True, first, None),
        ("disk_first_at_100", 100, 30, True, first, None),
        ("disk_first_at_1000", 1_000, 30, True, first, None),
    ):
        seconds = bench.pick(whole_s, 10)
        async with _site(bench, bench.directory / "disk", f"disk-{name}-thermo", buffer, reached=reached) as site:
            before = await _begun(site)
            done = await run_load(
                site.sluice.port,
                connections=CONNECTIONS,
                rate=rate,
                seconds=seconds,
                boot="c",
                secrets=secrets_path(site.sluice.directory),
            )
            await asyncio.sleep(SETTLE_S)
            written = site.written().since(before)
        if seconds >= PERIOD_S and not written.process:
            raise NotMeasuredError(f"nothing was written in {seconds} s: the commit of every 15 minutes did not come")
        note = f"{done.acknowledged:,} readings in {seconds} s on {site.kind}"
        results += _results(f"disk_bytes_per_reading_{name}", written, done.acknowledged, "bytes", target, note)
    return results


async def idle_disk(bench: Bench) -> list[Result]:
    """Bytes that a gateway without readings writes in a day, its Kafka up."""
    # It has a sign of life to store every 15 minutes.
    seconds = bench.pick(1_860, 15)
    async with _site(bench, bench.directory / "idle_disk", "idle-disk-thermo", "") as site:
        # No readings before it either: their duplicate windows are written up to 15 minutes later.
        await asyncio.sleep(bench.pick(30, 3))
        before = site.written()
        await asyncio.sleep(seconds)
        written = site.written().since(before)
    note = f"{seconds} s on {site.kind}"
    return _results("disk_bytes_per_day_idle", written, seconds / DAY_S, "bytes", "<= 5000000", note)


async def _begun(site: Site) -> Written:
    """Have every device send some readings, as the first one brings what is written once. Give the bytes by then."""
    # At a rate, the connections take turns. Flat out, a few of them would send all.
    await run_load(
        site.sluice.port,
        connections=CONNECTIONS,
        rate=4 * CONNECTIONS,
        seconds=2,
        secrets=secrets_path(site.sluice.directory),
    )
    await asyncio.sleep(SETTLE_S)
    return site.written()


def _results(name: str, written: Written, share: float, unit: str, target: str | None, note: str) -> list[Result]:  # noqa: PLR0913, PLR0917 - a figure, and what is said of it
    """Figures of both counters, each divided by `share`. The target is for the process's."""
    told = "" if written.disk is None else f", {written.disk / share:,.0f} by ext4's count"
    say(f"{name}: {written.process / share:,.0f} {unit}{told}")
    results = [Result(name, written.process / share, unit, target, note)]
    if written.disk is not None:
        # A commit of ours is a commit of its journal too: a few blocks beside ours.
        results.append(Result(f"{name}_ext4", written.disk / share, unit, None, "with ext4's journal"))
    return results


@asynccontextmanager
async def _site(bench: Bench, directory: Path, topic: str, buffer: str, *, reached: bool = True) -> AsyncIterator[Site]:
    """A gateway with an empty buffer, on a file system of its own if possible. `buffer`: lines of `[buffer]`."""
    with loop_disk(directory) as disk_of_its_own:
        place = directory / "disk"
        kind = file_system(place)
        if kind == "tmpfs":
            raise NotMeasuredError(f"{place} is on tmpfs, where nothing is written to disk")
        for old in place.glob("buffer.db*"):
            old.unlink()
        bootstrap = bench.kafka.bootstrap if reached else UNREACHABLE
        config = write_gateway(directory, bootstrap, topic, devices=CONNECTIONS, place=place, buffer=buffer)
        async with KafkaTopic(bench.kafka.bootstrap, topic), gateway(config) as sluice:
            yield Site(sluice, disk_of_its_own, kind)
