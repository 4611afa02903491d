"""Tells whether the file still has the settings that the gateway was started with.

It compares digests of what was read, so that a comment changes nothing.
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
SECRETS: Final = frozenset({"password", "users", "operators"})
"""Settings that are secrets, or names with their secrets."""
OTHERS_DIGITS: Final = 16
"""Hexadecimal digits of a digest that others see: enough to tell settings apart."""


class RunningSettings(Struct, frozen=True):
    """The settings of a running gateway, as its daemon tells them."""

    digest: str
    gateway: str = ""
    """Empty if a daemon of another version does not tell it, as is the namespace."""
    namespace: str = ""


def of(settings: Settings) -> RunningSettings:
    """Return what the daemon tells of its settings."""
    return RunningSettings(digest(settings), settings.gateway.id, settings.gateway.namespace)


def digest(settings: Settings) -> str:
    """Digest of settings. Equal settings have one digest, whoever reads them."""
    return hashlib.sha256(msgspec.json.encode(settings, enc_hook=_plain, order="sorted")).hexdigest()


def digest_for_others(settings: Settings) -> str:
    """Digest that others may see: without secrets. Gateways whose settings differ in their id alone have one digest."""
    plain = msgspec.to_builtins(settings, enc_hook=_plain)
    del plain["gateway"]["id"]
    return hashlib.sha256(msgspec.json.encode(_without_secrets(plain), order="sorted")).hexdigest()[:OTHERS_DIGITS]


def _without_secrets(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _names(of) if name in SECRETS else _without_secrets(of) for name, of in plain.items()}
    return [_without_secrets(each) for each in plain] if isinstance(plain, list | tuple) else plain


def _names(secret: Any) -> list[str] | bool:
    """The names that have secrets, or whether there is a secret."""
    return sorted(secret) if isinstance(secret, dict) else secret is not None


def _plain(value: object) -> str:
    if isinstance(value, Path):
        # Paths may be relative, and commands be called elsewhere.
        return os.path.abspath(value)  # noqa: PTH100 - a link stays one: what it leads to may change
    raise NotImplementedError(type(value))


def running_settings(state: Mapping[str, Any]) -> RunningSettings | None:
    """Read the settings in the daemon's answer to `state`; None if there are none, as in another version's."""
    with suppress(msgspec.ValidationError, KeyError):
        return msgspec.convert(state["settings"], RunningSettings)
    return None


def as_whom(running: RunningSettings, settings: Settings) -> str:
    """Name the gateway by which a running one goes on, if the settings now have another name; else empty."""
    if not (running.gateway and running.namespace):
        return ""
    was, now = (f"{each.namespace}/{each.gateway}" for each in (running, of(settings)))
    return "" if was == now else f", as {was}"


class SettingsFile:
    """The settings file, as the daemon itself looks at it. Runs on a thread of its own."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._running = of(settings)
        self._seen: tuple[int, int, int] | None = None
        self._change: str | None = None

    def change(self) -> str | None:
        """`as_whom` if the file has other settings now, else None. If it cannot be used, the last answer stays."""
        try:
            found = self._path.stat()
            seen = (found.st_ctime_ns, found.st_ino, found.st_size)
            if seen != self._seen:
                settings = config_file.load(self._path)
                self._change = None if digest(settings) == self._running.digest else as_whom(self._running, settings)
                self._seen = seen
        except (OSError, ConfigError):
            return self._change
        return self._change
