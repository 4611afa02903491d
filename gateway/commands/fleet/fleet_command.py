"""`sluice fleet`: takes in what a fleet's file in the network wants of this box."""

import os
import sys
import traceback

import click

from gateway.commands.fleet import look
from gateway.commands.fleet.look import LookError
from gateway.commands.options import FINDING, WrappingGroup, load_settings
from gateway.host.fleet_report import FleetReport
from gateway.host.service import ServiceError
from gateway.host.terminal import say
from gateway.settings import DEFAULT_CONFIG


@click.group(cls=WrappingGroup)
def fleet() -> None:
    """Take in the version and the settings that fleet.toml in a folder of the network wants of this box."""


@fleet.command(
    short_help="Look at the fleet's folder once, and take in what is for this box.",
    epilog="Example: sluice fleet pull",
)
def pull() -> None:
    """Look at the folder of [fleet] once, as root, and take in what fleet.toml there wants of this box.

    The file must be signed by a key that signs updates, and its serial number must not be lower than before. Settings
    are checked first, and the former ones are kept. A version is installed as sluice update does it. If the box is not
    found good within 5 minutes, it goes back by itself, and does not try the same again.

    A change that a power cut has interrupted is ended first. sluice status, the status page and the event `state` say
    what became of a change. Without the section [fleet], nothing is done.

    The exit code is 1 if nothing could be taken in, or if a change was refused or given up.
    """
    if os.geteuid() != 0:
        raise click.ClickException("only root may change this box: run this again with sudo")
    try:
        report = _look()
    except (LookError, ServiceError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}; is the disk full?") from error
    except Exception:  # noqa: BLE001 - none is foreseen
        # Python would end with 1. Of a look that ends so, the unit says that all is well.
        traceback.print_exc()
        sys.exit(os.EX_SOFTWARE)
    if report is None:
        return
    if report.serial:
        say(report.words)
    if report.unread:
        say(f"nothing was taken in now: {report.unread}", err=True)
    sys.exit(FINDING if report.trouble or report.result in {"refused", "went-back", "going-back"} else 0)


def _look() -> FleetReport | None:
    """Go on with a change that was cut off, or look at the folder; None if this box looks at none."""
    report = look.go_on(DEFAULT_CONFIG)
    settings = load_settings(DEFAULT_CONFIG)
    if settings.fleet is None and report is None:
        say("this box looks at no folder: gateway.toml has no section [fleet]")
        return None
    if settings.fleet is not None and (report is None or report.result == "waits"):
        report = look.look(DEFAULT_CONFIG, settings, settings.fleet)
    return report
