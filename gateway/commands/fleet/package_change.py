"""Another version for a box of plain Debian: `sluice update` installs it, and the package before is kept meanwhile."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Final

from gateway.commands.fleet.trial_steps import ChangeError, Stand
from gateway.commands.update import update_command
from gateway.commands.update.programs import UpdateError, call
from gateway.commands.update.update_command import (
    INSTALLED,
    KEY_FOLDERS,
    PACKAGE,
    Box,
    read_package,
    this_box,
    trusted_keys,
    verify,
)
from gateway.host.fleet_report import Trial
from gateway.host.safe_files import write_whole
from gateway.host.terminal import say

_INSTALLED_WELL: Final = "installed"
"""dpkg's word for a package that is in place as a whole."""


def release_of(version: str, box: Box) -> str:
    """The release of a package's version, without the part of Debian's release."""
    return version.removesuffix(f"~deb{box.debian}")


def file_name(release: str, box: Box) -> str:
    """The name of a release's package for this box, as `make deb` gives it."""
    return f"{PACKAGE}_{release}_{box.architecture}_deb{box.debian}.deb"


def install(source: str, *, allow_downgrade: bool) -> None:
    """Run `sluice update` in this process. Raises ChangeError.

    A process of its own would be the new version's as soon as that is in place, and a broken one could not go back.
    """
    words = ["--allow-downgrade", source] if allow_downgrade else [source]
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            update_command.update.main(words, prog_name="sluice update", standalone_mode=False)
    except SystemExit as ended:
        if ended.code:
            reason = " ".join(told.getvalue().split()).removeprefix("not installed: ")
            raise ChangeError(reason or f"sluice update ended with {ended.code}") from ended
    finally:
        sys.stderr.write(told.getvalue())


class PackageChange:
    """The gateway's package, and the one before in a folder that only root can write."""

    def __init__(self, trial: Trial, folder: Path, source: str = "", *, allow_downgrade: bool = False) -> None:
        self._trial = trial
        self._way_back = folder / "way-back.deb"
        self._source = source
        self._allow_downgrade = allow_downgrade

    def keep(self, fetched: Callable[[str], bytes]) -> None:
        """Keep the package of the installed version, from this box or else from the folder. Raises UpdateError.

        `fetched` brings a file of the folder by its name.
        """
        box, signature = this_box(), self._way_back.with_name(f"{self._way_back.name}.sig")
        here = update_command.CACHE / INSTALLED
        is_here = here.exists() and read_package(here).version == box.installed
        name = file_name(release_of(box.installed, box), box)
        try:
            for path, suffix in ((signature, ".sig"), (self._way_back, "")):
                data = here.with_name(f"{here.name}{suffix}").read_bytes() if is_here else fetched(f"{name}{suffix}")
                write_whole(path, data, 0o600)
            verify(self._way_back, signature.read_bytes(), trusted_keys(KEY_FOLDERS))
        except (UpdateError, OSError) as error:
            raise UpdateError(
                f"there would be no way back: the package of the installed version is not at hand ({error}). Put "
                f"{name} and its signature into the folder"
            ) from error
        if (found := read_package(self._way_back).version) != box.installed:
            raise UpdateError(f"there would be no way back: {name} of the folder is {found}, not {box.installed}")

    def stands(self) -> Stand:
        """See `Change`."""
        box = this_box()
        status = call("dpkg-query", "--show", "--showformat=${db:Status-Status}", PACKAGE).stdout.strip()
        if status != _INSTALLED_WELL:
            return "half"
        release = release_of(box.installed, box)
        return "old" if release == self._trial.old else "new" if release == self._trial.new else "other"

    def apply(self) -> None:
        """See `Change`."""
        install(self._source, allow_downgrade=self._allow_downgrade)

    def go_on(self) -> None:
        """See `Change`."""
        # dpkg has had the service restarted, and so has a start of the box.

    def go_back(self) -> None:
        """See `Change`."""
        # A cut in dpkg leaves a package that apt does not go on with by itself.
        configured = call("dpkg", "--configure", "-a", patience_s=None)
        if configured.returncode:
            say(configured.stderr, err=True)
        if self.stands() == "old":
            return
        try:
            install(str(self._way_back), allow_downgrade=True)
        except ChangeError:
            # The package may be in place, and its service not run for another reason.
            if self.stands() != "old":
                raise

    def forget(self) -> None:
        """See `Change`."""
        for path in (self._way_back, self._way_back.with_name(f"{self._way_back.name}.sig")):
            path.unlink(missing_ok=True)
