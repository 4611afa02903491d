"""The `sluice` command."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.buffer_schema import BufferFileError
from gateway.cli_options import FINDING, config_option, json_option, load_settings
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.buffer_status import BufferStatus


class _Commands(click.Group):
    """Loads the commands that look into the buffer when one is asked for: `sluice run` needs none of what they do."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "buffer"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "buffer":
            from gateway.buffer_commands import buffer  # noqa: PLC0415

            return buffer
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
    try:
        asyncio.run(_until_stopped(pipeline.run(settings)))
    except* (BufferFileError, OSError) as errors:
        raise click.ClickException("; ".join(str(error) for error in _leaves(errors))) from None


@main.command(epilog="Example: sluice check --config gateway.toml --create-topics")
@config_option
@click.option("--create-topics", is_flag=True, help="Create the topics that are missing, with LogAppendTime.")
@json_option
def check(config: Path, create_topics: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Check the configuration, the buffer's place and the topics in Kafka; say what is wrong and what to do.

    Topics that routes make from variables (device-{stream}) are judged once they exist.
    """
    from gateway import logs  # noqa: PLC0415
    from gateway.check import check_buffer, check_kafka  # noqa: PLC0415

    settings = load_settings(config)
    logs.quieten_libraries()
    findings = [check_buffer(settings), *asyncio.run(check_kafka(settings, create=create_topics))]
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.subject}: {finding.words}")
    sys.exit(0 if all(finding.ok for finding in findings) else FINDING)


@main.command(
    short_help="What waits in the buffer, and how the daemon is.", epilog="Example: sluice status --config gateway.toml"
)
@config_option
@json_option
def status(config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show what waits in the buffer and how the daemon is; works on a running gateway and on a stopped one."""
    from gateway import control  # noqa: PLC0415
    from gateway.buffer_status import read_status  # noqa: PLC0415
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
    for line in _status_lines(settings, found, daemon, unheard):
        click.echo(hanging(line, 12))


def _status_lines(
    settings: Settings, found: "BufferStatus", daemon: dict[str, Any] | None, unheard: str
) -> Iterator[str]:
    from gateway.terminal_text import escaped, size, utc  # noqa: PLC0415

    yield f"gateway     {settings.gateway.id}, {'running' if found.running else 'not running'}"
    if unheard:
        yield f"            what it is doing is not known: {unheard}"
    if found.oldest_wall_us is None:
        yield "buffer      empty: nothing waits for Kafka"
    else:
        doubt = "" if found.oldest_synced else ", by a clock that was never synced"
        yield f"buffer      {found.rows:,} rows safe on disk, the oldest of {utc(found.oldest_wall_us)} UTC{doubt}"
    used = found.bytes_used / settings.buffer.bytes_max
    yield f"space       {size(found.bytes_used)}, {used:.1%} of buffer.bytes_max"
    live = {} if daemon is None else daemon["buffer"]
    if live.get("failing"):
        yield f"            FAILING: {escaped(live['failing'])}; nothing is acknowledged until it works again"
    elif live.get("full") or (daemon is None and used >= 1):
        yield f"            FULL: {_WHEN_FULL[settings.buffer.when_full]}"
    for name in found.set_aside:
        yield f"            set aside as corrupt: {escaped(name)}; keep it until you need nothing more of it"
    uplink = None if daemon is None else daemon.get("uplink")
    if uplink is not None:
        down = "down: " + escaped(uplink.get("error") or "not tried yet")
        yield f"uplink      {'up' if uplink.get('up') else down}"
    yield from _input_lines(daemon or {})
    yield f"quarantine  {found.quarantined:,} kept on this box{_by_reason(found.quarantine_reasons)}"
    if found.losses:
        yield f"lost        {sum(found.losses.values()):,} not reported to Kafka yet{_by_reason(found.losses)}"
    yield f"devices     {len(found.devices):,} that send a sequence"
    for device in found.devices:
        yield f"            {escaped(device.device)}, last stored {utc(device.seen_us)} UTC"


def _input_lines(daemon: dict[str, Any]) -> Iterator[str]:
    """How the sources do, as far as a running gateway tells."""
    from gateway.terminal_text import escaped  # noqa: PLC0415

    for name, broker in daemon.get("mqtt_brokers", {}).items():
        state = "read from" if broker["connected"] else "NOT CONNECTED: the log says why"
        refused = f"; it refuses {', '.join(map(escaped, broker['refused']))}" if broker["refused"] else ""
        yield f"broker      {escaped(name)}: {state}{refused}"
    counts = daemon.get("mqtt_listener", {})
    refusals = {reason: count for reason, count in counts.items() if reason not in {"connected", "disconnected"}}
    if refusals:
        yield f"listener    since the start{_by_reason(refusals)}"


_WHEN_FULL = {
    "refuse": "readings are held unacknowledged until Kafka has taken some (buffer.when_full)",
    "drop-oldest": "the oldest readings are dropped to make room, and counted as lost (buffer.when_full)",
}


def _by_reason(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    return ": " + ", ".join(
        f"{f'{count:,}' if count else 'unknown'} {reason}" for reason, count in sorted(counts.items())
    )


async def _until_stopped(daemon: Coroutine[None, None, None]) -> None:
    task = asyncio.ensure_future(daemon)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


if __name__ == "__main__":
    main()
