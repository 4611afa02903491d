"""A look at the fleet's folder: takes in `fleet.toml`, and begins what it wants of this box, if it may happen now."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gateway.clock.kernel_clock import read_wall_clock
from gateway.commands.certificate_dates import certificate_dates
from gateway.commands.fleet.box_now import as_it_mostly_is, clock_floor_us
from gateway.commands.fleet.package_change import PackageChange, file_name, release_of, require
from gateway.commands.fleet.settings_change import SettingsChange, wanted_text
from gateway.commands.fleet.trial_steps import CUT_OFF, STARTS_MAX, Change, ChangeError, FetchError, begin, kept, resume
from gateway.commands.update import download
from gateway.commands.update.image_update import BUNDLE_SUFFIX, read_bundle, ready_image, update_image
from gateway.commands.update.programs import UpdateError, call, compare_versions
from gateway.commands.update.update_command import (
    BUNDLE_BYTES_MAX,
    KEY_FOLDERS,
    PACKAGE_BYTES_MAX,
    SIGNATURE_BYTES,
    this_box,
    trusted_keys,
    verify,
)
from gateway.fleet_file import BYTES_MAX, NAME, Fleet, Group, is_within, load
from gateway.host import fleet_report, last_update, our_image, service
from gateway.host.fleet_report import FleetReport, ReportError, Trial
from gateway.host.last_update import Before
from gateway.host.our_image import OurImage
from gateway.host.safe_files import sync_folder, why_others_could_change
from gateway.host.service import ServiceError
from gateway.settings import FleetSettings, Settings
from gateway.toml_files.mistakes import ConfigError

RESTS_MAX: Final = 23
"""Looks, so about a day, until a package that was refused again and again is fetched once more."""

NOT_TRIED: Final = f"it was written, and {STARTS_MAX} restarts did not bring this box to its trial"
RAUC: Final = "de.pengutronix.rauc"
"""Name of RAUC's service on the system bus, and of its interfaces."""


class LookError(Exception):
    """Nothing was taken in from the folder. The message says why."""


class NotNowError(Exception):
    """A change must not begin now. The message says why."""


def go_on(config: Path) -> FleetReport | None:
    """Go on with a change that was cut off; None if there is none."""
    with _alone() as folder:
        report = _report()
        if report is None or report.trial is None:
            return None
        trial = report.trial
        if trial.kind == "image":
            return _of_image(report, trial)
        change: Change = SettingsChange(config, folder) if trial.kind == "settings" else PackageChange(trial, folder)
        try:
            return resume(report, trial, change)
        except (ChangeError, UpdateError) as error:
            return _goes_on_later(str(error)) or report


def look(config: Path, settings: Settings, section: FleetSettings) -> FleetReport:
    """Look at the folder once. Whatever is wrong with it, nothing changes, and the report says so."""
    with _alone() as folder:
        report = _report() or FleetReport()
        looked = _Look(config, settings, section, folder)
        try:
            fleet, digest = looked.take_in(report)
        except (LookError, FetchError, UpdateError) as error:
            return kept(replace(report, trouble=str(error)))
        if digest != report.digest:
            # What was refused may be right in this file, such as `allow_downgrade`.
            report = replace(report, refusals=0, rests=0)
        return looked.follow(fleet, replace(report, serial=fleet.serial, digest=digest))


