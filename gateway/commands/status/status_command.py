"""The command `sluice status`: shows, once or again and again, what waits and how the daemon and devices are."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.commands.options import as_typed, config_option, json_option, load_as_service, named
from gateway.commands.status.words import DEVICES_MAX, INDENT, Glance, facts_of, status_lines
from gateway.health.conditions import conditions
from gateway.host.terminal import say, say_json
from gateway.reading import BufferFileError
from gateway.settings import Settings

WATCH_S = 2.0
WATCH_TIMEOUT_S = 5.0
"""Seconds after which --watch shows that the daemon does not answer: until then, the screen before it stands."""


@click.command(
    short_help="What waits, and how the daemon and its devices are.",
    epilog="Example: sluice status --watch 5 --config gateway.toml",
)
@config_option
@click.option(
    "--watch",
    "watch_s",
    type=named(click.FloatRange(0.2, 3_600), "number of seconds"),
    metavar="[SECONDS]",
    is_flag=False,
    flag_value=WATCH_S,
    help=f"Show it again every {WATCH_S:g} seconds, or every SECONDS, until Ctrl-C.",
)
@json_option
def status(config: Path, watch_s: float | None, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show what waits in the buffer, and how the daemon is. Works whether the gateway runs or not.

    Devices in trouble come first. A device is in trouble if it is silent for longer than usual, has readings MISSING
    or LOST, or has a finding (!) of sluice devices. MISSING is the least possible number, by the sensor's own sequence
    since the sensor or the gateway started.
    """
    settings = load_as_service(config)
    if watch_s is not None:
        if as_json or not sys.stdout.isatty():
            raise click.UsageError(
                "--watch needs a terminal as standard output; a program can call `sluice status --json` as often as it "
                "likes"
            )
        from gateway.commands.status.watch import watch  # noqa: PLC0415

        watch(lambda: glance(settings, config, WATCH_TIMEOUT_S), lambda seen: screen(seen, beside=2), watch_s)
        return
    try:
        seen = glance(settings, config)
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        say_json(glance_json(seen))
        return
    for line in screen(seen):
        say(line)


_ROWS_MIN = 5


def screen(seen: Glance, beside: int = 1) -> Iterator[str]:
    """Lines wrapped to the terminal. The table of devices fills the rest, but for lines `beside`, as the prompt."""
    from gateway.commands.status.device_table import device_lines  # noqa: PLC0415
    from gateway.host.terminal_text import hanging, terminal_height, terminal_width  # noqa: PLC0415

    lines = [hanging(as_typed(line), INDENT) for line in status_lines(seen)]
    yield from lines
    if seen.devices:
        left = terminal_height() - sum(line.count("\n") + 1 for line in lines) - 1 - beside
        rows = max(_ROWS_MIN, min(DEVICES_MAX, left))
        yield from map(as_typed, device_lines(seen.devices, rows, terminal_width()))


def glance_json(seen: Glance) -> dict[str, Any]:
    """Glance as JSON for programs."""
    devices = None if seen.devices is None else msgspec.to_builtins(seen.devices)
    disk = None if seen.disk is None else msgspec.to_builtins(seen.disk)
    found = msgspec.to_builtins(seen.buffer_status)
    told_by = {"daemon": seen.answer, "unheard": seen.unheard or None, "heard": devices, "not_heard": seen.not_heard}
    update = None if seen.update is None else msgspec.to_builtins(seen.update)
    image = None if seen.image is None else msgspec.to_builtins(seen.image)
    of_box = {"disk": disk, "image": image, "update": update}
    return {**found, **told_by, **of_box, "conditions": conditions(facts_of(seen))}


def glance(settings: Settings, config: Path, timeout_s: float | None = None) -> Glance:
    """Read the buffer file, and ask the daemon if it runs. Raises BufferFileError, click.ClickException."""
    from gateway.buffer.status import read_status, this_moment  # noqa: PLC0415
    from gateway.commands.buffer_commands import read_backlog_rows, read_room_left  # noqa: PLC0415
    from gateway.commands.status.device_table import device_rows  # noqa: PLC0415
    from gateway.daemon import control  # noqa: PLC0415
    from gateway.devices.listing import read_devices  # noqa: PLC0415
    from gateway.health.facts import read_state  # noqa: PLC0415
    from gateway.host import fleet_report, last_update, our_image  # noqa: PLC0415
    from gateway.host.disk_health import read_disk  # noqa: PLC0415
    from gateway.host.service import how_to_start  # noqa: PLC0415

    path = settings.buffer.path
    found = read_status(path)
    daemon: dict[str, Any] | None = None
    devices = None
    not_heard: tuple[str, ...] = ()
    unheard = ""
    if found.running:
        try:
            daemon = control.call(control.socket_path(path), "state", timeout_s)
        except control.ControlError as error:
            unheard = str(error)
        else:
            listing = read_devices(settings, timeout_s)
            unheard = listing.unheard
            if not unheard:
                devices = device_rows(listing, found.losses_by_device, read_state(daemon).up_s or None)
                not_heard = listing.not_heard
    return Glance(
        settings,
        found,
        daemon,
        unheard,
        read_room_left(settings, daemon),
        read_backlog_rows(settings),
        this_moment(settings.gateway),
        time.time(),
        devices=devices,
        not_heard=not_heard,
        to_start="" if found.running else how_to_start(config),
        disk=read_disk(path.parent),
        update=last_update.read(),
        refused_update=last_update.read_refused(),
        fleet=None if settings.fleet is None else fleet_report.read(),
        image=our_image.read(),
    )
