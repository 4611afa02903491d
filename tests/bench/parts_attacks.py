"""Measures a good sensor beside each kind of hostile neighbour, and compares it with a run without neighbours."""

import asyncio
import ssl
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from demo.kafka_broker import free_ports
from gateway.buffer.shares import kept_days
from gateway.commands.check.machine import TYPICAL_BYTES
from gateway.settings import BufferSettings
from tests.bench.context import Bench, say
from tests.bench.kafka_watch import KafkaTopic
from tests.bench.processes import gateway, secrets_path, write_gateway
from tests.bench.report import Result
from tests.support.attacks import ATTACKS, CBOR_TOPIC, NEEDS_NO_KAFKA, OVER_TLS, STREAMS, Target
from tests.support.certificates import make_authority
from tests.support.good_sensor import Good, attacked

SETTLE_S = 2.0
CONNECTIONS = 4
"""Of the good sensor. The p99 of one connection's readings would be one or two of them."""
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

[mqtt_listener.tls]
certificate = "{certificate}"
key = "{key}"
port = {tls_port}

[status_page]
host = "127.0.0.1"
port = {page_port}
"""


@dataclass(frozen=True, slots=True)
class Attacked:
    """A gateway's settings, and the secrets in them that an attacker and a good sensor have."""

    config: Path
    target: Target
    secret: str
    """Secret of the good sensor."""
    tls: ssl.SSLContext

    def good(self, *attacks: str) -> Good:
        """A sensor that keeps to the rules; over TLS beside an attack on TLS."""
        return Good(self.target, self.secret, self.tls if OVER_TLS & set(attacks) else None, CONNECTIONS)


def write_attacked(directory: Path, bootstrap: str, topic: str, bytes_max: int = BUFFER_BYTES_MAX) -> Attacked:
    """A gateway with the bounds that it is installed with, for a good sensor and one whose secret was stolen."""
    authority = make_authority(directory / "ca")
    server = authority.sign("server")
    tls_port, page_port = free_ports(2)
    extra = ROUTES.format(
        cbor=CBOR_TOPIC,
        streams=STREAMS,
        topic=topic,
        certificate=server.certificate,
        key=server.key,
        tls_port=tls_port,
        page_port=page_port,
    )
    config = write_gateway(
        directory, bootstrap, topic, devices=2, bytes_max=bytes_max, new_connections_per_s_max=50, extra=extra
    )
    secret, stolen = secrets_path(directory).read_text().split()
    port = tomllib.loads(config.read_text())["mqtt_listener"]["port"]
    context = ssl.create_default_context(cafile=authority.certificate)
    return Attacked(config, Target(port, tls_port, page_port, stolen), secret, context)


async def attacks(bench: Bench) -> list[Result]:
    """Each attack alone beside a good sensor that sends twenty readings a second and logs in twice a second."""
    seconds = bench.pick(15, 3)
    results = _results("", [await _beside(bench, (name,), seconds) for name in ATTACKS])
    days = kept_days(BufferSettings(), TYPICAL_BYTES)
    note = f"one reading of {TYPICAL_BYTES} bytes a second, beside one device that fills the buffer; by the settings"
    return [*results, Result("buffer_days_kept_for_others", days, "days", None, note)]


async def attack_pairs(bench: Bench) -> list[Result]:
    """Any two of the attacks at once, beside the same sensor."""
    pairs = list(combinations(ATTACKS, 2))
    return _results("_pairs", [await _beside(bench, pair, bench.pick(8, 3)) for pair in pairs[:: bench.pick(1, 12)]])


@dataclass(frozen=True, slots=True)
class Beside:
    """Figures of a good sensor beside attacks."""

    names: str
    ratio: float
    """Its PUBACK p99, as a multiple of the p99 without attacks on the same gateway."""
    refused: int
    unheard: int
    """Questions for the gateway's health that were not answered."""


async def _beside(bench: Bench, names: tuple[str, ...], seconds: float) -> Beside:
    told = "-and-".join(names)
    directory = bench.directory / "attacks" / told
    # The topics are made where Kafka is; a buffer is filled where it is not.
    is_away = not {"topics"} & set(names) and bool(NEEDS_NO_KAFKA & set(names))
    async with KafkaTopic(bench.kafka.bootstrap, f"attacks-{told}") as topic:
        site = write_attacked(directory, NO_KAFKA if is_away else bench.kafka.bootstrap, topic.name)
        async with gateway(site.config) as sluice:
            warm, without, beside = (site.good(*names) for _ in range(3))
            await warm.begin()
            # The first readings wait until the gateway knows how Kafka takes their topic.
            await warm.measure(SETTLE_S)
            await without.measure(seconds)
            with ExitStack() as attackers:
                for name in names:
                    attackers.enter_context(attacked(name, site.target, directory))
                await asyncio.sleep(SETTLE_S)
                before_s = sluice.cpu_s
                await beside.measure(seconds)
                cores = (sluice.cpu_s - before_s) / seconds
    ratio = beside.p99_ms / without.p99_ms
    say(
        f"attacks: {told}: PUBACK p99 {without.p99_ms:.1f} ms without, {beside.p99_ms:.1f} ms beside ({ratio:.1f} "
        f"times); {len(beside.answered_ms)} answered, {beside.refused} refused, {beside.unheard} times no health; "
        f"{cores:.2f} cores"
    )
    return Beside(told, ratio, beside.refused, beside.unheard)


def _results(kind: str, measured: list[Beside]) -> list[Result]:
    worst = max(measured, key=lambda each: each.ratio)
    told = ", ".join(f"{each.names}: {each.refused}" for each in measured if each.refused)
    refused = sum(each.refused for each in measured)
    silent_beside = ", ".join(f"{each.names}: {each.unheard}" for each in measured if each.unheard)
    unheard = sum(each.unheard for each in measured)
    return [
        Result(f"good_puback_p99_ratio_worst{kind}", worst.ratio, "times", "<= 5", worst.names),
        Result(f"good_refused_while_attacked{kind}", refused, "readings", "= 0", told),
        Result(f"health_unheard_while_attacked{kind}", unheard, "questions", "= 0", silent_beside),
        *(Result(f"good_puback_p99_ratio_{each.names.replace('-', '_')}", each.ratio, "times") for each in measured),
    ]
