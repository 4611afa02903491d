"""Reads `gateway.toml`, and reports every mistake with its line and the correction, before anything starts."""

import ipaddress
import re
from collections.abc import Container, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from gateway.config.payload_mistakes import payload_mistakes
from gateway.config.serial_mistakes import SERIAL_EXAMPLES, serial_elsewhere, serial_instead, serial_mistakes
from gateway.host.safe_files import LeftAloneError, true_path
from gateway.intake.routes import RouteError, RouteTable, compile_route, compile_routes
from gateway.listener.access import CommandTopics
from gateway.mqtt import topic_filters
from gateway.record_contract import COMMANDS_TOPIC, DEVICE_NAME, INTERNAL_PREFIX, KAFKA_TOPIC, NAME_RULE
from gateway.settings import (
    DEFAULT_ROUTE,
    OAUTHBEARER,
    BrokerSettings,
    CommandSettings,
    KafkaSaslSettings,
    KafkaSettings,
    ListenerSettings,
    RouteSettings,
    Settings,
)
from gateway.toml_files.mistakes import ConfigError, Mistake, Place, lines_of, show, spell
from gateway.toml_files.reader import read_text, read_toml
from gateway.toml_files.schema import Schema, converted, sections_of, struct_of, wanted

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:]+)\]|([^\s:@\[\]]+)):([0-9]{1,5})")
_BRACKETED = re.compile(r"\[.*\]")
_LIKE_IPV6 = re.compile(r"\[?[0-9A-Fa-f]*(?::[0-9A-Fa-f]*){2,}\]?")
_NUMBERS = re.compile(r"[0-9.]+")
_VARIABLE_NAME = re.compile(r"\{[^{}/]*\}")

