"""What became of the last update of a box with our image: a small file, which outlives both roots.

`sluice update` writes it, the judge of the trial completes it, and the daemon, the status page and `sluice status` read
it. An update on a stick that was refused stands in a file of its own, and is told while the stick is plugged in. Only
root may write both, and whoever likes may read them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.host.boot_slots import Slot
from gateway.host.safe_files import write_whole

FILE: Final = Path("/var/lib/sluice-update/last.json")
REFUSED: Final = Path("/run/sluice-update/refused.json")
"""Update on a stick that was refused. `sluice-stick@.service` of the image removes it when the stick is pulled out."""
BYTES_MAX: Final = 10_000
Result = Literal["on-trial", "good", "went-back", "refused"]


class Before(Struct, frozen=True):
    """How the gateway was before the update: what the new version has to reach too."""

    service: bool = False
    """Whether the service ran."""
    readings: bool = False
    """Whether sensors sent at least once a minute."""
    kafka: bool = False
    """Whether Kafka was reached."""


class LastUpdate(Struct, frozen=True):
    """One update."""

    id: str
    """Random, so that each result is told once."""
    old: str
    """Version before."""
    new: str
    """Version that was installed, or refused; empty if nobody knows which it is."""
    slot: Slot
    """Slot of the new version."""
    before: Before
    result: Result = "on-trial"
    reason: str = ""
    """Why it went back or was refused, in words."""
    given_up: str = ""
    """Version that was given up last. A stick does not bring it again."""
    cuts: int = 0
    """How often in a row the writing of the new version was cut off; 0 once it was written to its end."""

    @property
    def words(self) -> str:
        """The result in a sentence."""
        if self.result == "good":
            return f"version {self.new} was found good, and is used from now on; before it {self.old}"
        if self.result == "went-back":
            return f"version {self.new} was given up, and {self.old} runs again: {self.reason}"
        if self.result == "refused":
            return f"the stick brings no update that is taken, and version {self.old} goes on: {self.reason}"
        return f"version {self.new} is on trial; if it is not found good, this box goes back to {self.old}"


def read(file: Path | None = None) -> LastUpdate | None:
    """Read the last update; None if there was none, or if the file cannot be read."""
    with suppress(OSError, msgspec.DecodeError), (file or FILE).open("rb") as opened:
        return msgspec.json.decode(opened.read(BYTES_MAX), type=LastUpdate)
    return None


def read_refused() -> LastUpdate | None:
    """Read the update on the stick that is plugged in, if it was refused."""
    return read(REFUSED)


def write(update: LastUpdate, file: Path | None = None) -> None:
    """Store an update in place of the one before. Raises OSError; then the one before is there."""
    file = file or FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    # The service's user reads it.
    file.parent.chmod(0o755)
    write_whole(file, msgspec.json.encode(update), 0o644)
