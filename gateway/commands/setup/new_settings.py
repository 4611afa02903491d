"""Makes the files of a gateway from answers: `gateway.toml` with notes, and files with secrets."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gateway.commands.setup.answers import Answers
from gateway.commands.setup.write import CREDENTIALS_FOLDER, SECRETS_FOLDER, Folder, NewFile, owners_for
from gateway.config import config_file
from gateway.host.safe_files import PasswordFileError, read_password
from gateway.settings import DEFAULT_CONFIG, DEFAULT_ROUTE, ListenerSettings, Settings, StatusPageSettings
from gateway.toml_files.editor import edited
from gateway.toml_files.writer import toml_text

LISTENER_PORT: Final = ListenerSettings().port
_EVERY_NETWORK: Final = "0.0.0.0"  # noqa: S104 - sensors on the LAN are whom the listener is for
_ORDER: Final = (
    "gateway",
    "kafka",
    "buffer",
    "mqtt_listener",
    "mqtt_brokers",
    "serial",
    "status_page",
    "routes",
    "log",
)
_HEADING: Final = """\
# Settings of the gateway, written by `sluice setup` on {date}. You may edit them. `sluice settings` lists all settings.
# After a change: sudo sluice check, then sudo systemctl restart sluice. If you run `sluice setup` again, it proposes
# these settings, keeps those that it does not ask for, and keeps this file as it was under another name.

"""
_NOTES: Final[dict[tuple[str, ...], str]] = {
    ("gateway", "id"): "this box",
    ("gateway", "namespace"): "the site: keeps two sites' device 42 apart",
    ("kafka", "bootstrap"): "where readings go: host:port of one or more brokers",
    ("kafka", "create_topics"): "the gateway makes missing topics",
    ("kafka", "tls"): "brokers' certificates are always verified",
    ("kafka", "tls", "ca"): "who must have signed them; default: whom this box trusts",
    ("kafka", "sasl"): "the log-in",
    ("kafka", "sasl", "password_file"): "mode 0400; read again when it changes",
    ("buffer", "path"): "readings wait here until Kafka has them",
    ("mqtt_listener",): "sensors connect here, each with its own secret: sluice devices add NAME",
    ("mqtt_listener", "host"): "every network that this box is in",
    ("mqtt_listener", "anonymous"): "anybody who reaches the port may write as any device",
    ("serial", "ports"): '"all": every USB adapter, now and later',
    ("status_page",): "for a browser on the LAN",
    ("status_page", "password_file"): "the password's hash, made by sluice setup",
    ("routes",): "device/42/thermo goes to Kafka's topic device-thermo under the key 42",
    (
        "routes",
        "identity",
    ): 'a reading with "boot" and "seq" that is sent again is stored once; "none": never look for them',
}


@dataclass(frozen=True, slots=True)
class Existing:
    """Settings in place; empty if there are none."""

    text: str = field(default="", repr=False)
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)
    settings: Settings | None = None

    @property
    def page_password(self) -> Path | None:
        """File with the hash of the status page's password; None if there is none."""
        page = None if self.settings is None else self.settings.status_page
        return page.password_file if page is not None and page.password_file.exists() else None

    def kafka_password(self, user: str | None) -> str | None:
        """Read the password in place for a user of Kafka's; None if there is none, or it cannot be read."""
        sasl = None if self.settings is None else self.settings.kafka.sasl
        if sasl is None or sasl.user != user:
            return None
        with suppress(PasswordFileError):
            return read_password(sasl.password_file)
        return None


@dataclass(frozen=True, slots=True)
class Made:
    """Result of a setup, not written yet."""

    settings: Settings
    folders: tuple[Folder, ...]
    files: tuple[NewFile, ...]
    kept: Path | None
    """New path of the settings that were in place; None if they do not change."""
    replaced: tuple[Path, ...]
    """Files of secrets that the new settings do not name any more."""


def read_existing(config: Path) -> Existing:
    """Read the settings in place. Raises ConfigError if they have mistakes: what to keep would not be known."""
    if not config.exists():
        return Existing()
    settings = config_file.load(config)
    text = config.read_text(encoding="utf-8-sig")
    return Existing(text, tomllib.loads(text), settings)


