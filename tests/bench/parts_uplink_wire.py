"""Measures bytes on the wire for each reading, by codec, at live rate and in backlog, and each codec's CPU."""

import asyncio
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gateway.buffer.status import read_status
from tests.bench.context import Bench, say
from tests.bench.parts_uplink_site import (
    COUNTED,
    DEVICES,
    STREAM,
    backlog,
    copy_backlog,
    live_sensors,
    status_of,
    write_config,
)
from tests.bench.processes import Measured, NotMeasuredError, gateway
from tests.bench.report import Result
from tests.bench.uplink_cable import Carried, carried, have_real_packets
from tests.support.kafka_cluster import Listener, kafka_cluster
from tests.support.netns import BROKERS_NET, Namespace, new_network

CODECS = ("zstd", "lz4", "gzip", "none")
"""The first is the default."""
ROWS, ROWS_QUICK = 1_000_000, 50_000
LIVE_S, LIVE_QUICK_S = 60, 5
WARM_UP_S = 5.0
"""Topics are made and looked up, which is done once."""
COUNTED_AGAIN_S = 2.0
"""Seconds between two counts by the daemon of the bytes that its connections have carried."""
DRAINED_S_MAX = 300.0
KAFKA_ADDRESS = f"{BROKERS_NET}.10"


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes that readings cost: both ways, with headers of TCP and IP, answers and heartbeats."""

    wire_bytes: float
    """For each reading, as the daemon counts."""
    interface_bytes: float
    """These bytes as the gateway's network interface counts them, without its Ethernet headers."""
    packets: float
    """For each reading, both ways."""
    cpu_s_per_million: float


@dataclass(frozen=True, slots=True)
class _Net:
    """A network with an Ethernet's packet size, which the loopback does not have, and without other traffic."""

    bench: Bench
    gateway: Namespace
    bootstrap: str


async def wire(bench: Bench) -> list[Result]:
    """Measure a reading's bytes on the uplink, for each codec, live and in backlog, over an Ethernet of its own."""
    directory = bench.directory / "wire"
    directory.mkdir(parents=True)
    listener = Listener("GATEWAY", host=KAFKA_ADDRESS, bind="0.0.0.0")  # noqa: S104 - in a namespace of its own
    results = []
    with ExitStack() as stack:
        network = stack.enter_context(new_network(directory))
        cluster = stack.enter_context(
            kafka_cluster(directory / "kafka", 1, [listener], command_prefix=network.brokers.prefix)
        )
        have_real_packets(network)
        net = _Net(bench, network.gateway, f"{KAFKA_ADDRESS}:{cluster.node(1).ports['GATEWAY']}")
        for codec in CODECS:
            found = await asyncio.to_thread(network.gateway.inside, lambda codec=codec: asyncio.run(_codec(net, codec)))
            results += _results("" if codec == CODECS[0] else f"_{codec}", *found)
        counted = await asyncio.to_thread(network.gateway.inside, lambda: asyncio.run(_backlog(net, "zstd", COUNTED)))
        note = f"two more headers; the interface counts {counted.interface_bytes:.1f}"
        results.append(Result("wire_bytes_per_reading_backlog_with_sequence", counted.wire_bytes, "bytes", None, note))
    return results


def _results(suffix: str, live: _Cost, behind: _Cost) -> list[Result]:
    results = []
    for name, cost in (("live", live), ("backlog", behind)):
        target = "<= 50" if name == "backlog" and not suffix else None
        note = f"the interface counts {cost.interface_bytes:.1f}"
        results.append(Result(f"wire_bytes_per_reading_{name}{suffix}", cost.wire_bytes, "bytes", target, note))
        results.append(Result(f"wire_packets_per_reading_{name}{suffix}", cost.packets, "packets"))
        results.append(Result(f"wire_cpu_s_per_million_{name}{suffix}", cost.cpu_s_per_million, "s"))
    results.append(
        Result(f"wire_counted_share{suffix}", behind.wire_bytes / behind.interface_bytes, "of the interface's")
    )
    return results


# -- within the gateway's namespace -----------------------------------------------------------------


async def _codec(net: _Net, codec: str) -> tuple[_Cost, _Cost]:
    """At live rate, and in backlog."""
    live, behind = await _live(net, codec), await _backlog(net, codec, STREAM)
    say(
        f"wire {codec}: live {live.wire_bytes:.1f} bytes a reading, {live.cpu_s_per_million:.1f} s of CPU a million; "
        f"backlog {behind.wire_bytes:.1f} bytes, {behind.cpu_s_per_million:.2f} s"
    )
    return live, behind


async def _live(net: _Net, codec: str) -> _Cost:
    """Each device sends a reading a second."""
    directory = net.bench.directory / "wire" / f"live-{codec}"
    config = write_config(directory, net.bootstrap, f"live-{codec}", f'compression = "{codec}"')
    seconds = float(os.environ.get("BENCH_SECONDS", net.bench.pick(LIVE_S, LIVE_QUICK_S)))
    async with gateway(config) as sluice, live_sensors(sluice.port, STREAM, DEVICES) as sensors:
        await asyncio.sleep(WARM_UP_S)
        before = await _Seen.at(net, config, sluice, sensors.acknowledged)
        await asyncio.sleep(seconds)
        after = await _Seen.at(net, config, sluice, sensors.acknowledged)
    return after.since(before)


async def _backlog(net: _Net, codec: str, stream: str) -> _Cost:
    """A backlog alone, from the first connection on."""
    rows = net.bench.pick(ROWS, ROWS_QUICK)
    filled = await backlog(net.bench, rows, stream)
    directory = net.bench.directory / "wire" / f"backlog-{codec}-{stream}"
    config = write_config(directory, net.bootstrap, f"backlog-{codec}", f'compression = "{codec}"')
    copy_backlog(filled, config)
    before = carried(net.gateway)
    async with gateway(config) as sluice, asyncio.timeout(DRAINED_S_MAX):
        while read_status(directory / "buffer.db").rows:
            await asyncio.sleep(0.2)
        await asyncio.sleep(COUNTED_AGAIN_S)
        seen = await _Seen.at(net, config, sluice, rows)
    _forget(directory)
    return seen.since(_Seen(0, before, 0.0, 0))


def _forget(directory: Path) -> None:
    """Delete a buffer that is done with."""
    for path in directory.glob("buffer.db*"):
        path.unlink()


@dataclass(frozen=True, slots=True)
class _Seen:
    """Counters at one moment."""

    wire_bytes: int
    interface: Carried
    cpu_s: float
    readings: int

    @classmethod
    async def at(cls, net: _Net, config: Path, sluice: Measured, readings: int) -> "_Seen":
        """Now."""
        interface, cpu_s = carried(net.gateway), sluice.cpu_s
        return cls((await status_of(config))["wire_bytes"], interface, cpu_s, readings)

    def since(self, before: "_Seen") -> _Cost:
        """Cost of the readings between two moments."""
        readings = self.readings - before.readings
        if not readings:
            raise NotMeasuredError("no readings were taken in while it was measured")
        interface = self.interface.since(before.interface)
        return _Cost(
            (self.wire_bytes - before.wire_bytes) / readings,
            interface.bytes / readings,
            interface.packets / readings,
            (self.cpu_s - before.cpu_s) / readings * 1e6,
        )
