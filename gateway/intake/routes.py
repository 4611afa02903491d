"""Finds the Kafka topic and key of a reading from the topic it came in on."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.clock.arrival_buckets import LEAST_DELAY_US
from gateway.intake.escaped_names import escape
from gateway.record_contract import DEVICE_NAME, INTERNAL_PREFIX, KAFKA_TOPIC, NAME_RULE, attribute_of
from gateway.settings import Envelope, GatewaySettings, Oscillator, PayloadIdentity, RouteSettings, TimeSource

NO_ROUTE = "no-route"
"""Reason to refuse a topic that no template matches."""
BAD_NAME = "device-name-invalid"
"""Reason to refuse a topic whose device, or other part of its route's `key`, breaks the rule of names."""
LONG_NAME = "device-name-too-long"
"""Reason to refuse a topic whose device's name has more than 63 characters once it is escaped."""
TEMPLATES_TOLD_MAX = 5
_VARIABLE = re.compile(r"\{([a-z][a-z0-9_]*)\}")


def taken_words(routes: Sequence[RouteSettings]) -> str:
    """The topics that have a route, for a sender to another: `routes here take device/{device}/{stream}`."""
    told = ", ".join(route.topic for route in routes[:TEMPLATES_TOLD_MAX])
    more = f" and {len(routes) - TEMPLATES_TOLD_MAX} more" if len(routes) > TEMPLATES_TOLD_MAX else ""
    return f"routes here take {told}{more}" if routes else "there are no routes here"


def kafka_key(gateway: GatewaySettings, name: str) -> str:
    """The Kafka key of a device, or of this gateway (`gateway.key`)."""
    prefix = f"{gateway.namespace}/"
    # Without the prefix, a name that begins so (by the fallback topic, an MQTT topic) would be read as another one.
    return name if gateway.key == "name" and not name.startswith(prefix) else prefix + name


class RouteError(ValueError):
    """A template that cannot work; the message says what to write instead."""

    def __init__(self, setting: str, message: str) -> None:
        """`setting` is the route's setting that has the mistake."""
        super().__init__(message)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of one topic's readings."""

    kafka_topic: str
    device: str
    """The device's whole name, as `key` has it."""
    content_type: str
    identity: PayloadIdentity
    time: TimeSource
    time_error_us: int
    """The bound of a time that the sensor sent."""
    oscillator: Oscillator
    least_delay_us: int = LEAST_DELAY_US
    """Microseconds within which the quickest of the readings that teach the sensor's clock arrive."""
    variables: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The route's variables as the topic has them; none if device and Kafka topic show them all. If routes differ in
    nothing else, those of the first route count."""
    all_variables: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The route's variables, even if device and Kafka topic show them all."""
    envelope: Envelope = "binary"
    """Form of the records."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a topic has no destination; its readings go to the quarantine."""

    reason: str


@dataclass(frozen=True, slots=True)
class Route:
    """One compiled template."""

    settings: RouteSettings
    pattern: re.Pattern[str]
    shown: frozenset[str]
    """Variables that a record's key or Kafka topic shows, unless they are escaped."""

    def match(self, topic: str) -> Destination | Refusal | None:
        """The destination of a topic; None if the template does not match it."""
        found = self.pattern.fullmatch(topic)
        if found is None:
            return None
        of = self.settings
        variables = found.groupdict()
        escapes = of.names == "escape"
        names = {name: escape(value) for name, value in variables.items()} if escapes else dict(variables)
        if of.device is not None:
            names["device"] = of.device
        # An escaped name can break the rule only by its length.
        if not all(DEVICE_NAME.fullmatch(names[name]) for name in _VARIABLE.findall(of.key)):
            return Refusal(LONG_NAME if escapes else BAD_NAME)
        device = _filled(of.key, names)
        kafka_topic = _filled(of.kafka, names)
        if KAFKA_TOPIC.fullmatch(kafka_topic) is None:
            return Refusal("kafka-topic-name-invalid")
        are_shown = self.shown.issuperset(variables) and names.items() >= variables.items()
        return Destination(
            kafka_topic,
            device,
            of.content_type,
            of.identity,
            of.time,
            int(of.time_error_ms * 1000),
            of.oscillator,
            int(of.least_delay_ms * 1000),
            () if are_shown else tuple(variables.items()),
            tuple(variables.items()),
            of.envelope,
        )


def _filled(template: str, names: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda variable: names[variable[1]], template)


def compile_route(settings: RouteSettings) -> Route:
    """Check and compile a template. Raises RouteError.

    A level is literal text, `{name}` for a variable, `+` for any one level, or a last `#` for any that follow
    (wildcards as in MQTT 3.1.1, section 4.7).
    """
    levels = settings.topic.split("/")
    names = [found[1] for level in levels if (found := _VARIABLE.fullmatch(level))]
    if "#" in levels[:-1]:
        raise RouteError("topic", f"topic {settings.topic!r}: '#' may only be the last level")
    pattern = "/".join(_level_pattern(settings.topic, level) for level in levels)
    if levels[-1] == "#" and len(levels) > 1:
        # As in MQTT, 'a/#' matches 'a' too.
        pattern = pattern.removesuffix("/.*") + "(?:/.*)?"
    _check_variables(settings, names)
    _check_key(settings.key)
    in_kafka, in_key = _VARIABLE.findall(settings.kafka), _VARIABLE.findall(settings.key)
    # If two variables stand in the Kafka topic, nobody can tell where one ends.
    shown = frozenset(in_key + in_kafka if len(in_kafka) == 1 else in_key)
    return Route(settings, re.compile(pattern, re.DOTALL), shown)


