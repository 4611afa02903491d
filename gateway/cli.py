"""The `sluice` command."""

import asyncio
import faulthandler
import gc
import importlib
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import click
from click.exceptions import NoSuchCommand

from gateway.commands.options import WrappingGroup, config_option, load_settings
from gateway.reading import BufferFileError

_ELSEWHERE = {
    "buffer": "gateway.commands.buffer_commands:buffer",
    "devices": "gateway.commands.devices_commands:devices",
    "fleet": "gateway.commands.fleet.fleet_command:fleet",
    "provision": "gateway.commands.setup.provision_command:provision_command",
    "reset": "gateway.commands.setup.reset_command:reset",
    "settings": "gateway.commands.settings_command:settings_command",
    "setup": "gateway.commands.setup.setup_command:setup",
    "update": "gateway.commands.update.update_command:update",
    "check": "gateway.commands.check.check_command:check",
    "status": "gateway.commands.status.status_command:status",
}
"""Commands of other modules. A module is imported when its command is called, so that `sluice run` starts light."""

SWITCH_S = 0.0001
"""Seconds after which a busy thread lets another thread run (`sys.setswitchinterval`). A commit often waits for the
event loop. With Python's default of 5 ms, one connection that keeps the loop busy delays other readings by a second."""

_SAID_OTHERWISE = {
    **{
        word: f"systemd runs the gateway as a service; type  sudo systemctl {word} sluice"
        for word in ("start", "stop", "restart", "enable", "disable")
    },
    **dict.fromkeys(("log", "logs", "journal"), "the gateway logs to the journal; type  journalctl -u sluice"),
    "version": "type  sluice --version",
    "help": "type  sluice --help",
    "install": "type  sudo sluice update FILE.deb",
}
"""Words that people type as commands, and what to type instead."""


class _Commands(WrappingGroup):
    """The commands of this module and of `_ELSEWHERE`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            module, _, name = _ELSEWHERE[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), name)
            return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            if error.command_name in _SAID_OTHERWISE:
                raise click.UsageError(
                    f"No such command {error.command_name!r}: {_SAID_OTHERWISE[error.command_name]}", ctx
                ) from None
            # click would suggest commands of this module only. `reset` wipes a gateway, so it is never suggested.
            likely = [name for name in self.list_commands(ctx) if name != "reset"]
            raise NoSuchCommand(error.command_name, possibilities=likely, ctx=ctx) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice", message="sluice %(version)s")
def main() -> None:
    """Sluice, the edge gateway: takes readings from sensors, keeps them safe and forwards them to Kafka.

    A sensor gets its acknowledgement once a durable copy exists: on this box's disk, or with Kafka's replicas.
    """


@main.command(epilog="Example: sluice run --config gateway.toml")
@config_option
def run(config: Path) -> None:
    """Run the gateway until it is stopped (SIGTERM or Ctrl-C)."""
    from gateway import pipeline  # noqa: PLC0415 - the other commands need none of it
    from gateway.host import core_dumps, logs  # noqa: PLC0415 - the other commands need none of it

    core_dumps.forbid()
    settings = load_settings(config)
    logs.set_up(settings.log)
    # If systemd's watchdog ends a hanging daemon, the journal then shows where each thread stood.
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_S)
    # The objects loaded so far stay. Python would otherwise search them for garbage, and hold up every connection.
    gc.freeze()
    try:
        asyncio.run(_until_stopped(pipeline.run(settings, config)))
    except (BufferFileError, OSError) as error:
        raise click.ClickException(_words(error)) from None
    except ExceptionGroup as errors:
        # Not `except*`: it would wrap the ClickException in another group, which click does not show.
        told, others = errors.split((BufferFileError, OSError))
        if told is None or others is not None:
            raise
        raise click.ClickException("; ".join(_words(error) for error in _leaves(told))) from None


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
    """Message of an error, without the error number of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    main()
