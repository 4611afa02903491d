"""Asks Kafka for the present state of its topics, through Kafka's own client in Spark's JVM.

Spark knows topics by name and offset alone. If a topic is deleted and made again while a query runs, Spark reads on
from the old offset in silence, once the new topic has grown so long. So the job must ask for each topic's id before it
reads a batch and after.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from spark.engine.told_error import ToldError
from spark.source.kafka_failures import explain_failure, innermost
from spark.source.kafka_options import client_properties, without
from spark.source.kafka_source import ISOLATION, READ_COMMITTED
from spark.source.topic_changes import TopicNow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWER_S_MAX = 15
"""Seconds that Kafka may take to answer one question, with its client's own retries."""
REQUEST_MS_MAX = 5_000
CLOSE_MS_MAX = 2_000
LOOKS_MAX = 3
"""Attempts to ask. If a topic is deleted between two questions, the second fails, and both are asked again."""
Answer = TypeVar("Answer")


class TopicWatchError(ToldError):
    """Kafka did not answer. The message says why, and holds no secret."""


class TopicWatch:
    """A connection to Kafka for repeated questions, from one thread at a time."""

    def __init__(self, spark: "SparkSession", bootstrap: str, options: Mapping[str, str], pattern: str) -> None:
        """Make the client, which connects at the first question. `options` are from `kafka_options`.

        Raises TopicWatchError.
        """
        self._jvm: Any = spark._jvm  # noqa: SLF001
        self._options = options
        self.pattern = pattern
        """Java pattern of the topics to ask for. It may be changed between two questions."""
        self.names: frozenset[str] = frozenset()
        """All topics at the last question that the user may know of."""
        self._partitions: dict[str, list[Any]] = {}
        # Ours override the options: time-outs that suit reading may make a question take minutes.
        bounded = {
            **options,
            "client.id": "sluice-topic-watch",
            "request.timeout.ms": str(REQUEST_MS_MAX),
            "default.api.timeout.ms": str(ANSWER_S_MAX * 1000 - 1000),
        }
        properties = client_properties(spark, bootstrap, bounded)
        self._admin = self._answered(lambda: self._jvm.org.apache.kafka.clients.admin.AdminClient.create(properties))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, even if Kafka does not answer."""
        self._admin.close(self._jvm.java.time.Duration.ofMillis(CLOSE_MS_MAX))

    def ask(self) -> dict[str, TopicNow]:
        """Ask for the present state of the topics. Raises TopicWatchError."""
        return self._looked(self._topics)

    def topic_ids(self) -> dict[str, str]:
        """Ask for the topics' ids alone, which is quicker than `ask`. Raises TopicWatchError."""
        return self._looked(self._topic_ids)

    def _looked(self, look: Callable[[], Answer]) -> Answer:
        for _ in range(LOOKS_MAX):
            with suppress(_UnknownTopicError):
                return look()
        raise TopicWatchError("Kafka's topics are deleted while it is asked what they are: try again when that is done")

    def _topics(self) -> dict[str, TopicNow]:
        topics = self.topic_ids()
        spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec
        earliest, latest = self._offsets(topics, spec.earliest()), self._offsets(topics, spec.latest())
        # Asked last, so that records committed meanwhile do not look held back.
        stable = self._stable(topics)
        return {
            topic: TopicNow(topic_id, earliest.get(topic, {}), latest.get(topic, {}), stable.get(topic, {}))
            for topic, topic_id in topics.items()
        }

    def access(self, topics: Iterable[str]) -> dict[str, bool]:
        """Ask whether the user may read these topics. Topics that Kafka lacks are left out. Raises TopicWatchError."""
        admin = self._jvm.org.apache.kafka.clients.admin
        options = admin.DescribeTopicsOptions().includeAuthorizedOperations(True)
        read = self._jvm.org.apache.kafka.common.acl.AclOperation.READ
        found = {}
        for name, future in dict(self._admin.describeTopics(sorted(topics), options).topicNameValues()).items():
            try:
                allowed = self._answer(future).authorizedOperations()
                # None if nobody forbids anything.
                found[str(name)] = allowed is None or bool(allowed.contains(read))
            except _ForbiddenTopicError:
                # Kafka answers this for a topic that it lacks, too, if the user may not know of it.
                found[str(name)] = False
            except _UnknownTopicError:
                continue
        return found

    def offsets_at(self, time_ms: int) -> dict[str, dict[int, int]]:
        """Ask for each partition's first offset at this time or later, or else its end. Raises TopicWatchError."""
        now = self.ask()
        spec = self._jvm.org.apache.kafka.clients.admin.OffsetSpec.forTimestamp(time_ms)
        found = self._offsets(now, spec)
        return {
            topic: {
                partition: offset if offset >= 0 else now[topic].latest[partition]
                for partition, offset in offsets.items()
            }
            for topic, offsets in found.items()
        }

    def _topic_ids(self) -> dict[str, str]:
        names = self._matching_names()
        described = self._answer(self._admin.describeTopics(names).allTopicNames())
        found = {}
        for name in names:
            topic = described.get(name)
            found[name] = str(topic.topicId().toString())
            count = topic.partitions().size()
            if len(self._partitions.get(name, ())) != count:
                # Kept: to make one is a call to the JVM, and there may be thousands.
                self._partitions[name] = [
                    self._jvm.org.apache.kafka.common.TopicPartition(name, partition) for partition in range(count)
                ]
        return found

    def _matching_names(self) -> list[str]:
        pattern = self._jvm.java.util.regex.Pattern
        # Java prints a set as [a, b]. Kafka allows neither commas nor spaces in a name.
        names = str(self._answer(self._admin.listTopics().names()).toString()).strip("[]")
        self.names = frozenset(name for name in names.split(", ") if name)
        return sorted(name for name in self.names if pattern.matches(self.pattern, name))

    def _stable(self, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        """The last stable offsets, up to which committed records are read; empty if all records are read."""
        if self._options.get(ISOLATION, READ_COMMITTED) != READ_COMMITTED:
            return {}
        level = self._jvm.org.apache.kafka.common.IsolationLevel.READ_COMMITTED
        admin = self._jvm.org.apache.kafka.clients.admin
        return self._offsets(topics, admin.OffsetSpec.latest(), admin.ListOffsetsOptions(level))

    def _offsets(self, topics: Iterable[str], which: Any, *options: Any) -> dict[str, dict[int, int]]:
        asked = self._jvm.java.util.HashMap()
        partitions = [(topic, partition) for topic in topics for partition in self._partitions[topic]]
        for _, partition in partitions:
            asked.put(partition, which)
        answered = self._answer(self._admin.listOffsets(asked, *options).all())
        found: dict[str, dict[int, int]] = {}
        for topic, partition in partitions:
            found.setdefault(topic, {})[partition.partition()] = answered.get(partition).offset()
        return found

    def _answer(self, future: Any) -> Any:
        return self._answered(lambda: future.get(ANSWER_S_MAX, self._jvm.java.util.concurrent.TimeUnit.SECONDS))

    def _answered(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Py4JJavaError as error:
            if any(name in str(error) for name in ("UnknownTopicOrPartitionException", "InvalidTopicException")):
                raise _UnknownTopicError from None
            # Not "from error": the client's own words may hold secrets from its settings.
            words = explain_failure(error) or without(self._options, innermost(error))
            kind = _ForbiddenTopicError if "TopicAuthorizationException" in str(error) else TopicWatchError
            raise kind(f"Kafka does not say what its topics are: {words}") from None


class _UnknownTopicError(Exception):
    """Kafka has no such topic, or no longer has it."""


class _ForbiddenTopicError(TopicWatchError):
    """The user may not know of a topic."""
