"""Judges whether a Kafka topic may be written to, and creates topics. They must neither delete nor refuse readings."""

import asyncio
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.client import ConnectionGroup
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    IncompatibleBrokerVersion,
    InvalidConfigurationError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    NotControllerError,
    PolicyViolationError,
    RequestTimedOutError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
    for_code,
)
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.metadata import MetadataRequest
from msgspec import structs

from gateway.host.terminal_text import size, span
from gateway.kafka.batch import HEADER_BYTES
from gateway.settings import KafkaSettings

BATCH_BYTES_DEFAULT: Final = 1_000_000
"""Bytes of a batch that a topic is believed to take if it does not say: just below the least default of any broker."""
BATCH_BYTES_KAFKA: Final = 1_048_588
"""Default of a topic's `max.message.bytes` (Kafka 2.5 and later)."""
CREATION_S_MAX: Final = 5.0
"""Seconds that a created topic may take to be known everywhere. After that, it counts as one that waits."""
ANSWER_S_MAX: Final = 10.0
"""Seconds that the cluster may take to say whether it creates a topic. Other new topics wait meanwhile."""
DISKS_MIN: Final = 2
"""Brokers that must have a reading before this box needs no copy of it, if the cluster has so many."""
RETENTION_BYTES_MIN: Final = 10_000_000
"""Fewest bytes that a partition must keep to be written to: ten batches, which a backlog sends in seconds."""
REASSIGNED_TOLD_MAX: Final = 6
"""Partitions that a shown command names. Further partitions are only counted."""
SAID_CHARACTERS_MAX: Final = 300
"""Characters of a broker's text that are repeated. It may be anything, and is kept for each topic."""
UNKNOWN = "topic-unknown"
NOT_CREATED: Final = "topic-not-created"
NAME_COLLIDES: Final = "topic-name-collides"
"""Reason if Kafka has a topic whose name differs only in '.' and '_'."""
SEPARATORS_MAX: Final = 4
"""Most '.' and '_' in a name that is compared with other names. With more, too many names are like it, and only the
broker can refuse it."""
NOT_DESCRIBED: Final = "not-described"
"""Reason if no broker describes a topic. It is never a reason of the quarantine, as the topic's readings wait."""
BEING_MADE: Final = "being-made"
"""Reason if a created topic is not known yet. It is never a reason of the quarantine either."""
BEYOND_DEVICE: Final = "topic-limit-of-device"
BEYOND_ALL: Final = "topic-limit"
"""Beginnings of the reasons for topics beyond `kafka.topics_per_device_day_max` and `kafka.topics_created_max`."""
ADMIN_CONFIG: Final = "--command-config admin.properties"
"""Option of the commands that are shown, if the cluster uses TLS or SASL: Kafka's tools must do so too."""
ADMIN_WORDS: Final = (
    "an administrator of the cluster runs the commands told here, whose own security.protocol, sasl.* and ssl.* "
    "settings stand in the file that is called admin.properties in them"
)
"""Said once beside commands that name the file."""
AUTHORIZATION = (ClusterAuthorizationFailedError, TopicAuthorizationFailedError)
LASTING = (
    *AUTHORIZATION,
    InvalidConfigurationError,
    InvalidPartitionsError,
    InvalidTopicError,
    PolicyViolationError,
    UnsupportedVersionError,
)
"""Errors about a topic that the next attempt would get again. Any other error is about the cluster's state just now,
and sends nothing to the quarantine."""

TIMESTAMP_TYPE: Final = "message.timestamp.type"
CLEANUP_POLICY: Final = "cleanup.policy"
RETENTION_MS: Final = "retention.ms"
RETENTION_BYTES: Final = "retention.bytes"
MIN_IN_SYNC: Final = "min.insync.replicas"
MESSAGE_BYTES: Final = "max.message.bytes"
SEGMENT_BYTES: Final = "segment.bytes"
UNCLEAN_ELECTION: Final = "unclean.leader.election.enable"
TOPIC_CONFIG: Final = {TIMESTAMP_TYPE: "LogAppendTime", CLEANUP_POLICY: "delete"}
"""Settings of every topic that is created. Brokers delete by a record's timestamp, and refuse timestamps far in the
future. So the timestamp must be the broker's: the clock of a gateway or a sensor may be years off."""

_JUDGED_KEYS = (
    TIMESTAMP_TYPE,
    CLEANUP_POLICY,
    RETENTION_MS,
    RETENTION_BYTES,
    MIN_IN_SYNC,
    MESSAGE_BYTES,
    SEGMENT_BYTES,
    UNCLEAN_ELECTION,
)
_BROKER_RETENTION_MS = {"log.retention.ms": 1, "log.retention.minutes": 60_000, "log.retention.hours": 3_600_000}
"""A broker's settings for topics that have none, and their units in milliseconds. The first that is set counts."""