def _check_variables(settings: RouteSettings, names: Sequence[str]) -> None:
    """`names` are the topic's variables. Raises RouteError."""
    topic = f"topic {settings.topic!r}"
    if settings.device is not None and "device" in names:
        raise RouteError("device", f"{topic} names the device by {{device}}; remove that, or the setting device")
    if settings.device is None and names.count("device") != 1:
        instead = 'where all of it is one device\'s, write device = "NAME" instead'
        raise RouteError(
            "topic", f"{topic} must hold the variable {{device}} once: it becomes the Kafka key; {instead}"
        )
    if len(set(names)) != len(names):
        raise RouteError("topic", f"{topic} holds a variable twice")
    attributes = Counter(attribute_of(name) for name in names)
    if settings.envelope != "binary" and any(count > 1 for count in attributes.values()):
        raise RouteError("topic", f"{topic}: two of its variables differ in '_' alone, and are one name in an event")
    if settings.names == "escape" and not names:
        raise RouteError("names", f"{topic} holds no variable, so that there is no name to escape; remove names")
    for setting, template in (("kafka", settings.kafka), ("key", settings.key)):
        for name in _VARIABLE.findall(template):
            if name not in {*names, "device"}:
                raise RouteError(setting, f"{setting} {template!r} uses {{{name}}}, which {topic} does not hold")
    if KAFKA_TOPIC.fullmatch(_VARIABLE.sub("x", settings.kafka)) is None:
        words = "is no topic name: letters, digits, '.', '_', '-' and {variables}, at most 249"
        raise RouteError("kafka", f"kafka {settings.kafka!r} {words}")


def _check_key(key: str) -> None:
    """Check a route's `key`: without a `/` between variables, two topics could make one key. Raises RouteError."""
    levels = key.split("/")
    if levels.count("{device}") != 1:
        raise RouteError("key", f"key {key!r} must hold {{device}} once, as in '{{site}}/{{device}}'")
    for level in levels:
        if not _VARIABLE.fullmatch(level) and not DEVICE_NAME.fullmatch(level):
            words = f"will not do: between its '/' stand a '{{variable}}' alone, or a name ({NAME_RULE})"
            raise RouteError("key", f"key {key!r}: {level!r} {words}")


def _level_pattern(topic: str, level: str) -> str:
    variable = _VARIABLE.fullmatch(level)
    if variable is not None:
        return f"(?P<{variable[1]}>[^/]+)"
    if level == "+":
        return "[^/]*"
    if level == "#":
        return ".*"
    if any(character in level for character in "{}+#"):
        raise RouteError(
            "topic",
            f"topic {topic!r}: level {level!r} mixes text with a variable or wildcard; "
            "a level is plain text, '{name}', '+' or '#'",
        )
    return re.escape(level)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """All routes of a gateway."""

    routes: tuple[Route, ...]
    fallback_topic: str | None
    reserved_topics: frozenset[str]
    """The gateway's own topics, as no sensor may speak for it."""
    serial_topic: re.Pattern[str] | None = None
    """Pattern of topics that `serial.topic` makes, with the group `device`."""
    is_latest: Callable[[str], bool] = lambda _: False
    """Whether a Kafka topic is one of last readings. It is compacted, so it would lose a route's readings."""

    def serial_device(self, topic: str) -> str:
        """The device of a topic that `serial.topic` made; empty for any other topic."""
        found = None if self.serial_topic is None else self.serial_topic.fullmatch(topic)
        return "" if found is None else found["device"]

    def resolve(self, topic: str, writer: str | None, *, is_serial: bool = False) -> Destination | Refusal:
        """The one destination of a topic, for a sender that may write only as `writer` (None: as anybody)."""
        matches = [(route, match) for route in self.routes if (match := route.match(topic)) is not None]
        # A route that names the topic's device has priority, whatever other routes make of that topic.
        naming = [match for route, match in matches if route.settings.device is not None]
        # Without doubles, in their order.
        found = dict.fromkeys(naming or [match for _, match in matches])
        if not found and self.fallback_topic is not None:
            # No variable names the device. The sender's credential does, or a serial sensor's HELLO, or else the topic.
            named = writer or (self.serial_device(topic) if is_serial else "")
            return Destination(
                self.fallback_topic, named or topic, "application/octet-stream", "none", "receipt", 0, "rc"
            )
        if not found:
            return Refusal(NO_ROUTE)
        if len(found) > 1:
            return Refusal("ambiguous-route")
        (match,) = found
        if isinstance(match, Destination):
            topic = match.kafka_topic
            if topic in self.reserved_topics or topic.startswith(INTERNAL_PREFIX) or self.is_latest(topic):
                return Refusal("kafka-topic-reserved")
            if writer is not None and writer != match.device:
                return Refusal("not-the-writers-device")
        return match


def compile_routes(
    routes: Sequence[RouteSettings],
    fallback_topic: str | None,
    reserved_topics: frozenset[str],
    serial_topic: str | None = None,
    is_latest: Callable[[str], bool] = lambda _: False,
) -> RouteTable:
    """Compile all templates; `serial_topic` is `serial.topic`. Raises RouteError for the first that cannot work."""
    compiled = tuple(compile_route(route) for route in routes)
    of_serial = None if serial_topic is None else _serial_pattern(serial_topic)
    return RouteTable(compiled, fallback_topic, reserved_topics, of_serial, is_latest)


def _serial_pattern(template: str) -> re.Pattern[str]:
    pattern = re.escape(template).replace(re.escape("{device}"), f"(?P<device>{DEVICE_NAME.pattern})")
    return re.compile(pattern.replace(re.escape("{stream}"), ".+"))
