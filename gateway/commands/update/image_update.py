"""`sluice update FILE.raucb`: RAUC writes a signed bundle into the slot that does not run, and the box tries it."""

import secrets
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.clock.kernel_clock import boottime_us
from gateway.commands.update.programs import UpdateError, call, is_newer_version, last_lines
from gateway.commands.update.trial import own_settings, seen_now
from gateway.devices.listing import mean_interval_s, read_devices
from gateway.host import boot_slots, last_update, our_image, service
from gateway.host.last_update import Before, LastUpdate
from gateway.host.our_image import OurImage
from gateway.host.terminal import say
from gateway.reading import BufferFileError
from gateway.settings import Settings

BUNDLE_SUFFIX: Final = ".raucb"
SENDS_S: Final = 60.0
"""Mean seconds between two readings up to which a sensor has to be heard in the trial too."""


class Bundle(Struct, frozen=True):
    """A bundle's own fields."""

    compatible: str
    version: str


def update_image(file: Path, before: Before | None = None, *, allow_downgrade: bool) -> None:
    """Install a bundle, and restart the box to try it. Raises UpdateError.

    The trial has to reach `before`; if it is None, what this box is now.
    """
    image = ready_image()
    installed, running = image.version, image.slot
    bundle = read_bundle(file)
    if not is_newer_version(bundle.version, installed, allow_downgrade=allow_downgrade):
        say(f"version {bundle.version} is installed already: nothing was done")
        return
    former = last_update.read()
    given_up = "" if former is None else former.given_up
    cuts = former.cuts if former is not None and former.new == bundle.version else 0
    slot = boot_slots.other(running)
    update = LastUpdate(
        secrets.token_hex(8), installed, bundle.version, slot, before or how_it_is(), given_up=given_up, cuts=cuts
    )
    # Before RAUC: if the power goes once the slot is on trial, the trial knows what to ask for.
    try:
        last_update.write(update)
    except OSError as error:
        raise UpdateError(
            f"{last_update.FILE} cannot be written ({error.strerror}), and without it nobody could judge the new "
            "version: see that the data partition has room"
        ) from error
    say(f"writing version {bundle.version} into slot {update.slot}; readings are taken meanwhile")
    ended = call("rauc", "install", str(file), patience_s=None)
    if ended.returncode != 0:
        if former is None:
            last_update.FILE.unlink()
        else:
            last_update.write(former)
        raise UpdateError("\n".join(("RAUC did not install it; this version goes on. It says:", *last_lines(ended, 5))))
    say(f"installed: version {bundle.version}, before it {installed}")
    say("This box restarts now to try it. If it is not found good within 5 minutes, the box goes back by itself.")
    say("sluice status says what became of it.")
    service.reboot()


def ready_image() -> OurImage:
    """Describe this box's image. Raises UpdateError if it runs none of ours, or if a bundle may not be written now."""
    image = our_image.read()
    if image is None:
        raise UpdateError(
            "it is for boxes whose card was written from Sluice's image, and this one was not: take the .deb file of "
            "that version"
        )
    if boot_slots.read(boot_slots.BOOT_FOLDER).trial == image.slot:
        raise UpdateError(
            f"version {image.version} is on trial itself, and the other slot is what this box would go back to: wait "
            "until sluice status says that it was found good"
        )
    return image


def refuse_packages() -> None:
    """Raise UpdateError if this box runs our image, whose root is read only."""
    if our_image.read() is not None:
        raise UpdateError(
            "it is a package, and this box runs Sluice's image, which no package can change: take the .raucb file of "
            "that version"
        )


def read_bundle(file: Path) -> Bundle:
    """Read a bundle's fields once RAUC has verified its signature. Raises UpdateError."""
    ended = call("rauc", "info", "--output-format=json", str(file))
    if ended.returncode != 0:
        words = (
            "RAUC does not trust it: the file was changed or cut off on its way, or somebody else made it. Get it "
            "again from where your gateway came from. RAUC says:"
        )
        raise UpdateError("\n".join((words, *last_lines(ended, 5))))
    try:
        return msgspec.json.decode(ended.stdout, type=Bundle)
    except msgspec.DecodeError as error:
        raise UpdateError(f"RAUC's words on it cannot be read ({error}); is it a bundle of Sluice's?") from None


def how_it_is() -> Before:
    """Look at how the gateway is now: the new version has to reach that too."""
    seen, settings = seen_now(), own_settings()
    return Before(seen.active, settings is not None and _sensors_send(settings), seen.kafka)


def _sensors_send(settings: Settings) -> bool:
    try:
        states = read_devices(settings).states
    except BufferFileError:
        return False
    heard = [state.heard for state in states if state.heard is not None]
    lately_us = boottime_us() - 2 * SENDS_S * 1e6
    return any(of.received_us > lately_us and (mean_interval_s(of) or SENDS_S + 1) <= SENDS_S for of in heard)
