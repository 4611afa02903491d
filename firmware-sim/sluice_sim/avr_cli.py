"""The commands `sluice-sim avr` and `sluice-sim fault`."""

import sys
from pathlib import Path
from typing import Any, Final, cast

import click
from click.core import ParameterSource

from sluice_sim.avr import AvrOptions, main_avr
from sluice_sim.avr_board import SimulationError, give_command
from sluice_sim.avr_faults import COMMANDS, FAULTS_PER_MINUTE, Build, FaultRate, parse_fault_rate
from sluice_sim.provision import CLOCK_MS_MAX, PORT_MAX, SAMPLE_INTERVAL_MS_MAX, SAMPLE_INTERVAL_MS_MIN, Network

BOARDS_MAX = 200
_ONLY_FOR: Final[dict[str, Build]] = {"broker": "mqtt", "user_secret": "mqtt", "auto_reset": "serial"}
"""Options that work for one build alone."""


def _parse_broker(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
        raise click.BadParameter(f"{text!r} is not HOST:PORT, for example 127.0.0.1:1883")
    return host.strip("[]"), int(port)


def _parse_faults(_context: click.Context, _parameter: click.Parameter, text: str | None) -> FaultRate | None:
    try:
        return None if text is None else parse_fault_rate(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _refuse_useless(build: Build) -> None:
    """Raise click.UsageError if an option was given that does nothing. An environment variable may be set."""
    context = click.get_current_context()
    for name, only in _ONLY_FOR.items():
        if only != build and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} is for boards of the {only} build, and these are of the {build} build;"
                f" leave it out, or add --build {only}"
            )


@click.command(short_help="Run boards: the real firmware, simulated.")
@click.option("--count", "--sensors", "count", default=4, show_default=True, type=click.IntRange(1, BOARDS_MAX))
@click.option(
    "--dir",
    "directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for each board's port (tty-NAME), EEPROM image, ledger and other files. Files in it are used again.",
)
@click.option(
    "--build",
    default="serial",
    show_default=True,
    type=click.Choice(["serial", "mqtt"]),
    help="The firmware: frames on a serial port, or MQTT through a simulated ESP-AT modem.",
)
@click.option(
    "--broker",
    default="127.0.0.1:1883",
    show_default=True,
    metavar="HOST:PORT",
    callback=_parse_broker,
    help="Address of the gateway's listener, for the MQTT build.",
)
@click.option(
    "--user-secret",
    default="",
    envvar="SLUICE_SIM_USER_SECRET",
    show_envvar=True,
    help="Password of every MQTT sensor. A sensor's user name is its device name.",
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
    help="Seconds for which the boards run; 0 means until SIGTERM or Ctrl-C.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Decides temperatures, and the bytes of noise.")
@click.option(
    "--faults",
    metavar="SEED[:PER_MINUTE]",
    callback=_parse_faults,
    help="Have faults on a schedule. SEED, a number or any text, decides it."
    f" Without PER_MINUTE, each board has {FAULTS_PER_MINUTE:g} a minute.",
)
@click.option(
    "--noise", default=0.0, show_default=True, type=click.FloatRange(0, 1), help="Share of bytes with a wrong bit."
)
@click.option(
    "--ppm",
    default=0.0,
    show_default=True,
    type=click.FloatRange(-100_000, 100_000),
    help="Parts per million by which the boards' oscillators are too fast.",
)
@click.option("--auto-reset", is_flag=True, help="Reset a board when its port is opened, as with an Arduino.")
@click.option(
    "--clock-start",
    "clock_start_ms",
    metavar="MS",
    type=click.IntRange(0, CLOCK_MS_MAX),
    help="Start of the boards' millisecond counters: 4294957296 is 10 s before the wrap.",
)
@click.option(
    "--prefix",
    help="Names of boards, before their number. The default is s, or w with --build mqtt.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines: the boards, each fault, the summary.")
def avr(count: int, directory: Path, interval_ms: int, seconds: float, seed: int, **others: Any) -> None:
    """Run 8-bit sensors s1, s2, ...: the real firmware on simulated ATmega328Ps.

    The firmware is built if it is out of date. The gateway opens DIR/tty-s1 as it would open a USB adapter. Write
    serial.ports = ["DIR/tty-*"] in gateway.toml, with the whole path that is printed for each board as DIR. With
    --build mqtt, the boards w1, w2, ... connect to the gateway's MQTT listener instead. A board that starts again goes
    on with the boot counter in its EEPROM.

    For each board, DIR has NAME.ledger (its firmware's account of its samples), NAME.samples (every value with its true
    time) and NAME.faults (every fault with its time). The exit code is 1 if a board could not run, if no gateway opened
    its port, or if no listener let it in.
    """
    _refuse_useless(others["build"])
    host, port = others["broker"]
    options = AvrOptions(
        build=cast("Build", others["build"]),
        network=Network(host, port, secret=others["user_secret"]),
        noise=others["noise"],
        ppm=others["ppm"],
        auto_reset=others["auto_reset"],
        clock_start_ms=others["clock_start_ms"],
        faults=others["faults"],
        as_json=others["as_json"],
    )
    try:
        code = main_avr(count, directory, interval_ms, seconds, seed, options, others["prefix"])
    except (SimulationError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot use {directory}: {error.strerror or error}") from None
    sys.exit(code)


class _FaultCommand(click.Command):
    """Lists the faults of `COMMANDS` in the help text."""

    def format_epilog(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Faults"):
            formatter.write_dl([(f"{name} {one.arguments}".strip(), one.meaning) for name, one in COMMANDS.items()])


@click.command(
    cls=_FaultCommand,
    context_settings={"ignore_unknown_options": True},
    short_help="Do something to a board that runs.",
)
@click.argument("board", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, required=True, metavar="FAULT...")
def fault(board: Path, words: tuple[str, ...]) -> None:
    """Do something to a board that `sluice-sim avr` runs: `sluice-sim fault DIR/s1 reset`."""
    try:
        give_command(board, " ".join(words))
    except SimulationError as error:
        raise click.ClickException(str(error)) from None
