"""Sets a gateway up from answers: first everything is made and checked in memory, then it is written."""

import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from gateway.commands.setup.answers import SECRETS_NAME, Answers, Given, ca_text
from gateway.commands.setup.hardware import is_clock_synced, proposed_id
from gateway.commands.setup.new_settings import Existing, Made, make
from gateway.commands.setup.write import SetupWriteError, make_folders, refuse_changed, write_files
from gateway.host.safe_files import LeftAloneError, wipe
from gateway.listener import credentials
from gateway.page.password import make_password_line
from gateway.settings import GatewaySettings
from gateway.toml_files.mistakes import ConfigError, Mistake, Place

_ALPHABET: Final = "23456789abcdefghjkmnpqrstuvwxyz"
"""Characters of a password that a person reads out and types. No two of them look alike."""
_ASKED_FOR: Final[Mapping[str, Place]] = {
    "serial.ports": ("sensors", "serial"),
    "mqtt_listener": ("sensors", "mqtt"),
    "gateway.id": ("gateway", "id"),
    "gateway.clock": ("gateway", "clock"),
    "gateway.namespace": ("gateway", "namespace"),
    "kafka.bootstrap": ("kafka", "bootstrap"),
    "kafka.sasl.user": ("kafka", "user"),
    "kafka.sasl.mechanism": ("kafka", "mechanism"),
}
"""Answer that each setting comes from."""
_UNSEEN: Final = "nobody is there to be shown a new one"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is going to be written."""

    config: Path
    existing: Existing
    made: Made
    digests: Mapping[str, str] = field(repr=False)
    """SHA-256 of each device's secret."""
    shown: Mapping[str, str] = field(repr=False)
    """Secrets made here, by device."""
    kept: tuple[str, ...]
    """Devices that have a secret already, and keep it."""
    page_password: str | None = field(repr=False)
    """Password of the status page, if it was made here."""


def new_page_password() -> str:
    """Make a password of 59 random bits, in three parts that can be read out."""
    return "-".join("".join(secrets.choice(_ALPHABET) for _ in range(4)) for _ in range(3))


def plan(given: Given, config: Path, existing: Existing, *, is_watched: bool, ca: bytes | None = None) -> Plan:
    """Check answers, and make all that is to be written. Raises ConfigError with lines of the answers.

    If `is_watched`, somebody sees the output, so secrets may be made here and shown. `ca` is an authority's certificate
    that was read already.
    """
    mistakes = list(_unanswered(given, existing, is_watched=is_watched))
    answers, made_password = given.answers, None
    hashed: str | None = None
    if answers.status_page.enabled and not mistakes:
        password = answers.secrets.page_password
        if password is None and existing.page_password is None:
            password = made_password = new_page_password()
        hashed = None if password is None else make_password_line(password)
    gateway_id = answers.gateway.id or _id_in_place(existing) or proposed_id()
    if mistakes:
        # Go on without the log-in, so that other mistakes are reported too.
        answers = msgspec.structs.replace(answers, kafka=msgspec.structs.replace(answers.kafka, user=None))
    ca = ca or ca_text(given)
    try:
        made = make(config, existing, answers, gateway_id=gateway_id, ca=ca, page_hash=hashed)
    except ConfigError as error:
        raise ConfigError(given.path, [*mistakes, *(_of_answers(given, each) for each in error.mistakes)]) from None
    if mistakes:
        raise ConfigError(given.path, mistakes)
    taken = list(_taken_names(given, made))
    if taken:
        raise ConfigError(given.path, taken)
    known = _known_devices(made, existing)
    digests = dict(answers.secrets.devices_sha256)
    digests |= {name: credentials.digest(secret) for name, secret in answers.secrets.devices.items()}
    new = [name for name in answers.sensors.devices if name not in digests and name not in known]
    shown = {name: credentials.new_secret() for name in new}
    kept = tuple(name for name in answers.sensors.devices if name in known and name not in digests)
    digests |= {name: credentials.digest(secret) for name, secret in shown.items()}
    return Plan(config, existing, made, digests, shown, kept, made_password)


def carry_out(planned: Plan) -> None:
    """Write everything except the secrets made here. If it raises SetupWriteError, the settings are as they were.

    Devices' secrets that were given are written first, so that they are there once the settings are.
    """
    refuse_changed(planned.config, planned.existing.text)
    make_folders(planned.made.folders)
    try:
        _put(planned, without_shown(planned).digests)
    except credentials.CredentialsError as error:
        raise SetupWriteError(str(error)) from error
    write_files(planned.made.files, planned.config, planned.existing.text)
    for path in planned.made.replaced:
        # A link stays: somebody keeps that secret elsewhere.
        with suppress(LeftAloneError):
            wipe(path)


