"""Answers that `sluice setup` needs, from a person or a file. Every mistake is reported with its line."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.settings import Name
from gateway.toml_files.mistakes import ConfigError, Mistake, Place, line_of, lines_of, spell
from gateway.toml_files.reader import read_text, read_toml
from gateway.toml_files.schema import Schema, converted, struct_of, wanted
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
    devices: Annotated[tuple[Name, ...], Meta(description='a list of names, such as ["42", "43"]')] = ()
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
    return _checked(given)


def parse(text: str, path: Path) -> Given:
    """Read answers from a text, without a file of secrets. `path` is for messages. Raises ConfigError."""
    answers, lines = _parsed(text, path, Answers)
    return _checked(Given(answers, path, lines))


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
    example = f"sluice setup --example-answers > {path.name} makes an example"
    # A pipe might never be read to its end. Of errors here, `read_text` tells.
    with suppress(OSError):
        if path.exists() and not path.is_file():
            raise ConfigError(path, [Mistake(0, f"is no file; {example}")])
    return read_text(path, {FileNotFoundError: f"there is no such file; {example}"}, ANSWERS_BYTES_MAX)


# -- what types say -------------------------------------------------------------------------------


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


_SECTIONS: Final[dict[str, type[Struct]]] = {
    "gateway": GatewayAnswers,
    "kafka": KafkaAnswers,
    "sensors": SensorsAnswers,
    "status_page": StatusPageAnswers,
    "service": ServiceAnswers,
}


class _AnswersFile(Schema):
    """The file of answers, or that of secrets. Of secrets nothing is shown, not even a name."""

    noun = "answer"

    def elsewhere(self, place: Place, key: str) -> str:
        # A name below [devices], or a misspelt name, may itself be a secret: show only names of our own.
        sections = [name for name, kind in _SECTIONS.items() if key in kind.__struct_fields__ and (name,) != place]
        return _ELSEWHERE.get(key, "") or "".join(f"`{key}` belongs below [{name}]" for name in sections[:1])

    def missing(self, place: Place, _hint: object) -> tuple[Place, str]:
        return place[:-1], f"{place[-1]} is missing{_MISSING.get(place, '')}"

    def instead(self, hint: object, _value: object, place: Place) -> str:
        if struct_of(hint) is not None:
            return f"[{spell(place)}] on a line of its own, and its answers below"
        return wanted(hint)

    def is_secret(self, place: Place) -> bool:
        # Who writes a value to a section's own name may have meant a secret.
        return self.root is Secrets or place[0] == "secrets" or len(place) == 1

    def spell(self, place: Place) -> str:
        # A name below devices may be a secret on the wrong side of the =.
        return spell(place[: 1 if self.root is Secrets else 2] if self.is_secret(place) else place)


def _parsed(text: str, path: Path, kind: type[_T]) -> tuple[_T, dict[Place, int]]:
    schema, document, lines = _AnswersFile(kind), read_toml(text, path), lines_of(text)
    schema.require_none(schema.mistakes(document), lines, path)
    return converted(document, kind), lines


# -- what answers mean together -------------------------------------------------------------------


def _checked(given: Given) -> Given:
    _AnswersFile(Answers).require_none(_meaning_mistakes(given.answers), given.lines, given.path)
    return given


def _meaning_mistakes(answers: Answers) -> Iterator[tuple[Place, str]]:
    sensors, kafka, secrets = answers.sensors, answers.kafka, answers.secrets
    if EXAMPLE_BROKER in kafka.bootstrap:
        yield ("kafka", "bootstrap"), f"{EXAMPLE_BROKER} is only an example; write your own brokers"
    anonymous = sensors.anonymous
    if anonymous is not None and anonymous != ANONYMOUS_WORDS:
        told = f'write exactly anonymous = "{ANONYMOUS_WORDS}", or take it out'
        yield ("sensors", "anonymous"), told
    named = {*sensors.devices, *secrets.devices, *secrets.devices_sha256}
    if anonymous is not None and named:
        told = "makes the secrets of devices useless; write either anonymous or devices"
        yield ("sensors", "anonymous"), told
    if not sensors.mqtt and (named or anonymous is not None):
        yield ("sensors", "mqtt"), "is false, but devices need it to connect; write mqtt = true"
    if secrets.devices.keys() & secrets.devices_sha256.keys():
        told = "a name is here and in devices_sha256; give either its secret or the SHA-256 of its secret"
        yield (), f"{SECRETS_NAME}: devices: {told}"
    if secrets.kafka_password is not None and kafka.user is None:
        told = "is missing, but there is a kafka_password; write user, or take the password out"
        yield ("kafka", "user"), told
    if kafka.ca is not None and not kafka.tls:
        yield (
            ("kafka", "ca"),
            "is useless with tls = false, where no certificate is checked; write tls = true, or take ca out",
        )
    if kafka.mechanism == "PLAIN" and not kafka.tls:
        told = "is PLAIN, which sends the password itself, and without tls anybody on the way could read it"
        yield ("kafka", "mechanism"), f"{told}; write tls = true, or another mechanism"


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
