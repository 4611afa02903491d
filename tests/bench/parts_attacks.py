"""What hostile neighbours cost a good sensor: each attack beside it, against what it is without."""

import asyncio
from pathlib import Path

from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.processes import gateway, secrets_path, write_gateway
from tests.bench.report import Result
from tests.support.attacks import ATTACKS, CBOR_TOPIC, NEEDS_NO_KAFKA, STREAMS
from tests.support.good_sensor import Good, attacked

SETTLE_S = 2.0
BUFFER_BYTES_MAX = 200_000_000
NO_KAFKA = "127.0.0.1:9"
ROUTES = """
[[routes]]
topic = "{cbor}/{{device}}/{{stream}}"
kafka = "{topic}"
content_type = "application/cbor"
identity = "cbor"

[[routes]]
topic = "{streams}/{{device}}/{{stream}}"
kafka = "{topic}-{{stream}}"
identity = "json"
"""


def write_attacked(directory: Path, bootstrap: str, topic: str, bytes_max: int = BUFFER_BYTES_MAX) -> Path:
    """A gateway with the bounds that it is installed with, for a good sensor and one whose secret was stolen."""
    extra = ROUTES.format(cbor=CBOR_TOPIC, streams=STREAMS, topic=topic)
    return write_gateway(
        directory, bootstrap, topic, devices=2, bytes_max=bytes_max, new_connections_per_s_max=50, extra=extra
    )


async def attacks(bench: Bench) -> list[Result]:
    """Each attack alone beside a good sensor that sends twenty readings a second and logs in twice a second."""
    seconds = bench.pick(15, 3)
    ratios: dict[str, float] = {}
    refused: dict[str, int] = {}
    for name in ATTACKS:
        without, beside = await _measure(bench, name, seconds)
        ratios[name] = beside.p99_ms / without.p99_ms
        refused[name] = beside.refused
        say(
            f"attacks: {name}: PUBACK p99 {without.p99_ms:.1f} ms without, {beside.p99_ms:.1f} ms beside it "
            f"({ratios[name]:.1f} times); {len(beside.answered_ms)} answered, {beside.refused} refused"
        )
    worst = max(ratios, key=lambda name: ratios[name])
    return [
        Result("good_puback_p99_ratio_worst", ratios[worst], "times", "<= 5", worst),
        Result("good_refused_while_attacked", sum(refused.values()), "readings", "= 0", _told(refused)),
        *(Result(f"good_puback_p99_ratio_{name.replace('-', '_')}", ratio, "times") for name, ratio in ratios.items()),
    ]


async def _measure(bench: Bench, name: str, seconds: float) -> tuple[Good, Good]:
    """The good sensor on one gateway: without the attack, and beside it."""
    directory = bench.directory / "attacks" / name
    bootstrap = NO_KAFKA if name in NEEDS_NO_KAFKA else bench.kafka.bootstrap
    async with KafkaTopic(bench.kafka.bootstrap, f"attacks-{name}") as topic:
        config = write_attacked(directory, bootstrap, topic.name)
        good, stolen = secrets_path(directory).read_text().split()
        async with gateway(config) as sluice:
            without, beside = Good(sluice.port, good), Good(sluice.port, good)
            await without.measure(seconds)
            with attacked(name, sluice.port, stolen, directory):
                await asyncio.sleep(SETTLE_S)
                await beside.measure(seconds)
    return without, beside


def _told(refused: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in refused.items() if count)
