"""Keeps the list of who may log in to the MQTT listener, from the settings and the devices' file."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog

from gateway.listener.access import Identity, Refusal
from gateway.listener.credentials import NONE, Credentials, CredentialsError, Secrets, load, seconds
from gateway.settings import ListenerSettings

NOBODY: Final = (
    "no device can log in at the MQTT listener: neither mqtt_listener.users nor the devices' file has one; "
    "make a secret for each (sluice devices add NAME...)"
)
TROUBLE_INTERVAL_S: Final = 3_600.0
"""Seconds until the log tells again of a file that cannot be read."""
RETRY_INTERVAL_S: Final = 10.0
"""Seconds until such a file is read again although it looks unchanged."""
_KEPT: Final = "its earlier content counts until this gateway ends"
_NOTHING_KEPT: Final = "none of its devices can log in until it can be read"

_log = structlog.get_logger("sluice.mqtt_listener")
_Signature = tuple[int, int, int]


class Logins:
    """The hashes of secrets that are valid for a log-in now.

    `file` is the devices' file, if any. `now_s` returns seconds since 1970, as well as this box knows.
    """

    def __init__(self, settings: ListenerSettings, file: Path | None, now_s: Callable[[], float]) -> None:
        self._settings = settings
        self.file = file
        self._now_s = now_s
        self.devices: Mapping[str, tuple[str, ...]] = {}
        """SHA-256 digests of valid secrets, in hex, by device."""
        self.operators: Mapping[str, tuple[str, ...]] = {}
        self.listed = bool(settings.users)
        """Whether anybody was ever listed. If so, a certificate must name a listed device."""
        self.met: set[str] = set()
        """All names that could log in at any time since the start. They are no secrets, so the log may show them."""
        self.trouble = ""
        """Why the present file cannot be used; empty if it can."""
        self._told_s = self._tried_s = 0.0
        self._seen: _Signature | None = None
        self._was_there = False
        """Whether there has been a file, readable or not."""
        self._credentials = NONE
        self._next_end_s: float | None = None
        self._unite()
        self.reread()

    def __contains__(self, name: object) -> bool:
        return name in self.devices or name in self.operators

    def __iter__(self) -> Iterator[str]:
        yield from self.devices
        yield from self.operators

    @property
    def let_nobody_in(self) -> bool:
        """Whether no device can log in."""
        settings = self._settings
        certified = settings.tls is not None and settings.tls.client_ca is not None
        return not (settings.anonymous or certified or self.devices)

    def reread(self) -> bool:
        """Read the file again if it has changed; return whether a secret may have ended.

        If the file cannot be read, or is gone, its earlier content counts: one bad write must not lock out a site.
        """
        changed = self._look_at_file()
        if not changed and self._next_end_s is not None and self._now_s() >= self._next_end_s:
            changed = True
        if changed:
            self._unite()
        return changed

    def is_valid(self, identity: Identity) -> bool:
        """Whether the credentials that a client logged in with are still valid."""
        user = identity.user
        if user is None or identity.is_check:
            return True
        if identity.digest is None:  # a certificate
            return user in self.devices or not self.listed
        return identity.digest in (self.operators if identity.operator else self.devices).get(user, ())

    def may_be_guessed(self, name: str, judged: Identity | Refusal) -> bool:
        """Whether a judged log-in could be a guess at a secret that a person chose.

        Such secrets stand in the settings. A log-in with a secret of the devices' file is no guess.
        """
        settings = self._settings
        if name not in settings.users and name not in settings.operators:
            return False
        if isinstance(judged, Refusal):
            return True
        made = (*self._credentials.devices.get(name, ()), *self._credentials.operators.get(name, ()))
        return judged.digest is not None and all(secret.sha256 != judged.digest for secret in made)

    def state(self) -> dict[str, object]:
        """The state for `sluice status`."""
        return {
            "file": str(self.file),
            "devices": len(self.devices),
            "trouble": self.trouble or None,
            "kept": self._credentials is not NONE,
        }

    def _look_at_file(self) -> bool:
        if self.file is None:
            return False
        signature, now_s = _signature(self.file), self._now_s()
        is_due = bool(self.trouble) and not 0 <= now_s - self._tried_s < RETRY_INTERVAL_S
        if signature == self._seen and not is_due:
            return False
        self._seen, self._tried_s = signature, now_s
        try:
            credentials = load(self.file)
            if signature is None and self._was_there:
                self._tell(f"{self.file} is gone; put it back, or restart sluice to do without it", now_s)
                return False
        except CredentialsError as error:
            self.listed = self._was_there = True
            self._tell(str(error), now_s)
            return False
        if self.trouble:
            _log.info("the devices' file can be read again", path=str(self.file))
        self.trouble, self._credentials = "", credentials
        self._was_there = self._was_there or signature is not None
        self.listed = self.listed or self._was_there
        return True

    def _tell(self, trouble: str, now_s: float) -> None:
        if trouble == self.trouble and 0 <= now_s - self._told_s < TROUBLE_INTERVAL_S:
            return
        self.trouble, self._told_s = trouble, now_s
        meaning = _NOTHING_KEPT if self._credentials is NONE else _KEPT
        _log.error("the devices' file cannot be used", why=trouble, meaning=meaning, devices=len(self.devices))

    def _unite(self) -> None:
        """Unite the valid secrets. If a name is in the settings and in the file, the secrets of both are valid."""
        now_s, settings = self._now_s(), self._settings
        self.devices = _united(settings.users, self._credentials.devices, now_s)
        self.operators = _united(settings.operators, self._credentials.operators, now_s)
        self.met.update(self)
        self._next_end_s = min(_ends(self._credentials, now_s), default=None)


def _signature(path: Path) -> _Signature | None:
    """A value that changes with the file and its permissions; None if there is no file."""
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - each second
    except OSError:
        return None
    return found.st_ctime_ns, found.st_ino, found.st_size


def _united(
    settings: Mapping[str, str], credentials: Mapping[str, Secrets], now_s: float
) -> dict[str, tuple[str, ...]]:
    united: dict[str, tuple[str, ...]] = {name: (digest,) for name, digest in settings.items()}
    for name, secrets in credentials.items():
        valid = tuple(secret.sha256 for secret in secrets if secret.is_valid(now_s))
        if valid:
            united[name] = united.get(name, ()) + valid
    return united


def _ends(credentials: Credentials, now_s: float) -> Iterator[float]:
    """The times when valid secrets of the file will end, in seconds since 1970."""
    for of in (credentials.devices, credentials.operators):
        for secrets in of.values():
            yield from (
                seconds(secret.until) for secret in secrets if secret.until is not None and secret.is_valid(now_s)
            )
