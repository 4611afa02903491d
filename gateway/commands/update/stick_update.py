"""An update on a USB stick: found when the stick is plugged in, and installed at most once.

`/usr/lib/sluice/stick-update NAME` runs it as root, with the stick's name in /dev, on boxes with our image. Nobody is
there to answer: what is not taken is told on the status page, in `sluice status` and as an event.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import cmp_to_key
from pathlib import Path
from typing import Final, NamedTuple

from gateway.commands.update.image_update import BUNDLE_SUFFIX, how_it_is, read_bundle, ready_image, update_image
from gateway.commands.update.programs import UpdateError, compare_versions
from gateway.host import boot_slots, last_update, usb_sticks
from gateway.host.last_update import Before, LastUpdate
from gateway.host.our_image import COMPATIBLE, OurImage
from gateway.host.terminal import say
from gateway.host.terminal_text import escaped
from gateway.host.usb_sticks import MediumError

FILES_MAX: Final = 20
"""Most files of a stick that are looked at."""
SETTLED_S: Final = 300.0
"""Seconds after its start within which a box should be as it mostly is: sensors are heard, and Kafka is reached."""
LOOK_S: Final = 5.0
TROUBLE_MAX: Final = 2_000
"""Most characters that are told."""
_EVERYTHING: Final = Before(service=True, readings=True, kafka=True)


class Choice(NamedTuple):
    """What is done about a stick."""

    file: Path | None
    """File to install."""
    version: str
    """Version of that file, or of a refused one; empty if it is not known."""
    trouble: str
    """Why none is installed, in words; empty if there is nothing to tell."""


NOTHING: Final = Choice(None, "", "")


def main(name: str) -> None:
    """Look at a stick, and install the newest update that it brings and this box takes."""
    if name not in usb_sticks.sticks():
        return
    try:
        with usb_sticks.mounted(name) as folder:
            files = bundles(folder)
            if files:
                look_at(files)
    except MediumError as error:
        say(str(error), err=True)


def bundles(folder: Path) -> list[Path]:
    """Files of a stick that may be updates, by their names. Hidden ones are what a Mac adds."""
    named = [path for path in sorted(folder.iterdir()) if path.name.lower().endswith(BUNDLE_SUFFIX)]
    plain = [path for path in named if path.is_file() and not path.is_symlink() and not path.name.startswith(".")]
    return plain[:FILES_MAX]


def look_at(files: Sequence[Path]) -> None:
    """Install one of these files, or tell why none is."""
    try:
        image = ready_image()
        if _waits_for_restart(image):
            return
        choice = choose(files, image.version)
        if choice.file is not None:
            _wait_until_settled()
            choice = _install(choice.file, choice.version)
    except UpdateError as error:
        say(str(error), err=True)
        return
    if choice.trouble:
        say(choice.trouble, err=True)
        _tell(image, choice)


def choose(files: Sequence[Path], installed: str) -> Choice:
    """Choose the newest file that is to be trusted, is for this board, and was not given up before."""
    versions, troubles = {}, []
    for file in files:
        try:
            bundle = read_bundle(file)
        except UpdateError as error:
            troubles.append(_words(file, str(error)))
            continue
        if bundle.compatible == COMPATIBLE:
            versions[file] = bundle.version
        else:
            troubles.append(_words(file, f"it is for {bundle.compatible}, and this box is {COMPATIBLE}"))
    newest = _newest(versions, installed, last_update.read())
    if newest.file is not None:
        return newest
    return newest._replace(trouble="; ".join(filter(None, (newest.trouble, *troubles)))[:TROUBLE_MAX])


def _newest(versions: Mapping[Path, str], installed: str, former: LastUpdate | None) -> Choice:
    """The newest of these files, if it is newer than the installed version; else why it is not."""

    def order(one: Path, other: Path) -> int:
        a, b = versions[one], versions[other]
        return compare_versions(a, "gt", b) - compare_versions(a, "lt", b)

    refused, ordered = NOTHING, sorted(versions, key=cmp_to_key(order), reverse=True)
    for file in ordered:
        version = versions[file]
        if compare_versions(version, "eq", installed):
            return refused
        if former is not None and version == former.given_up:
            # What became of the last update is told already, and says more.
            if former.new != version:
                again = f"version {version} was given up before; sluice update FILE tries it again"
                refused = Choice(None, version, _words(file, again))
        elif compare_versions(version, "gt", installed):
            return Choice(file, version, "")
        elif file is ordered[0]:
            return Choice(None, version, _words(file, f"version {version} is older than the installed {installed}"))
        else:
            return refused
    return refused


def _words(file: Path, trouble: str) -> str:
    """A trouble with its file in one line. Whoever has a stick names its files."""
    return f"{escaped(file.name)}: {' '.join(trouble.split())}"


def _waits_for_restart(image: OurImage) -> bool:
    """Whether an update is written already, by another partition of the stick or by hand, and the box restarts now."""
    trial = boot_slots.read(boot_slots.BOOT_FOLDER).trial
    update = last_update.read()
    return trial not in {None, image.slot} and update is not None and update.result == "on-trial"


def _wait_until_settled() -> None:
    """Wait until the box is as it mostly is, for the new version has to do as much.

    A stick may be there when the box starts. The monotonic clock counts from then on.
    """
    while time.monotonic() < SETTLED_S and how_it_is() != _EVERYTHING:
        time.sleep(LOOK_S)


def _install(file: Path, version: str) -> Choice:
    try:
        update_image(file, allow_downgrade=False)
    except UpdateError as error:
        return Choice(None, version, _words(file, str(error)))
    return Choice(file, version, "")


def _tell(image: OurImage, choice: Choice) -> None:
    # The same stick is told of once, however often the box starts with it.
    name = hashlib.sha256(f"{choice.version}\n{choice.trouble}".encode()).hexdigest()[:16]
    slot = boot_slots.other(image.slot)
    refused = LastUpdate(name, image.version, choice.version, slot, Before(), "refused", choice.trouble)
    last_update.write(refused, last_update.REFUSED)
