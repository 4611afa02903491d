"""The settings that the gateway was started with, and those that stand in the file now: are they the same?

By a digest of what was read, so that a comment changes nothing.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config import config_file
from gateway.settings import Settings
from gateway.toml_files.mistakes import ConfigError

RESTART: Final = "sudo systemctl restart sluice"


class RunningSettings(Struct, frozen=True):
    """What the daemon tells of them."""

    digest: str
    gateway: str
    namespace: str


def of(settings: Settings) -> RunningSettings:
    """What is to be told of these."""
    return RunningSettings(digest(settings), settings.gateway.id, settings.gateway.namespace)


def digest(settings: Settings) -> str:
    """The same for the same settings, whoever reads them."""
    return hashlib.sha256(msgspec.json.encode(settings, enc_hook=_plain, order="sorted")).hexdigest()


def _plain(value: object) -> str:
    if isinstance(value, Path):
        # They may be relative, and commands be called elsewhere.
        return os.path.abspath(value)  # noqa: PTH100 - a link stays one: what it leads to may change
    raise NotImplementedError(type(value))


def running_settings(state: Mapping[str, Any]) -> RunningSettings | None:
    """Of the daemon's answer to `state`; None where it tells nothing, as one of another version does."""
    with suppress(msgspec.ValidationError, KeyError):
        return msgspec.convert(state["settings"], RunningSettings)
    return None


def changed_words(running: RunningSettings, settings: Settings) -> str:
    """That they are not the same."""
    was, now = (f"{each.namespace}/{each.gateway}" for each in (running, of(settings)))
    as_whom = "" if was == now else f", as {was}"
    return f"changed since the gateway was started, which goes on with those of before{as_whom}: {RESTART}"


class SettingsFile:
    """The file, as the daemon itself looks at it. On a thread of its own."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._digest = digest(settings)
        self._seen: tuple[int, int, int] | None = None
        self._is_changed = False

    def has_changed(self) -> bool:
        """Whether other settings stand there now. What cannot be used is not known to be others: check says so."""
        try:
            found = self._path.stat()
            seen = (found.st_ctime_ns, found.st_ino, found.st_size)
            if seen != self._seen:
                self._is_changed = digest(config_file.load(self._path)) != self._digest
                self._seen = seen
        except (OSError, ConfigError):
            return self._is_changed
        return self._is_changed
