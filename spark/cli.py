"""`sluice-cloud`: the commands of the cloud side."""

import click

from spark.ingest_command import ingest
from spark.registry_commands import devices, registry
from spark.replay_command import replay
from spark.table_commands import gaps, gateways, quarantine, readings, sql, windows
from spark.upkeep_commands import delete_device, maintain


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The cloud side of Sluice: Kafka's records made into Delta tables that can be trusted."""


for command in (ingest, readings, windows, gaps, gateways, quarantine, sql, replay, maintain, devices, registry):
    main.add_command(command)
devices.add_command(delete_device)


if __name__ == "__main__":
    main()