_NO_FILE = (
    "there is no such file; write one (sudo sluice setup asks what has to be in it, and writes it; the page for "
    "installers, docs/install.md, has an example), or say with --config where it is"
)
_UNREAD: Mapping[type[Exception], str] = {
    FileNotFoundError: _NO_FILE,
    IsADirectoryError: "is a directory; name the file in it with --config",
    PermissionError: "this user may not read it; run this with sudo, or as the user that sluice runs as",
}
_FOREIGN_LINK = (
    "buffer.path: {path} leads through a symbolic link that another user of this box can have made, and root does not "
    "follow it; write the path that it leads to, if that is the gateway's"
)
_NO_DIGEST = (
    "a value here is not the SHA-256 of a secret, so that nobody could connect with it; write its 64 lower-case "
    "hex digits (printf %s SECRET | sha256sum), never the secret itself"
)
_NO_DEVICE = (
    f"a name here is no device name, so that every reading of that user would go to the quarantine; write {NAME_RULE}"
)
_NO_LOG_IN_SO = (
    "a sensor that logs in is called by its user name, in which no '/' can stand: every reading would go to the "
    "quarantine (not-the-writers-device); remove it, for one gateway has one user of a name anyway"
)
_ALSO_A_DEVICE = (
    "a name here is one of mqtt_listener.users too, so that its secret would be a device's and an operator's; "
    "write another name"
)
_INTERNAL = (
    f"begins with {INTERNAL_PREFIX}, as the topics do that Kafka keeps for itself; write a topic of your own, "
    "without that beginning"
)
_NOT_ITS_OWN = (
    "must hold {gateway} once, for each gateway has a topic of its own: another one that read it would answer for "
    "devices that it does not have"
)
_NO_PLACE_FOR_COMMANDS = (
    "has no template that ends in '#' and has no '+', so that commands from the cloud ([commands]) have no topic; "
    "add 'command/{device}/#'"
)
_DEVICE_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,62}")
_SPEAKS = "the gateway's own topic: a sensor could speak there for the gateway; write another topic"
_TOPIC_OF_EVENTS = (
    "is kafka.events_topic too, so that whoever reads events would get quarantined bytes among them; "
    'write another topic, such as "gateway-quarantine"'
)
_NO_TOPIC = (
    "is no topic name, so that Kafka would refuse all that goes there; write 1 to 249 letters, digits, '.', '_' or '-'"
)
_EVERYWHERE = (
    "is empty, which would listen on every network that this box is in; "
    'write "0.0.0.0" if that is meant, "127.0.0.1" for this box alone, or one address of this box'
)
_NO_HOST = (
    "no host can be called so (a name's parts, between single dots, have 1 to 63 characters); "
    "write a host's name or its IP address"
)
_ENDS_THE_OTHER = (
    "and the broker would end the one for the other; write all topics into one section, or another client_id"
)
_OVERLAP = (
    "match some of the same topics, and a broker may send such a message once for each; "
    "write filters that do not overlap"
)
_HALF_A_PAIR = "has one of certificate and key; write both, or neither"
_IN_THE_CLEAR = {
    "PLAIN": "is PLAIN, which sends the password itself, and without [kafka.tls] anybody on the way could read it; add "
    '[kafka.tls] and the brokers\' port for it, or write "SCRAM-SHA-512" where the brokers offer that',
    OAUTHBEARER: "is OAUTHBEARER, which sends an access token itself, and without [kafka.tls] anybody on the way could "
    "read it; add [kafka.tls] and the brokers' port for it",
}
_AUTHORIZATION_EXAMPLE = 'token_url = "https://login.example/oauth2/token"'
_FOLDER_EXAMPLE = 'url = "https://updates.example/fleet", a folder by https and without a password'
_UNVERIFIED = (
    "certificates are always verified, for without that anybody could answer; where they are of an authority of your "
    "own, write its certificate into a file, and that file's path as ca"
)
_ENCRYPTION = "TLS has a section of its own: write [kafka.tls], with ca where the authority is one of your own"
_LOG_IN = "a log-in has a section of its own: write [kafka.sasl] with mechanism, user and password_file"
_SECTIONS = {
    "sasl": "write [kafka.sasl] instead",
    "tls": "write [kafka.tls] for the way to Kafka, or [mqtt_listener.tls] for sensors' connections",
}
"""Inner sections that stand at the file's top, and what to write."""
_OF_OTHER_CLIENTS = (
    (re.compile(r"security([._].*)?"), f"{_ENCRYPTION}. And {_LOG_IN}"),
    (re.compile(r"ssl([._].*)?"), _ENCRYPTION),
    (re.compile(r"sasl[._].*|user|username|password|password_file"), _LOG_IN),
)
"""Settings of other clients of Kafka, and how to set them here."""
_WITHOUT_VERIFYING = re.compile(r"(insecure|verify|check|skip|ssl_verify|endpoint_identification)[a-z_]*")
"""Names that other programs give to verifying, in a section of TLS."""
_TOP = "the file's top, above the first section"
_NAMESAKES_MAX = 3
"""Sections that a message names. If more have a setting of one name, such as port, that says nothing."""
_TOPIC_TEMPLATES = {
    "backlog_topic": '"{topic}.backlog"',
    "structured_topic": '"structured-{topic}"',
    "latest_topic": '"latest-{topic}"',
}
_OTHER_NAME = 'write another one, such as "latest-{topic}"'
_BOOTSTRAP_MAX = 32
"""Addresses of brokers. Any one of them names all the others of its cluster."""
_LINGER_SHARE = 1 / 4
"""Greatest share of `live_age_s_max` for `linger_ms`: the time that the link takes comes on top."""
_BANDWIDTH_LEAST = {"bytes_per_s_max": 1_000, "bytes_per_day_max": 100_000}
"""Least bytes of a metered link. With fewer, the gateway's own traffic does not get through: connecting, heartbeats,
acknowledgements."""
_TOO_NARROW = "bytes do not carry even what connecting and heartbeats take"
_OWN_PORTS: Mapping[Place, int] = {
    ("mqtt_listener", "port"): 1883,
    ("mqtt_listener", "tls", "port"): 8883,
    ("status_page", "port"): 8080,
}
"""Ports on which this box listens. A message proposes these, or the next that are free."""
_SECRETS = (("mqtt_listener", "users"), ("mqtt_listener", "operators"))
"""Sections whose names and values are never shown. If somebody swapped name and secret, the name is the secret."""
_EXAMPLES: Mapping[tuple[str, ...], str] = {
    ("gateway",): '; write [gateway] with id = "the name of this box"',
    ("kafka",): '; write [kafka] with bootstrap = ["kafka.example:9092"]',
    ("gateway", "id"): '; write id = "the name of this box"',
    ("kafka", "bootstrap"): '; write bootstrap = ["kafka.example:9092"]',
    ("kafka", "sasl", "mechanism"): '; write mechanism = "SCRAM-SHA-512", or another that the brokers offer',
    ("kafka", "sasl", "user"): '; write user = "the name that the brokers know this gateway by"',
    ("kafka", "sasl", "password_file"): '; write password_file = "/etc/sluice/kafka.password", a file whose first '
    "line is the password, and that its owner alone may read (chmod 0400)",
    **SERIAL_EXAMPLES,
}
"""Words for a missing setting, by its sections and name."""
_LISTENER_NAMES = frozenset(ListenerSettings.__struct_fields__)