class _Look:
    """One look at the folder."""

    def __init__(self, config: Path, settings: Settings, section: FleetSettings, folder: Path) -> None:
        self._config = config
        self._settings = settings
        self._section = section
        self._folder = folder
        self._dates = certificate_dates(settings, clock_floor_us(settings))
        gateway = settings.gateway
        self._gateway = f"{gateway.namespace}/{gateway.id}"

    def take_in(self, report: FleetReport) -> tuple[Fleet, str]:
        """Fetch the fleet's file, and return it with its digest. Raises LookError, FetchError, UpdateError."""
        self._require_own_ca()
        with self._fetched(f"{NAME}.sig") as signature, self._fetched(NAME, BYTES_MAX) as file:
            keys = trusted_keys(KEY_FOLDERS)
            try:
                verify(file, signature.read_bytes(), keys)
            except UpdateError as error:
                # The words of the error are for packages.
                raise LookError(
                    f"{NAME} is not trusted: its signature fits none of the keys in "
                    f"{' and '.join(map(str, KEY_FOLDERS))}, or one of the two files was changed or cut off. Sign it "
                    "with such a key, and put both into the folder again"
                ) from error
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            try:
                fleet = load(file)
            except ConfigError as error:
                told = "; ".join(f"line {mistake.line}: {mistake.message}" for mistake in error.mistakes)
                raise LookError(f"{NAME} has mistakes, or is for a newer version: {told}") from error
        if fleet.serial < report.serial:
            raise LookError(
                f"{NAME} has the serial number {fleet.serial}, and this box has taken in {report.serial} already: it "
                "is an old file. If it is meant, sign it with a higher number"
            )
        if fleet.serial == report.serial and digest != report.digest:
            raise LookError(
                f"{NAME} is another file than the one that this box has taken in, and has the same serial number "
                f"{fleet.serial}: sign it with a higher number"
            )
        return fleet, digest

    def follow(self, fleet: Fleet, report: FleetReport) -> FleetReport:
        """Do what the file wants of this box, if it may happen now, and return the report."""
        group = fleet.group_of(self._gateway)
        if group is None:
            self._clear()
            return kept(replace(report, wish="", result="none", reason="", trouble=""))
        if group.wish != report.wish:
            self._clear()
            report = replace(report, wish=group.wish, result="waits", reason="", starts=0)
        if group.wish == report.given_up:
            reason = report.reason or "it was given up before"
            return kept(replace(report, result="went-back", reason=reason, trouble=""))
        # Fetching takes long, and a power cut meanwhile must not let an older file in.
        report = replace(kept(report), trouble="")
        try:
            return self._begin(report, group)
        except NotNowError as error:
            return kept(replace(report, result="waits", reason=str(error)))
        except FetchError as error:
            # Not refused: the network may be well at the next look, and the part that came is kept.
            reason = "a file of it did not come from the folder"
            return kept(replace(report, result="waits", reason=reason, trouble=str(error)))
        except (ChangeError, UpdateError, ServiceError) as error:
            return _goes_on_later(str(error)) or self._refused(report, str(error))

    def _require_own_ca(self) -> None:
        """Raise LookError unless root may open the file with the folder's authority: another could make it a pipe."""
        if self._section.ca is None:
            return
        try:
            trouble = why_others_could_change(self._section.ca, os.getuid())
        except OSError as error:
            trouble = error.strerror
        if trouble is not None:
            raise LookError(f"fleet.ca: {self._section.ca} cannot be used: {trouble}")

    def _begin(self, report: FleetReport, group: Group) -> FleetReport:
        """Begin a change, if one is missing and may happen now.

        Raises NotNowError, FetchError, ChangeError, UpdateError.
        """
        image = our_image.read()
        last = None if image is None else last_update.read()
        if last is not None and last.result == "on-trial":
            # Somebody else began it, and this box may go back from it. Only one thing is changed at a time.
            raise NotNowError(f"version {last.new} of the image is on trial")
        is_other_version = group.version is not None and _installed(image) != group.version
        text = wanted_text(self._config, group.settings) if group.settings and not is_other_version else None
        if not is_other_version and text is None:
            self._clear()
            return kept(replace(report, result="good", reason="", refusals=0, rests=0))
        self._require_now(group)
        if text is None:
            return self._change_version(report, group, image)
        return self._change_settings(report, group)

    def _require_now(self, group: Group) -> None:
        """Raise NotNowError if a change must not begin now."""
        if not group.is_drawn(self._gateway):
            raise NotNowError(f"this box is not among the first {group.share} per cent of its group")
        for hours, where in ((group.hours, NAME), (self._section.hours, "gateway.toml")):
            if hours is None:
                continue
            clock = read_wall_clock(self._settings.gateway)
            if clock.error_us is None:
                raise NotNowError(f"{where} has hours for it ({hours} UTC), and this box's clock is not synced")
            if not is_within(hours, datetime.now(UTC)):
                raise NotNowError(f"{where} has hours for it: {hours} UTC")

    def _before(self, group: Group) -> Before:
        """What a change has to reach, as the last thing before it begins. Raises NotNowError."""
        before = as_it_mostly_is()
        # Fetching and looking take their time.
        self._require_now(group)
        return before

    def _change_settings(self, report: FleetReport, group: Group) -> FleetReport:
        before = self._before(group)
        # Not earlier: somebody may have changed the file meanwhile.
        text = wanted_text(self._config, group.settings)
        if text is None:
            return kept(replace(report, result="good", reason=""))
        change = SettingsChange(self._config, self._folder)
        change.keep(text)
        return begin(report, Trial("settings", "", "", before), change)

    def _change_version(self, report: FleetReport, group: Group, image: OurImage | None) -> FleetReport:
        version = group.version or ""
        if report.rests:
            return kept(replace(report, rests=report.rests - 1))
        if image is not None:
            return self._change_image(report, group, version, image)
        box = this_box()
        old = release_of(box.installed, box)
        _require_allowed(group, version, old)
        trial = Trial("package", old, version, Before())
        file = self._place(name := file_name(version, box))
        change = PackageChange(trial, self._folder, file, allow_downgrade=group.allow_downgrade)
        change.keep(self._fetched)
        with self._fetched(f"{name}.sig"), self._fetched(name):
            require(file, version, box)
            report = begin(report, replace(trial, before=self._before(group)), change)
        if report.result == "refused":
            return self._refused(report, report.reason)
        if report.result == "good" and group.settings:
            # This process still is of the version before, and does not know the settings of the new one.
            return kept(replace(report, result="waits", reason="the version is good; the settings follow"))
        return report

    def _change_image(self, report: FleetReport, group: Group, version: str, image: OurImage) -> FleetReport:
        """Install a bundle. The box then restarts, and the judge of the image's trial says what became of it."""
        ready_image()
        _require_allowed(group, version, image.version)
        with self._fetched(f"sluice-{version}-arm64{BUNDLE_SUFFIX}", BUNDLE_BYTES_MAX) as file:
            if (found := read_bundle(file).version) != version:
                raise UpdateError(f"it is version {found} by its own words, not {version}")
            before = self._before(group)
            last = last_update.read()
            trial = Trial("image", image.version, version, before, former="" if last is None else last.id)
            report = kept(replace(report, result="on-trial", reason="", trial=trial))
            try:
                update_image(file, before, allow_downgrade=group.allow_downgrade)
            except UpdateError as error:
                return self._refused(replace(report, trial=None), str(error))
        return report

    def _refused(self, report: FleetReport, reason: str) -> FleetReport:
        refusals = report.refusals + 1
        rests = min(2**refusals, RESTS_MAX) - 1
        return kept(replace(report, result="refused", reason=reason, refusals=refusals, rests=rests))

    def _place(self, name: str) -> Path:
        """Where a file of the network is on this box, while it is needed."""
        return self._folder / f"fetched-{name}"

    @contextmanager
    def _fetched(self, name: str, bytes_max: int = PACKAGE_BYTES_MAX) -> Iterator[Path]:
        """A file of the network. It is kept for the next look if a change must not begin now. Raises FetchError."""
        file = self._place(name)
        bytes_max = SIGNATURE_BYTES if name.endswith(".sig") else bytes_max
        try:
            download.fetch(f"{self._section.url.rstrip('/')}/{name}", file, bytes_max, self._dates, self._section.ca)
        except UpdateError as error:
            raise FetchError(str(error)) from error
        is_for_later = False
        try:
            yield file
        except NotNowError:
            is_for_later = True
            raise
        finally:
            if not is_for_later:
                download.forget(file)

    def _clear(self) -> None:
        """Remove what another change has left, such as a part of its package: there is no trial that needs it."""
        for path in self._folder.iterdir():
            path.unlink()


