"""Which topics are written to, which flaws are reported, and that the reported commands mend them."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    NodeNotReadyError,
    RecordListTooLargeError,
    RequestTimedOutError,
)
from aiokafka.protocol.admin import (
    CreateTopicsRequest,
    CreateTopicsResponse_v3,
    DescribeConfigsRequest,
    DescribeConfigsResponse_v2,
)
from aiokafka.protocol.metadata import MetadataResponse_v5
from aiokafka.structs import BrokerMetadata
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from demo.kafka_broker import Broker, kafka_broker
from gateway.buffer.rows import Lane, Series
from gateway.clock.gateway_clock import BootClock, BootTimes
from gateway.kafka.batch import HEADER_BYTES, EncodedBatch
from gateway.kafka.record import RecordEncoder
from gateway.kafka.topics import (
    ADMIN_CONFIG,
    BATCH_BYTES_DEFAULT,
    RETENTION_BYTES_MIN,
    Partition,
    TopicVerdict,
    _creation_refusal,
    _refusal,
    create_topics,
    forbidden_hint,
    inspect_topics,
    judge,
    read_cluster,
)
from gateway.settings import GatewaySettings, KafkaSaslSettings, KafkaSettings, KafkaTlsSettings
from tests.support.buffers import row_of
from tests.support.kafka_admin import administered, allow, create_topic
from tests.support.kafka_cluster import Listener, kafka_cluster
from tests.support.waiting import patience

UNKNOWN_SERVER_ERROR = -1
UNKNOWN_TOPIC = 3
LEADER_NOT_AVAILABLE = 5
REQUEST_TIMED_OUT = 7
INVALID_TOPIC = 17
TOPIC_AUTHORIZATION_FAILED = 29
TOPIC_ALREADY_EXISTS = 36
INVALID_PARTITIONS = 37
INVALID_REPLICATION_FACTOR = 38
INVALID_CONFIG = 40
NOT_CONTROLLER = 41
POLICY_VIOLATION = 44
THROTTLING_QUOTA_EXCEEDED = 89

SETTINGS = KafkaSettings(("kafka:9092",))
SOUND = {
    "message.timestamp.type": "LogAppendTime",
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "min.insync.replicas": "2",
    "max.message.bytes": "1048588",
    "segment.bytes": "1073741824",
    "unclean.leader.election.enable": "false",
}
"""Settings that a topic of three replicas ought to have."""
THREE = frozenset({1, 2, 3})


def partitions(*replicas: Sequence[int]) -> list[Partition]:
    """Partitions with these replicas, all of them in sync."""
    return [Partition(number, each[0], tuple(each), tuple(each)) for number, each in enumerate(replicas)]


def judged(
    config: Mapping[str, str],
    replicas: Sequence[Sequence[int]] = ((1, 2, 3),),
    brokers: frozenset[int] = THREE,
    settings: KafkaSettings = SETTINGS,
) -> TopicVerdict:
    return judge("t", {**SOUND, **config}, partitions(*replicas), brokers, settings)


# -- which are written to -------------------------------------------------------------------------


def test_a_sound_topic_has_no_flaw_and_says_how_it_keeps_readings() -> None:
    verdict = judged({})
    assert verdict.usable
    assert verdict.flaws == ()
    assert verdict.batch_bytes_max == 1_048_588
    assert verdict.summary == (
        "stamps records itself (LogAppendTime), keeps readings for 7 d, 3 replicas, 2 of which must have each reading"
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"message.timestamp.type": "CreateTime"}, "topic-not-logappendtime"),
        ({"cleanup.policy": "compact"}, "topic-compacted"),
        ({"cleanup.policy": "compact,delete"}, "topic-compacted"),
        ({"retention.ms": "86399999"}, "topic-retention-too-short"),
        ({"retention.ms": "86400000"}, ""),
        ({"retention.ms": "-1"}, ""),
        ({"retention.bytes": str(RETENTION_BYTES_MIN - 1)}, "topic-retention-too-short"),
        ({"retention.bytes": str(RETENTION_BYTES_MIN)}, ""),
        # Nothing is ever deleted: how long does not count.
        ({"cleanup.policy": "", "retention.ms": "1", "retention.bytes": "1"}, ""),
        ({"min.insync.replicas": "4"}, "topic-refuses-writes"),
        ({"min.insync.replicas": "3"}, ""),
        # Consumers take any codec.
        ({"compression.type": "gzip"}, ""),
    ],
)
def test_topics_that_delete_or_refuse_readings_are_not_written_to(config: dict[str, str], reason: str) -> None:
    verdict = judged(config)
    assert (verdict.reason, bool(verdict.hint)) == (reason, bool(reason))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"cleanup.policy": "compact"}, ""),
        ({"cleanup.policy": "compact", "retention.ms": "1", "retention.bytes": "1"}, ""),
        ({"cleanup.policy": "compact,delete"}, "topic-not-compacted"),
        ({"cleanup.policy": "delete"}, "topic-not-compacted"),
        ({"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"}, "topic-not-logappendtime"),
    ],
)
def test_a_topic_of_last_readings_forgets_no_device(config: dict[str, str], reason: str) -> None:
    settings = structs.replace(SETTINGS, latest_topic="latest-{topic}")
    verdict = judge("latest-t", {**SOUND, **config}, partitions((1, 2, 3)), THREE, settings)
    assert (verdict.reason, bool(verdict.hint)) == (reason, bool(reason))
    if not reason:
        assert verdict.flaws == ()
        assert "keeps the last reading of each device" in verdict.summary
    assert judge("latest-", {**SOUND, **config}, partitions((1, 2, 3)), THREE, settings).reason != "topic-not-compacted"


def test_how_long_a_topic_must_keep_readings_is_a_setting() -> None:
    patient = structs.replace(SETTINGS, retention_s_min=604_801.0)
    assert judged({}, settings=patient).reason == "topic-retention-too-short"
    assert judged({"retention.ms": "0"}, settings=structs.replace(SETTINGS, retention_s_min=0.0)).usable


def test_all_that_keeps_a_topic_from_being_written_to_is_told_at_once() -> None:
    verdict = judged({"message.timestamp.type": "CreateTime", "cleanup.policy": "compact", "min.insync.replicas": "4"})
    assert verdict.reason == "topic-not-logappendtime"
    for told in ("CreateTime", "compaction keeps the last reading of each device", "Kafka refuses everything"):
        assert told in verdict.hint


def test_an_old_broker_that_does_not_know_a_setting_is_not_held_against_the_topic() -> None:
    verdict = judge("t", {"message.timestamp.type": "LogAppendTime"}, partitions([1]), frozenset({1}), SETTINGS)
    assert verdict.usable
    assert verdict.batch_bytes_max == BATCH_BYTES_DEFAULT
    assert judge("t", {}, partitions([1]), frozenset({1}), SETTINGS).reason == "topic-not-logappendtime"


# -- one disk (promise P2) ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "replicas", "brokers", "fails"),
    [
        (2, [1, 2, 3], THREE, []),
        (1, [1, 2, 3], THREE, [True]),
        (1, [1], THREE, [True]),
        # Two of two: while one is away readings wait on this box. With a third broker that need not be.
        (2, [1, 2], frozenset({1, 2}), []),
        (2, [1, 2], THREE, [False]),
        (1, [1, 2], frozenset({1, 2}), [True]),
        # There is one disk only.
        (1, [1], frozenset({1}), []),
    ],
)
def test_check_fails_where_one_disk_is_enough_although_there_are_several(
    least: int, replicas: list[int], brokers: frozenset[int], fails: list[bool]
) -> None:
    verdict = judged({"min.insync.replicas": str(least)}, [replicas], brokers)
    assert verdict.usable, "refusing would stop the site"
    assert [flaw.fails for flaw in verdict.flaws] == fails
    assert all("one disk alone" in flaw.words for flaw in verdict.flaws if flaw.fails)


def test_a_partition_that_has_fewer_replicas_than_the_others_counts() -> None:
    (flaw,) = judged({"min.insync.replicas": "1"}, [[1, 2, 3], [2]]).flaws
    assert flaw.fails
    assert judged({}, [[1, 2, 3], [2]]).reason == "topic-refuses-writes"


def test_a_leader_that_lacks_acknowledged_readings_is_warned_of() -> None:
    (flaw,) = judged({"unclean.leader.election.enable": "true"}).flaws
    assert not flaw.fails
    assert "unclean.leader.election.enable=false" in flaw.words


def test_what_brokers_that_are_away_mean_is_told() -> None:
    def flaws(*in_sync: tuple[int, ...]) -> list[tuple[bool, str]]:
        states = [Partition(number, (*each, -1)[0], (1, 2, 3), each) for number, each in enumerate(in_sync)]
        return [(flaw.fails, flaw.words) for flaw in judge("t", SOUND, states, THREE, SETTINGS).flaws]

    assert flaws((1, 2, 3), (3, 2, 1)) == []
    ((fails, words),) = flaws((1, 2, 3), (2, 3))
    assert not fails
    assert words.startswith("1 of its 2 partitions: not every replica is in sync")
    assert words.endswith("broker 1")
    (refused, behind) = flaws((3,), (), (2, 3))
    assert refused[0]
    assert refused[1].startswith("2 of its 3 partitions: Kafka accepts no readings just now")
    assert refused[1].endswith("brokers 1, 2, 3")
    assert not behind[0]


# -- the size of a batch --------------------------------------------------------------------------


def test_a_batch_fits_the_message_and_the_segment() -> None:
    for config in ({"max.message.bytes": "500000"}, {"max.message.bytes": "5000000", "segment.bytes": "500000"}):
        verdict = judged(config)
        assert verdict.usable
        assert verdict.batch_bytes_max == 500_000
        (flaw,) = verdict.flaws
        assert not flaw.fails
        assert flaw.words.startswith(f"records above {500_000 - HEADER_BYTES} bytes")
    wanted = SETTINGS.record_bytes_max + HEADER_BYTES
    assert judged({"max.message.bytes": str(wanted)}).flaws == ()
    assert len(judged({"max.message.bytes": str(wanted - 1)}).flaws) == 1


# -- what is told to do ---------------------------------------------------------------------------


@dataclass
class Topic:
    """A topic that somebody mends by the shown commands."""

    config: dict[str, str]
    replicas: list[list[int]]
    brokers: frozenset[int]
    settings: KafkaSettings

    def verdict(self) -> TopicVerdict:
        return judge("t", self.config, partitions(*self.replicas), self.brokers, self.settings)

    def obey(self, words: str) -> None:
        for told in re.findall(r"--add-config ([a-z.]+=\S+)", words):
            for change in told.strip(",;").split(","):
                key, _, value = change.partition("=")
                assert self.config.get(key) != value, "a change that changes nothing"
                self.config[key] = value
        for each in reassigned(words):
            assert len(set(each["replicas"])) == len(each["replicas"])
            assert self.brokers.issuperset(each["replicas"])
            self.replicas[each["partition"]] = each["replicas"]


def reassigned(words: str) -> list[dict[str, Any]]:
    """The partitions in the file that somebody is told to give to kafka-reassign-partitions.sh."""
    _, found, file = words.partition("which holds ")
    return json.JSONDecoder().raw_decode(file)[0]["partitions"] if found else []


@st.composite
def topics(draw: st.DrawFn) -> Topic:
    brokers = frozenset(range(1, 1 + draw(st.integers(1, 5))))
    replicas = st.lists(st.sampled_from(sorted(brokers)), min_size=1, max_size=len(brokers), unique=True)
    size = st.sampled_from([-1, 0, 1, 10_000_000, 1_000_000_000])
    config = {
        "message.timestamp.type": draw(st.sampled_from(["CreateTime", "LogAppendTime"])),
        "cleanup.policy": draw(st.sampled_from(["delete", "compact", "compact,delete", "delete, compact", ""])),
        "retention.ms": str(draw(st.sampled_from([-1, 0, 86_399_999, 86_400_000, 604_800_000]))),
        "retention.bytes": str(draw(size)),
        "min.insync.replicas": str(draw(st.integers(1, 6))),
        "max.message.bytes": str(draw(st.sampled_from([0, 4_000, 1_048_588, 5_000_000]))),
        "segment.bytes": str(draw(st.sampled_from([14, 1_048_576, 1_073_741_824]))),
        "unclean.leader.election.enable": draw(st.sampled_from(["true", "false"])),
    }
    for absent in draw(st.sets(st.sampled_from(sorted(set(config) - {"min.insync.replicas"})), max_size=3)):
        del config[absent]
    settings = structs.replace(
        SETTINGS,
        replicas=draw(st.integers(1, 4)),
        record_bytes_max=draw(st.sampled_from([4_096, 900_000, 3_000_000])),
        retention_s_min=draw(st.sampled_from([0.0, 86_400.0, 86_400.0005])),
    )
    return Topic(config, draw(st.lists(replicas, min_size=1, max_size=6)), brokers, settings)


@given(topics())
def test_who_does_what_he_is_told_has_a_sound_topic(topic: Topic) -> None:
    for _ in range(4):
        verdict = topic.verdict()
        for words in (verdict.hint, *(flaw.words for flaw in verdict.flaws)):
            topic.obey(words)
    assert topic.verdict().usable
    assert topic.verdict().flaws == ()


@given(topics())
def test_no_topic_that_passes_loses_readings_or_needs_one_disk_only(topic: Topic) -> None:
    verdict = topic.verdict()
    config = topic.config
    replicas = min(map(len, topic.replicas))
    if verdict.usable:
        assert config["message.timestamp.type"] == "LogAppendTime"
        assert "compact" not in config.get("cleanup.policy", "")
        assert int(config["min.insync.replicas"]) <= replicas
        kept_ms = int(config.get("retention.ms", -1)) if config.get("cleanup.policy", "delete") else -1
        assert kept_ms < 0 or kept_ms >= topic.settings.retention_s_min * 1000
    if verdict.usable and not any(flaw.fails for flaw in verdict.flaws) and len(topic.brokers) > 1:
        assert min(replicas, int(config["min.insync.replicas"])) >= 2


def test_the_first_of_many_partitions_are_shown() -> None:
    (flaw,) = judged({"min.insync.replicas": "1"}, [[1]] * 50).flaws
    told = reassigned(flaw.words)
    assert [each["partition"] for each in told] == list(range(6))
    assert "(and so on for 44 partitions more)" in flaw.words
    assert {tuple(each["replicas"]) for each in told} == {(1, 2, 3), (1, 3, 2)}, "not all on the same"


# -- what a broker's codes mean -------------------------------------------------------------------


def test_settings_that_this_gateway_may_not_see_are_told_by_the_right_that_is_missing() -> None:
    settings = structs.replace(SETTINGS, sasl=KafkaSaslSettings("SCRAM-SHA-512", "ditch", Path("password")))
    hidden = _refusal("t", TOPIC_AUTHORIZATION_FAILED, 0, "no", settings)
    assert hidden is not None
    assert hidden.reason == "topic-config-hidden"
    assert hidden.hint.endswith(
        "kafka-acls.sh --bootstrap-server kafka:9092 --command-config admin.properties --add --allow-principal "
        "User:ditch --operation DescribeConfigs --topic t"
    )
    unseen = _refusal("t", TOPIC_AUTHORIZATION_FAILED, TOPIC_AUTHORIZATION_FAILED, "no", settings)
    assert unseen is not None
    assert unseen.reason == "topic-refused"
    assert "--operation Write --operation DescribeConfigs" in unseen.hint


def test_a_topic_that_may_not_be_written_to_is_told_with_the_right_that_is_missing() -> None:
    settings = structs.replace(SETTINGS, sasl=KafkaSaslSettings("SCRAM-SHA-512", "ditch", Path("password")))
    hint = forbidden_hint("t", settings)
    assert hint.startswith("the broker does not let this gateway write to it; allow it (ACL Write)")
    assert hint.endswith(
        "kafka-acls.sh --bootstrap-server kafka:9092 --command-config admin.properties --add --allow-principal "
        "User:ditch --operation Write --topic t"
    )


@pytest.mark.parametrize("secured", [{"tls": KafkaTlsSettings()}, {"sasl": KafkaSaslSettings("PLAIN", "u", Path("p"))}])
def test_a_cluster_that_asks_who_is_there_has_its_commands_log_in(secured: dict[str, Any]) -> None:
    config = {"message.timestamp.type": "CreateTime"}
    bare, logged_in = (
        judged(config, settings=each).hint + judged({"min.insync.replicas": "1"}, [[1]], settings=each).flaws[0].words
        for each in (SETTINGS, structs.replace(SETTINGS, **secured))
    )
    assert "--command-config" not in bare
    assert logged_in.count("--bootstrap-server kafka:9092 --command-config admin.properties ") == 3
    assert logged_in.replace(f" {ADMIN_CONFIG}", "") == bare


@pytest.mark.parametrize(
    ("config_code", "partitions_code"),
    [
        (UNKNOWN_TOPIC, UNKNOWN_TOPIC),
        # Just deleted, or seen by one broker and not yet by the other.
        (UNKNOWN_TOPIC, 0),
        (0, UNKNOWN_TOPIC),
        # Who may write to it and not see its settings, is told only so that it is missing.
        (TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC),
    ],
)
def test_a_missing_topic_is_unknown(config_code: int, partitions_code: int) -> None:
    refused = _refusal("t", config_code, partitions_code, None, SETTINGS)
    assert refused is not None
    assert refused.reason == "topic-unknown"
    assert refused.hint.startswith(
        "it does not exist; create it: kafka-topics.sh --bootstrap-server kafka:9092 --create"
    )
    settings = " --topic t --partitions 3 --replication-factor 3 --config message.timestamp.type=LogAppendTime "
    assert settings + "--config min.insync.replicas=2; or set kafka.create_topics = true" in refused.hint
    assert "sluice check --create-topics" in refused.hint


def test_a_lasting_no_is_a_verdict() -> None:
    assert _refusal("t", 0, 0, None, SETTINGS) is None
    invalid = _refusal("t", INVALID_TOPIC, INVALID_TOPIC, None, SETTINGS)
    assert invalid is not None
    assert invalid.reason == "topic-refused"
    for code in (TOPIC_AUTHORIZATION_FAILED, POLICY_VIOLATION, INVALID_CONFIG, INVALID_PARTITIONS):
        refused = _creation_refusal("t", code, "as I say", SETTINGS)
        assert (refused.reason, refused.usable, refused.waits) == ("topic-not-created", False, False)
        assert "as I say" in refused.hint
        assert ("--operation Create " in refused.hint) == (code == TOPIC_AUTHORIZATION_FAILED)


@pytest.mark.parametrize(
    "code", [REQUEST_TIMED_OUT, LEADER_NOT_AVAILABLE, NOT_CONTROLLER, UNKNOWN_SERVER_ERROR, 32_000]
)
def test_trouble_in_the_cluster_sends_nothing_to_the_quarantine(code: int) -> None:
    verdicts = [_refusal("t", *codes, "not now", SETTINGS) for codes in ((code, 0), (0, code))]
    for verdict in (*verdicts, _creation_refusal("t", code, "not now", SETTINGS)):
        assert verdict is not None
        assert (verdict.usable, verdict.waits) == (False, True)
        assert "(not now): its readings wait on this box" in verdict.hint


# -- a cluster, as it answers ---------------------------------------------------------------------


class Answers:
    """A client of three brokers. The first broker cannot be reached. The answers are aiokafka's own.

    It describes every topic that it is asked for, but for those that it does not know or is told of a code for.
    """

    def __init__(
        self, partitions: Sequence[tuple[int, int, int, list[int], list[int], list[int]]], up: set[int]
    ) -> None:
        self._client = self
        self.cluster = self
        self._conns: dict[object, object] = {}
        self._up = up
        self._partitions = partitions
        self.asked: list[int] = []
        self.failing: dict[int, KafkaError] = {}
        """Errors of asking connected brokers."""
        self.controller: BrokerMetadata | None = None
        self.unknown: set[str] = set()
        self.codes: dict[str, int] = {}
        """Error codes of describing these topics."""
        self.creations: dict[str, list[tuple[int, str | None]]] = {}
        """Results of creating these topics, one for each attempt. The last one repeats. Other topics are made."""
        self.replicas_asked: list[int] = []
        self.created_by = 0
        """The broker that was asked to create topics last."""
        self.is_renewed = False
        """Whether metadata were asked for again."""

    def brokers(self) -> list[BrokerMetadata]:
        return [BrokerMetadata(node, f"kafka{node}", 9092, None) for node in sorted(self._up)]

    async def ready(self, node: int) -> bool:
        return node != 1

    async def send(self, node: int, request: Any) -> Any:
        self.asked.append(node)
        if node in self.failing:
            raise self.failing[node]
        if isinstance(request, CreateTopicsRequest):
            self.created_by = node
            self.replicas_asked.append(request.create_topic_requests[0][2])
            assert request.timeout is not None
            assert request.timeout < SETTINGS.request_timeout_s * 1000, "it answers before it is given up"
            return CreateTopicsResponse_v3(0, [self._created(each[0]) for each in request.create_topic_requests])
        if isinstance(request, DescribeConfigsRequest):
            entries: list[object] = [(key, value, False, 5, False, []) for key, value in SOUND.items()]
            named = [(kind, name) for kind, name, _ in request._resources]
            return DescribeConfigsResponse_v2(0, [(self._code(name), "", kind, name, entries) for kind, name in named])
        brokers = [(broker.nodeId, broker.host, broker.port, None) for broker in self.brokers()]
        topics = [(self._code(name), name, False, self._partitions) for name in request._topics or ["t"]]
        return MetadataResponse_v5(0, brokers, "cluster", 1, topics)

    async def force_metadata_update(self) -> bool:
        self.is_renewed = True
        return True

    def _code(self, topic: str) -> int:
        return UNKNOWN_TOPIC if topic in self.unknown else self.codes.get(topic, 0)

    def _created(self, topic: str) -> tuple[str, int, str | None]:
        first, *rest = self.creations.get(topic, [(0, None)])
        if rest:
            self.creations[topic] = rest
        return (topic, *first)


def answers() -> Answers:
    """Answers of a cluster whose topics are sound."""
    return Answers([(0, 0, 1, [1, 2, 3], [1, 2, 3], [])], {1, 2, 3})


async def test_a_topic_is_judged_by_any_broker_that_can_be_reached_and_with_all_that_there_are() -> None:
    sound = Answers([(0, 0, 1, [1, 2, 3], [1, 2, 3], []), (0, 1, 2, [2, 3, 1], [2, 3, 1], [])], {1, 2, 3})
    (verdict,) = await inspect_topics(sound, ["t"], SETTINGS)
    assert (verdict.reason, verdict.flaws) == ("", ())
    assert 1 not in sound.asked

    # Broker 3 is down: Metadata names it nowhere but among the replicas.
    degraded = Answers([(0, 0, 1, [1, 2], [1, 2], []), (0, 1, 2, [2, 3], [2], [3])], {1, 2})
    cluster = await read_cluster(degraded)
    assert cluster.addresses == {1: ("kafka1", 9092), 2: ("kafka2", 9092)}
    assert (cluster.id, cluster.brokers) == ("cluster", THREE)
    (verdict,) = await inspect_topics(degraded, ["t"], SETTINGS)
    assert verdict.usable
    assert [flaw.words.split(":")[0] for flaw in verdict.flaws if flaw.fails] == ["1 of its 2 partitions"]
    assert ["while one broker is away" in flaw.words for flaw in verdict.flaws if not flaw.fails] == [True]


@pytest.mark.parametrize("error", [KafkaConnectionError, RequestTimedOutError, NodeNotReadyError])
async def test_a_broker_that_goes_away_while_it_is_asked_is_not_the_last_word(error: type[KafkaError]) -> None:
    sound = Answers([(0, 0, 1, [1, 2, 3], [1, 2, 3], [])], {1, 2, 3})
    # Broker 2 is connected, so that it is asked first; it restarts just then.
    sound._conns[2, 0] = SimpleNamespace(connected=lambda: True)
    sound.failing[2] = error("gone")
    cluster = await read_cluster(sound)
    assert (cluster.id, sound.asked) == ("cluster", [2, 3])
    sound.failing[3] = error("gone too")
    with pytest.raises(error):
        await read_cluster(sound)


async def test_what_a_broker_answers_is_asked_of_no_other() -> None:
    refusing = Answers([], {1, 2, 3})
    refusing.failing = dict.fromkeys((2, 3), ClusterAuthorizationFailedError("no"))
    with pytest.raises(ClusterAuthorizationFailedError):
        await read_cluster(refusing)
    assert len(refusing.asked) == 1


async def test_a_cluster_that_cannot_be_reached_is_no_verdict() -> None:
    with pytest.raises(NodeNotReadyError, match="none of the brokers"):
        await inspect_topics(Answers([], {1}), ["t"], SETTINGS)


async def test_a_topic_that_cannot_be_described_just_now_waits_and_the_others_are_judged() -> None:
    cluster = answers()
    cluster.codes["b"] = LEADER_NOT_AVAILABLE
    verdicts = await inspect_topics(cluster, ["a", "b", "c"], SETTINGS)
    assert [(each.topic, each.usable, each.waits) for each in verdicts] == [
        ("a", True, False),
        ("b", False, True),
        ("c", True, False),
    ]


@pytest.mark.parametrize("code", [UNKNOWN_SERVER_ERROR, REQUEST_TIMED_OUT, NOT_CONTROLLER, THROTTLING_QUOTA_EXCEEDED])
async def test_a_topic_that_cannot_be_created_just_now_waits_and_the_others_are_made(code: int) -> None:
    cluster = answers()
    cluster.creations["b"] = [(code, "not now")]
    verdicts = {each.topic: each for each in await create_topics(cluster, ["a", "b", "c"], SETTINGS)}
    assert {topic for topic, each in verdicts.items() if each.usable and each.made} == {"a", "c"}
    assert (verdicts["b"].reason, verdicts["b"].usable, verdicts["b"].waits) == ("topic-not-created", False, True)
    assert "not now" in verdicts["b"].hint
    assert cluster.is_renewed == (code == NOT_CONTROLLER), "the next look asks the broker that it is now"


async def test_a_cluster_that_wants_more_replicas_says_so_and_the_others_are_made() -> None:
    cluster = answers()
    cluster.creations["b"] = [(INVALID_REPLICATION_FACTOR, "the replication factor must be 5 at least")]
    verdicts = {each.topic: each for each in await create_topics(cluster, ["a", "b"], SETTINGS)}
    assert verdicts["a"].usable
    refused = verdicts["b"]
    assert (refused.reason, refused.usable, refused.waits) == ("topic-not-created", False, False), "it would stay so"
    assert refused.hint.startswith("the cluster refused to create it with 3 replicas, and with fewer: the replication")
    assert "must be 5 at least; set kafka.replicas" in refused.hint
    assert cluster.replicas_asked == [3, 2, 1]
    (alone,) = await create_topics(cluster, ["b"], structs.replace(SETTINGS, replicas=1))
    assert "with 1 replica: the replication" in alone.hint


async def test_what_a_broker_says_is_not_kept_at_any_length() -> None:
    cluster = answers()
    cluster.creations["a"] = [(44, "x" * 30_000)]  # POLICY_VIOLATION
    (verdict,) = await create_topics(cluster, ["a"], SETTINGS)
    assert verdict.reason == "topic-not-created"
    assert len(verdict.hint) < 1_000


async def test_one_who_asked_is_told_whether_a_topic_was_there_before() -> None:
    cluster = answers()
    cluster.creations["there"] = [(TOPIC_ALREADY_EXISTS, None)]
    cluster.creations["small"] = [(INVALID_REPLICATION_FACTOR, None), (0, None)]
    verdicts = {each.topic: each for each in await create_topics(cluster, ["there", "new", "small"], SETTINGS)}
    assert all(each.usable for each in verdicts.values())
    assert {topic: each.made for topic, each in verdicts.items()} == {"there": False, "new": True, "small": True}
    assert not any(each.made for each in await inspect_topics(cluster, ["there", "new"], SETTINGS))


async def test_a_created_topic_that_is_not_known_everywhere_yet_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.kafka.topics.CREATION_S_MAX", 0.0)
    cluster = answers()
    cluster.unknown, cluster.codes = {"unknown"}, {"leaderless": LEADER_NOT_AVAILABLE}
    verdicts = await create_topics(cluster, ["unknown", "leaderless", "sound"], SETTINGS)
    assert {each.topic: (each.usable, each.waits) for each in verdicts} == {
        "unknown": (False, True),
        "leaderless": (False, True),
        "sound": (True, False),
    }


async def test_a_created_topic_is_looked_at_until_it_has_leaders() -> None:
    class Slow(Answers):
        def _code(self, topic: str) -> int:
            return self.codes.pop(topic, 0)

    cluster = Slow([(0, 0, 1, [1, 2, 3], [1, 2, 3], [])], {1, 2, 3})
    cluster.codes["t"] = LEADER_NOT_AVAILABLE
    (made,) = await create_topics(cluster, ["t"], SETTINGS)
    assert made.usable
    assert made.made


async def test_a_broker_on_which_no_client_can_create_topics_gets_a_verdict() -> None:
    class Shut(Answers):
        async def send(self, node: int, request: Any) -> Any:
            if isinstance(request, CreateTopicsRequest):
                raise IncompatibleBrokerVersion("CreateTopicsRequest cannot be used if the API version is unknown")
            return await super().send(node, request)

    (refused,) = await create_topics(Shut([], {2}), ["t"], SETTINGS)
    assert (refused.reason, refused.waits) == ("topic-not-created", False)
    assert "do it by hand" in refused.hint


async def test_a_topic_of_which_the_cluster_says_nothing_waits() -> None:
    class Forgetful(Answers):
        async def send(self, node: int, request: Any) -> Any:
            response = await super().send(node, request)
            if isinstance(request, CreateTopicsRequest):
                response.topic_errors = response.topic_errors[1:]
            return response

    cluster = Forgetful([(0, 0, 1, [1, 2, 3], [1, 2, 3], [])], {1, 2, 3})
    verdicts = await create_topics(cluster, ["a", "b"], SETTINGS)
    assert {each.topic: (each.usable, each.waits) for each in verdicts} == {"a": (False, True), "b": (True, False)}


async def test_the_controller_is_asked_to_create_topics_and_any_other_broker_where_it_is_not_reached() -> None:
    for controller, asked in ((3, [3]), (2, [2]), (1, [2, 3])):
        cluster = answers()
        # The others would be asked first otherwise.
        cluster._conns = {(node, 0): SimpleNamespace(connected=lambda: True) for node in {2, 3} - {controller}}
        cluster.controller = BrokerMetadata(controller, f"kafka{controller}", 9092, None)
        (made,) = await create_topics(cluster, ["t"], SETTINGS)
        assert made.usable
        assert cluster.created_by in asked


async def test_metadata_that_name_no_controller_are_no_trouble() -> None:
    """While none is elected, or clients are not told it, a broker hands requests on, or says that it cannot."""
    (made,) = await create_topics(answers(), ["t"], SETTINGS)
    assert made.usable
    electing = answers()
    electing.creations["t"] = [(NOT_CONTROLLER, None)]
    (waits,) = await create_topics(electing, ["t"], SETTINGS)
    assert waits.waits
    assert "NotControllerError" in waits.hint


async def test_controllers_that_say_nothing_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them nothing is created, and readings are taken as ever."""
    monkeypatch.setattr("gateway.kafka.topics.ANSWER_S_MAX", 0.05)

    class Silent(Answers):
        async def send(self, node: int, request: Any) -> Any:
            if isinstance(request, CreateTopicsRequest):
                await asyncio.Event().wait()
            return await super().send(node, request)

    cluster = Silent([], {2})
    closed: list[int] = []
    cluster._conns[2, 0] = SimpleNamespace(connected=lambda: True, close=lambda: closed.append(2))
    (waits,) = await create_topics(cluster, ["t"], SETTINGS)
    assert (waits.reason, waits.waits) == ("topic-not-created", True)
    assert "are its controllers well?" in waits.hint
    assert closed == [2], "what is asked next there would wait for the answer"