def load(path: Path) -> Settings:
    """Read and check a configuration. Raises ConfigError.

    Symbolic links in `buffer.path` are followed, but by root none that somebody else can have made.
    """
    settings = load_as_written(path)
    try:
        # SQLite puts its WAL beside the real file: the buffer's other files must stand there, not beside a link to it.
        real = true_path(settings.buffer.path)
    except LeftAloneError as error:
        raise ConfigError(path, [Mistake(0, _FOREIGN_LINK.format(path=settings.buffer.path))]) from error
    return msgspec.structs.replace(settings, buffer=msgspec.structs.replace(settings.buffer, path=real))


def load_as_written(path: Path) -> Settings:
    """Read and check a configuration. Links in it are not followed, as they may lead elsewhere. Raises ConfigError."""
    return parse(read_text(path, _UNREAD), path)


def parse(text: str, path: Path) -> Settings:
    """Check the text of a configuration; `path` is for messages. Raises ConfigError."""
    document, lines = read_toml(text, path), lines_of(text)
    _SCHEMA.require_none(_SCHEMA.mistakes(document), lines, path)
    settings = converted(document, Settings)
    _SCHEMA.require_none((*_meaning_mistakes(settings), *_port_mistakes(settings, lines)), lines, path)
    # In one spelling each: the addresses that a broker tells are compared with them.
    bootstrap = tuple(dict.fromkeys(_spelled_out(address) for address in settings.kafka.bootstrap))
    return msgspec.structs.replace(settings, kafka=msgspec.structs.replace(settings.kafka, bootstrap=bootstrap))


def route_table(settings: Settings) -> RouteTable:
    """Compile the routes of settings that `parse` has checked."""
    reserved = frozenset(_own_topics(settings))
    serial_topic = None if settings.serial is None else settings.serial.topic
    return compile_routes(settings.routes, settings.fallback_topic, reserved, serial_topic, settings.kafka.is_latest)


# -- what types say -----------------------------------------------------------------------------


class _GatewayFile(Schema):
    """`gateway.toml`: the words for names and values of other programs and sections."""

    def elsewhere(self, place: Place, key: str) -> str:
        if not place:
            return _SECTIONS.get(key, "")
        if place[0] == "serial":
            return serial_elsewhere(place, key)
        if place[0] != "mqtt_listener" and place[-1] == "tls" and _WITHOUT_VERIFYING.fullmatch(key):
            return _UNVERIFIED
        if place != ("kafka",):
            return ""
        return next((words for names, words in _OF_OTHER_CLIENTS if names.fullmatch(key)), "")

    def namesakes(self, key: str) -> str:
        headers = [header or _TOP for header, _, own in sections_of(Settings) if key in {each.name for each in own}]
        if not 0 < len(headers) <= _NAMESAKES_MAX:
            return ""
        return f"`{key}` is a setting of {' and '.join(headers)}"

    def misplaced(self, place: Place, value: object) -> str:
        *section, name = place
        is_digest = isinstance(value, str) and _SHA256.fullmatch(value) is not None
        if place[:-1] not in _SECRETS or name not in _LISTENER_NAMES or is_digest:
            return ""
        # The line was added at the file's end, or below the header of the users.
        return f"`{name}` is a setting of [{section[0]}]: write it above [{self.spell(place)}]"

    def missing(self, place: Place, hint: object) -> tuple[Place, str]:
        noun = "the setting" if struct_of(hint) is None else "the section"
        example = _EXAMPLES.get(tuple(part for part in place if isinstance(part, str)), "")
        return place[:-1], f"{noun} {self.spell(place)} is missing{example}"

    def instead(self, hint: object, value: object, place: Place) -> str:
        """Say what to write: if a value only lacks brackets, or has quotes too many, just that."""
        kinds = get_args(hint)
        is_list = get_origin(hint) is tuple
        item = struct_of(kinds[0]) if is_list else struct_of(hint) if isinstance(place[-1], int) else None
        if item is not None:
            return _array_words(item, value, place)
        if place[0] == "serial" and (words := serial_instead(place, value)):
            return words
        if isinstance(value, str) and not self.is_secret(place):
            if is_list and kinds[0] is str and "@" not in value:
                return f"it in brackets: {show([part.strip() for part in value.split(',')])}"
            # The arguments of a choice among numbers are the numbers themselves.
            if kinds and (kinds[0] in {int, float} or isinstance(kinds[0], int)) and not is_list:
                return f"a number, without quotes: {wanted(hint)}"
        return wanted(hint)

    def is_secret(self, place: Place) -> bool:
        """Whether names and their secrets belong at a place, or around it."""
        if place[:2] == ("kafka", "sasl") and place[2:] in ((), ("password_file",)):
            return True
        if place[:1] == ("mqtt_brokers",) and place[2:] in ((), ("password",)):
            return True
        return any(all(part == other for part, other in zip(place, secret, strict=False)) for secret in _SECRETS)

    def spell(self, place: Place) -> str:
        return spell(place[:2] if place[:2] in _SECRETS else place)


