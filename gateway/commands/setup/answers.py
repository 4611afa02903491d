"""Answers that `sluice setup` needs, from a person or a file. Every mistake is reported with its line."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from gateway.settings import Name
from gateway.toml_files.mistakes import ConfigError, Mistake, Place, line_of, lines_of, show, spell
from gateway.toml_files.reader import read_toml
from gateway.toml_files.writer import toml_text

ANSWERS_BYTES_MAX: Final = 100_000
"""Largest file of answers or secrets, in bytes. A stick may hold anything under that name."""
ANONYMOUS_WORDS: Final = "anybody may write as any device"
"""Sentence to type for a listener that asks nobody for a secret."""
PASSWORD_LENGTH_MIN: Final = 8
SECRET_LENGTH_MIN: Final = 16
"""Characters of a device's secret that somebody else made. Its hash is quick, so it must not be guessable."""
SECRETS_NAME: Final = "sluice-secrets.toml"
"""Name of the file with secrets, beside the file of answers."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

_T = TypeVar("_T", bound=Struct)
Mechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"]
_OneLine = Annotated[
    str,
    Meta(min_length=1, max_length=1_000, pattern=r"^[^\x00-\x1f\x7f]*\Z", description="a text of 1 to 1000 characters"),
]
_PagePassword = Annotated[
    str,
    Meta(
        min_length=PASSWORD_LENGTH_MIN,
        max_length=256,
        pattern=r"^[^\x00-\x1f\x7f]*\Z",
        description=f"a text of at least {PASSWORD_LENGTH_MIN} characters, all of which can be seen",
    ),
]
_DeviceSecret = Annotated[
    str,
    Meta(
        min_length=SECRET_LENGTH_MIN,
        max_length=1_000,
        pattern=r"^[^\x00-\x1f\x7f]*\Z",
        description=f"a secret of at least {SECRET_LENGTH_MIN} characters; openssl rand -hex 16 makes one",
    ),
]
_Digest = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f]{64}\Z",
        description="the secret's SHA-256, 64 lower-case hex digits (printf %s SECRET | sha256sum)",
    ),
]


class GatewayAnswers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[gateway]`: identity and clock of this box."""

    id: Name | None = None
    """Default: the present id, or a name made from the hardware."""
    namespace: Name | None = None
    """Default: the present namespace, or `default`."""
    clock: Literal["kernel", "system"] | None = None
    """As in the settings. Default: the present value, or `kernel`."""


class KafkaAnswers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka]`: the brokers that readings go to, and this gateway's log-in there."""

    bootstrap: tuple[str, ...]
    tls: bool
    ca: Path | None = None
    """PEM file of the authority that signed the brokers' certificates, relative to the answers. It is copied."""
    user: _OneLine | None = None
    """User of the log-in; None for no log-in."""
    mechanism: Mechanism = "SCRAM-SHA-512"
    create_topics: bool = True


class SensorsAnswers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[sensors]`: sources of readings."""

    serial: tuple[_OneLine, ...] = ("all",)
    mqtt: bool = True
    devices: tuple[Name, ...] = ()
    """Names of sensors that connect by MQTT. Each gets a secret of its own."""
    anonymous: str | None = None
    """None, or `ANONYMOUS_WORDS`."""


class StatusPageAnswers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[status_page]`: on or off."""

    enabled: bool = True


