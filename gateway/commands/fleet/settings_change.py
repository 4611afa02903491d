"""Other settings for this box: `gateway.toml` is replaced by one renaming, and the former one is kept meanwhile."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.commands.fleet.trial_steps import BY_HAND, ChangeError, Stand, restart
from gateway.commands.setup.write import NewFile, Owner, SetupWriteError, write_files
from gateway.config import config_file
from gateway.fleet_file import with_changes
from gateway.host.safe_files import write_whole
from gateway.toml_files.editor import edited
from gateway.toml_files.mistakes import ConfigError
from gateway.toml_files.reader import read_toml
from gateway.toml_files.writer import toml_text


def wanted_text(config: Path, changes: Mapping[str, Any]) -> str | None:
    """The text of the settings with changes; None if the settings in place say so already.

    Notes and order stay where the text's form allows. Raises ChangeError if this version does not take the settings.
    """
    text = config.read_text(encoding="utf-8-sig")
    before = read_toml(text, config)
    wanted = with_changes(before, changes)
    if wanted == before:
        return None
    if "mqtt_brokers" in changes and any("password" in each for each in before.get("mqtt_brokers", ())):
        raise ChangeError(
            "mqtt_brokers has a password on this box, which no file of a fleet may have, and the change would remove "
            "it: write the password into a file here, and name that by password_file"
        )
    changed = edited(text, wanted, {}) or toml_text(wanted, {})
    try:
        config_file.parse(changed, config)
    except ConfigError as error:
        told = "; ".join(mistake.message for mistake in error.mistakes)
        raise ChangeError(f"this version does not take the settings: {told}") from error
    return changed


class SettingsChange:
    """The file of settings, and the former and the wanted one in a folder that only root can read."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._config = config
        self._old = folder / "old.toml"
        self._new = folder / "new.toml"

    def keep(self, text: str) -> None:
        """Keep the settings in place as the way back from this text. Raises ChangeError, OSError."""
        if self._config.is_symlink():
            raise ChangeError(
                f"{self._config} is a link, and a change would put a file in its place: put the file itself there"
            )
        write_whole(self._old, self._config.read_bytes(), 0o600)
        write_whole(self._new, text.encode(), 0o600)

    def stands(self) -> Stand:
        """See `Change`."""
        try:
            here = self._config.read_bytes()
            if here == self._old.read_bytes():
                return "old"
            return "new" if here == self._new.read_bytes() else "other"
        except OSError:
            return "other"

    def apply(self) -> None:
        """See `Change`."""
        self._put(self._new)
        self.go_on()

    def go_on(self) -> None:
        """See `Change`."""
        restart()

    def go_back(self) -> None:
        """See `Change`."""
        if self.stands() != "old":
            self._put(self._old)
        self.go_on()

    def forget(self) -> None:
        """See `Change`."""
        for path in (self._old, self._new):
            path.unlink(missing_ok=True)

    def _put(self, kept: Path) -> None:
        if self.stands() == "other":
            raise ChangeError(f"{self._config}: {BY_HAND}")
        try:
            found = self._config.stat()
            owner = Owner(found.st_uid, found.st_gid) if os.geteuid() == 0 else None
            before = self._config.read_text(encoding="utf-8-sig")
            file = NewFile(self._config, kept.read_bytes(), found.st_mode & 0o7777, owner)
            write_files([file], self._config, before)
        except (SetupWriteError, OSError) as error:
            raise ChangeError(str(error)) from error