def _report() -> FleetReport | None:
    """The report; None if this box looked at nothing yet. Raises LookError."""
    try:
        return fleet_report.read_surely()
    except ReportError as error:
        raise LookError(str(error)) from error


def _goes_on_later(trouble: str) -> FleetReport | None:
    """The report of a trial that has begun and met a trouble; None if none has. The next look goes on with it."""
    begun = _report()
    return None if begun is None or begun.trial is None else kept(replace(begun, trouble=trouble))


def _of_image(report: FleetReport, trial: Trial) -> FleetReport:
    """Take over what became of a bundle. After a start of the box, the judge of the image's trial finds that out."""
    last = last_update.read()
    if last is None or last.id == trial.former:
        return kept(replace(report, result="waits", reason=CUT_OFF, trial=None))
    if last.result == "on-trial":
        image = our_image.read()
        if last.new != trial.new or image is None or image.slot == last.slot or _rauc_writes():
            return report
        if report.starts >= STARTS_MAX:
            return kept(
                replace(report, result="went-back", reason=NOT_TRIED, given_up=report.wish, trial=None, starts=0)
            )
        # The look before was ended after it began to write, and only after a start does the judge look.
        report = kept(replace(report, starts=report.starts + 1))
        service.reboot()
        return report
    report = replace(report, starts=0)
    if last.result == "went-back" and trial.new == last.new == last.given_up:
        return kept(replace(report, result="went-back", reason=last.reason, given_up=report.wish, trial=None))
    words = "the version is good; the settings follow" if last.result == "good" else last.reason
    return kept(replace(report, result="waits", reason=words, trial=None))


def _rauc_writes() -> bool:
    told = call("busctl", "get-property", RAUC, "/", f"{RAUC}.Installer", "Operation")
    return told.returncode == 0 and "idle" not in told.stdout


def _require_allowed(group: Group, version: str, installed: str) -> None:
    if not group.allow_downgrade and compare_versions(version, "lt", installed):
        raise UpdateError(
            f"version {version} is older than the installed {installed}, and may have faults that are corrected here. "
            "If it is meant, write allow_downgrade = true"
        )


def _installed(image: OurImage | None) -> str:
    """The release that this box runs. Raises UpdateError."""
    if image is not None:
        return image.version
    box = this_box()
    return release_of(box.installed, box)


@contextmanager
def _alone() -> Iterator[Path]:
    """Keep a second look out. Yields a folder that only root can read. Raises LookError, OSError."""
    folder = fleet_report.FOLDER / "work"
    for each in (fleet_report.FOLDER, folder):
        if not each.is_dir():
            each.mkdir(parents=True, mode=0o700)
            sync_folder(each.parent)
    folder.chmod(0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LookError("another `sluice fleet pull` runs now: wait for its end") from None
        yield folder
    finally:
        os.close(held)
