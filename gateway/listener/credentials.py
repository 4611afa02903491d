"""Reads and changes `devices.json`, which holds the hashes of the secrets that `sluice devices` made.

The listener reads the file, and commands replace it as a whole. A secret has 130 random bits, so nobody can find it
from its SHA-256. With a slow hash, a fleet that connects at once would wait for minutes.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.host.safe_files import LeftAloneError, true_folder
from gateway.record_contract import DEVICE_NAME, NAME_RULE
from gateway.settings import Settings

FILE_NAME: Final = "devices.json"
FILE_BYTES_MAX: Final = 16_000_000
NAMES_MAX: Final = 20_000
"""Devices and operators that the file may hold: four times the default of `connections_max`."""
SECRETS_MAX: Final = 4
"""Valid secrets of one name at a time: the newest, and older ones kept by `--keep-old`."""
ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 in small letters. It has no i, l, o and u, so that no character looks like another."""
SECRET_CHARACTERS: Final = 26
"""Characters of a secret, with five bits each."""
KEEP_HOURS_MAX: Final = 8_760.0
"""Longest time of `--keep-old` in hours: a year."""
LOCK_WAIT_S: Final = 10.0
_LOCK_RETRY_S: Final = 0.05
_VERSION: Final = 1
_SHA256 = r"^[0-9a-f]{64}$"
_MOMENT = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"
_NEW_SUFFIX = ".new"


class CredentialsError(Exception):
    """The file cannot be read or changed, or a name cannot be used; the message says what to do."""


class CredentialsFileError(CredentialsError):
    """The file cannot be read, or is damaged."""


class Secret(Struct, frozen=True):
    """A secret as the file keeps it."""

    sha256: Annotated[str, Meta(pattern=_SHA256)]
    made: Annotated[str, Meta(pattern=_MOMENT)] | None
    """When it was made, in UTC; None if this box did not know the time."""
    until: Annotated[str, Meta(pattern=_MOMENT)] | None = None
    """When it expires, in UTC; None if never."""

    def is_valid(self, now_s: float) -> bool:
        """Whether it is still valid at `now_s`, in seconds since 1970."""
        return self.until is None or now_s < seconds(self.until)


Secrets = tuple[Secret, ...]


class Credentials(Struct, frozen=True):
    """The content of `devices.json`."""

    version: Literal[1] = _VERSION
    devices: dict[str, Secrets] = {}
    operators: dict[str, Secrets] = {}
    """Secrets by operator; operators send commands to devices and nothing else."""

    def __contains__(self, name: str) -> bool:
        return name in self.devices or name in self.operators


NONE: Final = Credentials()


class Made(Struct, frozen=True):
    """A new secret in plain text, shown once and kept nowhere."""

    name: str
    secret: str

    def __repr__(self) -> str:
        """Leave the secret out of tracebacks and logs."""
        return f"Made({self.name!r})"


def file_of(settings: Settings) -> Path:
    """Return the path of a gateway's devices file."""
    listener = settings.mqtt_listener
    named = None if listener is None else listener.devices_file
    return settings.buffer.path.with_name(FILE_NAME) if named is None else named


def new_secret() -> str:
    """Make a secret of 130 random bits that a person can type."""
    return "".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARACTERS))


def digest(secret: str) -> str:
    """Return the SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def seconds(moment: str) -> float:
    """Convert a time as the file writes it into seconds since 1970."""
    return datetime.fromisoformat(moment).timestamp()


def spelled(moment: datetime) -> str:
    """Write a time as the file has it."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


# -- reading --------------------------------------------------------------------------------------


def load(path: Path, folder: int | None = None) -> Credentials:
    """Read the file, by its path or in the open folder `folder`. A missing file holds no credentials.

    Raises CredentialsFileError.
    """
    try:
        # Commands run as root in a folder that is not root's. So no link is followed, and no pipe is waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path if folder is None else path.name, flags, dir_fd=folder)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise CredentialsFileError(f"{path} is no file; remove it, and add the devices anew")
            with open(handle, "rb", closefd=False) as file:
                text = file.read(min(found.st_size, FILE_BYTES_MAX) + 1)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return NONE
    except PermissionError as error:
        raise CredentialsFileError(
            f"{path} is not this user's; run this with sudo, or as the user that sluice runs as"
        ) from error
    except OSError as error:
        raise CredentialsFileError(f"{path} cannot be read: {error.strerror}; {_mend(path)}") from error
    return _parsed(path, text)


