"""A topic that was replaced is noticed and reported, and reading goes on without a silent loss."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from demo.kafka_broker import Broker, format_storage, launch_broker, wait_until_ready
from spark.source.kafka_source import KafkaSource
from spark.source.topic_changes import (
    GoingOn,
    Loss,
    PartitionsShrunk,
    RetentionOvertook,
    TopicGone,
    TopicMadeAnew,
    TopicNow,
    TopicRead,
    TopicTruncated,
    going_on,
    starting_offsets,
    trouble_words,
    troubles,
)
from spark.source.topic_choice import FORBIDDEN, KAFKAS_OWN, NOT_OF_PATTERN, TOO_MANY, TopicChoice
from spark.source.topic_watch import TopicWatch, TopicWatchError
from tests.support import kafka_admin
from tests.support.kafka_records import delete_before, produce
from tests.support.spark_records import topics_now

READ = {"device-thermo": TopicRead("AAA", {0: 100, 1: 40})}


def now(
    topic_id: str = "AAA", earliest: dict[int, int] | None = None, latest: dict[int, int] | None = None
) -> dict[str, TopicNow]:
    return {"device-thermo": TopicNow(topic_id, earliest or {0: 0, 1: 0}, latest or {0: 150, 1: 40})}


def test_what_has_only_grown_is_no_trouble() -> None:
    grown = now(earliest={0: 100, 1: 7, 2: 0}, latest={0: 100, 1: 900, 2: 5})
    assert troubles(READ, grown | {"device-new": TopicNow("CCC", {0: 3}, {0: 4})}) == []
    assert going_on(READ, grown) == GoingOn({"device-thermo": {0: 100, 1: 40, 2: 0}}, ())


def test_a_topic_made_anew_is_read_from_its_beginning() -> None:
    # Its offsets go beyond those that were read, so that only the id tells.
    anew = now("BBB", {0: 0, 1: 5}, {0: 150, 1: 60})

    assert troubles(READ, anew) == [TopicMadeAnew("device-thermo", "AAA", "BBB")]
    gone_on = going_on(READ, anew)

    assert gone_on.starting == {"device-thermo": {0: 0, 1: 5}}
    assert gone_on.losses == (
        Loss("device-thermo", "AAA", 0, 100, None),
        Loss("device-thermo", "AAA", 1, 40, None),
        Loss("device-thermo", "BBB", 1, 0, 5),
    )


def test_what_retention_took_is_passed_over_and_recorded() -> None:
    overtaken = now(earliest={0: 120, 1: 0})
    assert troubles(READ, overtaken) == [RetentionOvertook("device-thermo", 0, 100, 120)]
    assert going_on(READ, overtaken) == GoingOn(
        {"device-thermo": {0: 120, 1: 40}}, (Loss("device-thermo", "AAA", 0, 100, 120),)
    )


def test_a_deleted_topic_is_not_named_to_spark() -> None:
    assert troubles(READ, {}) == [TopicGone("device-thermo")]
    gone_on = going_on(READ, {"device-power": TopicNow("CCC", {0: 0}, {0: 9})})
    assert gone_on.starting == {"device-power": {0: 0}}
    assert [loss.end for loss in gone_on.losses] == [None, None]


def test_fewer_partitions_and_lost_records_are_told() -> None:
    assert troubles(READ, now(earliest={0: 0}, latest={0: 100})) == [PartitionsShrunk("device-thermo", 2, 1)]
    truncated = now(latest={0: 90, 1: 40})
    assert troubles(READ, truncated) == [TopicTruncated("device-thermo", 0, 100, 90)]
    # Nobody knows which of the 90 were read before: they are read again.
    assert going_on(READ, truncated).starting == {"device-thermo": {0: 0, 1: 40}}


def test_a_person_is_told_what_happened_and_what_to_do() -> None:
    found = troubles(READ | {"device-power": TopicRead("PPP", {0: 3})}, now("BBB"))
    words = trouble_words(found)
    assert "topic device-power has been deleted" in words
    assert "topic device-thermo has been deleted and made anew (its id was AAA and is BBB)" in words
    assert "sluice-cloud ingest` with the same options and --go-on" in words
    assert "20 records from offset 100 to 119" in trouble_words(troubles(READ, now(earliest={0: 120, 1: 0})))
    many = troubles({f"t{number}": TopicRead("A", {0: 0}) for number in range(40)}, {})
    assert "and 30 more of these" in trouble_words(many)


ids = st.sampled_from(["AAA", "BBB"])
spans = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)
topics_there = st.builds(
    lambda topic_id, ends: TopicNow(topic_id, dict(enumerate(e for e, _ in ends)), dict(enumerate(n for _, n in ends))),
    ids,
    st.lists(spans, min_size=1, max_size=3),
)
topics_read = st.builds(TopicRead, ids, st.dictionaries(st.integers(0, 2), st.integers(0, 9), min_size=1))
names = st.sampled_from(["a", "b", "c"])


@given(st.dictionaries(names, topics_read), st.dictionaries(names, topics_there))
def test_each_offset_is_read_before_or_after_or_recorded_as_lost(
    read: dict[str, TopicRead], there: dict[str, TopicNow]
) -> None:
    gone_on = going_on(read, there)

    assert {topic: set(offsets) for topic, offsets in gone_on.starting.items()} == {
        topic: set(found.earliest) for topic, found in there.items()
    }
    for topic, offsets in gone_on.starting.items():
        found = there[topic]
        before = read.get(topic, TopicRead(found.topic_id, {}))
        for partition, start in offsets.items():
            assert found.earliest[partition] <= start <= found.latest[partition]
            was_read = before.next_offsets.get(partition, 0) if before.topic_id == found.topic_id else 0
            lost = {
                offset
                for loss in gone_on.losses
                if (loss.topic, loss.topic_id, loss.partition) == (topic, found.topic_id, partition)
                for offset in range(loss.first, loss.end or 0)
            }
            if topic in read:
                assert all(offset < was_read or offset in lost for offset in range(start))
            # Records that can still be read are not called lost.
            assert not lost & set(range(start, found.latest[partition]))
    # Going on is only for troubles: without one it loses nothing.
    if not troubles(read, there):
        assert all(loss.partition not in read[loss.topic].next_offsets for loss in gone_on.losses)
    # And once gone on, all is well.
    after = {topic: TopicRead(there[topic].topic_id, offsets) for topic, offsets in gone_on.starting.items()}
    assert troubles(after, there) == []


def test_offsets_are_written_as_spark_reads_them() -> None:
    assert json.loads(starting_offsets({"b": {1: 2, 0: 1}, "a": {0: 0}})) == {"a": {"0": 0}, "b": {"0": 1, "1": 2}}


@pytest.mark.kafka
@pytest.mark.spark
def test_a_real_topic_made_anew_with_more_records_is_noticed(kafka: Broker, spark: SparkSession) -> None:
    topic = "device-watch-anew"
    asyncio.run(kafka_admin.create_topic(kafka.bootstrap, topic, 2))
    asyncio.run(kafka_admin.create_topic(kafka.bootstrap, f"x-{topic}"))
    asyncio.run(produce(kafka.bootstrap, topic, {0: 100, 1: 1}))
    with TopicWatch(spark, kafka.bootstrap, {}, "device-watch-.*") as watch:
        first = watch.ask()
        assert first.keys() == {topic}
        assert (first[topic].earliest, first[topic].latest) == ({0: 0, 1: 0}, {0: 100, 1: 1})
        read = {topic: TopicRead(first[topic].topic_id, {0: 100, 1: 0})}
        assert troubles(read, watch.ask()) == []

        asyncio.run(delete_before(kafka.bootstrap, topic, {1: 1}))
        assert troubles(read, watch.ask()) == [RetentionOvertook(topic, 1, 0, 1)]

        asyncio.run(kafka_admin.delete_topic(kafka.bootstrap, topic))
        assert troubles(read, watch.ask()) == [TopicGone(topic)]
        asyncio.run(kafka_admin.create_topic(kafka.bootstrap, topic, 3))
        asyncio.run(produce(kafka.bootstrap, topic, {0: 150}))
        anew = watch.ask()

    assert troubles(read, anew) == [TopicMadeAnew(topic, read[topic].topic_id, anew[topic].topic_id)]
    assert anew[topic].latest == {0: 150, 1: 0, 2: 0}
    assert going_on(read, anew).starting == {topic: {0: 0, 1: 0, 2: 0}}


@pytest.mark.kafka
@pytest.mark.spark
def test_of_what_gateways_name_no_more_is_read_than_may_be(
    kafka: Broker, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark.source.topic_choice.NAMED_MAX", 2)
    topics = {"choice-a", "choice-b", "choice-c", "__choice", "choice-by-pattern"}
    for topic in topics | {"choice-nobodys"}:
        asyncio.run(kafka_admin.create_topic(kafka.bootstrap, topic))
    source = KafkaSource(kafka.bootstrap, "choice-by-.*", named=())
    named = frozenset({*topics, "choice-gone", "choice-by-gone", ".*", "a|b"})
    with TopicWatch(spark, kafka.bootstrap, {}, source.every_pattern) as watch:
        choice = TopicChoice(spark, watch, source)
        assert choice.begin(frozenset()).keys() == {"choice-by-pattern"}
        assert (choice.left_out, choice.fresh, choice.untold()) == ({}, frozenset(), None)
        # They are named while it runs.
        assert choice.compare(named).keys() == {"choice-by-pattern"}
        assert choice.fresh == {"choice-a", "choice-b"}
        assert choice.begin(named).keys() == {"choice-by-pattern", "choice-a", "choice-b"}
        assert choice.left_out == {"__choice": KAFKAS_OWN, "choice-c": TOO_MANY} == choice.untold()
        assert choice.gone == named - topics
        assert choice.reads("choice-a")
        assert not choice.reads("choice-aa")
        assert choice.begin(named).keys() == {"choice-by-pattern", "choice-a", "choice-b"}
        assert choice.untold() is None

        alone = TopicChoice(spark, watch, KafkaSource(kafka.bootstrap, "choice-by-.*"))
        watch.pattern = alone.source.every_pattern
        assert alone.begin(named).keys() == {"choice-by-pattern"}
        assert alone.left_out == dict.fromkeys(sorted(topics - {"choice-by-pattern"}), NOT_OF_PATTERN)


@pytest.mark.kafka
@pytest.mark.spark
def test_a_topic_that_the_user_may_not_know_of_is_told_and_not_taken_for_deleted(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = format_storage(tmp_path)
    with files.properties.open("a") as properties:
        properties.write("authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n")
        properties.write("allow.everyone.if.no.acl.found=true\n")
    broker = launch_broker(files)
    try:
        wait_until_ready(broker)
        for topic in ("open", "hidden", "described"):
            asyncio.run(kafka_admin.create_topic(broker.bootstrap, topic))
        asyncio.run(kafka_admin.allow(broker.bootstrap, "ANONYMOUS", "described", "DESCRIBE"))
        asyncio.run(kafka_admin.allow(broker.bootstrap, "another", "hidden", "READ"))
        source = KafkaSource(broker.bootstrap, "device-.*", named=())
        with TopicWatch(spark, broker.bootstrap, {}, source.every_pattern) as watch:
            choice = TopicChoice(spark, watch, source)
            assert choice.begin(frozenset({"open", "hidden", "described", "deleted"})).keys() == {"open"}
            assert choice.left_out == dict.fromkeys(("described", "hidden"), FORBIDDEN)
            assert choice.gone == {"deleted"}
            # Once it may be read, it is.
            asyncio.run(kafka_admin.allow(broker.bootstrap, "ANONYMOUS", "hidden", "READ", "DESCRIBE"))
            choice.compare(frozenset({"hidden"}))
            assert choice.fresh == {"hidden"}
    finally:
        broker.stop()


@pytest.mark.spark
def test_a_broker_that_does_not_answer_is_told_in_time(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark.source.topic_watch.ANSWER_S_MAX", 2)
    monkeypatch.setattr("spark.source.topic_watch.REQUEST_MS_MAX", 500)
    with pytest.raises(TopicWatchError, match="no broker answers"):
        topics_now(spark, "127.0.0.1:9", {"request.timeout.ms": "60000"}, ".*")
    with pytest.raises(TopicWatchError, match="none of the names in --bootstrap"):
        topics_now(spark, "no-such-host.invalid:9092", {}, ".*")
