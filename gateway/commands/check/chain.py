"""Checks every link of the chain, from the settings to a record that is read back from Kafka."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import structs

from gateway.buffer.status import is_running
from gateway.commands.check.end_to_end import check_end_to_end
from gateway.commands.check.finding import Finding, skipped, wrong
from gateway.commands.check.front_door import check_brokers, check_listener
from gateway.commands.check.kafka import TOPIC_ABSENT, TOPIC_UNWRITTEN, check_kafka
from gateway.commands.check.kafka_way import Way, check_way
from gateway.commands.check.machine import check_machine
from gateway.commands.check.sensors import check_sensors
from gateway.commands.check.topics import check_topics
from gateway.host.service import SERVICE_START, is_there
from gateway.settings import Settings

LINKS: Final = {
    "configuration": "settings",
    "disk": "disk",
    "clock": "clock",
    "serial": "serial lines",
    "listener": "sensors over MQTT",
    "broker": "the site's broker",
    "sensors": "what sensors send",
    "dns": "Kafka: names",
    "tcp": "Kafka: connection",
    "tls": "Kafka: TLS",
    "sasl": "Kafka: log-in",
    "kafka": "Kafka: cluster",
    "topics": "Kafka: topics",
    "end-to-end": "end to end",
}
"""Links in the order of the chain: a stable name for programs, and a name for people."""
_OF_UPLINK: Final = ("tls", "sasl", "kafka")
"""Links whose findings about this box are shown beside their findings from the network."""


def check_chain(settings: Settings, config: Path, *, create: bool) -> Iterator[Finding]:
    """Check every link in order, and give each finding as soon as it is made. `create` makes missing topics."""
    later: list[Finding] = []
    for finding in check_machine(settings, config):
        if finding.link in _OF_UPLINK:
            later.append(finding)
            continue
        yield finding
    entrances = list(_of("listener", check_listener(settings)))
    yield from entrances
    yield from _of("broker", check_brokers(settings))
    yield from _of("sensors", check_sensors(settings))
    way = asyncio.run(check_way(settings))
    for link in ("dns", "tcp", *_OF_UPLINK):
        yield from (finding for finding in (*later, *way.findings) if finding.link == link)
    found = _cluster(settings, way, create=create)
    yield from found
    yield structs.replace(check_topics(settings), link="topics")
    if _is_stopped(settings, config):
        yield structs.replace(
            wrong("gateway-stopped", "gateway", f"it does not run, so it takes no reading; {SERVICE_START}"),
            link="end-to-end",
        )
        return
    closed = [finding for finding in entrances if not finding.ok]
    if closed and len(closed) == len(entrances):
        because = f"{closed[0].subject} fails, see above"
        yield structs.replace(skipped("test reading", because), link="end-to-end")
        return
    why_not = way.why_not or _why_not_taken(settings.kafka.events_topic, found)
    yield from _of("end-to-end", check_end_to_end(settings, why_not))


def _is_stopped(settings: Settings, config: Path) -> bool:
    """Tell whether this gateway is a service and does not run. False if this user may not know."""
    path = settings.buffer.path
    lock = path.with_name(path.name + ".lock")
    return not is_running(path) and os.access(lock if lock.exists() else path.parent, os.R_OK) and is_there(config)


def _why_not_taken(topic: str, found: Sequence[Finding]) -> str:
    """Reason, from the findings, why Kafka takes nothing for a topic now; empty if there is none."""
    for finding in found:
        if not finding.ok and (
            finding.link == "kafka"
            or (finding.subject == f"topic {topic}" and finding.code in {TOPIC_ABSENT, TOPIC_UNWRITTEN})
        ):
            return f"{finding.subject} fails, see above"
    return ""


def _cluster(settings: Settings, way: Way, *, create: bool) -> list[Finding]:
    """Check Kafka's cluster and topics, by the addresses that let this gateway in."""
    if not way.answering:
        has_told = any(finding.link == "kafka" for finding in way.findings)
        told = [] if has_told else [structs.replace(skipped("Kafka", way.why_not), link="kafka")]
        return [*told, structs.replace(skipped("Kafka's topics", way.why_not), link="topics")]
    kafka = structs.replace(settings.kafka, bootstrap=way.answering)
    found = asyncio.run(check_kafka(structs.replace(settings, kafka=kafka), create=create))
    return [each if each.link else structs.replace(each, link="kafka") for each in found]


def _of(link: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield structs.replace(finding, link=link)