_SCHEMA = _GatewayFile(Settings)


def _array_words(item: type[Struct], value: object, place: Place) -> str:
    """Say how to write a section that may come several times, and what it needs if none was begun."""
    name = ".".join(part for part in place if isinstance(part, str))
    if isinstance(value, dict) and value and all(isinstance(inner, dict | list) for inner in value.values()):
        first, inner = next(iter(value.items()))
        below = f"[[{name}.{first}]]" if isinstance(inner, list) else f"[{name}.{first}]"
        needed = [field.name for field in fields(item) if field.required and field.name not in value]
        return f"[[{name}]] with its {' and '.join(needed)} above {below}"
    return f"[[{name}]], with two brackets"


# -- what settings mean together ----------------------------------------------------------------


def _meaning_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    yield from _topic_mistakes(settings)
    yield from _route_mistakes(settings)
    yield from _bootstrap_mistakes(settings.kafka)
    yield from _kafka_access_mistakes(settings.kafka)
    yield from _kafka_time_mistakes(settings.kafka)
    for name, example in _TOPIC_TEMPLATES.items():
        yield from _topic_template_mistakes(settings, name, example)
    yield from _latest_topic_mistakes(settings)
    yield from _bandwidth_mistakes(settings.kafka)
    if settings.mqtt_listener is not None:
        yield from _listener_mistakes(settings.mqtt_listener)
    yield from _broker_mistakes(settings)
    yield from _size_mistakes(settings)
    if settings.commands is not None:
        yield from _command_mistakes(settings, settings.commands)
    if settings.serial is not None:
        yield from serial_mistakes(settings.serial)
    if settings.status_page is not None:
        yield from _own_host_mistakes(("status_page", "host"), settings.status_page.host)
    if settings.fleet is not None and not _is_folder(settings.fleet.url):
        yield ("fleet", "url"), f"{show(settings.fleet.url)} will not do; write {_FOLDER_EXAMPLE}"


def _size_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    """Find messages that would be taken, and could never be stored."""
    most = settings.buffer.bytes_max // 2
    sections: list[tuple[Place, int]] = [
        (("mqtt_brokers", number), broker.packet_bytes_max) for number, broker in enumerate(settings.mqtt_brokers)
    ]
    if settings.mqtt_listener is not None:
        sections.append((("mqtt_listener",), settings.mqtt_listener.packet_bytes_max))
    for place, size in sections:
        if size > most:
            yield (*place, "packet_bytes_max"), f"{size} is more than half of buffer.bytes_max; lower it, or raise that"


def _own_topics(settings: Settings) -> dict[str, str]:
    """Return the topics on which the gateway speaks or listens for itself, and the settings that name them."""
    kafka, commands = settings.kafka, settings.commands
    own = {} if commands is None else {commands.topic_of(settings.gateway.id): "commands.topic"}
    return {**own, kafka.quarantine_topic: "kafka.quarantine_topic", kafka.events_topic: "kafka.events_topic"}