_NOT_TOLD: Final = (UnknownTopicOrPartitionError.errno, None, ())

Config = Mapping[str, str | None]
"""A topic's settings in effect. If it has none of its own, the broker's count. An old broker has fewer."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A flaw of a topic that is written to all the same."""

    words: str
    fails: bool
    """Whether `sluice check` fails because of it. Otherwise it warns."""


@dataclass(frozen=True, slots=True)
class TopicVerdict:
    """The verdict on whether a topic can be trusted with readings. If it can, `reason` and `hint` are empty."""

    topic: str
    reason: str = ""
    hint: str = ""
    """The meaning of the reason, and what mends it."""
    batch_bytes_max: int = BATCH_BYTES_DEFAULT
    """Bytes of the largest batch that the topic takes, with its header (`kafka.batch.HEADER_BYTES`)."""
    flaws: tuple[Flaw, ...] = ()
    summary: str = ""
    """The topic's way of keeping readings, in words for people."""
    waits: bool = False
    """Whether the trouble may pass by itself. The topic's readings wait on disk, and it is looked at again."""
    made: bool = False
    """Whether the topic was created just now, for this verdict."""
    copies: int = 0
    """Replicas that have a record once Kafka acknowledges it, at least."""

    @property
    def usable(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Partition:
    """Leader and replicas of one partition. Brokers are node ids."""

    number: int
    leader: int
    """-1 if there is none."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster by its own account."""

    id: str
    """Id that no other cluster has; empty if it has none."""
    addresses: Mapping[int, tuple[str, int]]
    """Host and port of each broker that is up, as advertised."""
    topics: Mapping[str, tuple[int, tuple[Partition, ...]]]
    """Error code and partitions of each topic that was asked for."""

    @property
    def brokers(self) -> frozenset[int]:
        """All brokers that are heard of. A broker that is down is still named by partitions with a replica on it."""
        replicas = {node for _, partitions in self.topics.values() for each in partitions for node in each.replicas}
        return frozenset(self.addresses) | replicas


# -- asking ---------------------------------------------------------------------------------------


async def read_cluster(admin: AIOKafkaAdminClient, topics: Iterable[str] | None = None) -> Cluster:
    """Read brokers, and all or the named topics with their partitions. Creates no topic, despite auto-creation.

    Raises KafkaError if no broker can be asked.
    """
    asked = None if topics is None else list(topics)
    # The admin client's own describe_topics lets the broker create the topics.
    response = await _ask(admin, lambda _: MetadataRequest(asked, allow_auto_topic_creation=False))
    answer = response.to_object()
    return Cluster(
        (answer.get("cluster_id") or "")[:SAID_CHARACTERS_MAX],
        {broker["node_id"]: (broker["host"], broker["port"]) for broker in answer["brokers"]},
        {topic["topic"]: (topic["error_code"], tuple(_partitions(topic))) for topic in answer["topics"]},
    )


def _partitions(topic: Mapping[str, Any]) -> Iterator[Partition]:
    for each in sorted(topic["partitions"], key=lambda partition: int(partition["partition"])):
        yield Partition(each["partition"], each["leader"], tuple(each["replicas"]), tuple(each["isr"]))


async def inspect_topics(
    admin: AIOKafkaAdminClient, topics: Iterable[str], settings: KafkaSettings
) -> list[TopicVerdict]:
    """Judge topics as the brokers describe them, in the order given. A topic that none describes just now waits.

    Raises KafkaError if no broker can be asked.
    """
    asked = list(topics)
    if not asked:
        return []
    resources = [(ConfigResourceType.TOPIC, topic, list(_JUDGED_KEYS)) for topic in asked]
    response = await _ask(admin, lambda _: DescribeConfigsRequest(resources))
    described = {topic: (code, message, entries) for code, message, _, topic, entries in response.resources}
    cluster = await read_cluster(admin, asked)
    # The commands that are shown ask for no more replicas than there are brokers.
    fitting = structs.replace(settings, replicas=min(settings.replicas, max(1, len(cluster.brokers))))
    verdicts = []
    for topic in asked:
        code, message, entries = described.get(topic, _NOT_TOLD)
        partitions_code, partitions = cluster.topics.get(topic, (UnknownTopicOrPartitionError.errno, ()))
        verdict = _refusal(topic, code, partitions_code, _cut(message), fitting)
        if verdict is None:
            config = {entry[0]: _cut(entry[1]) for entry in entries}
            verdict = judge(topic, config, partitions, cluster.brokers, settings)
        verdicts.append(verdict)
    missing = [verdict.topic for verdict in verdicts if verdict.reason == UNKNOWN]
    # If this gateway makes topics, the broker itself refuses a name that collides.
    likes = {} if settings.create_topics else await _likes(admin, missing)
    return [_collides(each.topic, likes[each.topic]) if each.topic in likes else each for each in verdicts]


async def _likes(admin: AIOKafkaAdminClient, topics: Iterable[str]) -> dict[str, str]:
    """By topic: an existing topic whose name differs in '.' and '_' only."""
    alike = {topic: set(_names_alike(topic)) for topic in topics}
    asked = set().union(*alike.values())
    if not asked:
        return {}
    cluster = await read_cluster(admin, asked)
    there = {other for other, (code, _) in cluster.topics.items() if not code}
    return {topic: min(others & there) for topic, others in alike.items() if others & there}


def _names_alike(topic: str) -> Iterator[str]:
    parts = re.split("[._]", topic)
    if len(parts) <= SEPARATORS_MAX + 1:
        for separators in itertools.product("._", repeat=len(parts) - 1):
            other = "".join(map("".join, zip(parts, (*separators, ""), strict=True)))
            if other != topic:
                yield other


async def create_topics(
    admin: AIOKafkaAdminClient, topics: Iterable[str], settings: KafkaSettings
) -> list[TopicVerdict]:
    """Create topics that neither delete nor refuse readings, and return the verdicts. Existing topics are only judged.

    They get `kafka.replicas`, or as many as the cluster has brokers for. From two replicas on, two must have a reading
    (`min.insync.replicas`). If one of two brokers is away, nothing is accepted then, and readings wait on this box,
    which is made for it. With less, one disk would be enough.

    A topic that cannot be created just now waits. Raises KafkaError if no broker can be asked.
    """
    waiting = list(topics)
    if not waiting:
        return []
    config = {**TOPIC_CONFIG, **await _retention(admin, settings), **_message_size(settings)}
    verdicts = []
    # Topics that exist now, and whether they were created just now.
    made: dict[str, bool] = {}
    replicas = settings.replicas
    while waiting:
        # Metadata names only brokers that are up; the controller knows those that are down too. So it is asked for all
        # replicas, and then for one less each time, as a topic keeps the number that it begins with.
        least = {MIN_IN_SYNC: str(min(DISKS_MIN, replicas))}
        answers = await _create(admin, waiting, replicas, {**config, **least}, settings)
        asked, waiting = waiting, []
        for topic in asked:
            code, detail = answers.get(topic, (UnknownError.errno, None))
            error = for_code(code)
            if error is InvalidReplicationFactorError and replicas > 1:
                waiting.append(topic)
            elif code and error is not TopicAlreadyExistsError:
                verdicts.append(_creation_refusal(topic, code, detail, settings))
            else:
                made[topic] = not code
        replicas -= 1
    return verdicts + await _inspect_created(admin, made, settings)


async def _create(
    admin: AIOKafkaAdminClient, topics: Sequence[str], replicas: int, config: Mapping[str, str], settings: KafkaSettings
) -> dict[str, tuple[int, str | None]]:
    """Ask for topics. Returns code and text of the answer for each. Raises KafkaError if no broker can be asked.

    The admin client itself asks the controller alone, as long as it takes, and fails if Metadata names none. Any broker
    hands the request on to the controller. Only brokers of a cluster with ZooKeeper do not, and say so.
    """
    compacted = {**config, CLEANUP_POLICY: "compact"}
    new: list[Any] = [
        (topic, settings.partitions, replicas, [], list((compacted if settings.is_latest(topic) else config).items()))
        for topic in topics
    ]
    patience_s = min(ANSWER_S_MAX, settings.request_timeout_s)
    # The cluster should give up before this box does, and say so.
    timeout_ms = int(patience_s * 1000 / 2)
    client = admin._client  # noqa: SLF001 - see `_ask`
    controller = client.cluster.controller
    first = None if controller is None else controller.nodeId
    try:
        async with asyncio.timeout(patience_s):
            response = await _ask(admin, lambda _: CreateTopicsRequest(new, timeout_ms, validate_only=False), first)
    except (TimeoutError, RequestTimedOutError):
        # Brokers that have lost their controllers still take readings.
        return dict.fromkeys(topics, (RequestTimedOutError.errno, "no answer: are its controllers well?"))
    except IncompatibleBrokerVersion:
        return dict.fromkeys(
            topics, (UnsupportedVersionError.errno, "no client can create topics there; do it by hand")
        )
    answers = {topic: (code, _cut(rest[0]) if rest else None) for topic, code, *rest in response.topic_errors}
    if any(code == NotControllerError.errno for code, _ in answers.values()):
        # So that the next attempt finds the controller.
        await client.force_metadata_update()
    return answers


async def _inspect_created(
    admin: AIOKafkaAdminClient, made: Mapping[str, bool], settings: KafkaSettings
) -> list[TopicVerdict]:
    """Judge new topics, again and again for a while: brokers may not know yet what the controller has just made."""
    deadline = time.monotonic() + CREATION_S_MAX
    while True:
        verdicts = await inspect_topics(admin, made, settings)
        unseen = {verdict.topic for verdict in verdicts if verdict.reason == UNKNOWN or verdict.waits}
        if not unseen or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    return [
        _waits(verdict.topic, NOT_CREATED, "it exists, and not every broker knows it yet")
        if verdict.topic in unseen
        else replace(verdict, made=made[verdict.topic])
        for verdict in verdicts
    ]


async def _retention(admin: AIOKafkaAdminClient, settings: KafkaSettings) -> dict[str, str]:
    """`retention.ms` for a new topic if the broker's own would be too short. Otherwise the broker decides.

    If a broker hides its settings from this gateway, they stay in force, and the verdict on the new topic tells.
    """
    keys = list(_BROKER_RETENTION_MS)
    response = await _ask(admin, lambda node: DescribeConfigsRequest([(ConfigResourceType.BROKER, str(node), keys)]))
    ((code, _, _, _, entries),) = response.resources
    if code:
        return {}
    config = {entry[0]: entry[1] for entry in entries}
    for key, unit_ms in _BROKER_RETENTION_MS.items():
        value = _number(config, key)
        if value is not None:
            return {RETENTION_MS: str(_least_ms(settings))} if 0 <= value * unit_ms < _least_ms(settings) else {}
    return {}


def _message_size(settings: KafkaSettings) -> dict[str, str]:
    """`max.message.bytes` for a new topic if larger records are wanted than Kafka takes by default."""
    wanted = settings.record_bytes_max + HEADER_BYTES
    return {MESSAGE_BYTES: str(wanted)} if wanted > BATCH_BYTES_KAFKA else {}


def _cut(said: str | None) -> str | None:
    return said and said[:SAID_CHARACTERS_MAX]


async def _ask(admin: AIOKafkaAdminClient, request: Callable[[int], Any], first: int | None = None) -> Any:
    """Ask brokers until one answers: `first`, then connected brokers, then the others. Returns the answer.

    `request` makes the request for a node id. If a broker goes away or says nothing, the next one is asked. If none
    answers, raises the KafkaError of the last one.

    The admin client itself asks one broker at random, and fails if that broker cannot be reached. Its client and the
    client's connections are private in aiokafka 0.14. So that version is pinned, and a test covers this.
    """
    client = admin._client  # noqa: SLF001
    nodes = [broker.nodeId for broker in client.cluster.brokers()]
    random.shuffle(nodes)
    connected = {node for (node, _), connection in client._conns.items() if connection.connected()}  # noqa: SLF001
    gone: KafkaError = NodeNotReadyError("none of the brokers that the cluster names can be connected to from here")
    for node in sorted(nodes, key=lambda node: (node != first, node not in connected)):
        if not await client.ready(node):
            continue
        try:
            return await client.send(node, request(node))
        except (KafkaConnectionError, RequestTimedOutError, NodeNotReadyError) as error:
            gone = error
        except asyncio.CancelledError:
            # Answers come in the order of requests, so the next request would wait for this one's answer.
            if (connection := client._conns.get((node, ConnectionGroup.DEFAULT))) is not None:  # noqa: SLF001
                connection.close()
            raise
    raise gone


# -- judging --------------------------------------------------------------------------------------


def judge(
    topic: str, config: Config, partitions: Sequence[Partition], brokers: frozenset[int], settings: KafkaSettings
) -> TopicVerdict:
    """Judge a topic by its settings and partitions (at least one). `brokers` are all of the cluster, up or down."""
    is_latest = settings.is_latest(topic)
    keeps = _is_not_compacted if is_latest else _deletes
    refusals = [*_stamped_wrongly(topic, config, settings), *keeps(topic, config, settings)]
    refusals += _refuses(topic, config, partitions, settings)
    if refusals:
        return replace(refusals[0], hint="; ".join(refusal.hint for refusal in refusals))
    flaws = (
        *(() if is_latest else _one_disk(topic, config, partitions, brokers, settings)),
        *_out_of_sync(config, partitions),
        *(() if is_latest else _deletes_by_size(topic, config, settings)),
        *_refuses_large(topic, config, settings),
    )
    return TopicVerdict(
        topic,
        batch_bytes_max=_batch_bytes_max(config),
        flaws=flaws,
        summary=_summary(config, partitions),
        copies=min(_fewest_replicas(partitions), _number(config, MIN_IN_SYNC) or 1),
    )


def is_safe(verdict: TopicVerdict, settings: KafkaSettings) -> bool:
    """Whether Kafka's acknowledgement alone keeps a reading: brokers acknowledge before they sync their disks."""
    return verdict.copies >= DISKS_MIN or (verdict.copies > 0 and settings.one_replica_is_enough)


def _stamped_wrongly(topic: str, config: Config, settings: KafkaSettings) -> Iterator[TopicVerdict]:
    stamped_by = config.get(TIMESTAMP_TYPE)
    if stamped_by != "LogAppendTime":
        yield TopicVerdict(
            topic,
            "topic-not-logappendtime",
            f"its {TIMESTAMP_TYPE} is {stamped_by}: retention would delete what a gateway with a wrong clock sends; "
            f"set it: {_alter(topic, settings, f'{TIMESTAMP_TYPE}=LogAppendTime')}",
        )


def _deletes(topic: str, config: Config, settings: KafkaSettings) -> Iterator[TopicVerdict]:
    """Verdicts on a topic that deletes readings before its readers have seen them."""
    policies = _policies(config)
    if "compact" in policies:
        yield TopicVerdict(
            topic,
            "topic-compacted",
            f"its {CLEANUP_POLICY} is {config.get(CLEANUP_POLICY)}: compaction keeps the last reading of each device "
            f"and deletes the others; set it: {_alter(topic, settings, f'{CLEANUP_POLICY}=delete')}",
        )
    if "delete" not in policies:
        return
    kept_ms = _number(config, RETENTION_MS)
    least_ms = _least_ms(settings)
    if kept_ms is not None and 0 <= kept_ms < least_ms:
        yield TopicVerdict(
            topic,
            "topic-retention-too-short",
            f"it keeps readings for {span(kept_ms / 1000)} ({RETENTION_MS}={kept_ms}), less than "
            f"kafka.retention_s_min = {settings.retention_s_min:.0f} ({span(least_ms / 1000)}): who reads it could not "
            f"be away for longer; set it: {_alter(topic, settings, f'{RETENTION_MS}={least_ms}')}, or lower "
            "kafka.retention_s_min",
        )
    kept_bytes = _number(config, RETENTION_BYTES)
    if kept_bytes is not None and 0 <= kept_bytes < RETENTION_BYTES_MIN:
        yield TopicVerdict(
            topic,
            "topic-retention-too-short",
            f"it keeps {size(kept_bytes)} of each partition ({RETENTION_BYTES}={kept_bytes}), which a backlog after an "
            "outage sends within seconds: its first readings would be deleted while the last are being sent; take the "
            f"bound away: {_alter(topic, settings, f'{RETENTION_BYTES}=-1')}, or make it {size(RETENTION_BYTES_MIN)} "
            "at the very least",
        )


def _is_not_compacted(topic: str, config: Config, settings: KafkaSettings) -> Iterator[TopicVerdict]:
    """The verdict on a topic of last readings that would delete the last reading of a device that fell silent."""
    if _policies(config) != {"compact"}:
        yield TopicVerdict(
            topic,
            "topic-not-compacted",
            f"its {CLEANUP_POLICY} is {config.get(CLEANUP_POLICY)}, and kafka.latest_topic is for the last reading of "
            f"each device, however old; set it: {_alter(topic, settings, f'{CLEANUP_POLICY}=compact')}",
        )


def _refuses(
    topic: str, config: Config, partitions: Sequence[Partition], settings: KafkaSettings
) -> Iterator[TopicVerdict]:
    """The verdict on a topic for which no broker would ever accept a reading."""
    least = _number(config, MIN_IN_SYNC)
    replicas = _fewest_replicas(partitions)
    if least is not None and least > replicas:
        mended = min(DISKS_MIN, replicas)
        yield TopicVerdict(
            topic,
            "topic-refuses-writes",
            f"{least} replicas must have each reading ({MIN_IN_SYNC}), and it has {replicas}: Kafka refuses everything "
            f"that is sent to it; set it: {_alter(topic, settings, f'{MIN_IN_SYNC}={mended}')}, or give it more "
            "replicas (kafka-reassign-partitions.sh)",
        )


def _one_disk(
    topic: str, config: Config, partitions: Sequence[Partition], brokers: frozenset[int], settings: KafkaSettings
) -> Iterator[Flaw]:
    """Flaws of replication. The worst is that Kafka acknowledges what one broker has."""
    replicas = _fewest_replicas(partitions)
    least = _number(config, MIN_IN_SYNC) or 1
    if len(brokers) < DISKS_MIN:
        return
    meaning = (
        f"Kafka acknowledges readings that one disk alone has, although there are {len(brokers)} brokers, and this box "
        "keeps no copy then. It sends them all the same: refusing would stop this site"
    )
    two = f"{MIN_IN_SYNC}={DISKS_MIN}"
    if replicas < DISKS_MIN:
        more = _reassign(topic, partitions, brokers, least, settings)
        then = f", then {_alter(topic, settings, two)}" if least < DISKS_MIN else ""
        yield Flaw(f"{meaning}. It has one replica; give it more: {more}{then}", fails=True)
    elif least < DISKS_MIN:
        yield Flaw(f"{meaning}. Its {MIN_IN_SYNC} is {least}; set it: {_alter(topic, settings, two)}", fails=True)
    else:
        if least == replicas and len(brokers) > replicas:
            more = _reassign(topic, partitions, brokers, least, settings)
            yield Flaw(
                f"each of its {replicas} replicas must have each reading ({MIN_IN_SYNC}={least}): while one broker is "
                f"away, Kafka refuses readings, and they wait on this box; give it more replicas: {more}",
                fails=False,
            )
        if config.get(UNCLEAN_ELECTION) == "true":
            yield Flaw(
                f"its {UNCLEAN_ELECTION} is true: a replica that lacks acknowledged readings may take over, and they "
                f"are gone; set it: {_alter(topic, settings, f'{UNCLEAN_ELECTION}=false')}",
                fails=False,
            )


def _out_of_sync(config: Config, partitions: Sequence[Partition]) -> Iterator[Flaw]:
    """Flaws that come of brokers which are away just now."""
    least = _number(config, MIN_IN_SYNC) or 1
    refused = [each for each in partitions if each.leader < 0 or len(each.in_sync) < least]
    lagging = [each for each in partitions if each not in refused and len(each.in_sync) < len(each.replicas)]
    for some, meaning, fails in (
        (refused, f"Kafka accepts no readings just now (fewer in sync than {MIN_IN_SYNC}={least}): they wait", True),
        (lagging, "not every replica is in sync, and fewer brokers than usual may fail", False),
    ):
        if some:
            absent = sorted({node for each in some for node in each.replicas if node not in each.in_sync})
            yield Flaw(
                f"{len(some)} of its {_count(len(partitions), 'partition')}: {meaning}; bring back, or wait for, "
                f"{'broker' if len(absent) == 1 else 'brokers'} {', '.join(map(str, absent))}",
                fails=fails,
            )


def _deletes_by_size(topic: str, config: Config, settings: KafkaSettings) -> Iterator[Flaw]:
    kept_bytes = _number(config, RETENTION_BYTES)
    if kept_bytes is not None and kept_bytes >= 0 and "delete" in _policies(config):
        yield Flaw(
            f"it deletes by size ({RETENTION_BYTES}={kept_bytes}, {size(kept_bytes)} of each partition), however short "
            "a time it has kept a reading; if more comes in while nobody reads it, readings are lost; take the bound "
            f"away: {_alter(topic, settings, f'{RETENTION_BYTES}=-1')}",
            fails=False,
        )


def _refuses_large(topic: str, config: Config, settings: KafkaSettings) -> Iterator[Flaw]:
    wanted = settings.record_bytes_max + HEADER_BYTES
    taken = _batch_bytes_max(config)
    if taken < wanted:
        changes = ",".join(f"{key}={wanted}" for key, bound in _batch_bounds(config).items() if bound < wanted)
        yield Flaw(
            f"records above {max(taken - HEADER_BYTES, 0)} bytes, headers included, go to the quarantine, although "
            f"kafka.record_bytes_max is {settings.record_bytes_max}; set it: {_alter(topic, settings, changes)}, or "
            "lower kafka.record_bytes_max",
            fails=False,
        )


def _summary(config: Config, partitions: Sequence[Partition]) -> str:
    kept_ms = _number(config, RETENTION_MS)
    deletes = "delete" in _policies(config) and kept_ms is not None and kept_ms >= 0
    replicas = _fewest_replicas(partitions)
    least = _number(config, MIN_IN_SYNC)
    in_sync = f", {least} of which must have each reading" if least is not None and replicas > 1 else ""
    kept = f"keeps readings for {span((kept_ms or 0) / 1000)}" if deletes else "keeps readings for ever"
    if "compact" in _policies(config):
        kept = "keeps the last reading of each device"
    return f"stamps records itself (LogAppendTime), {kept}, {_count(replicas, 'replica')}{in_sync}"


def _policies(config: Config) -> frozenset[str]:
    """`delete`, `compact`, both, or none. With none, nothing is ever deleted (Kafka 4.2 and later)."""
    value = config.get(CLEANUP_POLICY)
    return frozenset({"delete"} if value is None else {part.strip() for part in value.split(",")})


def _fewest_replicas(partitions: Sequence[Partition]) -> int:
    return min(len(each.replicas) for each in partitions)


def _batch_bytes_max(config: Config) -> int:
    return min(_batch_bounds(config).values())


def _batch_bounds(config: Config) -> dict[str, int]:
    """Bounds of a batch by setting. A broker compares a batch with both, as it must fit into a segment of the log."""
    message, segment = _number(config, MESSAGE_BYTES), _number(config, SEGMENT_BYTES)
    bounds = {MESSAGE_BYTES: BATCH_BYTES_DEFAULT if message is None else message}
    return bounds if segment is None else {**bounds, SEGMENT_BYTES: segment}


def _least_ms(settings: KafkaSettings) -> int:
    return math.ceil(settings.retention_s_min * 1000)


def _number(config: Config, key: str) -> int | None:
    """A setting as a whole number; None if the broker does not say, or says anything else."""
    try:
        return int(config.get(key) or "")
    except ValueError:
        return None


# -- words ----------------------------------------------------------------------------------------


def _refusal(
    topic: str, code: int, partitions_code: int, message: str | None, settings: KafkaSettings
) -> TopicVerdict | None:
    """The verdict by the codes of DescribeConfigs and Metadata; None if the topic is described."""
    errors = [for_code(each) for each in (partitions_code, code) if each]
    if not errors:
        return None
    forbidden = any(error in AUTHORIZATION for error in errors)
    # A gateway that may see topics, but not their settings, learns only from Metadata whether a topic exists.
    if errors[0] is UnknownTopicOrPartitionError or (UnknownTopicOrPartitionError in errors and not forbidden):
        return TopicVerdict(topic, UNKNOWN, _missing(topic, settings))
    if forbidden:
        return _forbidden(topic, settings, seen=not partitions_code)
    detail = message or ", ".join(error.__name__ for error in errors)
    if any(error not in LASTING for error in errors):
        return _waits(topic, NOT_DESCRIBED, f"the cluster does not say how it keeps readings ({detail})")
    return TopicVerdict(topic, "topic-refused", detail)


def _missing(topic: str, settings: KafkaSettings) -> str:
    """Words on how to create a topic that does not exist."""
    config = {TIMESTAMP_TYPE: TOPIC_CONFIG[TIMESTAMP_TYPE], MIN_IN_SYNC: min(DISKS_MIN, settings.replicas)}
    return (
        f"it does not exist; create it: {_tool('kafka-topics.sh', settings)} --create --topic {topic} "
        f"--partitions {settings.partitions} --replication-factor {settings.replicas} "
        f"{' '.join(f'--config {key}={value}' for key, value in config.items())}; or set kafka.create_topics = true. "
        "Those whose whole names stand in the settings are made by sluice check --create-topics"
    )


_COLLISION: Final = (
    "Kafka keeps no two topics whose names differ in '.' and '_' only: their metrics would have one name. Change the "
    "route so that the names differ, or delete the other topic; the readings that wait for it are sent then"
)


def _collides(topic: str, other: str) -> TopicVerdict:
    return TopicVerdict(
        topic, NAME_COLLIDES, f"it does not exist, and its name collides with that of the topic {other}: {_COLLISION}"
    )


def beyond_verdict(topic: str, reason: str, settings: KafkaSettings) -> TopicVerdict:
    """The verdict on a topic that this gateway does not make, as it has made as many as it may."""
    if reason == BEYOND_DEVICE:
        setting = "kafka.topics_per_device_day_max"
        made = f"{_count(settings.topics_per_device_day_max, 'topic')} for this device today"
        mend = "create the topic, or raise that setting, if the device is as it should be; else revoke its secret"
    else:
        setting = "kafka.topics_created_max"
        made = f"{_count(settings.topics_created_max, 'topic')} in all"
        mend = "create the topic, delete others that nobody needs, or raise that setting"
    words = f"this gateway has made {made}, and makes no more ({setting}): {mend}"
    return TopicVerdict(topic, f"{reason}: {setting}", f"{words}. What waits for a topic is sent once that exists")


def _waits(topic: str, reason: str, words: str) -> TopicVerdict:
    hint = f"{words}: its readings wait on this box, and it is looked at again by itself"
    return TopicVerdict(topic, reason, hint, waits=True)


def _forbidden(topic: str, settings: KafkaSettings, *, seen: bool) -> TopicVerdict:
    """The verdict on a topic whose settings this gateway may not see. Nobody knows how long it keeps readings."""
    if seen:
        return TopicVerdict(
            topic,
            "topic-config-hidden",
            "the broker does not let this gateway see its settings, so that nobody knows whether readings would be "
            f"deleted early; allow it (ACL DescribeConfigs): {allow_command(topic, settings, 'DescribeConfigs')}",
        )
    allow = allow_command(topic, settings, "Write", "DescribeConfigs")
    return TopicVerdict(
        topic,
        "topic-refused",
        "the broker does not let this gateway see it, if it exists; allow it (ACLs Write and DescribeConfigs, and "
        f"Create where this gateway is to make it): {allow}",
    )


def forbidden_hint(topic: str, settings: KafkaSettings) -> str:
    """Hint for a topic that this gateway may see but not write to."""
    return (
        "the broker does not let this gateway write to it; allow it (ACL Write), and the readings that wait for it "
        f"are sent by themselves: {allow_command(topic, settings, 'Write')}"
    )


def _creation_refusal(topic: str, code: int, detail: str | None, settings: KafkaSettings) -> TopicVerdict:
    """The verdict if CreateTopics, asked for fewer and fewer replicas, ended with this code."""
    error = for_code(code)
    told = detail or error.__name__
    if error is InvalidReplicationFactorError:
        fewer = ", and with fewer" if settings.replicas > 1 else ""
        words = (
            f"the cluster refused to create it with {_count(settings.replicas, 'replica')}{fewer}: {told}; set "
            "kafka.replicas to the least number that the cluster allows, and see that as many brokers are up"
        )
        return TopicVerdict(topic, NOT_CREATED, words)
    if error not in LASTING:
        return _waits(topic, NOT_CREATED, f"the cluster cannot create it just now ({told})")
    if error is InvalidTopicError and "collide" in told:
        return TopicVerdict(topic, NAME_COLLIDES, f"the broker refused to create it: {told}; {_COLLISION}")
    mend = f"; allow it (ACL Create): {allow_command(topic, settings, 'Create')}" if error in AUTHORIZATION else ""
    return TopicVerdict(topic, NOT_CREATED, f"the broker refused to create it: {told}{mend}")


def _alter(topic: str, settings: KafkaSettings, changes: str) -> str:
    return (
        f"{_tool('kafka-configs.sh', settings)} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {changes}"
    )


def allow_command(topic: str, settings: KafkaSettings, *operations: str) -> str:
    # The broker decides what a client with a certificate is called.
    user = settings.sasl.user if settings.sasl is not None else "NAME"
    each = " ".join(f"--operation {operation}" for operation in operations)
    return f"{_tool('kafka-acls.sh', settings)} --add --allow-principal User:{user} {each} --topic {topic}"


def _tool(name: str, settings: KafkaSettings) -> str:
    """The beginning of a command of Kafka's tools."""
    secured = f" {ADMIN_CONFIG}" if settings.tls is not None or settings.sasl is not None else ""
    return f"{name} --bootstrap-server {settings.bootstrap[0]}{secured}"


def _reassign(
    topic: str, partitions: Sequence[Partition], brokers: frozenset[int], least: int, settings: KafkaSettings
) -> str:
    """The command that gives a topic the replicas of a new one, or at least one to spare (if brokers suffice)."""
    count = min(max(settings.replicas, DISKS_MIN + 1, least + 1), len(brokers))
    told = [
        {"topic": topic, "partition": each.number, "replicas": _spread(each, brokers, count)}
        for each in partitions[:REASSIGNED_TOLD_MAX]
    ]
    rest = len(partitions) - len(told)
    further = f" (and so on for {_count(rest, 'partition')} more)" if rest else ""
    return (
        f"{_tool('kafka-reassign-partitions.sh', settings)} --execute "
        f"--reassignment-json-file FILE, which holds {json.dumps({'version': 1, 'partitions': told})}{further}"
    )


def _spread(partition: Partition, brokers: frozenset[int], count: int) -> list[int]:
    """The replicas that are there, then further brokers. Each partition begins with another one of these."""
    others = sorted(brokers.difference(partition.replicas))
    shift = partition.number % len(others) if others else 0
    return [*partition.replicas, *others[shift:], *others[:shift]][: max(count, len(partition.replicas))]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
