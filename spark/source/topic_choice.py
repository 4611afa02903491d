"""Chooses the topics that a run of `ingest` reads: by its pattern, and without --topics also by gateways' heartbeats.

Whoever may write to `gateway-events` can name any topic in a heartbeat. So the run takes a name only if Kafka has the
topic, the topic is not Kafka's own, and the job's user may read it. It takes at most NAMED_MAX names.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gateway.record_contract import INTERNAL_PREFIX
from spark.source.kafka_source import KafkaSource
from spark.source.topic_changes import TopicNow
from spark.source.topic_watch import TopicWatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMED_MAX = 1_000
"""Topics that one run reads because gateways name them, beside the topics of the pattern."""
ASKED_MAX = 5_000
"""Topics that one question to Kafka asks for by name."""
NOT_OF_PATTERN = "--topics does not fit it"
KAFKAS_OWN = f"names that begin with {INTERNAL_PREFIX} are Kafka's own"
FORBIDDEN = "the job's user may not read it"
TOO_MANY = f"gateways name more than {NAMED_MAX:,} topics: give --topics"


class TopicChoice:
    """The topics that a run reads, and those that it does not read although gateways write to them."""

    def __init__(self, spark: "SparkSession", watch: TopicWatch, source: KafkaSource) -> None:
        self.source = source
        self.left_out: Mapping[str, str] = {}
        """Topics that gateways name, and why each is not read."""
        self.fresh: frozenset[str] = frozenset()
        """Topics that gateways name and that will be read once reading begins anew."""
        self.gone: frozenset[str] = frozenset()
        """Topics that gateways name and that Kafka no longer has."""
        self._spark = spark
        self._watch = watch
        self._access: dict[str, bool] = {}
        """True for each named topic that the user may read, False for others. Topics that Kafka lacks are not in it."""
        self._told: Mapping[str, str] = {}
        self.reads: Callable[[str], bool] = lambda _: False
        """Tells whether a topic of this name is read. Kafka need not have it."""

    def untold(self) -> Mapping[str, str] | None:
        """Return the topics left out, with the reasons; None if they are those of the last call."""
        before, self._told = self._told, self.left_out
        return None if before == self._told else self._told

    def topic_ids(self) -> dict[str, str]:
        """Ask Kafka for the ids of the topics that are read. Raises TopicWatchError."""
        return self._watch.topic_ids()

    def begin(self, named: frozenset[str]) -> dict[str, TopicNow]:
        """Take up the topics that gateways name now. Return all topics to read. Raises TopicWatchError."""
        self.reads = _fits(self._spark, self.source.every_pattern)
        now = self.compare(named)
        if self.fresh:
            self.source = replace(self.source, named=tuple(sorted({*(self.source.named or ()), *self.fresh})))
            self._watch.pattern = self.source.every_pattern
            self.reads = _fits(self._spark, self.source.every_pattern)
            now = self.compare(named)
        return now

    def compare(self, named: frozenset[str]) -> dict[str, TopicNow]:
        """Ask Kafka for its topics, and compare them with the names from gateways. Raises TopicWatchError."""
        now = self._watch.ask()
        others = named - now.keys()
        unasked = self._ask(others)
        # The heartbeats were read before Kafka was asked. So these topics existed, and are gone now.
        self.gone = others - unasked - self._access.keys()
        self.left_out, self.fresh = self._sorted_out(others - self.gone, unasked)
        return now

    def _ask(self, others: frozenset[str]) -> set[str]:
        """Ask Kafka which topics it has and which may be read. Return the topics that are too many to ask for."""
        # The list of all topics lacks those that the user may not know of. So ask for each by its name.
        listed = self._watch.names
        unknown = sorted(
            others - {topic for topic, may in self._access.items() if may and topic in listed},
            key=lambda topic: (topic not in listed, topic),
        )
        asked, unasked = unknown[:ASKED_MAX], unknown[ASKED_MAX:]
        self._access = {topic: may for topic, may in self._access.items() if topic not in unknown}
        if asked:
            self._access |= self._watch.access(asked)
        return set(unasked)

    def _sorted_out(self, others: frozenset[str], unasked: set[str]) -> tuple[dict[str, str], frozenset[str]]:
        forbidden = {topic for topic in others - unasked if not self._access[topic]}
        if self.source.named is None:
            why = dict.fromkeys(others, NOT_OF_PATTERN)
            why |= {topic: TOO_MANY if topic in unasked else FORBIDDEN for topic in others if self.reads(topic)}
            return dict(sorted(why.items())), frozenset()
        own = {topic for topic in others if topic.startswith(INTERNAL_PREFIX)}
        wanted = sorted(others - own - forbidden - unasked)
        room = max(0, NAMED_MAX - len(self.source.named))
        left_out = dict.fromkeys([*unasked, *wanted[room:]], TOO_MANY) | dict.fromkeys(forbidden, FORBIDDEN)
        return dict(sorted((left_out | dict.fromkeys(own, KAFKAS_OWN)).items())), frozenset(wanted[:room])


def _fits(spark: "SparkSession", pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a Java pattern fits a topic."""
    java = spark._jvm.java.util.regex.Pattern  # type: ignore[union-attr]  # noqa: SLF001

    @lru_cache(maxsize=100_000)
    def is_fit(topic: str) -> bool:
        return bool(java.matches(pattern, topic))

    return is_fit
