"""Checks Kafka: whether it answers, whether its brokers can be reached, and whether its topics keep readings safely."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from msgspec import structs

from gateway.commands.certificate_dates import certificate_dates
from gateway.commands.check.finding import Finding, remark, well, wrong
from gateway.downlink.command_topic import CommandTopicError, CommandTopicMissingError, partitions_of, try_to_read
from gateway.health.conditions import disk_always_first
from gateway.intake.route_topics import VARIABLE, can_make, is_echo_topic
from gateway.kafka.link import KafkaLink
from gateway.kafka.reach import Fault, host_and_port
from gateway.kafka.secret_files import KafkaFileError
from gateway.kafka.topics import (
    ADMIN_CONFIG,
    ADMIN_WORDS,
    UNKNOWN,
    Cluster,
    TopicVerdict,
    create_topics,
    inspect_topics,
    is_safe,
    read_cluster,
)
from gateway.record_contract import INTERNAL_PREFIX
from gateway.settings import KafkaSettings, Settings, topic_behind
from gateway.tls.dates import Dates

BROKERS_DIALLED_MAX = 12
"""Most brokers that are dialled. An unreachable broker costs up to `kafka.connect_timeout_s`."""
TOPIC_ABSENT, TOPIC_UNWRITTEN = "topic-absent", "topic-unwritten"
"""Codes of findings about a topic that gets no records."""
COMMANDS_UNREAD = "commands-unread"
"""Code of the finding that no command can come from Kafka."""
BROKER_UNREACHED, BROKER_UNUSABLE = "kafka-broker-unreached", "kafka-broker-unusable"
"""Codes of findings about a broker that nothing can be sent to."""
WITHOUT_TLS = (
    "everybody on the way to Kafka can read and change the readings; add [kafka.tls] and the brokers' port for TLS, "
    "unless that way is yours alone"
)
_FILES = frozenset(
    {
        "kafka.tls.ca",
        "kafka.tls.certificate",
        "kafka.tls.key",
        "kafka.sasl.password_file",
        "kafka.sasl.token_ca",
    }
)
"""Settings that name files, which `check_machine` checks."""
_TOPIC = "{topic}"
"""Variable of `kafka.backlog_topic` and other templates, for the topic that they make a further topic from."""


async def check_kafka(settings: Settings, *, create: bool) -> list[Finding]:
    """Check Kafka and the topics whose names are known. `create` makes the topics that are missing.

    The first finding is about Kafka as a whole.
    """
    kafka, dates = settings.kafka, certificate_dates(settings)
    subject = f"Kafka at {','.join(kafka.bootstrap)}"
    try:
        link = KafkaLink(kafka, dates)
    except KafkaFileError as error:
        return [wrong("kafka-unusable", subject, _unusable(str(error)))]
    try:
        async with connected(link, settings) as admin:
            # Dial before anything is asked, so that a broker that cannot be reached is asked last.
            tried, failed = await _dial(admin, link, kafka)
            others = await _silent([each for each in kafka.bootstrap if each not in failed], settings, dates)
            about = [*failed.values(), *others]
            if failed and len(failed) == tried:
                return [_none_usable(subject, [each.code for each in failed.values()]), *about]
            cluster, findings = await _look_at_topics(admin, link, settings, create=create)
    except (KafkaError, OSError, TimeoutError) as error:
        return [wrong(_code(link, kafka), subject, _trouble(link, kafka, error))]
    about += [*_absent(cluster), *_with_admin_words(findings)]
    return [well(subject, f"answers; {_cluster_words(cluster)}"), *about]


def _unusable(trouble: str) -> str:
    """Say that Kafka was not tried. If a file is the cause, `check_machine` has said what is wrong with the file."""
    setting = trouble.partition(" ")[0].rstrip(":")
    return f"not tried: {setting} cannot be used, see above" if setting in _FILES else trouble


@asynccontextmanager
async def connected(link: KafkaLink, settings: Settings) -> AsyncIterator[AIOKafkaAdminClient]:
    """Connect a client to one address of `kafka.bootstrap`. Raises KafkaError, OSError, TimeoutError."""
    timeout_s = settings.kafka.request_timeout_s
    with link.entered():
        admin = AIOKafkaAdminClient(
            client_id=settings.gateway.id, request_timeout_ms=int(timeout_s * 1000), **link.options()
        )
        try:
            async with asyncio.timeout(timeout_s):
                await admin.start()
            yield admin
        finally:
            await admin.close()
            await link.let_go()


async def _dial(admin: AIOKafkaAdminClient, link: KafkaLink, kafka: KafkaSettings) -> tuple[int, dict[str, Finding]]:
    """Connect to the brokers at the addresses that they advertise.

    Returns how many were tried, and by address a finding for each broker that cannot be used. An answer from an
    address of `kafka.bootstrap` is not enough, because readings go to the leader of their partition.
    """
    client = admin._client  # noqa: SLF001 - aiokafka is pinned, and tests come by here
    brokers = sorted(client.cluster.brokers(), key=lambda broker: int(broker.nodeId))
    if len(brokers) > BROKERS_DIALLED_MAX:
        brokers = random.sample(brokers, BROKERS_DIALLED_MAX)
    failed = []
    for broker in brokers:
        try:
            # The link bounds connecting by itself. This time-out bounds whatever else may hang.
            async with asyncio.timeout(kafka.request_timeout_s):
                reached = await client.ready(broker.nodeId)
        except TimeoutError:
            reached = False
        if not reached:
            failed.append(broker)
    # If no broker is reached, the caller says once what that means.
    means = ", and readings whose partition it leads wait on this box" if len(failed) < len(brokers) else ""
    findings = {}
    for broker in failed:
        address = host_and_port(broker.host, broker.port)
        fault = link.faults.get(address)
        what = "it does not answer" if fault is None else f"{fault.words}; {fault.hint}"
        is_reached = fault is not None and fault.is_reached
        words = f"{_cannot(is_reached=is_reached)}{means}: {what}"
        code = BROKER_UNUSABLE if is_reached else BROKER_UNREACHED
        findings[address] = wrong(code, f"Kafka's broker {broker.nodeId} at {address}", words)
    return len(brokers), findings


def _none_usable(subject: str, codes: Sequence[str]) -> Finding:
    """Say that no broker can be used. `codes` are those of the brokers' findings."""
    can = "can use" if BROKER_UNUSABLE in codes else "reaches"
    words = f"answers, but this box {can} none of its brokers: nothing can be sent, and no topic checked"
    if BROKER_UNREACHED in codes:
        return wrong("kafka-unreached", subject, words)
    return wrong("kafka-unusable", subject, words)