async def test_nothing_is_created_where_no_broker_can_be_reached() -> None:
    with pytest.raises(NodeNotReadyError, match="none of the brokers"):
        await create_topics(Answers([], {1}), ["t"], SETTINGS)


# -- a real broker --------------------------------------------------------------------------------


async def make(admin: AIOKafkaAdminClient, topic: str, **config: str) -> None:
    settings = {
        "message.timestamp.type": "LogAppendTime",
        **{key.replace("_", "."): value for key, value in config.items()},
    }
    response: Any = await admin.create_topics([NewTopic(topic, 2, 1, topic_configs=settings)])
    assert response.topic_errors[0][1] == 0, response
    async with asyncio.timeout(patience(10)):
        while (await read_cluster(admin, [topic])).topics[topic][0]:
            await asyncio.sleep(0.02)


@pytest.mark.kafka
async def test_topics_of_a_broker_are_judged_by_what_takes_effect(kafka: Broker) -> None:
    settings = KafkaSettings((kafka.bootstrap,))
    async with administered(kafka.bootstrap) as admin:
        await make(admin, "judged-sound")
        await make(admin, "judged-compacted", cleanup_policy="compact")
        await make(admin, "judged-short", retention_ms="1000")
        await make(admin, "judged-refusing", min_insync_replicas="2")
        await make(admin, "judged-small", max_message_bytes="5000")
        names = ["compacted", "gone", "sound", "short", "small", "refusing"]
        verdicts = await inspect_topics(admin, [f"judged-{name}" for name in names], settings)
        assert await inspect_topics(admin, [], settings) == []
    assert [verdict.topic for verdict in verdicts] == [f"judged-{name}" for name in names]
    assert {verdict.topic.removeprefix("judged-"): verdict.reason for verdict in verdicts} == {
        "sound": "",
        "compacted": "topic-compacted",
        "short": "topic-retention-too-short",
        "refusing": "topic-refuses-writes",
        "small": "",
        "gone": "topic-unknown",
    }
    gone, sound, small = verdicts[1], verdicts[2], verdicts[4]
    # The cluster has one broker.
    assert " --replication-factor 1 --config message.timestamp.type=LogAppendTime --config min.insync.replicas=1;" in (
        gone.hint
    )
    assert (sound.flaws, sound.batch_bytes_max) == ((), 1_048_588)
    assert sound.summary.endswith("keeps readings for 7 d, 1 replica"), "the broker's default"
    assert small.batch_bytes_max == 5_000


