"""`sluice-cloud registry` and `sluice-cloud devices list`: check, load and show the registry."""

from pathlib import Path

import click

from gateway.host.terminal import say
from gateway.host.terminal_text import counted
from spark.commands.answers import Form, print_relation
from spark.commands.asked_options import asks
from spark.commands.cli_options import warehouse_option
from spark.commands.command_session import session
from spark.commands.desk_session import asking, explain_nothing
from spark.desk.asked import Asked, equal, where
from spark.registry.registry import Registry
from spark.registry.registry_file import load_registry_file

_path = click.argument("path", type=click.Path(path_type=Path))


@click.group()
def registry() -> None:
    """Check or load the registry: sites, calibrations and retirements, in registry.toml or CSV files."""


@registry.command()
@_path
def check(path: Path) -> None:
    """Check a registry. Nothing is changed."""
    found = load_registry_file(path)
    say(f"{_counted(found)}: version {found.version}")


@registry.command(short_help="Replace the registry of a warehouse.")
@_path
@warehouse_option
def load(path: Path, warehouse: str) -> None:
    """Replace the registry of a warehouse. It counts at once, for old readings too. `ingest` may run meanwhile."""
    found = load_registry_file(path)
    spark = session("sluice-registry")
    from spark.log.warehouse_version import note_registry, open_version  # noqa: PLC0415
    from spark.registry.registry_table import load_registry  # noqa: PLC0415

    open_version(spark, warehouse)
    version = load_registry(spark, warehouse, found)
    note_registry(spark, warehouse, version)
    say(f"{_counted(found)}: version {version} counts from now on")


@click.group()
def devices() -> None:
    """List the devices of the registry, or delete all that a device sent."""


@devices.command("list")
@warehouse_option
@asks("device", "site")
def list_devices(warehouse: str, asked: Asked, form: Form) -> None:
    """Show at which sites devices are and were."""
    columns = ("namespace", "device", "site", "valid_from", "valid_to", "labels", "registry_version")
    with asking(warehouse) as tables:
        limits = equal(asked, "device", "site")
        rows = f"SELECT * FROM ({tables.select('devices')}) {where(limits)}"
        found = tables.source.db.sql(f"{rows} ORDER BY namespace, device, valid_from NULLS FIRST")
        if not print_relation(
            tables.source.db, found, form, columns, spare=("registry_version", "labels", "namespace")
        ):
            explain_nothing(tables, asked, form, None, lambda _: rows)


def _counted(found: Registry) -> str:
    counts = (
        (len(found.devices), "device"),
        (len(found.calibrations), "calibration"),
        (len(found.gateways), "gateway"),
    )
    return ", ".join(counted(count, what) for count, what in counts)