async def _silent(addresses: Sequence[str], settings: Settings, dates: Dates) -> list[Finding]:
    """Warn of addresses of `kafka.bootstrap` that lead to no broker, although another address does.

    Nobody would notice a dead address before it is the only one left. All are tried at the same time.
    """
    # A single address is the one that has answered.
    if len(settings.kafka.bootstrap) == 1:
        return []
    found = await asyncio.gather(*(_is_silent(address, settings, dates) for address in addresses))
    return [finding for finding in found if finding is not None]


async def _is_silent(address: str, settings: Settings, dates: Dates) -> Finding | None:
    kafka = structs.replace(settings.kafka, bootstrap=(address,))
    link = KafkaLink(kafka, dates)
    try:
        async with connected(link, structs.replace(settings, kafka=kafka)):
            return None
    except (KafkaError, OSError, TimeoutError) as error:
        words = f"only its other addresses lead to Kafka; {address} {_trouble(link, kafka, error)}"
        return remark("bootstrap-unreached", "kafka.bootstrap", words)


def _trouble(link: KafkaLink, kafka: KafkaSettings, error: Exception) -> str:
    """Say for each address that was tried why no broker answers, and what to do."""
    faults = _faults(link, kafka)
    if not faults:
        told = str(error) or type(error).__name__
        return f"{_cannot(is_reached=False)}: {told}; is kafka.bootstrap right, and is the broker up?"
    told = ". And ".join(f"{fault.words}; {fault.hint}" for fault in faults).replace("?. And", "? And")
    return f"{_cannot(is_reached=_are_reached(faults))}: {told}"


def _code(link: KafkaLink, kafka: KafkaSettings) -> str:
    return "kafka-unusable" if _are_reached(_faults(link, kafka)) else "kafka-unreached"


def _faults(link: KafkaLink, kafka: KafkaSettings) -> list[Fault]:
    return [fault for address, fault in link.faults.items() if address in kafka.bootstrap]


def _are_reached(faults: list[Fault]) -> bool:
    return bool(faults) and all(fault.is_reached for fault in faults)


def _cannot(*, is_reached: bool) -> str:
    return "is reached, and cannot be used" if is_reached else "cannot be reached"