def make(  # noqa: PLR0913 - what a setup is made of
    config: Path,
    existing: Existing,
    answers: Answers,
    *,
    gateway_id: str,
    ca: bytes | None = None,
    page_hash: str | None = None,
    now: datetime | None = None,
) -> Made:
    """Make the files for answers. `page_hash` is the hash of the page's password; None keeps the one in place.

    The new settings are read as the gateway will read them. Raises ConfigError if they have mistakes.
    """
    folder, owners, now = config.parent, owners_for(config), now or datetime.now(UTC)
    folders, files = [Folder(folder, 0o755, None)], []
    document = _merged(existing.document, answers, gateway_id)
    kafka, secrets = document["kafka"], answers.secrets
    if ca is not None:
        path = folder / "kafka-ca.pem"
        kafka["tls"]["ca"] = str(path)
        files.append(NewFile(path, ca, 0o644, owners.settings))
    if answers.kafka.user is not None:
        password = secrets.kafka_password
        if password is None:
            # `plan` has checked that there is a password in place.
            kafka["sasl"]["password_file"] = existing.document["kafka"]["sasl"]["password_file"]
        else:
            path = _password_place(folder, existing, password)
            kafka["sasl"]["password_file"] = str(path)
            folders.append(Folder(path.parent, 0o750, owners.secrets_folder, may_be_link=False))
            files.append(NewFile(path, f"{password}\n".encode(), 0o400, owners.secrets))
    if page_hash is not None:
        path = _page_place(folder)
        folders.append(Folder(path.parent, 0o700, owners.credentials, may_be_link=False))
        files.append(NewFile(path, f"{page_hash}\n".encode(), 0o400, owners.credentials))
        if path != StatusPageSettings().password_file:
            document["status_page"]["password_file"] = str(path)
        else:
            document["status_page"].pop("password_file", None)
    if config != DEFAULT_CONFIG:
        document.setdefault("buffer", {}).setdefault("path", str(folder.absolute() / "buffer.db"))
    ordered = {name: document[name] for name in (*_top(document), *_ORDER) if name in document}
    # Keep a person's comments and order, if the editor understands the file.
    text = edited(existing.text, document, _NOTES) if existing.settings is not None else None
    if text is None:
        text = _HEADING.format(date=f"{now:%Y-%m-%d}") + toml_text({**ordered, **document}, _NOTES)
    settings = config_file.parse(text, config)
    data = settings.buffer.path.parent
    if data != folder:
        folders.append(Folder(data, 0o750, owners.data))
    kept = _kept(existing, text, config, now)
    if kept is not None:
        files.append(NewFile(kept, existing.text.encode(), 0o640, owners.settings))
    files.append(NewFile(config, text.encode(), 0o640, owners.settings))
    ours = {*_password_places(folder), _page_place(folder)}
    replaced = sorted((ours & {*secret_files(existing.settings)}) - {*secret_files(settings)})
    return Made(settings, tuple(folders), tuple(files), kept, tuple(replaced))


def secret_files(settings: Settings | None) -> Iterator[Path]:
    """Paths of the files with secrets that the settings name."""
    if settings is None:
        return
    kafka, listener, page = settings.kafka, settings.mqtt_listener, settings.status_page
    named = [
        None if kafka.sasl is None else kafka.sasl.password_file,
        None if kafka.tls is None else kafka.tls.key,
        None if listener is None or listener.tls is None else listener.tls.key,
        None if page is None else page.password_file,
    ]
    for broker in settings.mqtt_brokers:
        named += [broker.password_file, None if broker.tls is None else broker.tls.key]
    yield from (path for path in named if path is not None)


def _top(document: Mapping[str, Any]) -> list[str]:
    """Names of settings above the first section."""
    return [name for name, value in document.items() if not isinstance(value, dict | list)]


def _merged(old: Mapping[str, Any], answers: Answers, gateway_id: str) -> dict[str, Any]:
    """Put the answers into the settings in place. Settings that are not asked for stay."""
    document = {name: dict(value) if isinstance(value, dict) else value for name, value in old.items()}
    gateway = document.get("gateway", {})
    namespace = answers.gateway.namespace or gateway.get("namespace", "default")
    document["gateway"] = {"id": gateway_id, "namespace": namespace} | {
        key: value for key, value in gateway.items() if key not in {"id", "namespace"}
    }
    if answers.gateway.clock is not None:
        document["gateway"]["clock"] = answers.gateway.clock
    document["kafka"] = _kafka(document.get("kafka", {}), answers)
    sensors = answers.sensors
    if sensors.mqtt:
        listener = document.get("mqtt_listener", {"host": _EVERY_NETWORK, "port": LISTENER_PORT})
        listener.pop("anonymous", None)
        document["mqtt_listener"] = listener | ({"anonymous": True} if sensors.anonymous is not None else {})
    else:
        document.pop("mqtt_listener", None)
    serial = {"ports": list(sensors.serial)} | {
        key: value for key, value in document.get("serial", {}).items() if key != "ports"
    }
    if sensors.serial or len(serial) > 1:
        document["serial"] = serial
    else:
        document.pop("serial", None)
    if answers.status_page.enabled:
        document.setdefault("status_page", {})
    else:
        document.pop("status_page", None)
    if not old:
        document["routes"] = [{"topic": DEFAULT_ROUTE.topic, "kafka": DEFAULT_ROUTE.kafka, "identity": "json"}]
    return document


def _kafka(old: Mapping[str, Any], answers: Answers) -> dict[str, Any]:
    asked = answers.kafka
    known = {"bootstrap", "create_topics", "tls", "sasl"}
    kafka: dict[str, Any] = {"bootstrap": list(asked.bootstrap), "create_topics": asked.create_topics}
    kafka |= {key: value for key, value in old.items() if key not in known}
    if asked.tls:
        # Keep what setup does not ask for, such as this gateway's own certificate.
        kafka["tls"] = dict(old.get("tls", {}))
    if asked.user is not None:
        kafka["sasl"] = {"mechanism": asked.mechanism, "user": asked.user}
    return kafka


def _password_places(folder: Path) -> list[Path]:
    return [folder / SECRETS_FOLDER / name for name in ("kafka.password", "kafka-2.password")]


def _page_place(folder: Path) -> Path:
    return folder / CREDENTIALS_FOLDER / "status-page"


def _password_place(folder: Path, existing: Existing, password: str) -> Path:
    """Choose the file for a password of Kafka's.

    A new password never replaces the file that the settings in place name. If setup were cut off half-way, the gateway
    would go on with the old user and the new password.
    """
    sasl = None if existing.settings is None else existing.settings.kafka.sasl
    named = None if sasl is None else sasl.password_file
    if named is not None and sasl is not None and existing.kafka_password(sasl.user) == password:
        return named
    return next(place for place in _password_places(folder) if place != named)


def _kept(existing: Existing, text: str, config: Path, now: datetime) -> Path | None:
    if not existing.text or existing.text == text:
        return None
    return config.with_name(f"{config.name}.{now:%Y%m%dT%H%M%S}")