def _topic_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    """Check the topics that are named outright, without a template."""
    kafka = settings.kafka
    if kafka.events_topic == kafka.quarantine_topic:
        yield ("kafka", "quarantine_topic"), f"{show(kafka.quarantine_topic)} {_TOPIC_OF_EVENTS}"
    named: dict[Place, str | None] = {
        ("kafka", "events_topic"): kafka.events_topic,
        ("kafka", "quarantine_topic"): kafka.quarantine_topic,
        ("fallback_topic",): settings.fallback_topic,
    }
    for place, topic in named.items():
        if topic is None:
            continue
        if KAFKA_TOPIC.fullmatch(topic) is None:
            yield place, f"{show(topic)} {_NO_TOPIC}"
        elif topic.startswith(INTERNAL_PREFIX):
            yield place, f"{show(topic)} {_INTERNAL}"
    owner = _own_topics(settings).get(settings.fallback_topic or "")
    if owner is not None:
        yield ("fallback_topic",), f'{show(settings.fallback_topic)} is {owner}, {_SPEAKS}, such as "strays"'


def _route_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    own = _own_topics(settings)
    first: dict[tuple[str, bool], int] = {}
    for index, route in enumerate(settings.routes):
        yield from payload_mistakes(route, ("routes", index))
        try:
            compile_route(route)
        except RouteError as error:
            yield ("routes", index, error.setting), str(error)
            continue
        # Variables match the same levels whatever their names. A route that names its device goes before another.
        shape = _VARIABLE_NAME.sub("{}", route.topic), route.device is not None
        earlier = first.setdefault(shape, index)
        if earlier != index:
            yield ("routes", index, "topic"), _same_topics(route, earlier, settings.routes[earlier])
        if route.key != DEFAULT_ROUTE.key and _has_log_ins_alone(settings):
            yield ("routes", index, "key"), f"is {show(route.key)}, and {_NO_LOG_IN_SO}"
        if route.kafka in own:
            yield (
                ("routes", index, "kafka"),
                f'{show(route.kafka)} is {own[route.kafka]}, {_SPEAKS}, such as "device-{{stream}}"',
            )
        elif route.kafka.startswith(INTERNAL_PREFIX):
            yield ("routes", index, "kafka"), f"{show(route.kafka)} {_INTERNAL}"


def _has_log_ins_alone(settings: Settings) -> bool:
    """Whether all that comes in is from devices that have logged in."""
    listener, serial = settings.mqtt_listener, settings.serial
    others = settings.mqtt_brokers or (serial is not None and serial.names_ports)
    return listener is not None and not listener.anonymous and not others


def _same_topics(route: RouteSettings, index: int, earlier: RouteSettings) -> str:
    return (
        f"{show(route.topic)} takes the same topics as {show(earlier.topic)} of routes[{index}]: where the two "
        "routes differ, every reading of them goes to the quarantine as ambiguous; remove one of the two"
    )


def _bootstrap_mistakes(kafka: KafkaSettings) -> Iterator[tuple[Place, str]]:
    place = ("kafka", "bootstrap")
    if not kafka.bootstrap:
        yield place, 'is empty; write at least one broker, such as ["kafka.example:9092"]'
    if len(kafka.bootstrap) > _BOOTSTRAP_MAX:
        few = f"write {_BOOTSTRAP_MAX} at most: whichever of them answers names all brokers of its cluster"
        yield place, f"has {len(kafka.bootstrap)} addresses; {few}"
    for address in kafka.bootstrap:
        mistake = _address_mistake(address)
        if mistake:
            yield place, f"{show(address)}{mistake}"


def _address_mistake(address: str) -> str:
    """Say what is wrong with an address of a broker, and what to write instead; empty if it is right."""
    mistake = ""
    found = _ADDRESS.fullmatch(address)
    scheme, slashes, _ = address.partition("://")
    if "," in address:
        each = show([part.strip() for part in address.split(",")])
        mistake = f" is several addresses in one text; write each in quotes of its own: {each}"
    elif slashes:
        mistake = f" is no address; leave out {show(scheme + slashes)}: host:port alone, such as 'kafka.example:9092'"
    elif found is None:
        six = ", or '[2001:db8::1]:9092' with an address of IPv6" if _LIKE_IPV6.fullmatch(address) else ""
        mistake = f" is no address; write host:port, such as 'kafka.example:9092'{six}"
    elif not 1 <= int(found[3]) <= 65535:
        mistake = f": {found[3]} is no port; write 1 to 65535"
    elif found[1] is not None and not _is_address(found[1]):
        mistake = ": no IPv6 address stands in the brackets; write '[2001:db8::1]:9092'"
    elif found[2] is not None and _NUMBERS.fullmatch(found[2]) and not _is_address(found[2]):
        # The system may take it for another address all the same: to it, 010 is 8.
        mistake = f": {found[2]} is no IPv4 address; write four numbers, without zeros in front"
    elif not _can_be_looked_up(found[1] or found[2]):
        mistake = f": {_NO_HOST}, such as 'kafka.example:9092'"
    return mistake


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _spelled_out(address: str) -> str:
    """Spell a right address of `kafka.bootstrap` as `host:port` is spelled everywhere else."""
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
    return f"{host}:{int(port)}"


