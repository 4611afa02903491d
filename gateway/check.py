"""`sluice check`, as far as it is about Kafka: does it answer, and are its topics safe to write to?"""

import asyncio
import re

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from msgspec import Struct

from gateway.kafka_topics import UNKNOWN, TopicVerdict, create_topics, inspect_topics
from gateway.routes import INTERNAL_PREFIX
from gateway.settings import KafkaSettings, Settings

_VARIABLE = re.compile(r"\{[a-z][a-z0-9_]*\}")
_ANY = "[A-Za-z0-9._-]"


class Finding(Struct, frozen=True):
    """One thing that was looked at."""

    subject: str
    ok: bool
    words: str


async def check_kafka(settings: Settings, *, create: bool) -> list[Finding]:
    """Look at Kafka and at the topics whose names are known; with `create`, make the missing ones."""
    kafka = settings.kafka
    address = ",".join(kafka.bootstrap)
    admin = AIOKafkaAdminClient(
        bootstrap_servers=list(kafka.bootstrap),
        client_id=settings.gateway.id,
        request_timeout_ms=int(kafka.request_timeout_s * 1000),
    )
    try:
        async with asyncio.timeout(kafka.request_timeout_s):
            await admin.start()
            existing = set(await admin.list_topics())
            topics = wanted_topics(settings, existing)
            if create and (missing := topics - existing):
                created = {verdict.topic: verdict for verdict in await create_topics(admin, sorted(missing), kafka)}
            else:
                created = {}
            verdicts = await inspect_topics(admin, sorted(topics))
    except (KafkaError, OSError, TimeoutError) as error:
        told = str(error) or type(error).__name__
        words = f"cannot be reached ({told}): is kafka.bootstrap right, and is the broker up?"
        return [Finding(f"Kafka at {address}", ok=False, words=words)]
    finally:
        await admin.close()
    findings = [Finding(f"Kafka at {address}", ok=True, words="answers")]
    findings += [_finding(verdict, created.get(verdict.topic), kafka) for verdict in verdicts]
    return findings + _routes_without_topics(settings, topics)


def _routes_without_topics(settings: Settings, topics: set[str]) -> list[Finding]:
    """Routes whose topics depend on what sensors publish, and none exists yet: the first reading would go aside."""
    if settings.kafka.create_topics:
        return []
    findings = []
    for route in settings.routes:
        first, *rest = _VARIABLE.split(route.kafka)
        if rest and (first or rest[-1]) and not any(_pattern(first, rest).fullmatch(topic) for topic in topics):
            words = (
                "no such topic exists, and what is published for one goes to the quarantine; create the topics that "
                "your sensors need, with message.timestamp.type=LogAppendTime, or set kafka.create_topics = true"
            )
            findings.append(Finding(f"route to {route.kafka}", ok=False, words=words))
    return findings


def wanted_topics(settings: Settings, existing: set[str]) -> set[str]:
    """Topics that this gateway is known to write to.

    Its own, those of routes without variables, and of the rest those that exist. A template that neither begins nor
    ends with text says too little: it names no topics here, for it would take in those of others.
    """
    kafka = settings.kafka
    topics = {kafka.events_topic, kafka.quarantine_topic}
    if settings.fallback_topic is not None:
        topics.add(settings.fallback_topic)
    for route in settings.routes:
        first, *rest = _VARIABLE.split(route.kafka)
        if not rest:
            topics.add(route.kafka)
        elif first or rest[-1]:
            pattern = _pattern(first, rest)
            topics |= {name for name in existing if pattern.fullmatch(name) and not name.startswith(INTERNAL_PREFIX)}
    return topics


def _pattern(first: str, rest: list[str]) -> re.Pattern[str]:
    """What a template can make: its static parts, with something in each place where a variable stands.

    Each inner part is taken where it comes first and not tried elsewhere (atomic groups): nothing is missed so, as all
    variables take the same characters, and no name in the cluster makes the match slow.
    """
    *inner, last = rest
    middle = "".join(f"(?>{_ANY}+?{re.escape(part)})" for part in inner)
    return re.compile(f"{re.escape(first)}{middle}{_ANY}+{re.escape(last)}")


def _finding(verdict: TopicVerdict, created: TopicVerdict | None, kafka: KafkaSettings) -> Finding:
    if created is not None and not created.usable:
        verdict = created
    if verdict.reason == UNKNOWN and kafka.create_topics:
        words = "does not exist yet; sluice run makes it, with LogAppendTime (kafka.create_topics)"
        return Finding(f"topic {verdict.topic}", ok=True, words=words)
    if verdict.reason == UNKNOWN:
        words = "does not exist; `sluice check --create-topics` makes it, with LogAppendTime"
        return Finding(f"topic {verdict.topic}", ok=False, words=words)
    if not verdict.usable:
        return Finding(f"topic {verdict.topic}", ok=False, words=f"{verdict.reason}; {verdict.hint}")
    words = "created, with LogAppendTime" if created is not None else "stamps records itself (LogAppendTime)"
    return Finding(f"topic {verdict.topic}", ok=True, words=words)
