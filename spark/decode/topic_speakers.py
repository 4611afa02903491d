"""Judges by the registry which gateway may speak in which topic: a topic's writer can write any `ce_source` there.

A gateway with `topics` may speak only in these, and in these only such gateways may speak. All other gateways share
the other topics. Kafka's ACLs guard the topics themselves. Both together make a record's source true.
"""

from dataclasses import dataclass

from spark.decode.record_rules import NOT_THEIRS, Record

FAULT = f"{NOT_THEIRS}the registry has others speak here, or this gateway elsewhere"
ANY = "*"


@dataclass(frozen=True, slots=True)
class TopicOwners:
    """Gateways with topics of their own. If there are none, nothing is judged."""

    topics: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pairs of a `ce_source` and its topics: names, or beginnings of names with `*`."""


class Speakers:
    """Judges the sources of typed records."""

    def __init__(self, owners: TopicOwners) -> None:
        self._owners = owners.topics
        self._fits: dict[tuple[str, str], bool] = {}

    def judge(self, record: Record) -> None:
        """Give a record a `header_fault` if its source may not speak in its topic.

        Such a record loses its `ce_id`: else the true gateway's record with this id would count as a copy. A retry
        gives it back.
        """
        if record.header_fault is not None or record.namespace is None:
            return
        source = f"/{record.namespace}/{record.gateway}"
        # A structured event names the topic of its series, which may be another one than it is in.
        if not all(self.may_speak(source, topic) for topic in {record.topic, record.stream or record.topic}):
            record.header_fault, record.ce_id = FAULT, None

    def may_speak(self, source: str, topic: str) -> bool:
        """True if a gateway, named by its `ce_source`, may speak in a topic."""
        if not self._owners:
            return True
        if (source, topic) not in self._fits:
            speakers = [owner for owner, topics in self._owners if any(_is_in(topic, each) for each in topics)]
            has_topics = any(owner == source for owner, _ in self._owners)
            self._fits[source, topic] = source in speakers or not (speakers or has_topics)
        return self._fits[source, topic]


def _is_in(topic: str, named: str) -> bool:
    return topic.startswith(named.removesuffix(ANY)) if named.endswith(ANY) else topic == named
