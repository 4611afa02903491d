"""Checks who may log in at the MQTT listener, and whether the file with the hashes of secrets can be used."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.buffer.status import is_running
from gateway.commands.check.finding import Finding, remark, well, wrong
from gateway.devices.listing import not_heard_words, read_devices
from gateway.host.terminal_text import counted
from gateway.listener.credentials import Credentials, CredentialsError, file_of, load
from gateway.listener.logins import NOBODY
from gateway.reading import BufferFileError
from gateway.settings import ListenerSettings, Settings

NAMES_TOLD_MAX = 5
_FILE = "mqtt_listener.devices_file"
_LOG_INS = "mqtt_listener.users"


def check_devices(settings: Settings, listener: ListenerSettings) -> Iterator[Finding]:
    """Check who may log in at the listener, without asking the listener."""
    path = file_of(settings)
    try:
        credentials = load(path)
    except CredentialsError as error:
        words = f"{error}. A running gateway goes on with the last good file; after a restart it lets none of them in"
        yield from [found for found in _rights(path) if not found.ok] or [wrong("devices-file-unusable", _FILE, words)]
        return
    yield from _rights(path)
    yield from _namesakes(listener, credentials)
    certified = listener.tls is not None and listener.tls.client_ca is not None
    number = len(listener.users.keys() | credentials.devices.keys())
    if number:
        unheard = _not_heard(settings)
        words = f"; {not_heard_words(unheard)}" if unheard else ""
        yield well(_LOG_INS, f"{counted(number, 'device')} may log in (sluice devices list){words}")
    elif not listener.anonymous and not certified:
        yield remark("nobody-can-log-in", _LOG_INS, NOBODY)


def _not_heard(settings: Settings) -> tuple[str, ...]:
    """Devices that a running gateway has not heard yet; empty if no gateway runs."""
    if is_running(settings.buffer.path):
        with suppress(BufferFileError):
            return read_devices(settings).not_heard
    return ()


def _rights(path: Path) -> Iterator[Finding]:
    """Check that the daemon, which owns the folder, may read the file, and nobody else."""
    try:
        found, folder = path.stat(), path.parent.stat()
    except OSError:
        return
    if found.st_uid != folder.st_uid and (os.geteuid() == 0 or not os.access(path, os.R_OK)):
        yield wrong(
            "devices-file-unusable",
            _FILE,
            f"{path} and its directory belong to different users, so sluice cannot read it; "
            f"run: chown --reference={path.parent} {path}",
        )
        return
    # If the folder is root's, the daemon reads the file by its group.
    others = stat.S_IRWXO if folder.st_uid == 0 and folder.st_gid != 0 else stat.S_IRWXG | stat.S_IRWXO
    if found.st_mode & others:
        yield remark(
            "devices-file-readable",
            _FILE,
            f"others may read {path}, which names all devices; forbid that: chmod 0600 {path}",
        )


def _namesakes(listener: ListenerSettings, credentials: Credentials) -> Iterator[Finding]:
    """Report names that are both in gateway.toml and in the file."""
    crossed = (listener.operators.keys() & credentials.devices.keys()) | (
        listener.users.keys() & credentials.operators.keys()
    )
    if crossed:
        yield wrong(
            "devices-name-twice",
            _FILE,
            f"{_named(crossed)}: a device in one place and an operator in the other (gateway.toml, the devices' file); "
            "the operator counts. Take the line out of gateway.toml, and restart sluice",
        )
    twice = (listener.users.keys() & credentials.devices.keys()) | (
        listener.operators.keys() & credentials.operators.keys()
    )
    if twice:
        yield remark(
            "devices-name-twice",
            _LOG_INS,
            f"{_named(twice)}: the secret in gateway.toml works beside the secret that sluice devices made; take its "
            "line out of gateway.toml and restart sluice, unless you want both",
        )


def _named(names: set[str]) -> str:
    told = sorted(names)[:NAMES_TOLD_MAX]
    return ", ".join(told) + (", ..." if len(names) > len(told) else "")