def store_shown(planned: Plan) -> None:
    """Store the secrets made here, last of all, just before they are shown. Raises CredentialsError.

    So no failure before can leave a device with a secret that nobody saw and that the next setup would keep.
    """
    _put(planned, {name: planned.digests[name] for name in planned.shown})


def take_back_shown(planned: Plan) -> None:
    """Remove the secrets made here, if the terminal was gone before they were shown. Raises CredentialsError."""
    if planned.shown:
        credentials.revoke(credentials.file_of(planned.made.settings), planned.shown)


def without_shown(planned: Plan) -> Plan:
    """Remove the secrets made here from a plan, if they could not be stored."""
    digests = {name: digest for name, digest in planned.digests.items() if name not in planned.shown}
    return replace(planned, digests=digests, shown={})


def _put(planned: Plan, digests: Mapping[str, str]) -> None:
    settings = planned.made.settings
    if digests:
        credentials.put(credentials.file_of(settings), digests, _now(settings.gateway))


def _now(gateway: GatewaySettings) -> datetime | None:
    """Time in UTC; None if this box's clock is not synced."""
    return datetime.now(UTC) if is_clock_synced(gateway) else None


def _taken_names(given: Given, made: Made) -> Iterator[Mistake]:
    """Report names of devices that an operator has, or a user in gateway.toml."""
    listener = made.settings.mqtt_listener
    operators = credentials.load(credentials.file_of(made.settings)).operators
    users: Collection[str] = () if listener is None else listener.users
    secrets_given = {*given.answers.secrets.devices, *given.answers.secrets.devices_sha256}
    for name in dict.fromkeys((*given.answers.sensors.devices, *secrets_given)):
        if name in operators or (listener is not None and name in listener.operators):
            told = f"{name} is the name of an operator, who sends commands to devices; write another name"
            yield given.mistake(("sensors", "devices"), told)
        elif name in users and name in secrets_given:
            told = (
                f"{name} has its secret in gateway.toml ([mqtt_listener.users]); take that line out, or give no secret "
                "here"
            )
            yield given.mistake(("sensors", "devices"), told)


def _known_devices(made: Made, existing: Existing) -> set[str]:
    """Devices that have a secret which somebody was shown.

    Without settings in place there is none: a file of secrets is left from a setup that was cut off.
    """
    if existing.settings is None:
        return set()
    listener = existing.settings.mqtt_listener
    return {*credentials.load(credentials.file_of(made.settings)).devices} | {
        *(listener.users if listener is not None else ())
    }


def _id_in_place(existing: Existing) -> str | None:
    return None if existing.settings is None else existing.settings.gateway.id


def _unanswered(given: Given, existing: Existing, *, is_watched: bool) -> list[Mistake]:
    """Report passwords and secrets that are needed, and are neither in the answers nor in place."""
    answers, found = given.answers, []
    user, secrets_given = answers.kafka.user, answers.secrets
    if user is not None and secrets_given.kafka_password is None and existing.kafka_password(user) is None:
        told = f"has no password; write kafka_password into {SECRETS_NAME} beside this file"
        found.append(given.mistake(("kafka", "user"), told))
    if is_watched:
        return found
    if answers.status_page.enabled and secrets_given.page_password is None and existing.page_password is None:
        told = f"has no password, and {_UNSEEN}; write page_password into {SECRETS_NAME}, or enabled = false"
        found.append(given.mistake(("status_page",), told))
    for name in _without_secret(answers, existing):
        told = (
            f"{name} has no secret, and {_UNSEEN}; write one below [devices] in {SECRETS_NAME} (openssl rand -hex 16 "
            "makes one), or leave the device out and run sluice devices add later"
        )
        found.append(given.mistake(("sensors", "devices"), told))
    return found


def _without_secret(answers: Answers, existing: Existing) -> list[str]:
    known: set[str] = {*answers.secrets.devices, *answers.secrets.devices_sha256}
    if existing.settings is not None:
        listener = existing.settings.mqtt_listener
        known |= {*credentials.load(credentials.file_of(existing.settings)).devices}
        known |= {*(listener.users if listener is not None else ())}
    return [name for name in answers.sensors.devices if name not in known]


def _of_answers(given: Given, mistake: Mistake) -> Mistake:
    """Turn a mistake in the new settings into a mistake at the answer's line, if an answer caused it."""
    setting, colon, words = mistake.message.partition(": ")
    place = _ASKED_FOR.get(setting)
    if colon and place is not None:
        return given.mistake(place, words)
    return Mistake(0, f"with the settings in place: {mistake.message}")
