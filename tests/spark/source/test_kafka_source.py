"""Spark reads a real Kafka: topics, records at once, first and last offsets, log-ins."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from demo.kafka_broker import Broker
from spark.source.kafka_failures import explain_failure
from spark.source.kafka_options import (
    KafkaOptionError,
    check_options,
    client_properties,
    kafka_options,
    properties,
    source_options,
    without,
)
from spark.source.kafka_source import KafkaSource, kafka_range, kafka_stream, lags, progress_offsets
from spark.source.storage_failures import explain_storage
from spark.source.topic_changes import TopicRead, going_on
from spark.source.topic_choice import FORBIDDEN, TopicChoice
from spark.source.topic_watch import TopicWatch, TopicWatchError
from tests.support import kafka_admin
from tests.support.certificates import Authority, make_authority
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.kafka_records import allow_reading, delete_before, produce
from tests.support.spark_records import topics_now

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

USER, PASSWORD = "analyst", "correct-horse-4711"
LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule"


# -- settings -----------------------------------------------------------------------------------------


def test_settings_come_from_texts_and_a_file(tmp_path: Path) -> None:
    config = tmp_path / "kafka.properties"
    config.write_text(
        "# the site's broker\n"
        "security.protocol = SASL_SSL\n"
        "kafka.client.rack: r1\n"
        "sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\\n"
        '    username="u" \\\n'
        '    password="a=b:c#d";\n'
    )
    config.chmod(0o400)
    assert kafka_options(["kafka.client.rack=r2", "fetch.max.bytes = 1000", "groupIdPrefix=site-"], config) == {
        "security.protocol": "SASL_SSL",
        "client.rack": "r2",
        "fetch.max.bytes": "1000",
        "groupIdPrefix": "site-",
        "sasl.jaas.config": (
            'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="a=b:c#d";'
        ),
    }
    options = {"security.protocol": "SSL", "groupIdPrefix": "site-"}
    assert source_options(options) == {"kafka.security.protocol": "SSL", "groupIdPrefix": "site-"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["hunter2"], "takes key=value"),
        (["=hunter2"], "takes key=value"),
        (["ssl.keystore.password=hunter2"], "ssl.keystore.password is a secret.*--kafka-config FILE"),
        (["kafka.sasl.jaas.config=hunter2"], "sasl.jaas.config is a secret"),
        (["bootstrap.servers=a:1"], "give it as --bootstrap"),
        (["auto.offset.reset=latest"], "auto.offset.reset cannot be set"),
        (["client.rack=\x00"], "NUL"),
    ],
)
def test_a_setting_that_cannot_be_is_told_without_its_value(given: list[str], words: str) -> None:
    with pytest.raises(KafkaOptionError, match=words) as told:
        kafka_options(given)
    assert "hunter2" not in str(told.value)


def test_a_file_with_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    config = tmp_path / "kafka.properties"
    config.write_text("ssl.truststore.password=hunter2\n")
    config.chmod(0o440)
    with pytest.raises(KafkaOptionError, match="chmod 0400") as told:
        kafka_options([], config)
    assert "hunter2" not in str(told.value)
    config.write_bytes(b"ssl.truststore.password=hunter2\xff")
    with pytest.raises(KafkaOptionError, match="not UTF-8") as told:
        kafka_options([], config)
    assert told.value.__cause__ is None
    for path, words in ((tmp_path, "is no file"), (tmp_path / "none", "No such file")):
        with pytest.raises(KafkaOptionError, match=words):
            kafka_options([], path)
    config.write_text("security.protocol=SSL\n")
    config.chmod(0o444)
    assert kafka_options([], config) == {"security.protocol": "SSL"}


@pytest.mark.spark
@hypothesis_settings(deadline=None, max_examples=150)
@given(st.text("ab=: \t\f\\\n\r#!u0041tän", max_size=30))
@example("\\\r#a")
@example("\\\n\na=b")
@example("\\\n")
@example("\\\n ")
def test_a_file_is_read_as_java_reads_it(spark: SparkSession, text: str) -> None:
    jvm: Any = spark._jvm
    expected = jvm.java.util.Properties()
    try:
        expected.load(jvm.java.io.StringReader(text))
    except Exception:  # noqa: BLE001 - a Java error; which is Java's business
        with pytest.raises(KafkaOptionError):
            list(properties(text))
        return
    assert dict(properties(text)) == dict(expected)


@pytest.mark.spark
def test_kafkas_own_client_judges_names_and_values(spark: SparkSession) -> None:
    right = {"security.protocol": "SSL", "ssl.truststore.type": "PEM", "groupIdPrefix": "x", "fetch.max.wait.ms": "9"}
    check_options(spark, "127.0.0.1:9092", right)
    for options, words in (
        ({"sasl.mechansm": "PLAIN"}, "sasl.mechansm is no setting.*is sasl.mechanism meant"),
        ({"security.protocol": "TLS"}, "security.protocol"),
        ({"fetch.max.bytes": "many"}, "fetch.max.bytes"),
    ):
        with pytest.raises(KafkaOptionError, match=words):
            check_options(spark, "127.0.0.1:9092", right | options)
    # A class of the site's own may have settings of its own.
    handler = "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler"
    check_options(spark, "127.0.0.1:9092", {"sasl.login.callback.handler.class": handler, "x.y": "1"})


def test_what_others_say_is_freed_of_secrets() -> None:
    options = {"sasl.jaas.config": f'{LOGIN} required username="u" password="s3cret";', "ssl.key.password": "s3c"}
    # The shorter one is a part of the longer.
    said = f"cannot use s3cret of {options['sasl.jaas.config']} with s3c"
    assert without(options, said) == "cannot use [hidden] of [hidden] with [hidden]"


# -- the source ---------------------------------------------------------------------------------------


def ran(frame: DataFrame, checkpoint: Path) -> tuple[list[str], list[StreamingQueryProgress]]:
    """Run a stream to its present end. Returns the records that it read, as topic-partition-offset, and its batches."""
    read: list[str] = []

    def take(batch: DataFrame, _: int) -> None:
        read.extend(f"{row.topic}-{row.partition}-{row.offset}" for row in batch.collect())

    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    started = query.trigger(availableNow=True).start()
    try:
        assert started.awaitTermination(300)
        return read, [batch for batch in started.recentProgress if batch.numInputRows]
    finally:
        started.stop()


def span(topic: str, partition: int, first: int, end: int) -> set[str]:
    return {f"{topic}-{partition}-{offset}" for offset in range(first, end)}


@pytest.fixture(scope="module")
def topics(kafka: Broker) -> str:
    """Live topics of 30 and 10 records, a backlog of 400, and one that is not meant."""

    async def make() -> None:
        for topic, counts in {
            "device-src-a": {0: 20, 1: 10},
            "device-src-b": {0: 10},
            "device-src-a.backlog": {0: 200, 1: 200},
            "x-device-src-a": {0: 5},
        }.items():
            await kafka_admin.create_topic(kafka.bootstrap, topic, len(counts))
            await produce(kafka.bootstrap, topic, counts)

    asyncio.run(make())
    return "device-src-.*"


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.usefixtures("topics")
def test_a_backlog_has_a_share_of_its_own(kafka: Broker, spark: SparkSession, tmp_path: Path) -> None:
    source = KafkaSource(
        kafka.bootstrap,
        "device-src-.*",
        batch_records_max=20,
        backlog_topics=r".*src.*\.backlog",
        backlog_records_max=150,
    )
    assert "backlog" not in repr(KafkaSource(kafka.bootstrap, "x", {"sasl.jaas.config": "backlog"})).split("topics=")[0]

    read, batches = ran(kafka_stream(spark, source), tmp_path / "checkpoint")

    backlog = span("device-src-a.backlog", 0, 0, 200) | span("device-src-a.backlog", 1, 0, 200)
    live = span("device-src-a", 0, 0, 20) | span("device-src-a", 1, 0, 10) | span("device-src-b", 0, 0, 10)
    assert len(read) == len(set(read))
    assert set(read) == live | backlog
    # Live topics are done after two batches, whatever lies in the backlog.
    assert [[each.numInputRows for each in batch.sources] for batch in batches] == [[20, 150], [20, 150], [0, 100]]
    ends, latest = progress_offsets(batches[0])
    assert sum(end for offsets in ends.values() for end in offsets.values()) == 170
    assert latest == {
        "device-src-a": {0: 20, 1: 10},
        "device-src-b": {0: 10},
        "device-src-a.backlog": {0: 200, 1: 200},
    }
    assert [lags(batch) for batch in batches] == [
        {"device-src-a": 15, "device-src-b": 5, "device-src-a.backlog": 250},
        {"device-src-a": 0, "device-src-b": 0, "device-src-a.backlog": 100},
        {"device-src-a": 0, "device-src-b": 0, "device-src-a.backlog": 0},
    ]

    with pytest.raises(StreamingQueryException) as failure:
        ran(kafka_stream(spark, replace(source, backlog_topics=None)), tmp_path / "checkpoint")
    assert "made with backlog topics and this job has none" in (explain_failure(failure.value) or "")


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.usefixtures("topics")
def test_a_new_checkpoint_begins_where_it_is_told_to(kafka: Broker, spark: SparkSession, tmp_path: Path) -> None:
    source = KafkaSource(kafka.bootstrap, "device-src-.*", backlog_topics=r".*src.*\.backlog")
    now = topics_now(spark, kafka.bootstrap, {}, source.every_pattern)
    assert now.keys() == {"device-src-a", "device-src-b", "device-src-a.backlog"}
    read_before = {
        "device-src-a": TopicRead(now["device-src-a"].topic_id, {0: 18, 1: 10}),
        "device-src-a.backlog": TopicRead(now["device-src-a.backlog"].topic_id, {0: 199, 1: 200}),
        # Made anew since.
        "device-src-b": TopicRead("another", {0: 10}),
    }
    starting = going_on(read_before, now).starting

    read, _ = ran(kafka_stream(spark, replace(source, starting=starting)), tmp_path / "checkpoint")

    assert set(read) == (
        span("device-src-a", 0, 18, 20) | span("device-src-b", 0, 0, 10) | span("device-src-a.backlog", 0, 199, 200)
    )

    # A topic that nobody named, as one that appeared a moment ago.
    lacking = {topic: offsets for topic, offsets in starting.items() if topic != "device-src-b"}
    with pytest.raises(StreamingQueryException) as failure:
        ran(kafka_stream(spark, replace(source, starting=lacking)), tmp_path / "other")
    assert "Start it again" in (explain_failure(failure.value) or "")


@pytest.mark.kafka
@pytest.mark.spark
def test_a_span_is_read_by_offsets_or_by_kafkas_time(kafka: Broker, spark: SparkSession) -> None:
    topic = "device-range"
    asyncio.run(kafka_admin.create_topic(kafka.bootstrap, topic, 2))
    asyncio.run(produce(kafka.bootstrap, topic, {0: 5, 1: 5}))
    between = datetime.now(UTC)
    asyncio.run(produce(kafka.bootstrap, topic, {0: 3}))
    source = KafkaSource(kafka.bootstrap, "device-range.*")

    def found(frame: DataFrame) -> set[str]:
        assert "headers" in frame.columns
        return {f"{row.topic}-{row.partition}-{row.offset}" for row in frame.collect()}

    older = span(topic, 0, 0, 5) | span(topic, 1, 0, 5)
    newer = span(topic, 0, 5, 8)
    assert found(kafka_range(spark, source, "earliest", "latest")) == older | newer
    assert found(kafka_range(spark, source, "earliest", between)) == older
    assert found(kafka_range(spark, source, between, "latest")) == newer
    # One partition of several, which Spark's own pattern would not allow.
    assert found(kafka_range(spark, source, {topic: {0: 2}}, {topic: {0: 4}})) == span(topic, 0, 2, 4)
    assert found(kafka_range(spark, source, "earliest", {topic: {1: 4}})) == span(topic, 1, 0, 4)
    with pytest.raises(ValueError, match="different partitions"):
        kafka_range(spark, source, {topic: {0: 2}}, {topic: {1: 4}})

    # A pattern without topics gives nothing, in Spark without a word.
    nothing = KafkaSource(kafka.bootstrap, "no-such-.*")
    assert topics_now(spark, kafka.bootstrap, {}, nothing.every_pattern) == {}
    assert found(kafka_range(spark, nothing, "earliest", "latest")) == set()


@pytest.mark.kafka
@pytest.mark.spark
def test_what_a_producer_took_back_is_not_read(kafka: Broker, spark: SparkSession, tmp_path: Path) -> None:
    topic = "device-taken-back"
    asyncio.run(kafka_admin.create_topic(kafka.bootstrap, topic))

    async def send() -> None:
        await produce(kafka.bootstrap, topic, {0: 2})
        async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id="mirror-1") as mirror:
            for is_good in (False, True, False):
                await mirror.begin_transaction()
                for _ in range(3):
                    await mirror.send_and_wait(topic, b"7", partition=0)
                await (mirror.commit_transaction() if is_good else mirror.abort_transaction())

    asyncio.run(send())
    # Each transaction ends with a mark, which has an offset too.
    committed = span(topic, 0, 0, 2) | span(topic, 0, 6, 9)
    source = KafkaSource(kafka.bootstrap, topic, batch_records_max=5)

    read, _ = ran(kafka_stream(spark, source), tmp_path / "checkpoint")
    assert sorted(read) == sorted(committed)
    assert ran(kafka_stream(spark, source), tmp_path / "checkpoint") == ([], [])
    again = kafka_range(spark, source, "earliest", "latest")
    assert {f"{row.topic}-{row.partition}-{row.offset}" for row in again.collect()} == committed

    # A reader that wants all of it says so.
    everything = replace(source, options=kafka_options(["isolation.level=read_uncommitted"]))
    assert kafka_range(spark, everything, "earliest", "latest").count() == 11


# -- failures in words --------------------------------------------------------------------------------


@pytest.mark.kafka
@pytest.mark.spark
def test_what_kafka_no_longer_has_ends_the_query_with_words(kafka: Broker, spark: SparkSession, tmp_path: Path) -> None:
    topic = "device-overtaken"
    asyncio.run(kafka_admin.create_topic(kafka.bootstrap, topic))
    asyncio.run(produce(kafka.bootstrap, topic, {0: 10}))
    source = KafkaSource(kafka.bootstrap, topic)
    first = topics_now(spark, kafka.bootstrap, {}, topic)
    ran(kafka_stream(spark, source), tmp_path / "checkpoint")

    # The job stands still, and retention does not.
    asyncio.run(produce(kafka.bootstrap, topic, {0: 10}, start=10))
    asyncio.run(delete_before(kafka.bootstrap, topic, {0: 15}))
    with pytest.raises(StreamingQueryException) as failure:
        ran(kafka_stream(spark, source), tmp_path / "checkpoint")
    words = explain_failure(failure.value) or ""
    assert "Kafka no longer has the records that are to be read next" in words
    assert "--go-on" in words

    gone_on = going_on(
        {topic: TopicRead(first[topic].topic_id, {0: 10})}, topics_now(spark, kafka.bootstrap, {}, topic)
    )
    assert [(loss.first, loss.end) for loss in gone_on.losses] == [(10, 15)]
    read, _ = ran(kafka_stream(spark, replace(source, starting=gone_on.starting)), tmp_path / "another")
    assert set(read) == span(topic, 0, 15, 20)

    # Where no topic is left Spark says nothing, and waits for one: the topics' ids tell.
    asyncio.run(kafka_admin.create_topic(kafka.bootstrap, "device-left"))
    asyncio.run(kafka_admin.delete_topic(kafka.bootstrap, topic))
    with pytest.raises(StreamingQueryException) as failure:
        ran(kafka_stream(spark, replace(source, topics=f"{topic}|device-left")), tmp_path / "another")
    assert "no longer has device-overtaken-0" in (explain_failure(failure.value) or "")


@pytest.mark.spark
def test_an_unknown_host_of_an_oauth_server_is_neither_the_warehouses_nor_a_wrong_password(spark: SparkSession) -> None:
    options = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": "https://login.invalid/token",
        "sasl.login.callback.handler.class": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
        ),
        "sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
            'clientId="job" clientSecret="s3cret";'
        ),
        "sasl.login.retry.backoff.max.ms": "100",
    }
    with pytest.raises(TopicWatchError, match="no token could be had of the OAuth server") as told:
        topics_now(spark, "127.0.0.1:1", options, ".*")
    assert "s3cret" not in str(told.value)
    client = client_properties(spark, "127.0.0.1:1", options)
    with pytest.raises(Py4JJavaError) as refused:
        spark._jvm.org.apache.kafka.clients.admin.AdminClient.create(client)  # type: ignore[union-attr]
    assert explain_storage(refused.value, "s3a://bucket/warehouse") is None


def test_what_is_not_kafkas_fault_is_not_explained() -> None:
    assert explain_failure(ValueError("no column x")) is None


# -- security -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Authority]]:
    """A broker that wants TLS and a log-in, and lets the user read one of two topics."""
    folder = tmp_path_factory.mktemp("secure")
    authority = make_authority(folder / "ca")
    key_store = authority.sign("broker").key_store
    listener = Listener("LOGIN", "SASL_SSL", key_store=key_store, mechanisms=("SCRAM-SHA-512",))
    with kafka_cluster(folder / "nodes", 1, [listener]) as cluster:

        async def fill() -> None:
            await kafka_admin.set_password(cluster.bootstrap, USER, "SCRAM-SHA-512", PASSWORD)
            for topic in ("device-mine", "device-theirs"):
                await kafka_admin.create_topic(cluster.bootstrap, topic)
                await produce(cluster.bootstrap, topic, {0: 7})
            await allow_reading(cluster.bootstrap, USER, "device-mine")
            await kafka_admin.allow(cluster.bootstrap, USER, "device-theirs", "DESCRIBE")

        asyncio.run(fill())
        yield cluster, authority


def secrets_file(folder: Path, authority: Authority, password: str = PASSWORD) -> Path:
    path = folder / "kafka.properties"
    path.unlink(missing_ok=True)
    path.write_text(
        "security.protocol=SASL_SSL\n"
        "sasl.mechanism=SCRAM-SHA-512\n"
        "ssl.truststore.type=PEM\n"
        f"ssl.truststore.location={authority.certificate}\n"
        f'sasl.jaas.config={LOGIN} required username="{USER}" password="{password}";\n'
    )
    path.chmod(0o400)
    return path


@needs_openssl
@pytest.mark.kafka
@pytest.mark.spark
def test_one_file_serves_every_client_and_its_secrets_are_seen_nowhere(
    secure: tuple[Cluster, Authority], spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster, authority = secure
    (bootstrap,) = cluster.addresses("LOGIN")
    options = kafka_options([], secrets_file(tmp_path, authority))
    check_options(spark, bootstrap, options)
    source = KafkaSource(bootstrap, "device-mine", options)
    assert set(topics_now(spark, bootstrap, options, source.every_pattern)) == {"device-mine"}

    stream = kafka_stream(spark, source)
    read, _ = ran(stream, tmp_path / "checkpoint")
    assert set(read) == span("device-mine", 0, 0, 7)
    span_read = kafka_range(spark, source, "earliest", "latest")
    assert span_read.count() == 7

    shown = [repr(source), plan(stream), plan(span_read)]
    shown += [path.read_text(errors="replace") for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert any("device-mine" in text for text in shown[1:])
    for text in [*shown, *capfd.readouterr()]:
        assert PASSWORD not in text


def plan(frame: DataFrame) -> str:
    """All that Spark's user interface and its event log show of a query."""
    execution = frame._jdf.queryExecution()
    mode = frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode  # type: ignore[union-attr]
    modes = [mode.fromString(name) for name in ("extended", "formatted", "cost")]
    return "\n".join([execution.toString(), *(execution.explainString(each) for each in modes)])