class ServiceAnswers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[service]`: start the service, or only write its settings."""

    start: bool = True


class Secrets(Struct, frozen=True, forbid_unknown_fields=True):
    """Secrets, from `sluice-secrets.toml` or from `[secrets]` among the answers."""

    kafka_password: _OneLine | None = None
    page_password: _PagePassword | None = None
    devices: dict[Name, _DeviceSecret] = msgspec.field(default_factory=dict)
    devices_sha256: dict[Name, _Digest] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        """Hide the secrets, wherever the object is printed."""
        return "Secrets(...)"


class Answers(Struct, frozen=True, forbid_unknown_fields=True):
    """All answers."""

    kafka: KafkaAnswers
    gateway: GatewayAnswers = GatewayAnswers()
    sensors: SensorsAnswers = SensorsAnswers()
    status_page: StatusPageAnswers = StatusPageAnswers()
    service: ServiceAnswers = ServiceAnswers()
    secrets: Secrets = Secrets()


EXAMPLE_BROKER: Final = "kafka.example:9093"
"""Address in the example. Names under `.example` never resolve (RFC 6761, section 6.5)."""
EXAMPLE: Final = f"""\
# Answers for `sluice setup --answers FILE`. Called sluice.toml, on the boot partition or on a USB stick, this file is
# taken in when the gateway starts. An answer behind a # is only an example.

[gateway]
# id = "barn-1"                    # this box; default: a name made from its hardware
namespace = "north-farm"           # the site: keeps two sites' device 42 apart
# clock = "system"                 # in a container or virtual machine whose host keeps the clock; else leave it out

[kafka]
bootstrap = ["{EXAMPLE_BROKER}"] # one or more brokers, host:port
tls = true                         # false: without TLS, and everything can be read on the way
# ca = "kafka-ca.pem"              # beside this file: who signed the brokers' certificates; else whom this box trusts
# user = "barn-1"                  # the log-in, if Kafka wants one; its password is kafka_password, see below
# mechanism = "SCRAM-SHA-512"      # or "SCRAM-SHA-256"; "PLAIN" only with tls
create_topics = true               # the gateway makes missing topics; false: you make them

[sensors]
serial = ["all"]                   # every USB adapter, now and later; or ports ["/dev/serial/by-id/..."]; or []
mqtt = true                        # sensors may connect to port 1883 of this box
devices = ["42", "43"]             # each gets a secret of its own; more later: sluice devices add NAME
# anonymous = "{ANONYMOUS_WORDS}"   # this exact sentence, instead of devices: no secrets at all

[status_page]
enabled = true                     # http://THIS-BOX:8080 on the LAN, with a password

[service]
start = true                       # start it, now and at every boot

# Write secrets into another file beside this one, {SECRETS_NAME}, without a header:
#   kafka_password = "..."
#   page_password = "..."          # of the status page, {PASSWORD_LENGTH_MIN} characters or more; else made, shown once
#   [devices]
#   "42" = "..."                   # a sensor's, {SECRET_LENGTH_MIN} characters or more; else made, shown once
#   [devices_sha256]
#   "43" = "..."                   # or only its SHA-256 (printf %s SECRET | sha256sum)
# On a boot partition or a USB stick, give all of them: nobody looks at a screen on which a secret could be shown.
"""


@dataclass(frozen=True, slots=True)
class Given:
    """Answers with their file. Paths in the answers are relative to the file's folder."""

    answers: Answers
    path: Path
    lines: Mapping[Place, int] = field(repr=False)

    def mistake(self, place: Place, message: str) -> Mistake:
        """Make a mistake about what an answer means, at the answer's line."""
        return Mistake(line_of(self.lines, place), f"{spell(place)}: {message}")


def load(path: Path) -> Given:
    """Read answers and the secrets beside them. Raises ConfigError with every mistake of one of the two files."""
    text = _read(path)
    answers, lines = _parsed(text, path, Answers)
    given = Given(answers, path, lines)
    beside = path.with_name(SECRETS_NAME)
    if beside != path and beside.exists():
        secrets = parse_secrets(_read(beside), beside)
        if answers.secrets != Secrets():
            told = f"is here and in {SECRETS_NAME} too; write all secrets into {SECRETS_NAME}"
            raise ConfigError(path, [given.mistake(("secrets",), told)])
        given = Given(msgspec.structs.replace(answers, secrets=secrets), path, lines)
    mistakes = list(_meaning_mistakes(given))
    if mistakes:
        raise ConfigError(path, mistakes)
    return given


def parse(text: str, path: Path) -> Given:
    """Read answers from a text, without a file of secrets. `path` is for messages. Raises ConfigError."""
    answers, lines = _parsed(text, path, Answers)
    given = Given(answers, path, lines)
    mistakes = list(_meaning_mistakes(given))
    if mistakes:
        raise ConfigError(path, mistakes)
    return given


def parse_secrets(text: str, path: Path) -> Secrets:
    """Read secrets from a text. Raises ConfigError, whose words hold no secret."""
    secrets, _ = _parsed(text, path, Secrets)
    return secrets


def without_secrets(text: str) -> str:
    """Remove `[secrets]` from a text of answers. Comments go too."""
    document = tomllib.loads(text)
    document.pop("secrets", None)
    return toml_text(document, {})


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            what = "is no file" if path.exists() else "there is no such file"
            words = f"{what}; sluice setup --example-answers > {path.name} makes an example"
            raise ConfigError(path, [Mistake(0, words)])
        with path.open("rb") as file:
            data = file.read(ANSWERS_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(path, [Mistake(0, f"cannot be read: {error.strerror}")]) from error
    if len(data) > ANSWERS_BYTES_MAX:
        raise ConfigError(path, [Mistake(0, f"has more than {ANSWERS_BYTES_MAX} bytes: these are no answers")])
    try:
        # Editors on Windows put a byte order mark first, and end lines with CR LF.
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        # Not "from error", because that error holds the text, which may be secret.
        raise ConfigError(path, [Mistake(0, "is not UTF-8 text, as TOML must be; save it as UTF-8")]) from None


# -- what types say -------------------------------------------------------------------------------


def _parsed(text: str, path: Path, kind: type[_T]) -> tuple[_T, dict[Place, int]]:
    try:
        document = read_toml(text, path)
    except (RecursionError, ValueError):
        words = "has something too deep or too long to be read, which no answer is"
        raise ConfigError(path, [Mistake(0, words)]) from None
    lines = lines_of(text)
    found = list(_struct_mistakes(kind, document, (), is_secret=kind is Secrets))
    if found:
        mistakes = [
            Mistake(line_of(lines, place), f"{spell(_shown_place(place, kind))}: {words}" if place else words)
            for place, words in found
        ]
        raise ConfigError(path, mistakes)
    return msgspec.convert(document, kind, dec_hook=_decode_path), lines


def _struct_mistakes(
    struct: type[Struct], table: Mapping[str, object], place: Place, *, is_secret: bool
) -> Iterator[tuple[Place, str]]:
    hints = get_type_hints(struct, include_extras=True)
    for key in table:
        if key not in hints:
            yield (*place, key), f"there is no such answer; {_instead_of(key, place, hints)}"
    for each in fields(struct):
        here = (*place, each.name)
        if each.name in table:
            hidden = is_secret or each.name == "secrets"
            yield from _value_mistakes(hints[each.name], table[each.name], here, is_secret=hidden)
        elif each.required:
            yield place, f"{each.name} is missing{_MISSING.get(here, '')}"


def _value_mistakes(hint: object, value: object, place: Place, *, is_secret: bool) -> Iterator[tuple[Place, str]]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        if isinstance(value, dict):
            yield from _struct_mistakes(hint, value, place, is_secret=is_secret)
        else:
            yield place, f"is a section: write [{spell(place)}] on a line of its own, and its answers below"
        return
    if get_origin(hint) is dict and isinstance(value, dict):
        for name, element in value.items():
            for part, kind in ((name, get_args(hint)[0]), (element, get_args(hint)[1])):
                if not _fits(part, kind):
                    yield (*place, name), f"this value will not do; write {_wanted(kind)}"
        return
    if not _fits(value, hint):
        shown = "this value" if is_secret else show(value)
        yield place, f"{shown} will not do; write {_wanted(hint)}"


def _fits(value: object, hint: object) -> bool:
    try:
        msgspec.convert(value, hint, dec_hook=_decode_path)
    except msgspec.ValidationError:
        return False
    return True


def _decode_path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str) and value and _CONTROL.search(value) is None:
        return Path(value)
    raise ValueError("not a path")


_MISSING: Final[dict[Place, str]] = {
    ("kafka",): '; write [kafka] with bootstrap = ["kafka.example:9093"] and tls = true',
    ("kafka", "bootstrap"): '; write bootstrap = ["kafka.example:9093"]',
    ("kafka", "tls"): "; write tls = true, or tls = false if the brokers take connections without TLS",
}
_ELSEWHERE: Final = {
    "password": f"write kafka_password, or page_password, into {SECRETS_NAME} beside this file",
    "site": "write namespace under [gateway]",
    "security": "write tls = true, and user if Kafka wants a log-in",
    "secrets": f"in {SECRETS_NAME} write secrets without a header",
}
"""Names that people may write by mistake, and what to write instead."""


def _instead_of(key: str, place: Place, known: Mapping[str, object]) -> str:
    # A name below [devices], or a misspelt name, may itself be a secret: show only names of our own.
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"write {close[0]!r} instead"
    sections = [name for name, kind in _SECTIONS.items() if key in kind.__struct_fields__ and (name,) != place]
    if sections:
        return f"`{key}` belongs below [{sections[0]}]"
    return f"answers here are: {', '.join(known)}"


_SECTIONS: Final[dict[str, type[Struct]]] = {
    "gateway": GatewayAnswers,
    "kafka": KafkaAnswers,
    "sensors": SensorsAnswers,
    "status_page": StatusPageAnswers,
    "service": ServiceAnswers,
}


def _shown_place(place: Place, kind: type[Struct]) -> Place:
    """Cut a place to the part that may be shown: a name below devices may be a secret on the wrong side of the =."""
    start = 0 if kind is Secrets else 1
    return place[: start + 1] if (kind is Secrets or place[:1] == ("secrets",)) and len(place) > start + 1 else place


def _wanted(hint: object) -> str:
    """Describe what to write for an answer of this type."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        # An answer that may be left out is described without None.
        given = [each for each in get_args(hint) if each is not type(None)]
        hint = given[0] if len(given) == 1 else hint
    for candidate in (hint, *(get_args(hint) if get_origin(hint) not in (tuple, dict) else ())):
        for argument in getattr(candidate, "__metadata__", ()):
            if isinstance(argument, Meta) and argument.description:
                return argument.description
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(show(argument) for argument in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return 'a list of names, such as ["42", "43"]' if inner is Name else 'a list of texts, such as ["...", "..."]'
    if get_origin(hint) is dict:
        return 'texts by name, such as "42" = "..."'
    return "true or false" if hint is bool else "a text in double quotes"


# -- what answers mean together -------------------------------------------------------------------


def _meaning_mistakes(given: Given) -> Iterator[Mistake]:
    answers, secrets = given.answers, given.answers.secrets
    sensors, kafka = answers.sensors, answers.kafka
    if EXAMPLE_BROKER in kafka.bootstrap:
        yield given.mistake(("kafka", "bootstrap"), f"{EXAMPLE_BROKER} is only an example; write your own brokers")
    anonymous = sensors.anonymous
    if anonymous is not None and anonymous != ANONYMOUS_WORDS:
        told = f'write exactly anonymous = "{ANONYMOUS_WORDS}", or take it out'
        yield given.mistake(("sensors", "anonymous"), told)
    named = {*sensors.devices, *secrets.devices, *secrets.devices_sha256}
    if anonymous is not None and named:
        told = "makes the secrets of devices useless; write either anonymous or devices"
        yield given.mistake(("sensors", "anonymous"), told)
    if not sensors.mqtt and (named or anonymous is not None):
        yield given.mistake(("sensors", "mqtt"), "is false, but devices need it to connect; write mqtt = true")
    if secrets.devices.keys() & secrets.devices_sha256.keys():
        told = "a name is here and in devices_sha256; give either its secret or the SHA-256 of its secret"
        yield Mistake(0, f"{SECRETS_NAME}: devices: {told}")
    if secrets.kafka_password is not None and kafka.user is None:
        told = "is missing, but there is a kafka_password; write user, or take the password out"
        yield given.mistake(("kafka", "user"), told)
    if kafka.ca is not None and not kafka.tls:
        yield given.mistake(
            ("kafka", "ca"),
            "is useless with tls = false, where no certificate is checked; write tls = true, or take ca out",
        )
    if kafka.mechanism == "PLAIN" and not kafka.tls:
        yield given.mistake(
            ("kafka", "mechanism"),
            "is PLAIN, which sends the password itself, and without tls "
            "anybody on the way could read it; write tls = true, or another mechanism",
        )


def ca_text(given: Given) -> bytes | None:
    """Read the authority's certificate; None if the answers name none. Raises ConfigError."""
    ca = given.answers.kafka.ca
    if ca is None:
        return None
    # Imported here because it needs a library of its own, and most answers name no certificate.
    from gateway.tls.certificates import CertificateFileError, read_certificates  # noqa: PLC0415

    path = given.path.parent / ca
    try:
        read_certificates(path)
        return path.read_bytes()
    except CertificateFileError as error:
        told = str(error)
    except OSError as error:
        told = f"{path}: {error.strerror}"
    raise ConfigError(given.path, [given.mistake(("kafka", "ca"), told)])
