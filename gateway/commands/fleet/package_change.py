"""Another version for a box of plain Debian: `sluice update` installs it, and the package before is kept meanwhile."""

import io
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr, suppress
from pathlib import Path
from typing import Final

from gateway.commands.fleet.trial_steps import ChangeError, FetchError, Stand, restart
from gateway.commands.update import update_command
from gateway.commands.update.programs import UpdateError, call, last_lines
from gateway.commands.update.update_command import (
    INSTALLED,
    KEY_FOLDERS,
    PACKAGE,
    SIGNATURE_BYTES,
    Box,
    read_package,
    this_box,
    trusted_keys,
    verify,
)
from gateway.host.fleet_report import Trial
from gateway.host.safe_files import write_whole

Fetched = Callable[[str], AbstractContextManager[Path]]
"""Brings a file of the folder by its name, and removes it afterwards."""
_INSTALLED_WELL: Final = "installed"
"""dpkg's word for a package that is in place as a whole."""
LOCKED_S: Final = 300.0
"""Seconds for which a going-back waits for dpkg's lock: unattended upgrades may hold it."""
LOOK_S: Final = 5.0


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


def require(file: Path, release: str, box: Box) -> None:
    """Raise UpdateError or OSError unless a package is signed by a trusted key, and is this release for this box.

    Whoever reaches the folder can put a package there under another one's name. A way back for another processor would
    be none.
    """
    with _signature(file).open("rb") as opened:
        signature = opened.read(SIGNATURE_BYTES + 1)
    verify(file, signature, trusted_keys(KEY_FOLDERS))
    package = read_package(file)
    if (found := release_of(package.version, box)) != release:
        raise UpdateError(f"it is version {found} by its own words, not {release}")
    if (package.name, package.architecture) != (PACKAGE, box.architecture):
        raise UpdateError(
            f"it is {package.name} for {package.architecture} by its own words, not {PACKAGE} for {box.architecture}"
        )


class PackageChange:
    """The gateway's package, and the one before in a folder that only root can write."""

    def __init__(self, trial: Trial, folder: Path, source: Path = Path(), *, allow_downgrade: bool = False) -> None:
        self._trial = trial
        self._way_back = folder / "way-back.deb"
        self._source = source
        self._allow_downgrade = allow_downgrade

    def keep(self, fetched: Fetched) -> None:
        """Keep the package of the installed version, from this box or else from the folder.

        Raises UpdateError if the folder has another one, and FetchError if none comes.
        """
        box = this_box()
        name = file_name(self._trial.old, box)
        # A look before may have kept it already.
        with suppress(UpdateError, OSError):
            return require(self._way_back, self._trial.old, box)
        try:
            self._copy(update_command.CACHE / INSTALLED, box)
        except (UpdateError, OSError):
            # A power cut can have damaged it, or the package came otherwise than by `sluice update`.
            try:
                with fetched(f"{name}.sig"), fetched(name) as file:
                    self._copy(file, box)
            except (UpdateError, FetchError) as error:
                raise type(error)(
                    f"there would be no way back: the package of the installed version is not at hand ({error}). Put "
                    f"{name} and its signature into the folder"
                ) from error

    def _copy(self, package: Path, box: Box) -> None:
        write_whole(_signature(self._way_back), _signature(package), 0o600)
        write_whole(self._way_back, package, 0o600)
        require(self._way_back, self._trial.old, box)

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
        install(str(self._source), allow_downgrade=self._allow_downgrade)

    def go_on(self) -> None:
        """See `Change`."""
        restart()

    def go_back(self) -> None:
        """See `Change`."""
        # Not by `sluice update`: the new version may trust other keys, and `keep` has verified it. Not by apt: after a
        # cut, apt wants the new version's scripts to be run first.
        until_s = time.monotonic() + LOCKED_S
        while self.stands() != "old":
            done = call("dpkg", "--force-confold", "--install", str(self._way_back), patience_s=None)
            if "locked by another process" in done.stderr and time.monotonic() < until_s:
                time.sleep(LOOK_S)
            elif self.stands() != "old":
                raise ChangeError(f"dpkg does not put the former package back: {' '.join(last_lines(done, 5))}")
        # The next `sluice update` keeps it as the version before.
        update_command.CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(update_command.CACHE / INSTALLED, self._way_back, 0o600)
        write_whole(_signature(update_command.CACHE / INSTALLED), _signature(self._way_back), 0o600)

    def forget(self) -> None:
        """See `Change`."""
        for path in (self._way_back, _signature(self._way_back)):
            path.unlink(missing_ok=True)


def _signature(package: Path) -> Path:
    return package.with_name(f"{package.name}.sig")