@pytest.mark.kafka
async def test_a_topic_is_created_sound_with_as_many_replicas_as_there_are_brokers(kafka: Broker) -> None:
    settings = KafkaSettings((kafka.bootstrap,), partitions=2, replicas=3)
    async with administered(kafka.bootstrap) as admin:
        (made,) = await create_topics(admin, ["made-sound"], settings)
        assert made.usable
        assert made.flaws == ()
        cluster = await read_cluster(admin, ["made-sound"])
        assert [each.replicas for each in cluster.topics["made-sound"][1]] == [(1,), (1,)]
        (again,) = await create_topics(admin, ["made-sound"], settings)
        assert made.made
        assert again == replace(made, made=False)
        assert await create_topics(admin, [], settings) == []
        (invalid,) = await create_topics(admin, ["no name"], settings)
        assert invalid.reason == "topic-not-created"


@pytest.mark.kafka
async def test_a_topic_of_last_readings_is_created_compacted(kafka: Broker) -> None:
    settings = KafkaSettings((kafka.bootstrap,), latest_topic="{topic}.latest")
    async with administered(kafka.bootstrap) as admin:
        verdicts = await create_topics(admin, ["made.latest", "made-beside"], settings)
        assert {verdict.topic: verdict.usable for verdict in verdicts} == {"made.latest": True, "made-beside": True}
        (plain,) = await inspect_topics(admin, ["made.latest"], KafkaSettings((kafka.bootstrap,)))
        assert plain.reason == "topic-compacted"


