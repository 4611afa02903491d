"""`sluice reset`: wipes the readings, secrets and settings of this gateway."""

import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from gateway.buffer import lock
from gateway.buffer.status import open_to_read, read_status
from gateway.buffer.stored_rows import ALL_SERIES
from gateway.commands.options import FINDING, config_option
from gateway.commands.setup.new_settings import secret_files
from gateway.commands.setup.provision import BOOT_FOLDERS, PROVISIONING_NAMES
from gateway.commands.setup.setup_command import end, typed
from gateway.commands.setup.write import CREDENTIALS_FOLDER, SECRETS_FOLDER, is_unfinished
from gateway.config import config_file
from gateway.host import fleet_report, service
from gateway.host.safe_files import LeftAloneError, why_left_alone, wipe
from gateway.host.service_user import as_service
from gateway.host.terminal import ask, confirm, say
from gateway.host.terminal_text import counted, escaped, hanging, readings_and_events
from gateway.listener import credentials
from gateway.reading import BufferFileError
from gateway.record_contract import READING_TYPE
from gateway.settings import DEFAULT_CONFIG, BufferSettings, Settings
from gateway.toml_files.mistakes import ConfigError

USAGE: Final = 2
UNNAMED: Final = "unnamed"
"""Word to type instead of the id, if no settings have an id."""
_BUFFER_PARTS: Final = ("-wal", "-shm", ".control", ".lock")
_OWN_NAMES: Final = frozenset({"kafka.password", "kafka-2.password", "status-page"})
"""Names that `sluice setup` gives to files in the folders for secrets."""
_READINGS: Final = f"""
    SELECT count(*) FROM ({ALL_SERIES}) AS found JOIN series ON series.number = found.series WHERE series.type = ?
"""
_COUNTED_ROWS_MAX: Final = 200_000
_LEFT_TOLD_MAX: Final = 20
_FLASH: Final = (
    "Secrets were overwritten first; readings were only removed. On flash memory (cards, SSDs) old copies of either "
    "can survive, and special tools can read them until that memory is used again. If that matters, make new passwords "
    "for Kafka, and destroy the card, or encrypt the next card from the start."
)


@dataclass(frozen=True, slots=True)
class ToWipe:
    """Files to be wiped, and files that stay."""

    gateway_id: str
    buffer: Path
    secrets: tuple[Path, ...]
    """Files with secrets. They are wiped first."""
    data: tuple[Path, ...]
    """Files of the buffer."""
    settings: tuple[Path, ...]
    """Files of the settings. They are wiped last, because they tell where the others are."""
    left: tuple[Path, ...]
    """Files that stay: secrets that the settings name elsewhere, and files of others beside the settings."""
    refused: tuple[tuple[Path, str], ...]
    """Files with a name of the gateway's that may be somebody else's, and why. They stay too."""

    @property
    def all(self) -> tuple[Path, ...]:
        """Files to be wiped, in this order."""
        return (*self.secrets, *self.data, *self.settings)


