"""The command `sluice-sim fleet`."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from sluice_sim.fleet import FleetError, FleetOptions, Progress, run_fleet
from sluice_sim.fleet_faults import NONE, USUAL, FaultError, FaultRates, option_name, with_rates
from sluice_sim.fleet_link import Address

PLAIN_REPORT_INTERVAL_S: Final = 10.0
"""Seconds between two lines of output without a terminal."""
BAR_CHARACTERS: Final = 20


def _address(value: str | None) -> Address | None:
    """Take HOST:PORT, or [HOST]:PORT for an IPv6 address. Raises click.BadParameter."""
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT, such as 127.0.0.1:1884", param_hint="--roam")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _named_numbers(values: tuple[str, ...]) -> dict[str, float]:
    """Take any number of NAME=NUMBER. Raises click.BadParameter."""
    numbers = {}
    for value in values:
        name, _, number = value.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not NAME=NUMBER, such as reboots=2", param_hint="--fault") from None
    return numbers


def _faults_help() -> str:
    """List the values of --fault."""
    lines = [
        f"{option_name(each.name):18}{each.metadata['usual']:g} ({each.metadata['unit']}): {each.metadata['meaning']}"
        for each in fields(FaultRates)
    ]
    return "\b\nFaults, and how much of them --faults has:\n" + "\n".join(f"  {line}" for line in lines)


@click.command(epilog=_faults_help(), short_help="Run many MQTT sensors, with faults.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The gateway's MQTT listener.")
@click.option("--port", default=1883, show_default=True, type=click.IntRange(1, 65535))
@click.option("--sensors", default=200, show_default=True, type=click.IntRange(1, 20_000))
@click.option(
    "--interval-ms",
    default=1000.0,
    show_default=True,
    type=click.FloatRange(10, 86_400_000),
    help="Time between two samples of one sensor.",
)
@click.option(
    "--seconds",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds for which samples are taken; 0 means until SIGTERM or Ctrl-C.",
)
@click.option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of JSON lines, which is overwritten. For each boot of each sensor it has the samples taken, sent, "
    "dropped and acknowledged.",
)
@click.option(
    "--samples",
    type=click.Path(dir_okay=False, path_type=Path),
    help="CSV file, which is overwritten. It has each sample and its true time, whatever the sensor's own clock says.",
)
@click.option(
    "--seed",
    type=int,
    help="Repeat a run: the same boot identities, values and faults. Without a seed, they are new.",
)
@click.option(
    "--user-secret",
    envvar="SLUICE_SIM_USER_SECRET",
    show_envvar=True,
    help="Password of every sensor. Its user name is its device name. Without a password, it sends no user name.",
)
@click.option("--faults", "all_faults", is_flag=True, help="Have all faults, as often as listed below.")
@click.option(
    "--fault",
    "given",
    multiple=True,
    help="Have one fault this often, or never (0). May be repeated.",
)
@click.option(
    "--time-scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.01, 100_000),
    help="Compress the time of faults: with 60, an hour of faults lasts a minute. Sampling is not compressed.",
)
@click.option(
    "--roam",
    metavar="HOST:PORT",
    help="Another gateway's listener, to which sensors roam and from which they come back.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line a second, the last one at the end.")
def fleet(  # noqa: PLR0913, PLR0917 - one for each option
    host: str,
    port: int,
    sensors: int,
    interval_ms: float,
    seconds: float,
    ledger: Path | None,
    samples: Path | None,
    seed: int | None,
    user_secret: str | None,
    all_faults: bool,  # noqa: FBT001 - a flag of the command line
    given: tuple[str, ...],
    time_scale: float,
    roam: str | None,
    as_json: bool,  # noqa: FBT001 - a flag of the command line
) -> None:
    """Run MQTT sensors m001, m002, ... that publish JSON to device/NAME/thermo.

    They use QoS 1, unless --fault says otherwise. Each sensor is a small client. While the gateway is away, it holds 64
    samples; then it drops the oldest, and reports it. At most 4 samples are sent and unacknowledged. They are sent
    again with DUP on the next connection.

    SIGTERM or Ctrl-C ends the run. No more samples are taken. Outstanding acknowledgements get up to 10 s. Then the
    sensors disconnect, and the ledger is written. A second signal ends the run at once. The exit code is 1 if the fleet
    could not do its work, or if no sensor was ever let in.
    """
    other = _address(roam)
    rates = _rates(_named_numbers(given), all_faults=all_faults, can_roam=other is not None)
    scale_source = click.get_current_context().get_parameter_source("time_scale")
    if rates == NONE and scale_source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--time-scale compresses the time of faults, but there are none: add --faults")
    options = FleetOptions(
        host, port, sensors, interval_ms, seconds, ledger, seed, user_secret, rates, time_scale, other, samples
    )
    show = _show_json if as_json else _shown_on_terminal(seconds) if sys.stdout.isatty() else _shown_sometimes()
    try:
        last = asyncio.run(_until_stopped(options, show))
    except OSError as error:
        of_samples = samples is not None and error.filename == str(samples)
        name, path = ("samples", samples) if of_samples else ("ledger", ledger)
        raise click.ClickException(
            f"cannot write the {name} {path}: {error.strerror or error}; choose another --{name}"
        ) from None
    except FleetError as error:
        raise click.ClickException(str(error)) from None
    except asyncio.CancelledError:
        raise click.Abort from None
    if as_json:
        _show_json(last)
    else:
        _sum_up(last, ledger)
    if not last.connections:
        raise click.ClickException(
            f"no sensor was ever let in: {last.last_error or 'there was no time to connect'}. "
            "See --host, --port and --user-secret, and that the gateway runs."
        )


def _rates(given: dict[str, float], *, all_faults: bool, can_roam: bool) -> FaultRates:
    """The rates of faults. Raises click.UsageError."""
    try:
        rates = with_rates(USUAL if all_faults else NONE, given)
    except FaultError as error:
        raise click.UsageError(f"--fault: {error}") from None
    if given.get("roams") and not can_roam:
        raise click.UsageError("--fault roams: give the other gateway by --roam HOST:PORT")
    if can_roam and "roams" not in given:
        return with_rates(rates, {"roams": USUAL.roams})
    return rates


async def _until_stopped(options: FleetOptions, show: Callable[[Progress], None]) -> Progress:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    running = asyncio.ensure_future(run_fleet(options, stopping, show))

    def stop() -> None:
        if stopping.is_set():
            running.cancel()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await running


def _line(progress: Progress) -> str:
    line = f"{progress.seconds:6.0f} s  {progress.connected}/{progress.sensors} connected  {_counts(progress)}"
    return line if progress.last_error is None else f"{line}  ({progress.last_error})"


def _counts(progress: Progress) -> str:
    counts = (
        f"{progress.acknowledged_per_s:.0f} readings/s  {progress.acknowledged} acknowledged  "
        f"{progress.waiting} waiting  {progress.dropped} dropped"
    )
    struck = sum(progress.faults.values())
    return f"{counts}  {struck} faults" if struck else counts


def bar(share: float) -> str:
    """Draw a share, 0 to 1, as a progress bar."""
    done = round(BAR_CHARACTERS * min(max(share, 0.0), 1.0))
    return f"[{'#' * done}{'.' * (BAR_CHARACTERS - done)}]"


def _shown_on_terminal(seconds: float) -> Callable[[Progress], None]:
    """Show one line that is overwritten: a bar of the time, or of the connections if no end is set."""

    def show(progress: Progress) -> None:
        share = progress.seconds / seconds if seconds else progress.connected / progress.sensors
        # A line beyond the terminal's width would wrap, and could not be overwritten.
        line = f"{bar(share)} {_line(progress)}"[: shutil.get_terminal_size().columns - 1]
        # Back to the line's start; the rest of the former line is erased.
        sys.stdout.write(f"\r{line}\x1b[K")
        sys.stdout.flush()

    return show


def _shown_sometimes() -> Callable[[Progress], None]:
    """Print a line every `PLAIN_REPORT_INTERVAL_S`."""
    due_s = PLAIN_REPORT_INTERVAL_S

    def show(progress: Progress) -> None:
        nonlocal due_s
        if progress.seconds >= due_s:
            due_s += PLAIN_REPORT_INTERVAL_S
            click.echo(_line(progress))

    return show


def _show_json(progress: Progress) -> None:
    click.echo(json.dumps(asdict(progress)))


def _sum_up(last: Progress, ledger: Path | None) -> None:
    if sys.stdout.isatty():
        click.echo()
    # All sensors have disconnected by now, so the number of connections says nothing.
    click.echo(f"end: {last.seconds:.0f} s  {last.sensors} sensors  {_counts(last)}")
    if last.faults:
        faults = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in sorted(last.faults.items()))
        click.echo(f"Faults: {faults}. --seed {last.seed} repeats them.")
    if last.handed_over:
        click.echo(f"{last.handed_over} samples were sent with QoS 0: nobody said whether they arrived.")
    if last.vanished:
        click.echo(f"{last.vanished} samples were lost to reboots.")
    if last.waiting:
        click.echo(f"{last.waiting} samples stayed with the sensors: sent or not, they were not acknowledged.")
    if ledger is not None:
        click.echo(f"Ledger: {ledger}")