def _parsed(path: Path, text: bytes) -> Credentials:
    """Parse the file's text. Raises CredentialsFileError, whose message repeats nothing of the text."""
    if len(text) > FILE_BYTES_MAX:
        raise CredentialsFileError(f"{path} has more than {FILE_BYTES_MAX} bytes, more than any list of devices needs")
    try:
        found = msgspec.json.decode(text, type=Credentials)
        # The pattern does not refuse a 13th month.
        for secret in (secret for of in (found.devices, found.operators) for each in of.values() for secret in each):
            for moment in filter(None, (secret.made, secret.until)):
                seconds(moment)
    except (ValueError, RecursionError):
        # "from None": the original error may repeat the file's text.
        raise CredentialsFileError(f"{path} is damaged, or was written by another version; {_mend(path)}") from None
    names = [*found.devices, *found.operators]
    if len(names) > NAMES_MAX or len(set(names)) < len(names) or not all(map(DEVICE_NAME.fullmatch, names)):
        raise CredentialsFileError(
            f"{path} holds an invalid name (a name has {NAME_RULE}), a name twice, or more than {NAMES_MAX} names; "
            f"{_mend(path)}"
        )
    return found


def _mend(path: Path) -> str:
    return (
        "put back a copy of it, or rename it and add the devices anew "
        f"(mv {path} {path}.damaged; sluice devices add NAME...)"
    )


# -- changing -------------------------------------------------------------------------------------


def add(path: Path, names: Iterable[str], now: datetime | None, *, operators: bool = False) -> list[Made]:
    """Make a secret for each name, or for none if a name exists already.

    `now` is None if this box does not know the time. Raises CredentialsError.
    """
    made = [Made(name, new_secret()) for name in dict.fromkeys(names)]
    with _changing(path) as change:
        known = change.before
        for each in made:
            _check_name(each.name)
            if each.name in known:
                raise CredentialsError(
                    f"{each.name} is there already; sluice devices rotate {each.name} makes a new secret for it, and "
                    "ends the old one"
                )
        _check_room(path, len(known.devices) + len(known.operators) + len(made))
        new = {each.name: (_kept(each, now),) for each in made}
        if operators:
            change.to(known.devices, {**known.operators, **new})
        else:
            change.to({**known.devices, **new}, known.operators)
    return made


def put(path: Path, digests: Mapping[str, str], now: datetime | None) -> None:
    """Replace all secrets of devices by secrets made elsewhere. `digests` are their SHA-256 in hex.

    Raises CredentialsError.
    """
    made = None if now is None else spelled(now)
    with _changing(path) as change:
        known = change.before
        for name in digests:
            _check_name(name)
            if name in known.operators:
                raise CredentialsError(f"{name} is an operator already; write another name, or revoke that one")
        devices = {**known.devices, **{name: (Secret(digest, made),) for name, digest in digests.items()}}
        _check_room(path, len(devices) + len(known.operators))
        change.to(devices, known.operators)


def rotate(path: Path, name: str, now: datetime | None, keep_old_hours: float = 0.0) -> Made:
    """Make a new secret for a name; its old secrets end now, or `keep_old_hours` from now at the latest.

    Raises CredentialsError.
    """
    made = Made(name, new_secret())
    with _changing(path) as change:
        known = change.before
        if name not in known:
            raise CredentialsError(_unknown(name))
        old: list[Secret] = []
        if keep_old_hours > 0:
            if now is None:
                raise CredentialsError(
                    "this box's clock is not synced, so it could not tell when the old secret must end; wait until the "
                    "clock is synced (sluice check says why it is not), or rotate without --keep-old"
                )
            old = [
                _ending(secret, now + timedelta(hours=keep_old_hours))
                for secret in (known.devices.get(name) or known.operators.get(name, ()))
                if secret.is_valid(now.timestamp())
            ]
            if len(old) >= SECRETS_MAX:
                raise CredentialsError(
                    f"{name} has {len(old)} valid secrets already; rotate it without --keep-old, which ends them"
                )
        new = (_kept(made, now), *old)
        if name in known.devices:
            change.to({**known.devices, name: new}, known.operators)
        else:
            change.to(known.devices, {**known.operators, name: new})
    return made


