"""Resolves a topic once for all its readings: their series, and the readers of their payloads."""

from typing import NamedTuple

from msgspec.structs import replace

from gateway.buffer.rows import Series, StructuredEvents
from gateway.intake import payload_identity, payload_time
from gateway.intake.reading_times import Ticking
from gateway.intake.routes import Destination, Refusal, RouteTable, kafka_key
from gateway.reading import Reading
from gateway.record_contract import READING_TYPE, says_json
from gateway.settings import GatewaySettings, KafkaSettings, PayloadIdentity

TOPICS_CACHED_MAX = 20_000
"""Resolved topics that are remembered. With more, the cache begins again."""
TOPIC_CACHED_CHARACTERS_MAX = 256
"""Characters of a topic above which it is resolved each time: a hostile one may have 65,535."""
PLAIN_BYTES = "application/octet-stream"
"""Content type of a payload that is not what its route declares."""


class ResolvedTopic(NamedTuple):
    """A topic by its route."""

    series: Series
    series_of_bytes: Series | None
    """Series of payloads that are no JSON although the route declares it; None if it declares something else."""
    layout: PayloadIdentity
    identify: payload_identity.Reader | None
    """None if the payload does not say who took it."""
    ticking: Ticking | None
    """Owner of the tick, if the tick gives a reading's time."""
    tell_time: payload_time.Reader | None
    """Reader for the time of a payload without a tick; None if there is none to be found."""
    time_error_us: int
    told: frozenset[str]
    """Names of user properties that the route reads. They become no headers of their own."""


class ResolvedTopics:
    """Topics that were resolved lately."""

    def __init__(self, routes: RouteTable, gateway: GatewaySettings, kafka: KafkaSettings) -> None:
        self._routes = routes
        self._gateway = gateway
        self._has_latest = kafka.latest_topic is not None
        self.known: dict[tuple[str, str, str | None], ResolvedTopic | Refusal] = {}
        """By topic, subject and writer."""

    def resolve(self, reading: Reading) -> ResolvedTopic | Refusal:
        """Resolve the topic of a reading, and remember it."""
        topic = reading.topic
        resolved = self._by_route(topic, reading.subject, reading.writer, is_serial=reading.is_serial)
        if len(self.known) >= TOPICS_CACHED_MAX:
            self.known.clear()
        if len(topic) <= TOPIC_CACHED_CHARACTERS_MAX:
            self.known[topic, reading.subject, reading.writer] = resolved
        return resolved

    def _by_route(self, topic: str, subject: str, writer: str | None, *, is_serial: bool) -> ResolvedTopic | Refusal:
        found = self._routes.resolve(topic, writer, is_serial=is_serial)
        if isinstance(found, Refusal):
            return found
        # A topic too long to be remembered with each clock shares the clock of its device's other long topics.
        stream = topic if len(topic) <= TOPIC_CACHED_CHARACTERS_MAX else ""
        key = kafka_key(self._gateway, found.device)
        series = Series(
            found.kafka_topic,
            key,
            found.device,
            subject,
            READING_TYPE,
            found.content_type,
            topic,
            found.variables,
            self._structured(found),
        )
        return ResolvedTopic(
            series,
            replace(series, content_type=PLAIN_BYTES) if says_json(found.content_type) else None,
            found.identity,
            payload_identity.reader(found.identity),
            Ticking(found.device, stream, found.oscillator, found.least_delay_us)
            if found.time in {"auto", "tick"}
            else None,
            payload_time.reader(found.time, found.identity, found.content_type),
            found.time_error_us,
            (payload_identity.PROPERTIES if found.identity == "properties" else frozenset())
            | (payload_time.PROPERTIES if found.time == "property" else frozenset()),
        )

    def _structured(self, found: Destination) -> StructuredEvents | None:
        if found.envelope == "binary" and not self._has_latest:
            return None
        return StructuredEvents(found.envelope == "structured", found.envelope == "both", found.all_variables)
