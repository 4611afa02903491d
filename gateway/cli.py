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
from gateway.cli_options import FINDING, WrappingGroup, config_option, json_option, load_settings
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.buffer_status import BufferStatus
    from gateway.check import Finding


class _Commands(WrappingGroup):
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

    settings = load_settings(config)
    logs.quieten_libraries()
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
    from gateway.buffer_status import this_moment, told  # noqa: PLC0415
    from gateway.terminal_text import escaped, size, utc  # noqa: PLC0415

    now = this_moment(settings.gateway)
    yield f"gateway     {settings.gateway.id}, {'running' if found.running else 'not running'}"
    if unheard:
        yield f"            what it is doing is not known: {unheard}"
    if found.oldest is None:
        yield "buffer      empty: nothing waits for Kafka"
    else:
        yield f"buffer      {found.rows:,} rows safe on disk, the oldest of {told(found.oldest, now)}"
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
        state = _up(settings, uplink) if uplink.get("up") else escaped(_down(settings, uplink.get("error")))
        yield f"uplink      {state}"
    yield from _input_lines(daemon or {})
    if found.quarantined:
        yield f"quarantine  {found.quarantined:,} kept on this box{_by_reason(found.quarantine_reasons)}"
        yield "            sluice buffer quarantine ls says what to do"
    else:
        yield "quarantine  empty"
    if found.losses:
        yield f"lost        {sum(found.losses.values()):,} not reported to Kafka yet{_by_reason(found.losses)}"
    yield f"devices     {f'{len(found.devices):,}' if found.devices else 'none yet'} that send a sequence of their own"
    for device in found.devices:
        doubtful = f"{utc(device.seen_us)} UTC, by a clock that nothing vouches for"
        seen = doubtful if device.seen is None else told(device.seen, now)
        yield f"            {escaped(device.device)}, last stored {seen}"


def _up(settings: Settings, uplink: dict[str, Any]) -> str:
    from gateway.terminal_text import span  # noqa: PLC0415

    if not uplink.get("waits_for_clock"):
        return "up"
    return (
        "up, but READINGS WAIT on this box until its clock is synced, at most for gateway.hold_unsynced_s = "
        f"{span(settings.gateway.hold_unsynced_s)} from when Kafka was reached; sluice check says what to do"
    )


def _down(settings: Settings, error: str | None) -> str:
    if not error:
        return "not tried yet"
    hint = "; sluice check tells more" if _CANNOT_BOOTSTRAP.search(error) else ""
    return f"down: {_kafka_words(settings, error)}{hint}"


def _input_lines(daemon: dict[str, Any]) -> Iterator[str]:
    """How the sources do, as far as a running gateway tells."""
    from gateway.terminal_text import escaped  # noqa: PLC0415

    for name, broker in daemon.get("mqtt_brokers", {}).items():
        state = "read from" if broker["connected"] else "NOT CONNECTED: the log says why"
        refused = f"; it refuses {', '.join(map(escaped, broker['refused']))}" if broker["refused"] else ""
        yield f"broker      {escaped(name)}: {state}{refused}"
    missing = daemon.get("counts", {}).get("identity-missing", 0)
    if missing:
        yield (
            f"identity    {missing:,} since the start came without the boot and seq that their route is to find "
            '(identity = "json"): they are stored, but one that is sent again is stored twice; correct what these '
            "sensors send"
        )
    counts = daemon.get("mqtt_listener", {})
    refusals = {reason: count for reason, count in counts.items() if reason not in {"connected", "disconnected"}}
    if refusals:
        yield f"listener    refused or ended since the start{_by_reason(refusals)}"
    serial = daemon.get("serial", {})
    for name, port in serial.get("ports", {}).items():
        sensor = "no sensor has said its name yet" if port["device"] is None else f"sensor {escaped(port['device'])}"
        yield f"serial      {escaped(name)}: {sensor}"
    for name, reason in serial.get("unopened", {}).items():
        yield f"serial      {escaped(name)}: CANNOT BE OPENED: {escaped(reason)}"
    for name in serial.get("missing", []):
        yield f"serial      {escaped(name)}: NOT THERE: plug it in, or mend serial.ports (sluice check lists what is)"


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