@click.command(
    short_help="Wipe readings, secrets and settings of this gateway.",
    epilog="Example: sluice reset --config gateway.toml",
)
@config_option
@click.option("--yes-wipe", "wiped_id", metavar="ID", help="Do not ask. ID must be the gateway.id of the settings.")
@click.option("--stop", is_flag=True, help="Stop the service first, without asking.")
def reset(config: Path, wiped_id: str | None, stop: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Wipe this gateway: waiting readings, secrets of devices, passwords and settings.

    It first counts what was not sent yet, and asks you to type the gateway's id. While the gateway runs it wipes
    nothing, unless you let it stop the gateway. If it is interrupted, call it again.

    Files of at most 1 MB, such as secrets and settings, are overwritten before they are removed. Larger files, which
    hold readings, are only removed. On flash memory, old copies of either can survive. If that matters, make new
    passwords for Kafka, and destroy the card.

    Some files stay: a link that another user may have made, a file with a second name, and a file of a third user. Each
    is named, and the exit code is 1.
    """
    config = config.absolute()
    try:
        found = find_what_to_wipe(config)
    except OSError as error:
        end(f"{error.filename}: {error.strerror}: run this as root, or as the user whose files these are")
    if not (found.all or found.refused):
        say(f"there is nothing to wipe: no settings at {config}, no buffer at {found.buffer}")
        return
    for line in _first_lines(found, config):
        say(hanging(line, 4))
    _confirm(found, wiped_id)
    try:
        with _stopped(config, found.buffer, may_stop=stop, may_ask=wiped_id is None):
            refused = [*found.refused, *_wipe_all(found.all)]
    except BufferFileError as error:
        end(str(error))
    except OSError as error:
        say(hanging(f"{error.filename}: {error.strerror}: not all is wiped; run this again", 4), err=True)
        sys.exit(FINDING)
    say(f"wiped: {counted(len(found.all) + len(found.refused) - len(refused), 'file')}")
    say(hanging(_FLASH, 0))
    for line in (*_refused_lines(refused), *(f"left: {path}" for path in found.left[:_LEFT_TOLD_MAX])):
        say(hanging(line, 4))
    told = "left: the program, and its journal (journalctl -u sluice), which has names of devices and no secrets"
    say(hanging(told, 4))
    if not os.path.lexists(config):
        say(hanging(f"this box is not set up now: {typed(config, 'setup')} sets it up again", 4))
    sys.exit(FINDING if refused else 0)


def _wipe_all(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Wipe files. Give each file that another user has changed meanwhile, which stays, and why. Raises OSError."""
    for path in paths:
        try:
            wipe(path)
        except LeftAloneError as error:
            yield path, str(error.strerror)


def _refused_lines(refused: Sequence[tuple[Path, str]]) -> Iterator[str]:
    for path, why in refused[:_LEFT_TOLD_MAX]:
        yield f"NOT WIPED: {path}: {why}. Look at it, and remove it yourself"
    if len(refused) > _LEFT_TOLD_MAX:
        yield f"NOT WIPED: {len(refused) - _LEFT_TOLD_MAX:,} more"


def find_what_to_wipe(config: Path) -> ToWipe:
    """Find the files that belong to settings, even if the settings are wrong or gone.

    Raises OSError for a folder that this user may not read.
    """
    settings = None
    with suppress(ConfigError):
        # Root must not follow a link that the service's user put in the buffer's place.
        settings = config_file.load_as_written(config)
    buffer = settings.buffer.path.absolute() if settings is not None else _buffer_of(config)
    devices = buffer.with_name(credentials.FILE_NAME) if settings is None else credentials.file_of(settings)
    folder = config.parent
    named = [path for path in secret_files(settings) if os.path.lexists(path)]
    ours = [
        path
        for name in (SECRETS_FOLDER, CREDENTIALS_FOLDER)
        for path in _inside(folder / name)
        if _is_ours(path, config)
    ]
    ours += [path for path in named if path.is_relative_to(folder)]
    ours += [path for path in (devices, devices.with_name(f"{devices.name}.new")) if os.path.lexists(path)]
    beside = _beside(folder)
    ours += [path for path in beside if is_unfinished(path.name)]
    kept = [path for path in beside if path.name.startswith(f"{config.name}.") or path.name == "kafka-ca.pem"]
    data = [*_of_buffer(buffer)]
    if folder == DEFAULT_CONFIG.parent:
        # Answers on the boot partition would set this box up again at its next start.
        boot = [boot / name for boot in BOOT_FOLDERS for name in PROVISIONING_NAMES]
        ours += [path for path in boot if path.is_file()]
        # Former settings, and a serial number that could be higher than those of another fleet.
        ours += [path for path in fleet_report.FOLDER.rglob("*") if path.is_file()]
    settings_files = [*kept, *([config] if os.path.lexists(config) else [])]
    judged = {path: why_left_alone(path) for path in (*ours, *data, *settings_files)}
    left = dict.fromkeys(path for path in (*beside, *named) if path not in judged)
    secrets, data, settings_files = (
        [path for path in dict.fromkeys(paths) if judged[path] is None] for paths in (ours, data, settings_files)
    )
    return ToWipe(
        _id_of(config, settings),
        buffer,
        tuple(secrets),
        tuple(data),
        tuple(settings_files),
        tuple(left),
        tuple((path, why) for path, why in judged.items() if why is not None),
    )


def _is_ours(path: Path, config: Path) -> bool:
    """Tell whether a file in a folder for secrets is the gateway's. Below /etc/sluice, every file is."""
    return config.parent == DEFAULT_CONFIG.parent or path.name in _OWN_NAMES or is_unfinished(path.name)


def _of_buffer(buffer: Path) -> list[Path]:
    """Files of the buffer: those set aside as damaged, the buffer itself and its side files; the lock last."""
    names = [buffer.name, *(buffer.name + part for part in _BUFFER_PARTS)]
    found = [path for path in _beside(buffer.parent) if path.name.startswith(f"{buffer.name}.corrupt-")]
    return [*found, *(path for path in map(buffer.with_name, names) if os.path.lexists(path))]


def _beside(folder: Path) -> list[Path]:
    """Files and links in a folder."""
    return sorted(path for path in folder.iterdir() if _is_no_folder(path)) if folder.is_dir() else []


def _inside(folder: Path) -> list[Path]:
    """Files and links below a folder. If the folder itself is a link, give only the link."""
    if folder.is_symlink():
        return [folder]
    return sorted(path for path in folder.rglob("*") if _is_no_folder(path)) if folder.is_dir() else []


def _is_no_folder(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def _buffer_of(config: Path) -> Path:
    """Find the buffer's path if the settings are wrong or gone."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Path(tomllib.loads(config.read_text(encoding="utf-8-sig"))["buffer"]["path"]).absolute()
    return BufferSettings().path if config == DEFAULT_CONFIG else config.parent / "buffer.db"


def _id_of(config: Path, settings: Settings | None) -> str:
    if settings is not None:
        return settings.gateway.id
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(tomllib.loads(config.read_text(encoding="utf-8-sig"))["gateway"]["id"])
    return UNNAMED


def _first_lines(found: ToWipe, config: Path) -> Iterator[str]:
    """Say what would be wiped, before anybody is asked."""
    yield f"This wipes the gateway {escaped(found.gateway_id)}: what waits, its secrets, its settings."
    if service.is_active(config):
        yield "The gateway runs: it would be stopped for that."
    if found.buffer in found.data:
        # Read the buffer as the service's user, who has written it.
        with as_service(config, found.buffer):
            lines = list(_buffer_lines(found.buffer, config))
        yield from lines
    for path in found.all:
        yield f"to be wiped: {path}"
    yield from _refused_lines(found.refused)


def _buffer_lines(buffer: Path, config: Path) -> Iterator[str]:
    """Say how much waits, and how to keep a copy."""
    try:
        status = read_status(buffer)
    except BufferFileError as error:
        yield f"How much waits unsent is not known: {error}"
        return
    copy = "; a copy: {} > FILE".format
    kept = copy(typed(config, "buffer export")) if status.rows else ""
    yield f"{_waiting(buffer, status.rows)} in {buffer}{kept}"
    if status.quarantined:
        kept = copy(typed(config, "buffer export --quarantine"))
        yield f"{counted(status.quarantined, 'input')} in the quarantine{kept}"


def _waiting(buffer: Path, rows: int) -> str:
    """Say how much waits. Readings and the gateway's own events are counted apart, if that is quick."""
    if not rows:
        return "nothing waits"
    with suppress(BufferFileError):
        if rows <= _COUNTED_ROWS_MAX:
            return _counted_apart(buffer, rows)
    return f"{readings_and_events(rows)} {'WAITS AND WAS' if rows == 1 else 'WAIT AND WERE'} NOT SENT"


def _counted_apart(buffer: Path, rows: int) -> str:
    with open_to_read(buffer) as connection:
        (readings,) = connection.execute(_READINGS, (READING_TYPE,)).fetchone()
    events = counted(max(rows - readings, 0), "event")
    if not readings:
        return f"no reading waits, but {events} of the gateway's own"
    were = "WAITS AND WAS" if readings == 1 else "WAIT AND WERE"
    of_them = f", and {events} of the gateway's own" if rows > readings else ""
    return f"{counted(readings, 'reading')} {were} NOT SENT{of_them}"


def _confirm(found: ToWipe, wiped_id: str | None) -> None:
    typed = wiped_id
    if typed is None:
        if not sys.stdin.isatty():
            raise click.UsageError("this asks at a terminal, and there is none; --yes-wipe ID does it without asking")
        try:
            typed = ask(
                f"To wipe it, type {escaped(found.gateway_id)}", prompt_suffix=" > ", default="", show_default=False
            )
        except click.Abort:
            say()
            end("nothing was wiped")
    if typed != found.gateway_id:
        end(f"that is not this gateway's id, which is {escaped(found.gateway_id)}: nothing was wiped")


@contextmanager
def _stopped(config: Path, buffer: Path, *, may_stop: bool, may_ask: bool) -> Iterator[None]:
    """Keep the gateway from running meanwhile. Raises BufferFileError if it runs all the same."""
    if service.is_active(config):
        if not may_stop and not (may_ask and _may_stop()):
            end("the gateway runs: nothing was wiped. Stop it (sudo systemctl stop sluice), or give --stop")
        try:
            service.stop()
        except service.ServiceError as error:
            end(f"{error}; nothing was wiped")
    lock_file = buffer_lock_file(buffer)
    # Taking the lock makes its file. Root must not make it where somebody's link leads.
    if not buffer.parent.is_dir() or why_left_alone(lock_file) is not None:
        yield
        return
    with lock.acquire(buffer):
        yield
        with suppress(LeftAloneError):
            wipe(lock_file)


def buffer_lock_file(buffer: Path) -> Path:
    """Path of the lock file, as `lock.acquire` names it."""
    return buffer.with_name(f"{buffer.name}.lock")


def _may_stop() -> bool:
    try:
        return confirm("The gateway runs. Stop it?", default=False)
    except click.Abort:
        say()
        return False