async def _look_at_topics(
    admin: AIOKafkaAdminClient, link: KafkaLink, settings: Settings, *, create: bool
) -> tuple[Cluster, list[Finding]]:
    """Read the cluster, and check the topics. Raises KafkaError, TimeoutError if the cluster does not answer."""
    kafka = settings.kafka
    created: dict[str, TopicVerdict] = {}
    async with asyncio.timeout(kafka.request_timeout_s):
        cluster = await read_cluster(admin)
    existing = set(cluster.topics)
    topics = wanted_topics(settings, existing)
    try:
        async with asyncio.timeout(kafka.request_timeout_s):
            if create:
                created = {each.topic: each for each in await create_topics(admin, sorted(topics - existing), kafka)}
            verdicts = await inspect_topics(admin, sorted(topics), kafka)
        of_commands = await _look_at_commands(admin, settings, create=create)
    except (KafkaError, TimeoutError) as error:
        told = link.fault or str(error) or type(error).__name__
        words = f"cannot be {'made' if create else 'checked'} just now ({told}): are all brokers well? Try again"
        return cluster, [structs.replace(wrong("topics-unchecked", "Kafka's topics", words), link="topics")]
    findings = [found for each in verdicts for found in _findings(each, created.get(each.topic), settings)]
    findings += _routes_without_topics(settings, topics) + _topics_of_devices(settings) + of_commands
    return cluster, [structs.replace(each, link="topics") for each in findings]


async def _look_at_commands(admin: AIOKafkaAdminClient, settings: Settings, *, create: bool) -> list[Finding]:
    """Check the topic of commands, if commands are read. Raises KafkaError, TimeoutError."""
    if settings.commands is None:
        return []
    kafka, topic = settings.kafka, settings.commands.topic_of(settings.gateway.id)
    subject = f"topic {topic}"
    try:
        async with asyncio.timeout(kafka.request_timeout_s):
            await partitions_of(admin, topic, kafka, create=create)
            await try_to_read(admin, topic, kafka)
    except CommandTopicMissingError as error:
        if kafka.create_topics:
            return [well(subject, "does not exist yet; sluice run makes it, with LogAppendTime (kafka.create_topics)")]
        return [wrong(COMMANDS_UNREAD, subject, f"no command comes from Kafka: {error}")]
    except CommandTopicError as error:
        return [wrong(COMMANDS_UNREAD, subject, f"no command comes from Kafka: {error}")]
    return [well(subject, "commands are read from it; whoever may write to it may command this gateway's devices")]


def _cluster_words(cluster: Cluster) -> str:
    count = len(cluster.brokers)
    if count == 1:
        return "its cluster is one broker, so acknowledged records are on one disk only"
    up = len(cluster.addresses)
    return f"its cluster has {count} brokers, {'all' if up == count else up} of them up"


def _absent(cluster: Cluster) -> list[Finding]:
    """Warn of brokers that have replicas and are down. What that means for a topic is in the topic's finding."""
    absent = sorted(cluster.brokers.difference(cluster.addresses))
    if not absent:
        return []
    words = (
        f"down: {', '.join(map(str, absent))}; there are replicas on them. Start them, or, if they are gone for good, "
        "move their replicas to other brokers (kafka-reassign-partitions.sh)"
    )
    return [remark("kafka-brokers-down", "Kafka's brokers", words)]


def _with_admin_words(findings: list[Finding]) -> list[Finding]:
    """Add to the first finding with a command who has to run such commands."""
    first = next((finding for finding in findings if ADMIN_CONFIG in finding.words), None)
    if first is None:
        return findings
    told = structs.replace(first, words=f"{first.words} ({ADMIN_WORDS})")
    return [told if finding is first else finding for finding in findings]


def _routes_without_topics(settings: Settings, topics: set[str]) -> list[Finding]:
    """Report routes with variables whose topics do not exist yet: their first reading would be quarantined."""
    if settings.kafka.create_topics:
        return []
    findings = []
    for route in settings.routes:
        first, *rest = VARIABLE.split(route.kafka)
        if rest and (first or rest[-1]) and not any(can_make(route.kafka, topic) for topic in topics):
            words = (
                "no such topic exists, so readings for such a topic go to the quarantine; create the topics that your "
                "sensors need, with message.timestamp.type=LogAppendTime, or set kafka.create_topics = true"
            )
            findings.append(wrong("route-without-topic", f"route to {route.kafka}", words))
    return findings


