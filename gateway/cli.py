"""The `sluice` command."""

import asyncio
import faulthandler
import importlib
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.buffer_schema import BufferFileError
from gateway.cli_options import FINDING, WrappingGroup, config_option, json_option, load_settings
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.check import Finding


_ELSEWHERE = {
    "buffer": "gateway.buffer_commands:buffer",
}
"""Commands of other modules, loaded when one is asked for: `sluice run` needs none of what they do."""


class _Commands(WrappingGroup):
    """This module's commands, and those of `_ELSEWHERE`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            module, _, name = _ELSEWHERE[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), name)
            return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice", message="sluice %(version)s")
def main() -> None:
    """Sluice, the edge gateway: takes readings from sensors, keeps them on disk, forwards them to Kafka.

    An acknowledgement that a sensor gets means "on disk", whether Kafka is up or not.
    """


@main.command(epilog="Example: sluice run --config gateway.toml")
@config_option
def run(config: Path) -> None:
    """Run the gateway until it is stopped (SIGTERM or Ctrl-C)."""
    from gateway import logs, pipeline  # noqa: PLC0415 - the other commands need none of it

    settings = load_settings(config)
    logs.set_up(settings.log)
    # Where systemd's watchdog ends a daemon that hangs, the journal then has where each thread stood.
    faulthandler.enable()
    try:
        asyncio.run(_until_stopped(pipeline.run(settings)))
    except* (BufferFileError, OSError) as errors:
        raise click.ClickException("; ".join(_words(error) for error in _leaves(errors))) from None


@main.command(
    short_help="Is all well: settings, disk, ports, certificates, Kafka?",
    epilog="Example: sluice check --config gateway.toml",
)
@config_option
@click.option("--create-topics", is_flag=True, help="Create the topics that are missing, with LogAppendTime.")
@json_option
def check(config: Path, create_topics: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Check the settings and what they name on this box, then Kafka; say what is wrong and what to do.

    On this box: the buffer's place, ports, certificates, passwords, serial lines; nothing is changed there. Run it as
    the user that sluice runs as. Topics that routes make from variables (device-{stream}) are judged once they exist.

    Each line begins with ok, warn or FAIL; only what fails makes the exit code 1.
    """
    from gateway import logs  # noqa: PLC0415
    from gateway.check_machine import check_machine  # noqa: PLC0415
    from gateway.name_lookup import bound_look_ups  # noqa: PLC0415

    settings = load_settings(config)
    logs.quieten_libraries()
    bound_look_ups()
    findings = []
    # The box first, and each line at once: Kafka may take its time to be found missing.
    for found in (check_machine(settings, config), _check_kafka(settings, create=create_topics)):
        for finding in found:
            findings.append(finding)
            if not as_json:
                click.echo(_finding_line(finding))
    if as_json:
        click.echo(msgspec.json.encode(findings))
    sys.exit(0 if all(finding.ok for finding in findings) else FINDING)


def _check_kafka(settings: Settings, *, create: bool) -> "Iterator[Finding]":
    from gateway.check import check_kafka  # noqa: PLC0415

    yield from asyncio.run(check_kafka(settings, create=create))


def _finding_line(finding: "Finding") -> str:
    from gateway.check import Remark  # noqa: PLC0415
    from gateway.terminal_text import escaped, hanging  # noqa: PLC0415

    judgement = "FAIL" if not finding.ok else "warn" if isinstance(finding, Remark) else "ok  "
    return hanging(f"{judgement}  {escaped(finding.subject)}: {escaped(finding.words)}", 6)


@main.command(
    short_help="What waits in the buffer, and how the daemon is.", epilog="Example: sluice status --config gateway.toml"
)
@config_option
@json_option
def status(config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show what waits in the buffer and how the daemon is; works on a running gateway and on a stopped one."""
    from gateway import control, status_text  # noqa: PLC0415
    from gateway.buffer_commands import read_room_left, read_rows_behind  # noqa: PLC0415
    from gateway.buffer_status import read_status, this_moment  # noqa: PLC0415
    from gateway.terminal_text import hanging  # noqa: PLC0415

    settings = load_settings(config)
    path = settings.buffer.path
    try:
        found = read_status(path)
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error
    daemon: dict[str, Any] | None = None
    unheard = ""
    if found.running:
        try:
            daemon = control.call(control.socket_path(path), "state")
        except control.ControlError as error:
            unheard = str(error)
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(found), "daemon": daemon}))
        return
    seen = status_text.Glance(
        settings,
        found,
        daemon,
        unheard,
        read_room_left(settings, daemon),
        read_rows_behind(settings),
        this_moment(settings.gateway),
        time.time(),
    )
    for line in status_text.status_lines(seen):
        click.echo(hanging(line, status_text.INDENT))


@main.command(
    short_help="Each device: where, last heard, its clock's drift and bound.",
    epilog="Example: sluice devices --config gateway.toml",
)
@config_option
@json_option
def devices(config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show every device that this gateway knows: where it is, when it was heard last, and what is known of its clock.

    DRIFT is how fast the sensor's clock runs, in parts per million above true. BOUND is that of the error of a reading
    taken now, against this box's clock. OBSERVED is when the sensor's clock was last compared with that: a PROBE that
    was answered, or an MQTT reading that told something. Works on a running gateway and on a stopped one.

    The exit code is 1 where something is to be mended: a clock that is worse than the settings say, ticks that no time
    follows from, dates that cannot be right.
    """
    from gateway import device_listing, devices_text  # noqa: PLC0415

    settings = load_settings(config)
    try:
        listing = device_listing.read_devices(settings)
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        known = {"gateway": settings.gateway.id, "running": listing.running, "devices": listing.devices}
        click.echo(msgspec.json.encode({**known, "unheard": listing.unheard or None}))
    else:
        for line in devices_text.devices_lines(listing):
            click.echo(line)
    sys.exit(FINDING if any(device.finding for device in listing.devices) else 0)


async def _until_stopped(daemon: Coroutine[None, None, None]) -> None:
    task = asyncio.ensure_future(daemon)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return


def _words(error: BaseException) -> str:
    """An error without its number; errors of our own have words only."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    main()