@needs_openssl
@pytest.mark.kafka
@pytest.mark.spark
def test_a_refused_connection_to_kafka_has_words(
    secure: tuple[Cluster, Authority], spark: SparkSession, tmp_path: Path
) -> None:
    cluster, authority = secure
    (bootstrap,) = cluster.addresses("LOGIN")
    right = kafka_options([], secrets_file(tmp_path, authority))
    wrong = kafka_options([], secrets_file(tmp_path, authority, "wrong-" + PASSWORD))
    stranger = make_authority(tmp_path / "stranger")
    for options, words in (
        (wrong, "does not accept the log-in"),
        (right | {"ssl.truststore.location": str(stranger.certificate)}, "the TLS handshake with Kafka fails"),
        (right | {"ssl.truststore.location": str(tmp_path / "none")}, "none"),
        (right | {"sasl.jaas.config": f"{LOGIN} {PASSWORD}"}, "sasl.jaas.config is not written as"),
    ):
        with pytest.raises(TopicWatchError, match=words) as told:
            topics_now(spark, bootstrap, options, ".*")
        assert PASSWORD not in str(told.value)

    # A heartbeat that names it does not stop the job.
    source = KafkaSource(bootstrap, "nothing-else", right, named=())
    with TopicWatch(spark, bootstrap, right, source.every_pattern) as watch:
        choice = TopicChoice(spark, watch, source)
        assert choice.begin(frozenset({"device-mine", "device-theirs"})).keys() == {"device-mine"}
        assert choice.left_out == {"device-theirs": FORBIDDEN}

    with pytest.raises(StreamingQueryException) as failure:
        ran(kafka_stream(spark, KafkaSource(bootstrap, "device-theirs", right)), tmp_path / "checkpoint")
    assert "does not allow this user to read the topics device-theirs" in (explain_failure(failure.value) or "")
    with pytest.raises((StreamingQueryException, CapturedException)) as refused:
        ran(kafka_stream(spark, KafkaSource(bootstrap, "device-mine", wrong)), tmp_path / "wrong")
    assert "does not accept the log-in" in (explain_failure(refused.value) or "")
