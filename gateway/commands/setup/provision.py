"""Takes in what was put on a boot partition or a stick: `sluice.toml` and its secrets, once; then the secrets go.

How far it has come stands in names, as a renaming needs no room and happens or does not: `sluice.toml` is to be taken
in, `sluice.toml.taken` was, and what is secret beside it is still to be wiped, `sluice.toml.done` is over. Cut off
before the first renaming, all of it is done once more, which changes nothing; after that, only the wiping is. A stick
is looked at no more once settings are in place: cut off behind these, its secrets stay on it, under their old names.
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
"""All that may lie on a medium, what is secret first."""
_HIDDEN_ENDING: Final = f"{ANSWERS_NAME}.txt"
"""What a Windows that hides endings makes of the name."""
_FLASH: Final = (
    "On flash memory (cards, sticks) what is overwritten may lie on beneath, where tools for that can read it. Keep "
    "this medium as you keep a key, or make new passwords where it was lost."
)


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What became of a folder."""

    folder: Path
    taken: Plan | None
    """What was set; None where nothing was."""
    trouble: str = ""
    """Why something that is there was not taken in; the report on the medium says more."""
    starts: bool = False
    """Whether the gateway is to be started now."""


def is_asked(folder: Path) -> bool:
    """Whether anything is to be taken in from a folder, or to be ended."""
    names = (ANSWERS_NAME, TAKEN_NAME, _HIDDEN_ENDING)
    return any(_is_plain(folder / name) for name in names)


def provision(folder: Path, config: Path) -> Provisioned:
    """Take in what is in a folder, and say on the medium what became of it. Nothing happens where nothing is there.

    Where something is wrong nothing is changed, neither on the gateway nor on the medium, but for the report.
    """
    answers, taken = folder / ANSWERS_NAME, folder / TAKEN_NAME
    try:
        if not _is_plain(answers):
            if _is_plain(taken):
                _end(folder)
            elif _is_plain(folder / _HIDDEN_ENDING):
                told = f"{_HIDDEN_ENDING} is to be called {ANSWERS_NAME}: rename it (its ending may be hidden)"
                _report(folder, [told, f"Nothing was set, and {_left(folder)}."])
                return Provisioned(folder, None, told)
            return Provisioned(folder, None)
        if not _may_be_written(folder):
            # Its secrets could not be wiped.
            return Provisioned(folder, None, f"{folder} cannot be written: nothing was taken in from it")
        secrets = folder / SECRETS_NAME
        for path in (answers, secrets):
            # Neither could be wiped.
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
        _report(folder, ["Nothing was set. To be mended:", "", *lines, "", f"Then start it again; {_left(folder)}."])
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
    """The settings in place; of those that have mistakes nothing is kept but the file: nobody is there to mend them."""
    try:
        return read_existing(config)
    except ConfigError:
        with suppress(OSError, UnicodeDecodeError):
            return Existing(config.read_text(encoding="utf-8-sig"))
        raise


def _end(folder: Path) -> None:
    """Wipe what is secret on the medium. Done again, it goes on where it was cut off."""
    taken = folder / TAKEN_NAME
    wipe(folder / SECRETS_NAME)
    try:
        text = taken.read_text(encoding="utf-8-sig")
        has_secrets = "secrets" in tomllib.loads(text)
    except ValueError:
        # Damaged since: who knows what of it is secret.
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
    return [*lines, f"{check}, in a terminal of this box, goes through every link of the chain."]


def _left(folder: Path) -> str:
    if (folder / SECRETS_NAME).exists():
        return f"{SECRETS_NAME} was left where it is, and whoever has this medium can read it"
    return "the files were left as they are"


def _report(folder: Path, lines: list[str]) -> None:
    """Say on the medium what became of it; not again where the same stands there."""
    report = folder / REPORT_NAME
    body = harmless("\n".join(lines).rstrip() + "\n")
    with suppress(OSError, UnicodeDecodeError):
        if _is_plain(report) and report.read_text(encoding="utf-8").partition("\n\n")[2] == body:
            return
    now = datetime.now(UTC)
    head = f"Sluice, {now:%Y-%m-%d %H:%M} UTC by this box's clock, which may not be right before it has a network."
    _write(report, f"{head}\n\n{body}")


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole: a stick may hold a link under any name, and root must not write where it leads."""
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
    """Whether a file is there, and no link to one: what lies elsewhere is not the medium's."""
    return path.is_file() and not path.is_symlink()


def _may_be_written(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY


def _rename(old: Path, new: Path) -> None:
    """Where a test cuts it off."""
    old.replace(new)
    sync_folder(new.parent)