@pytest.mark.kafka
async def test_names_that_differ_in_dot_and_underscore_only_are_told_as_that(kafka: Broker) -> None:
    settings = KafkaSettings((kafka.bootstrap,), create_topics=True)
    by_hand = structs.replace(settings, create_topics=False)
    async with administered(kafka.bootstrap) as admin:
        await make(admin, "likes-a.b_c")
        (refused,) = await create_topics(admin, ["likes-a_b.c"], settings)
        unmade = await inspect_topics(admin, ["likes-a_b.c", "likes-a.b.c", "likes-a_b_c"], by_hand)
        other, dashed = await inspect_topics(admin, ["likes-a_b.d", "likes-a-b-c"], by_hand)
        (asked,) = await inspect_topics(admin, ["likes-a_b.c"], settings)
    for verdict in (refused, *unmade):
        assert (verdict.reason, verdict.usable, verdict.waits) == ("topic-name-collides", False, False)
        assert "likes-a.b_c" in verdict.hint
        assert "differ in '.' and '_' only" in verdict.hint
        assert "kafka-topics.sh" not in verdict.hint
    assert "collides with existing topic" in refused.hint, "the broker's words"
    assert (other.reason, dashed.reason) == ("topic-unknown", "topic-unknown")
    assert asked.reason == "topic-unknown", "it is asked for again: the other one may be gone"


