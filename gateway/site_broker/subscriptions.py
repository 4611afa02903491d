"""Subscribes to topics at a broker, and keeps track of the subscriptions that it grants."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog
from paho.mqtt.subscribeoptions import SubscribeOptions

from gateway.mqtt.protocol import MalformedPacketError
from gateway.reading import Mark
from gateway.settings import BrokerSettings
from gateway.site_broker.client import BrokerClient

SUBSCRIBE_AGAIN_S: Final = 600.0
"""Seconds until a refused subscription is tried again."""
_REFUSED: Final = 0x80

_log = structlog.get_logger("sluice.mqtt_broker")


class Subscriptions:
    """The topic filters of one broker's session."""

    def __init__(self, settings: BrokerSettings, prefix: str, broker: str) -> None:
        """The keys of the session's marks begin with `prefix`. `broker` is the broker's name in the log."""
        self._settings = settings
        self._key = f"{prefix}topics"
        self._broker = broker
        self.answered = asyncio.Event()
        """Set while there is a connection, and the broker has answered each SUBSCRIBE and UNSUBSCRIBE."""
        self.refused: set[str] = set()
        """Topic filters that the broker does not let this gateway read."""
        self._topics: set[str] = set()
        """Filters that the broker's session may have; kept, to know which of them to unsubscribe."""
        self._asked: dict[int, tuple[str, ...]] = {}
        """Filters by the packet identifier of their SUBSCRIBE or UNSUBSCRIBE, until they are answered."""
        self._codes: dict[str, int] = {}
        """The last return code of each filter in a SUBACK."""
        self._ask_again_s = 0.0

    def load(self, kept: Mapping[str, bytes]) -> None:
        """Begin with the filters that an earlier process kept."""
        with contextlib.suppress(msgspec.DecodeError):
            self._topics = set(msgspec.json.decode(kept.get(self._key, b"[]"), type=list[str]))

    def mark(self) -> Mark:
        """The mark that keeps the filters."""
        return Mark(self._key, msgspec.json.encode(sorted(self._topics)))

    def connecting(self) -> Mark:
        """Return the mark that must be on disk before CONNECT and SUBSCRIBE are sent."""
        self._topics.update(self._settings.topics)
        return self.mark()

    def connected(self, client: BrokerClient) -> None:
        """Subscribe to all topics of the settings, even in a session that is there; unsubscribe from all others.

        A process that was killed between CONNECT and SUBSCRIBE leaves a session without subscriptions, and a broker may
        come back with an old session. The cost is that retained messages come again with each SUBSCRIBE.
        """
        self._subscribe(client, self._settings.topics)
        surplus = sorted(self._topics.difference(self._settings.topics))
        if surplus:
            _, identifier = client.unsubscribe(surplus)
            self._asked[identifier or 0] = tuple(surplus)

    def ask_again(self, client: BrokerClient, now_s: float) -> None:
        """Subscribe again to refused filters, at most once in SUBSCRIBE_AGAIN_S."""
        if self.refused and now_s >= self._ask_again_s:
            self._subscribe(client, sorted(self.refused))

    def _subscribe(self, client: BrokerClient, names: Sequence[str]) -> None:
        qos = self._settings.qos
        wanted: list[tuple[str, Any]] = [(name, qos) for name in names]
        if self._settings.version == "5":
            # 2: do not send what was retained, as it would not be stored.
            wanted = [(name, SubscribeOptions(qos, retainHandling=2)) for name in names]
        _, identifier = client.subscribe(wanted)
        self._asked[identifier or 0] = tuple(names)
        self._ask_again_s = asyncio.get_running_loop().time() + SUBSCRIBE_AGAIN_S

    def granted(self, identifier: int, codes: bytes) -> None:
        """Take a SUBACK (section 3.9). Raises MalformedPacketError."""
        names = self._asked.get(identifier, ())
        if len(names) != len(codes):
            raise MalformedPacketError("a SUBACK that answers another number of filters than were asked for")
        for name, code in zip(names, codes, strict=True):
            if code >= _REFUSED:
                self.refused.add(name)
            else:
                self.refused.discard(name)
            if self._codes.get(name) != code:
                self._codes[name] = code
                self._say_granted(name, code)
        self._was_answered(identifier)

    def ended(self, identifier: int) -> None:
        """Take an UNSUBACK (section 3.11)."""
        self._topics.difference_update(self._asked.get(identifier, ()))
        self._was_answered(identifier)

    def disconnected(self) -> None:
        """Forget what was asked on a connection that is over, as nobody answers it any more."""
        self._asked.clear()
        self.answered.clear()

    def _was_answered(self, identifier: int) -> None:
        self._asked.pop(identifier, None)
        if not self._asked:
            self.answered.set()

    def _say_granted(self, name: str, code: int) -> None:
        """Log that the broker grants less than was asked for."""
        if code >= _REFUSED:
            _log.error(
                "the broker refuses a subscription, so that nothing of it is read: allow this user to read it in "
                "the broker's access list, or change mqtt_brokers.topics",
                broker=self._broker,
                topic=name,
                asked_again_in_s=SUBSCRIBE_AGAIN_S,
            )
        elif not code:
            _log.warning(
                "the broker grants QoS 0 only: messages from while this gateway is away, or is killed, are lost; "
                "allow QoS 1 in the broker's settings",
                broker=self._broker,
                topic=name,
            )
        elif code < self._settings.qos:
            _log.warning("the broker grants QoS 1 where QoS 2 was asked for", broker=self._broker, topic=name)