def _kafka_time_mistakes(kafka: KafkaSettings) -> Iterator[tuple[Place, str]]:
    """Check times that each make sense and do not go together."""
    connect_s, request_s = kafka.connect_timeout_s, kafka.request_timeout_s
    if connect_s >= request_s:
        meaning = (
            "within which a session must have begun: one broker that does not answer would use it all up, and no "
            "other be tried; lower it, or raise that"
        )
        yield ("kafka", "connect_timeout_s"), f"{connect_s:g} is not below request_timeout_s ({request_s:g}), {meaning}"
    most_ms = kafka.live_age_s_max * 1000 * _LINGER_SHARE
    if kafka.linger_ms > most_ms:
        meaning = (
            "readings that only wait for company would become backlog; "
            f"write {most_ms:g} at most, or raise live_age_s_max"
        )
        told = f"{kafka.linger_ms:g} is more than a quarter of live_age_s_max ({kafka.live_age_s_max:g} s)"
        yield ("kafka", "linger_ms"), f"{told}: {meaning}"


def _kafka_access_mistakes(kafka: KafkaSettings) -> Iterator[tuple[Place, str]]:
    tls, sasl = kafka.tls, kafka.sasl
    if tls is not None and (tls.certificate is None) != (tls.key is None):
        yield ("kafka", "tls"), _HALF_A_PAIR
    if sasl is None:
        return
    if sasl.mechanism in _IN_THE_CLEAR and tls is None:
        yield ("kafka", "sasl", "mechanism"), _IN_THE_CLEAR[sasl.mechanism]
    yield from _token_mistakes(sasl)
    if not sasl.user:
        yield ("kafka", "sasl", "user"), "is empty; write the name that the brokers know this gateway by"


def _token_mistakes(sasl: KafkaSaslSettings) -> Iterator[tuple[Place, str]]:
    place: Place = ("kafka", "sasl")
    if sasl.mechanism != OAUTHBEARER:
        for name in ("token_url", "scope", "token_ca", "extensions"):
            if getattr(sasl, name):
                told = f'is for mechanism = "{OAUTHBEARER}", and this is {show(sasl.mechanism)}'
                yield (*place, name), f"{told}; remove one of the two"
        return
    if sasl.token_url is None:
        yield place, f'has mechanism = "{OAUTHBEARER}" and no token_url; write {_AUTHORIZATION_EXAMPLE}'
    elif not _is_https(sasl.token_url):
        yield (*place, "token_url"), f"{show(sasl.token_url)} will not do; write {_AUTHORIZATION_EXAMPLE}"


def _is_https(url: str) -> bool:
    """Whether a text is a URL of HTTPS that can be asked, and holds no password."""
    try:
        parts = urlsplit(url)
        return parts.scheme == "https" and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False


def _is_folder(url: str) -> bool:
    """Whether a text is the URL of a folder that files are fetched from by HTTPS."""
    return _is_https(url) and not urlsplit(url).query and not urlsplit(url).fragment


def _topic_template_mistakes(settings: Settings, name: str, example: str) -> Iterator[tuple[Place, str]]:
    """Check a template that makes a further topic from each topic of readings."""
    place: Place = ("kafka", name)
    template: str | None = getattr(settings.kafka, name)
    if template is None:
        return
    first, *rest = template.split("{topic}")
    if len(rest) != 1:
        yield place, f"{show(template)} must hold {{topic}} once, as in {example}"
        return
    last = rest[0]
    if not first + last:
        yield place, f"is the topic of live readings itself; leave it out, or write {example}"
        return
    if KAFKA_TOPIC.fullmatch(f"{first}x{last}") is None:
        wanted = "letters, digits, '.', '_' or '-'"
        yield place, f"{show(template)} makes no topic name: beside {{topic}} write {wanted}, as in {example}"
        return
    if first.startswith(INTERNAL_PREFIX):
        yield place, f"{show(template)} {_INTERNAL}"
    for topic, setting in _own_topics(settings).items():
        if len(topic) > len(first + last) and topic.startswith(first) and topic.endswith(last):
            made = f"{show(template)} could make {show(topic)}"
            yield place, f"{made}, which is {setting}, {_SPEAKS}, such as {example}"
    for topic in _topics_of_readings(settings):
        if KAFKA_TOPIC.fullmatch(made := f"{first}{topic}{last}") is None:
            yield place, f"makes a name of {len(made)} characters from {show(topic)}, and Kafka takes 249; shorten one"