@pytest.mark.kafka
async def test_a_created_topic_keeps_readings_long_enough_and_takes_the_largest(kafka: Broker) -> None:
    settings = KafkaSettings((kafka.bootstrap,), retention_s_min=30 * 86_400.0, record_bytes_max=3_000_000)
    async with administered(kafka.bootstrap) as admin:
        (made,) = await create_topics(admin, ["made-long"], settings)
    assert made.usable
    assert made.flaws == ()
    assert "keeps readings for 30 d" in made.summary
    assert made.batch_bytes_max == 3_000_000 + HEADER_BYTES


@pytest.mark.kafka
async def test_the_broker_takes_batches_up_to_the_bound_and_none_above(kafka: Broker) -> None:
    settings = KafkaSettings((kafka.bootstrap,))
    async with administered(kafka.bootstrap) as admin:
        await make(admin, "bound-message", max_message_bytes="5000")
        await make(admin, "bound-segment", max_message_bytes="3000000", segment_bytes="1048576")
        verdicts = await inspect_topics(admin, ["bound-message", "bound-segment"], settings)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all", max_request_size=4_000_000)
    await producer.start()
    try:
        for verdict in verdicts:
            taken = await producer.send_batch(batch_of(verdict.batch_bytes_max), verdict.topic, partition=0)
            assert (await taken).offset == 0
            refused = await producer.send_batch(batch_of(verdict.batch_bytes_max + 1), verdict.topic, partition=0)
            with pytest.raises((MessageSizeTooLargeError, RecordListTooLargeError)):
                await refused
    finally:
        await producer.stop()


