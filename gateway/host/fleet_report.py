"""What became of a fleet's file on this box: a small file, which outlives a power cut at any moment.

`sluice fleet pull` writes it. The daemon and `sluice status` read it. Only root may write it, and whoever likes may
read it.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.host.last_update import Before
from gateway.host.safe_files import write_whole

FOLDER: Final = Path("/var/lib/sluice-fleet")
BYTES_MAX: Final = 20_000
Result = Literal["none", "waits", "on-trial", "going-back", "good", "went-back", "refused"]
"""`none`: no group names this box. `waits`: not drawn yet, or not within its hours. `good`: this box has what it is to
have. `refused`: nothing was tried."""
Kind = Literal["settings", "package", "image"]


class Trial(Struct, frozen=True):
    """A change that is on trial."""

    kind: Kind
    old: str
    new: str
    """Versions before and after; empty for settings."""
    before: Before
    former: str = ""
    """Id of the image's update before this one. While it is the last one, the bundle's writing has not begun."""


class FleetReport(Struct, frozen=True):
    """How this box stands to the fleet's file."""

    serial: int = 0
    """Highest serial number that was taken in; 0 if none was."""
    digest: str = ""
    """SHA-256 of the file with that number."""
    wish: str = ""
    """Digest of what this box is to have (`Group.wish`); empty if no group names it."""
    result: Result = "none"
    reason: str = ""
    """Why, in words."""
    given_up: str = ""
    """Wish that was given up last. It is not tried again."""
    refusals: int = 0
    """How often in a row this wish's package was refused."""
    starts: int = 0
    """How often in a row this wish's change was begun or gone on with, and did not come to its end."""
    rests: int = 0
    """Looks until a package that was refused is tried again. Fetching it may be dear."""
    trouble: str = ""
    """Why the last look took nothing in, or could not put the former state back; empty if it did."""
    trial: Trial | None = None

    @property
    def words(self) -> str:
        """The result in a sentence."""
        told = {
            "none": "fleet.toml names this box in no group",
            "waits": "what fleet.toml wants of this box is to come",
            "on-trial": "what fleet.toml wants of this box is on trial; if it is not found good, the box goes back",
            "going-back": "what fleet.toml wants of this box was not found good, and the box goes back",
            "good": "this box has what fleet.toml wants",
            "went-back": "what fleet.toml wants of this box was given up",
            "refused": "what fleet.toml wants of this box cannot be tried",
        }[self.result]
        told = f"{told}: {self.reason}" if self.reason else told
        is_stuck = self.result == "going-back" and self.trouble
        return f"{told}. The going back has not succeeded yet: {self.trouble}" if is_stuck else told

    @property
    def unread(self) -> str:
        """Why the last look took nothing in, in words; empty if it did."""
        return "" if self.result == "going-back" else self.trouble


class ReportError(Exception):
    """There is a report, and it cannot be read. The message says what to do."""


def read(folder: Path | None = None) -> FleetReport | None:
    """Read the report; None if this box looked at no fleet's file yet, or if the report cannot be read."""
    with suppress(ReportError):
        return read_surely(folder)
    return None


def read_surely(folder: Path | None = None) -> FleetReport | None:
    """Read the report; None if this box looked at no fleet's file yet. Raises ReportError."""
    file = _file(folder)
    try:
        with file.open("rb") as opened:
            return msgspec.json.decode(opened.read(BYTES_MAX), type=FleetReport)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ReportError(
            f"{file} cannot be read ({error}), so nobody knows which file this box has taken in, and what it has given "
            "up. If it stays so, remove it: then this box takes in any file that is signed, and tries it anew"
        ) from error


def write(report: FleetReport, folder: Path | None = None) -> None:
    """Store a report in place of the one before. Raises OSError; then the one before is there."""
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    # The service's user reads it.
    file.parent.chmod(0o755)
    write_whole(file, msgspec.json.encode(report), 0o644)


def _file(folder: Path | None) -> Path:
    return (folder or FOLDER) / "report.json"