def _latest_topic_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    """Find topics of readings that would be compacted."""
    kafka = settings.kafka
    others = {kafka.structured_topic: "kafka.structured_topic", kafka.backlog_topic: "kafka.backlog_topic"}
    if kafka.latest_topic is not None and kafka.latest_topic in others:
        yield ("kafka", "latest_topic"), f"is {others[kafka.latest_topic]} too, and is compacted; {_OTHER_NAME}"
    for topic in _topics_of_readings(settings):
        if kafka.is_latest(topic):
            yield ("kafka", "latest_topic"), f"{show(topic)} is such a topic, and has a route's readings; {_OTHER_NAME}"


def _topics_of_readings(settings: Settings) -> list[str]:
    """Return the topics of readings that are named outright, without a variable."""
    topics = [route.kafka for route in settings.routes] + [settings.fallback_topic or ""]
    return [topic for topic in topics if KAFKA_TOPIC.fullmatch(topic)]


def _bandwidth_mistakes(kafka: KafkaSettings) -> Iterator[tuple[Place, str]]:
    for name, least in _BANDWIDTH_LEAST.items():
        value = getattr(kafka, name)
        if 0 < value < least:
            yield ("kafka", name), f"{value} {_TOO_NARROW}; write {least} or more, or 0 for no bound"


def _command_mistakes(settings: Settings, commands: CommandSettings) -> Iterator[tuple[Place, str]]:
    place: Place = ("commands", "topic")
    topic, kafka = commands.topic_of(settings.gateway.id), settings.kafka
    if commands.topic.count("{gateway}") != 1:
        yield place, f"{show(commands.topic)} {_NOT_ITS_OWN}, as in {show(COMMANDS_TOPIC)}"
    elif KAFKA_TOPIC.fullmatch(topic) is None:
        yield place, f"{show(topic)} {_NO_TOPIC}"
    elif topic.startswith(INTERNAL_PREFIX):
        yield place, f"{show(topic)} {_INTERNAL}"
    elif topic in {kafka.events_topic, kafka.quarantine_topic}:
        yield place, f"{show(topic)} is a topic that this gateway writes to; write another one"
    if not commands.devices:
        yield ("commands", "devices"), 'is empty, so that no device could be commanded; write names, or ["*"] for all'
    for pattern in commands.devices:
        if _DEVICE_PATTERN.fullmatch(pattern) is None:
            yield ("commands", "devices"), f"{show(pattern)} fits no device name; write {NAME_RULE}, or '*' in it"
    listener = settings.mqtt_listener
    if listener is not None and CommandTopics(listener.command_topics).topic_of("x", "") is None:
        yield ("mqtt_listener", "command_topics"), _NO_PLACE_FOR_COMMANDS


def _own_host_mistakes(place: Place, host: str) -> Iterator[tuple[Place, str]]:
    """Check an address that this box is to listen on."""
    if not host:
        yield place, _EVERYWHERE
    elif _BRACKETED.fullmatch(host):
        yield place, _without_brackets(host)
    elif not _can_be_looked_up(host):
        yield place, f'{show(host)}: {_NO_HOST}, such as "0.0.0.0" for all of this box'


def _port_mistakes(settings: Settings, written: Container[Place]) -> Iterator[tuple[Place, str]]:
    """Find two listeners on one port. The line is that of a port in the file, for the other may be a default."""
    listener, page = settings.mqtt_listener, settings.status_page
    taken: dict[int, Place] = {}
    ports: dict[Place, int] = {}
    if listener is not None:
        ports["mqtt_listener", "port"] = listener.port
        if listener.tls is not None:
            ports["mqtt_listener", "tls", "port"] = listener.tls.port
    if page is not None:
        ports["status_page", "port"] = page.port
    for later, port in ports.items():
        earlier = taken.setdefault(port, later)
        if earlier == later:
            continue
        place, other = (later, earlier) if later in written else (earlier, later)
        aside = "" if other in written else ", as nothing else is written there"
        free = next(number for number in count(_OWN_PORTS[place]) if number not in ports.values())
        yield place, f"{port} is {spell(other)}{aside}; write another, such as {free}"