def revoke(path: Path, names: Iterable[str]) -> list[str]:
    """Remove names with all their secrets, or none if a name is unknown. Raises CredentialsError."""
    gone = list(dict.fromkeys(names))
    with _changing(path) as change:
        for name in gone:
            if name not in change.before:
                raise CredentialsError(_unknown(name))
        change.to(_without(change.before.devices, gone), _without(change.before.operators, gone))
    return gone


def _without(secrets_of: Mapping[str, Secrets], gone: Iterable[str]) -> dict[str, Secrets]:
    left = dict(secrets_of)
    for name in gone:
        left.pop(name, None)
    return left


def _kept(made: Made, now: datetime | None) -> Secret:
    return Secret(digest(made.secret), None if now is None else spelled(now))


def _ending(secret: Secret, until: datetime) -> Secret:
    if secret.until is not None and seconds(secret.until) <= until.timestamp():
        return secret
    return msgspec.structs.replace(secret, until=spelled(until))


def _unknown(name: str) -> str:
    return f"no secret of {name!r} was made by sluice devices add; sluice devices list shows all names"


def _check_name(name: str) -> None:
    if DEVICE_NAME.fullmatch(name) is None:
        raise CredentialsError(f"{name!r} is no device name; write {NAME_RULE}")


def _check_room(path: Path, names: int) -> None:
    if names > NAMES_MAX:
        raise CredentialsError(f"{path} would hold more than {NAMES_MAX} names; revoke names that are no longer used")


class _Change:
    """The file while it is locked."""

    def __init__(self, path: Path, folder: int) -> None:
        self._path = path
        self._folder = folder
        self.before = load(path, folder)

    def to(self, devices: dict[str, Secrets], operators: dict[str, Secrets]) -> None:
        """Replace the file; it is on disk when this returns."""
        text = msgspec.json.format(msgspec.json.encode(Credentials(devices=devices, operators=operators)), indent=1)
        new, folder = self._path.name + _NEW_SUFFIX, self._folder
        # A power cut may have left one.
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(new, flags, 0o600, dir_fd=folder)
        with open(handle, "wb") as file:  # noqa: PTH123 - what is open already
            if os.geteuid() == 0:
                # The daemon must read the file. It owns the folder; if root owns it, its group may be the daemon's.
                owner = os.fstat(folder)
                os.fchown(handle, owner.st_uid, owner.st_gid)
                if owner.st_uid == 0 and owner.st_gid != 0:
                    os.fchmod(handle, 0o640)
            file.write(text + b"\n")
            file.flush()
            os.fsync(handle)
        os.rename(new, self._path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


@contextmanager
def _changing(path: Path) -> Iterator[_Change]:
    """Lock the file against other commands. Raises CredentialsError.

    The folder itself is locked. Root would have to make a lock file in another user's folder, and that user could lead
    root elsewhere by a link in its place.
    """
    try:
        with true_folder(path) as folder:
            _lock(folder, path)
            yield _Change(path, folder)
    except OSError as error:
        raise CredentialsError(_not_changed(path, error)) from error


def _lock(folder: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise CredentialsError(
                    f"another command has been changing {path} for {LOCK_WAIT_S:.0f} s; nothing was changed: wait for "
                    "it, or end it, and try again"
                ) from error
            time.sleep(_LOCK_RETRY_S)
        else:
            return


def _not_changed(path: Path, error: OSError) -> str:
    if isinstance(error, LeftAloneError):
        return (
            f"nothing was changed: a link may lead {path} elsewhere: {error.strerror}; set mqtt_listener.devices_file "
            "to a path without that link"
        )
    if isinstance(error, PermissionError):
        return (
            f"nothing was changed: this user may not write in {path.parent}; run this with sudo, or as the user "
            "that sluice runs as"
        )
    if isinstance(error, FileNotFoundError):
        return (
            f"nothing was changed: the directory {path.parent} is not there; make it, for the user that sluice runs "
            "as (sluice check says which it is), or name another with mqtt_listener.devices_file"
        )
    return (
        f"nothing was changed: {path} cannot be written: {error.strerror or error}; check that the disk has room and "
        "no errors"
    )
