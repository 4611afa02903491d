"""The command `sluice-sim`: sensors that do not exist, for demonstrations, tests and measurements."""

import click

from sluice_sim.avr_cli import avr, fault
from sluice_sim.fleet_cli import fleet


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice", message="sluice-sim %(version)s")
def main() -> None:
    """Simulated sensors for Sluice: real clients of the gateway, with a ledger of what it acknowledged."""


main.add_command(avr)
main.add_command(fault)
main.add_command(fleet)
