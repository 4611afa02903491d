"""Takes in `sluice.toml` and its secrets once, from a boot partition or a stick, and then wipes the secrets.

The file's name tells how far this has come, because a renaming needs no room and cannot happen by half. `sluice.toml`
is to be taken in. `sluice.toml.taken` was taken in, and secrets beside it are still to be wiped. `sluice.toml.done` is
over. If it is cut off before the first renaming, all is done again, which changes nothing. If it is cut off later, only
the wiping is done. A stick is not read any more once settings are in place. If it is cut off after the settings were
written, the secrets stay on the stick, under their old names.
"""

import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.commands.setup.answers import SECRETS_NAME, Secrets, load, without_secrets
from gateway.commands.setup.new_settings import Existing, read_existing
from gateway.commands.setup.plan import Plan, carry_out, plan
from gateway.commands.setup.setup_command import typed, written_lines
from gateway.commands.setup.write import SetupWriteError, writable_trouble
from gateway.host.safe_files import sync_folder, why_left_alone, wipe
from gateway.host.terminal_text import harmless
from gateway.listener.credentials import CredentialsError
from gateway.toml_files.mistakes import ConfigError

ANSWERS_NAME: Final = "sluice.toml"
TAKEN_NAME: Final = f"{ANSWERS_NAME}.taken"
DONE_NAME: Final = f"{ANSWERS_NAME}.done"
REPORT_NAME: Final = "sluice-report.txt"
PROVISIONING_NAMES: Final = (SECRETS_NAME, ANSWERS_NAME, TAKEN_NAME, DONE_NAME, REPORT_NAME)
"""Names of files of a provisioning, secrets first."""
BOOT_FOLDERS: Final = (Path("/boot/firmware"), Path("/boot"))
"""Folders of a card's boot partition, which any computer can write: since Raspberry Pi OS and Debian 12, and before."""
_HIDDEN_ENDING: Final = f"{ANSWERS_NAME}.txt"
"""Name that a file of answers gets on a Windows that hides endings."""
_FLASH: Final = (
    "On flash memory (cards, sticks) old copies of overwritten data can survive, and special tools can read them. Keep "
    "this medium as you keep a key, or make new passwords if it is lost."
)


@dataclass(frozen=True, slots=True)
class Provisioned:
    """Result of provisioning from one folder."""

    folder: Path
    taken: Plan | None
    """Plan that was carried out; None if nothing was set."""
    trouble: str = ""
    """Reason why answers were not taken in. The report on the medium says more."""
    starts: bool = False
    """True if the gateway is to be started now."""


def is_asked(folder: Path) -> bool:
    """Tell whether a folder has answers to be taken in, or secrets still to be wiped."""
    names = (ANSWERS_NAME, TAKEN_NAME, _HIDDEN_ENDING)
    return any(_is_plain(folder / name) for name in names)


def provision(folder: Path, config: Path) -> Provisioned:
    """Take in the answers in a folder, and write a report beside them. Do nothing if there are none.

    If something is wrong, nothing is changed on the gateway, and nothing but the report on the medium.
    """
    answers, taken = folder / ANSWERS_NAME, folder / TAKEN_NAME
    try:
        if not _is_plain(answers):
            if _is_plain(taken):
                _end(folder)
            elif _is_plain(folder / _HIDDEN_ENDING):
                told = f"{_HIDDEN_ENDING} must be called {ANSWERS_NAME}: rename it (its ending may be hidden)"
                _report(folder, [told, f"Nothing was set, and {_left(folder)}."])
                return Provisioned(folder, None, told)
            return Provisioned(folder, None)
        if not _may_be_written(folder):
            # The secrets could not be wiped later.
            return Provisioned(folder, None, f"{folder} cannot be written: nothing was taken in from it")
        secrets = folder / SECRETS_NAME
        for path in (answers, secrets):
            # Such a file could not be wiped later.
            why = why_left_alone(path)
            if why is not None:
                return Provisioned(folder, None, f"{path}: {why}: nothing was taken in")
        return _taken_in(folder, config)
    except OSError as error:
        return Provisioned(folder, None, f"{error.filename or folder}: {error.strerror or error}")