def batch_of(size: int) -> EncodedBatch:
    """A batch of one record that takes `size` bytes."""
    series = Series("t", "42", "42", "device/42/t", "sluice.reading", "application/json")
    encoder = RecordEncoder(GatewaySettings("gw1"), Lane(1, "lane", "boot", "buffer"), series)
    payload = size // 2
    while True:
        batch = EncodedBatch("none")
        row = row_of(payload=bytes(payload))
        batch.add(encoder.encode(row, BootTimes(BootClock.constant(0, 0)), 0))
        if batch.bytes == size:
            return batch
        payload += size - batch.bytes


@pytest.mark.kafka
async def test_asking_for_a_topic_does_not_make_it_even_where_the_broker_makes_topics_by_itself(tmp_path: Path) -> None:
    with kafka_broker(tmp_path, auto_create_topics=True) as broker:
        async with administered(broker.bootstrap) as admin:
            (verdict,) = await inspect_topics(admin, ["asked-for"], KafkaSettings((broker.bootstrap,)))
            assert verdict.reason == "topic-unknown"
            assert "asked-for" not in (await read_cluster(admin)).topics


@pytest.mark.kafka
async def test_rights_that_are_missing_are_named_one_after_the_other(tmp_path: Path) -> None:
    login = Listener("LOGIN", "SASL_PLAINTEXT", mechanisms=("PLAIN",), plain_users=(("ditch", "secret"),))
    with kafka_cluster(tmp_path, 1, [login]) as cluster:
        (address,) = cluster.addresses("LOGIN")
        settings = KafkaSettings((address,))
        await create_topic(cluster.bootstrap, "guarded")
        # A topic that has an access list takes nobody whom it does not allow.
        await allow(cluster.bootstrap, "another", "guarded", "WRITE")
        gateway = AIOKafkaAdminClient(
            bootstrap_servers=address,
            security_protocol="SASL_PLAINTEXT",
            sasl_plain_username="ditch",
            sasl_plain_password="secret",  # noqa: S106 - a broker that lives for this test
        )
        await gateway.start()
        try:
            verdict = await once_judged(gateway, "topic-refused", settings)
            assert "--operation Write --operation DescribeConfigs " in verdict.hint
            await allow(cluster.bootstrap, "ditch", "guarded", "WRITE")
            verdict = await once_judged(gateway, "topic-config-hidden", settings)
            assert "--operation DescribeConfigs " in verdict.hint
            assert "--operation Write" not in verdict.hint
            await allow(cluster.bootstrap, "ditch", "guarded", "DESCRIBE_CONFIGS")
            assert (await once_judged(gateway, "", settings)).usable
        finally:
            await gateway.close()


async def once_judged(admin: AIOKafkaAdminClient, reason: str, settings: KafkaSettings) -> TopicVerdict:
    """The verdict on `guarded` once the broker has heard of the change that makes it this one."""
    async with asyncio.timeout(patience(10)):
        while True:
            (verdict,) = await inspect_topics(admin, ["guarded"], settings)
            if verdict.reason == reason:
                return verdict
            await asyncio.sleep(0.05)
