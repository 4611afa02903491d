"""The command `sluice-sim`: sensors that do not exist, for demonstrations, tests and measurements."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from sluice_sim.avr import SAMPLE_INTERVAL_MS_MAX, SAMPLE_INTERVAL_MS_MIN, SimulationError, main_avr
from sluice_sim.fleet import FleetOptions, Progress, run_fleet

PLAIN_REPORT_INTERVAL_S = 10
"""Where no terminal shows the line, it is printed so often."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Simulated sensors for Sluice: real clients of the gateway, with a ledger of what it acknowledged."""


@main.command()
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
    help="How long samples are taken; 0 means until SIGTERM or Ctrl-C.",
)
@click.option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of JSON lines, written over: what each sensor took, sent, dropped, and got acknowledged.",
)
@click.option(
    "--seed",
    type=int,
    help="Repeat a run: the same boot identities and values. Without it the boot identities are new.",
)
@click.option(
    "--user-secret",
    envvar="SLUICE_SIM_USER_SECRET",
    show_envvar=True,
    help="Every sensor's password; its user name is its device name. Without it: no user name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line a second.")
def fleet(  # noqa: PLR0913, PLR0917 - one for each option
    host: str,
    port: int,
    sensors: int,
    interval_ms: float,
    seconds: float,
    ledger: Path | None,
    seed: int | None,
    user_secret: str | None,
    as_json: bool,  # noqa: FBT001 - a flag of the command line
) -> None:
    """Run MQTT sensors m001, m002, ... that publish JSON to device/NAME/thermo with QoS 1.

    Each is a small client: 64 samples held while the gateway is away, then the oldest is dropped and noted;
    at most 4 unacknowledged; sent again with DUP on the next connection. SIGTERM or Ctrl-C ends it: no more
    samples, up to 10 s for outstanding acknowledgements, DISCONNECT, the ledger. A second one ends it at once.
    """
    options = FleetOptions(host, port, sensors, interval_ms, seconds, ledger, seed, user_secret)
    show = _show_json if as_json else _show_on_terminal if sys.stdout.isatty() else _show_sometimes
    try:
        last = asyncio.run(_until_stopped(options, show))
    except OSError as error:
        raise click.ClickException(
            f"cannot write the ledger {ledger}: {error.strerror or error}; choose another --ledger"
        ) from None
    except asyncio.CancelledError:
        raise click.Abort from None
    if as_json:
        _show_json(last)
        return
    if sys.stdout.isatty():
        click.echo()
    click.echo(_line(last))
    if last.waiting:
        click.echo(f"{last.waiting} samples stayed with the sensors: sent or not, they were not acknowledged.")
    if ledger is not None:
        click.echo(f"Ledger: {ledger}")


@main.command()
@click.option("--sensors", default=4, show_default=True, type=click.IntRange(1, 200))
@click.option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where each board's port (tty-NAME), EEPROM image and ledger are; what is there is used again.",
)
@click.option(
    "--interval-ms",
    default=1000,
    show_default=True,
    type=click.IntRange(SAMPLE_INTERVAL_MS_MIN, SAMPLE_INTERVAL_MS_MAX),
    help="Time between two samples of one sensor.",
)
@click.option(
    "--seconds",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long the boards run; 0 means until SIGTERM or Ctrl-C.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Chooses the temperatures.")
def avr(sensors: int, directory: Path, interval_ms: int, seconds: float, seed: int) -> None:
    """Run 8-bit sensors s1, s2, ...: the real firmware on simulated ATmega328Ps, each on a serial port.

    Builds the firmware if need be. The gateway opens DIR/tty-s1 and so on as it would open USB adapters: set
    serial.ports = ["DIR/tty-*"] in gateway.toml. A board starts again with the boot counter of its EEPROM.
    """
    try:
        code = main_avr(sensors, directory, interval_ms, seconds, seed)
    except (SimulationError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    sys.exit(code)


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
    line = (
        f"{progress.seconds:6.0f} s  {progress.connected}/{progress.sensors} connected  "
        f"{progress.acknowledged_per_s:.0f} readings/s  {progress.acknowledged} acknowledged  "
        f"{progress.waiting} waiting  {progress.dropped} dropped"
    )
    return line if progress.last_error is None else f"{line}  ({progress.last_error})"


def _show_on_terminal(progress: Progress) -> None:
    # Back to the line's start, and what is left of the former line is erased.
    sys.stdout.write(f"\r{_line(progress)}\x1b[K")
    sys.stdout.flush()


def _show_sometimes(progress: Progress) -> None:
    if round(progress.seconds) % PLAIN_REPORT_INTERVAL_S == 0:
        click.echo(_line(progress))


def _show_json(progress: Progress) -> None:
    click.echo(json.dumps(asdict(progress)))