def _taken_in(folder: Path, config: Path) -> Provisioned:
    answers = folder / ANSWERS_NAME
    trouble = writable_trouble(config)
    if trouble is not None:
        return _not_taken_in(folder, trouble)
    try:
        given = load(answers)
        planned = plan(given, config, _in_place(config), is_watched=False)
        carry_out(planned)
    except ConfigError as error:
        lines = [
            f"{error.path.name}{f', line {mistake.line}' if mistake.line else ''}: {mistake.message}"
            for mistake in error.mistakes
        ]
        _report(folder, ["Nothing was set. Correct this:", "", *lines, "", f"Then start it again; {_left(folder)}."])
        return Provisioned(folder, None, f"{answers} has mistakes: {'; '.join(lines)}")
    except (SetupWriteError, CredentialsError) as error:
        return _not_taken_in(folder, str(error))
    _report(folder, _set_lines(planned, has_secrets=given.answers.secrets != Secrets()))
    _rename(answers, folder / TAKEN_NAME)
    _end(folder)
    return Provisioned(folder, planned, starts=given.answers.service.start)


def _not_taken_in(folder: Path, trouble: str) -> Provisioned:
    _report(folder, [f"Nothing was set: {trouble}", "", f"Then start it again; {_left(folder)}."])
    return Provisioned(folder, None, f"{folder / ANSWERS_NAME} cannot be taken in: {trouble}")


def _in_place(config: Path) -> Existing:
    """Read the settings in place. If they have mistakes, keep only their text: nobody is there to correct them."""
    try:
        return read_existing(config)
    except ConfigError:
        with suppress(OSError, UnicodeDecodeError):
            return Existing(config.read_text(encoding="utf-8-sig"))
        raise


def _end(folder: Path) -> None:
    """Wipe the secrets on the medium. If this was cut off, calling it again goes on."""
    taken = folder / TAKEN_NAME
    wipe(folder / SECRETS_NAME)
    try:
        text = taken.read_text(encoding="utf-8-sig")
        has_secrets = "secrets" in tomllib.loads(text)
    except ValueError:
        # The file is damaged, so any part of it may be secret.
        wipe(taken)
        return
    if has_secrets:
        _write(folder / DONE_NAME, without_secrets(text))
        wipe(taken)
    else:
        _rename(taken, folder / DONE_NAME)


def _set_lines(planned: Plan, *, has_secrets: bool) -> list[str]:
    gateway = planned.made.settings.gateway
    lines = [f"This gateway was set up: it is {gateway.namespace}/{gateway.id}.", "", *written_lines(planned), ""]
    if has_secrets:
        lines += [f"{SECRETS_NAME} was overwritten and removed. {_FLASH}", ""]
    page = planned.made.settings.status_page
    if page is not None:
        lines.append(f"Its status page, once it runs: port {page.port} of this box, in a browser on its network.")
    check = typed(planned.config, "check")
    return [*lines, f"{check}, in a terminal of this box, checks every link of the chain."]


def _left(folder: Path) -> str:
    if (folder / SECRETS_NAME).exists():
        return f"{SECRETS_NAME} was left here, and whoever has this medium can read it"
    return "the files were left as they are"


def _report(folder: Path, lines: list[str]) -> None:
    """Write the report, unless a report with the same text is there."""
    report = folder / REPORT_NAME
    body = harmless("\n".join(lines).rstrip() + "\n")
    with suppress(OSError, UnicodeDecodeError):
        if _is_plain(report) and report.read_text(encoding="utf-8").partition("\n\n")[2] == body:
            return
    now = datetime.now(UTC)
    head = f"Sluice, {now:%Y-%m-%d %H:%M} UTC by this box's clock, which may not be right before it has a network."
    _write(report, f"{head}\n\n{body}")


def _write(path: Path, text: str) -> None:
    """Replace a file. A stick may hold a link under any name, and root must not follow it."""
    new = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        new.unlink()
    made = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(made, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(made)
    _rename(new, path)


def _is_plain(path: Path) -> bool:
    """Tell whether a file is there, and no link. A link's target may be outside the medium."""
    return path.is_file() and not path.is_symlink()


def _may_be_written(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY


def _rename(old: Path, new: Path) -> None:
    """Rename a file and sync its folder. Tests cut provisioning off here."""
    old.replace(new)
    sync_folder(new.parent)
