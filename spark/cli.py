"""`sluice-cloud`: the commands of the cloud side."""

import click

from spark.ingest_command import ingest
from spark.registry_commands import devices, registry
from spark.replay_command import replay
from spark.table_commands import gaps, gateways, quarantine, readings, sql, windows


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The cloud side of Sluice: Kafka's records made into Delta tables that can be trusted."""


for command in (ingest, readings, windows, gaps, gateways, quarantine, sql, replay, devices, registry):
    main.add_command(command)


if __name__ == "__main__":
    main()