def _topics_of_devices(settings: Settings) -> list[Finding]:
    """Warn of routes that make a topic for each device: the gateway may not make enough for a large site."""
    if not settings.kafka.create_topics:
        return []
    words = (
        "it makes a topic for each device; the gateway makes no more than kafka.topics_created_max = "
        f"{settings.kafka.topics_created_max:,} in all: raise that setting if there are more devices, or take "
        "{device} out of the route: the key of each record has the device anyway"
    )
    return [
        remark("topic-per-device", f"route to {route.kafka}", words)
        for route in settings.routes
        if "{device}" in route.kafka
    ]


def wanted_topics(settings: Settings, existing: set[str]) -> set[str]:
    """Names of the topics that this gateway is known to write to.

    These are its own topics, topics of routes without variables, and existing topics that other routes could make.
    The further topics of readings' topics are added: of backlogs, of structured events, of last readings. A template
    that neither begins nor ends with text adds nothing, because it would match topics of others.
    """
    kafka = settings.kafka
    streams = set() if settings.fallback_topic is None else {settings.fallback_topic}
    further: set[str] = set()
    echoed: set[str] = set()
    for route in settings.routes:
        templates = [each for each in (kafka.backlog_topic, kafka.latest_topic) if each is not None]
        if route.envelope == "both":
            templates.append(kafka.structured_topic)
        first, *rest = VARIABLE.split(route.kafka)
        of_route: set[str] = set()
        if not rest:
            of_route = {route.kafka}
        elif first or rest[-1]:
            made = {name for name in existing if can_make(route.kafka, name) and not name.startswith(INTERNAL_PREFIX)}
            # `device-{stream}` also matches the names of its own backlogs. A backlog has no backlog of its own.
            further |= {
                name for name in made for template in templates if can_make(route.kafka, topic_behind(template, name))
            }
            of_route = made - further
        streams |= of_route
        if route.envelope == "both":
            echoed |= of_route
    further |= {kafka.structured_topic.replace(_TOPIC, name) for name in echoed}
    for template in (kafka.backlog_topic, kafka.latest_topic):
        if template is not None:
            further |= {template.replace(_TOPIC, name) for name in streams}
    return {kafka.events_topic, kafka.quarantine_topic} | streams | further


def _findings(verdict: TopicVerdict, created: TopicVerdict | None, settings: Settings) -> list[Finding]:
    """Findings about a topic. `created` is the verdict of the attempt to make it, if there was one."""
    kafka = settings.kafka
    subject = f"topic {verdict.topic}"
    if created is not None and not created.usable and not verdict.usable:
        verdict = created
    if verdict.reason == UNKNOWN and kafka.create_topics:
        return [well(subject, "does not exist yet; sluice run makes it, with LogAppendTime (kafka.create_topics)")]
    if verdict.reason == UNKNOWN:
        words = "does not exist; `sluice check --create-topics` makes it, with LogAppendTime"
        return [wrong(TOPIC_ABSENT, subject, words)]
    if not verdict.usable:
        is_echo = is_echo_topic(settings, verdict.topic)
        lost = "its events are left out" if is_echo else "its readings go to the quarantine"
        how = " just now" if verdict.waits else f", so {lost}"
        return [wrong(TOPIC_UNWRITTEN, subject, f"is not written to{how}: {verdict.reason}; {verdict.hint}")]
    # A topic that this gateway may not see could have existed before.
    is_new = created is not None and created.made
    said = "created, with LogAppendTime" if is_new else verdict.summary
    flaws = [(wrong if flaw.fails else remark)("topic-flaw", subject, flaw.words) for flaw in verdict.flaws]
    return [well(subject, f"{said}; {_first_copy(verdict, settings)}"), *flaws]


def _first_copy(verdict: TopicVerdict, settings: Settings) -> str:
    """Say where a topic's readings have their first durable copy, and why."""
    if is_echo_topic(settings, verdict.topic):
        return "it has further records of readings, and their own topic says where they are first"
    why = disk_always_first(settings)
    if not why and is_safe(verdict, settings.kafka):
        left_ms = (settings.buffer.kafka_first_s - settings.kafka.linger_s) * 1000
        return f"Kafka has readings first, and this disk is spared, as long as Kafka answers within {left_ms:g} ms"
    why = why or "one broker alone would have them (kafka.one_replica_is_enough)"
    return f"this disk has readings first, because {why}"
