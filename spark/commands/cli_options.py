"""Options that the commands of `sluice-cloud` share."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.toml_files.mistakes import ConfigError
from spark.commands.failure_words import known
from spark.decode.streams_file import load_streams
from spark.engine.warehouse_folder import absolute, may_be_warehouse, no_tables
from spark.source.kafka_reach import unreachable

if TYPE_CHECKING:
    from spark.decode.codec_declarations import Streams

FINDING = 1
"""Exit code if something needs somebody, or a command was waited for and not delivered."""

# Commands import Spark inside their functions: the import takes a second, and `--help` does not need it.


def absolute_path(_context: click.Context, _parameter: click.Parameter, warehouse: str) -> str:
    path = known().warehouse = absolute(warehouse)
    return path


def existing(context: click.Context, parameter: click.Parameter, warehouse: str) -> str:
    """Return the absolute path of a warehouse, or fail before Spark starts, which takes seconds."""
    path = absolute_path(context, parameter, warehouse)
    if not may_be_warehouse(path):
        raise click.ClickException(no_tables(path))
    return path


def declared_streams(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> "Streams | None":
    """Read the file of `--streams`. The message about a wrong file has all its mistakes."""
    if path is None:
        return None
    try:
        return load_streams(path)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


warehouse_option = click.option(
    "--warehouse", required=True, metavar="PATH", callback=existing, help="Folder of the tables."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
streams_option = click.option(
    "--streams",
    type=click.Path(path_type=Path),
    metavar="FILE",
    callback=declared_streams,
    help="streams.toml, which says how payloads are read. Default: as the warehouse was last written.",
)
kafka_config_option = click.option(
    "--kafka-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Java properties for Kafka's client (TLS, SASL). If the file holds secrets, run chmod 0400 on it.",
)
kafka_option = click.option(
    "--kafka-option",
    "kafka_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting of Kafka's client that is no secret. Repeat it for more settings.",
)


def expect_kafka(bootstrap: str) -> None:
    """Fail at once if no broker answers. Spark would take minutes to say so."""
    known().reads_kafka = True
    reason = unreachable(bootstrap)
    if reason is not None:
        raise click.ClickException(f"Kafka cannot be reached ({reason}): check --bootstrap, and that the broker runs")


def kafka_settings(given: tuple[str, ...], config: Path | None) -> dict[str, str]:
    """Return the settings of --kafka-option and --kafka-config by their Kafka names."""
    from spark.source.kafka_options import kafka_options  # noqa: PLC0415

    options = kafka_options(given, config)
    known().kafka_options = options
    return options