def _listener_mistakes(listener: ListenerSettings) -> Iterator[tuple[Place, str]]:
    yield from _own_host_mistakes(("mqtt_listener", "host"), listener.host)
    if listener.port == 0 and listener.tls is None:
        yield ("mqtt_listener", "port"), "is 0, so that nobody could connect; write a port, or add [mqtt_listener.tls]"
    yield from _secret_mistakes(_SECRETS[0], listener.users)
    yield from _secret_mistakes(_SECRETS[1], listener.operators)
    for name in listener.users.keys() & listener.operators.keys():
        yield (*_SECRETS[1], name), _ALSO_A_DEVICE
    for template in listener.command_topics:
        try:
            CommandTopics((template,))
        except ValueError as error:
            yield ("mqtt_listener", "command_topics"), str(error)


def _secret_mistakes(place: Place, secrets: Mapping[str, str]) -> Iterator[tuple[Place, str]]:
    for name, digest in secrets.items():
        if DEVICE_NAME.fullmatch(name) is None:
            yield (*place, name), _NO_DEVICE
        if _SHA256.fullmatch(digest) is None:
            yield (*place, name), _NO_DIGEST


def _broker_mistakes(settings: Settings) -> Iterator[tuple[Place, str]]:
    sessions: dict[tuple[str, int, str], int] = {}
    for index, broker in enumerate(settings.mqtt_brokers):
        place = ("mqtt_brokers", index)
        if _BRACKETED.fullmatch(broker.host):
            yield (*place, "host"), _without_brackets(broker.host)
        elif not broker.host or not _can_be_looked_up(broker.host):
            yield (*place, "host"), f'{show(broker.host)}: {_NO_HOST}, such as "mosquitto.example"'
        session = (_same_host(broker.host), broker.port, broker.client_id or f"sluice-{settings.gateway.id}")
        earlier = sessions.setdefault(session, index)
        if earlier != index:
            yield place, f"is the same session as mqtt_brokers[{earlier}], {_ENDS_THE_OTHER}"
        yield from _subscription_mistakes(broker, (*place, "topics"))
        yield from _credential_mistakes(broker, place)
        if broker.backoff_s_min > broker.backoff_s_max:
            yield (*place, "backoff_s_min"), f"is above backoff_s_max ({broker.backoff_s_max}); write a smaller one"


def _same_host(host: str) -> str:
    """Return one name for names that are certainly of one host."""
    host = host.lower().removesuffix(".")
    return "localhost" if host in ("127.0.0.1", "::1") else host


def _subscription_mistakes(broker: BrokerSettings, place: Place) -> Iterator[tuple[Place, str]]:
    if not broker.topics:
        yield place, 'is empty, so that nothing would be read; write at least one filter, such as ["device/#"]'
    for number, topic_filter in enumerate(broker.topics):
        mistake = topic_filters.mistake(topic_filter)
        if mistake is not None:
            yield place, f"{show(topic_filter)} {mistake}"
            continue
        for other in broker.topics[:number]:
            if topic_filters.mistake(other) is None and topic_filters.overlap(topic_filter, other):
                yield place, f"{show(topic_filter)} and {show(other)} {_OVERLAP}"


def _credential_mistakes(broker: BrokerSettings, place: Place) -> Iterator[tuple[Place, str]]:
    if broker.password is not None and broker.password_file is not None:
        yield (*place, "password"), "stands beside password_file; write one of the two"
    if broker.user is None and (broker.password is not None or broker.password_file is not None):
        yield place, "has a password and no user, which MQTT 3.1.1 does not allow; write user"
    tls = broker.tls
    if tls is not None and (tls.certificate is None) != (tls.key is None):
        yield (*place, "tls"), _HALF_A_PAIR


def _without_brackets(host: str) -> str:
    return f"{show(host)}: an address stands here without brackets; write {show(host[1:-1])}"


def _can_be_looked_up(host: str) -> bool:
    """Whether a resolver can be asked for a host. getaddrinfo encodes names so, and fails with no OSError."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return not any(character.isspace() for character in host)
