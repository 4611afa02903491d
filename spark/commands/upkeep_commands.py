"""`sluice-cloud maintain` and `devices delete`: what is removed from the tables, and what for."""

from datetime import UTC
from typing import TYPE_CHECKING

import click

from gateway.host.terminal import confirm, say
from gateway.host.terminal_text import escaped
from spark.commands.cli_options import opened, warehouse_option, writing_alone
from spark.commands.command_session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@click.command("maintain", short_help="Remove what is older than it is kept, and unneeded files.")
@warehouse_option
@click.option(
    "--keep-days",
    type=click.FloatRange(0, 36_500),
    default=7.0,
    show_default=True,
    help="Days for which files stay that no table needs any more. With fewer than what the longest query takes, that "
    "query may fail.",
)
@click.option("--old-versions", is_flag=True, help="Remove what replays left: the tables of all earlier versions.")
def maintain_command(warehouse: str, keep_days: float, old_versions: bool) -> None:  # noqa: FBT001 - a flag
    """Remove what is older than streams.toml keeps it, and files that no table needs any more.

    `ingest` does this by itself once a day, and makes small files one as it goes. It must not run meanwhile.
    """
    spark = session("sluice-maintain")
    from spark.batch_job import BatchJob  # noqa: PLC0415
    from spark.log.warehouse_version import open_version  # noqa: PLC0415
    from spark.upkeep.table_upkeep import (  # noqa: PLC0415
        maintain,
        newest_day,
        remove_old_versions,
    )

    opened(spark, warehouse, open_version)
    with writing_alone(warehouse):
        # First: what a replay that died has not told yet is told by comparing the versions.
        job = BatchJob(spark, warehouse)
        if old_versions:
            for number in remove_old_versions(spark, warehouse):
                say(f"v{number} is removed")
        failed = maintain(job, newest_day(job), keep_days=keep_days, report=say)
        if failed:
            raise click.ClickException("\n".join([*failed, "the other tables are done"]))


@click.command("delete", short_help="Delete all that a device ever sent.")
@warehouse_option
@click.option("--namespace", required=True, help="The namespace that the device is in.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--unheard", is_flag=True, help="Also where nothing of it is here yet: refuse what comes.")
@click.argument("device")
def delete_device_command(warehouse: str, namespace: str, yes: bool, unheard: bool, device: str) -> None:  # noqa: FBT001 - flags
    """Delete all that a device ever sent, from every table; nobody can bring it back.

    What Kafka or a gateway still holds of it is refused when it comes, and so it is by a replay. What the device
    measures from now on is taken. `ingest` must not run meanwhile. Files that hold its data are removed from the disk
    when nothing has needed them for a week, or by `sluice-cloud maintain --keep-days 0` at once.
    """
    spark = session("sluice-devices")
    from spark.upkeep.device_deletion import (  # noqa: PLC0415
        delete_device,
        is_known,
        rows_of_device,
    )

    def counted(spark: "SparkSession", warehouse: str) -> int:
        return rows_of_device(spark, warehouse, namespace, device)

    rows = opened(spark, warehouse, counted)
    whose = f"{escaped(device)} in namespace {escaped(namespace)}"
    if not rows and not unheard and not is_known(spark, warehouse, namespace, device):
        raise click.ClickException(
            f"there is nothing of {whose} here: is the name right? With --unheard, what Kafka or a gateway still holds "
            "of it is refused when it comes"
        )
    if not yes:
        what = f"delete {rows} records of {whose} for good" if rows else f"refuse all of {whose}"
        confirm(f"{what}, and what comes later of before now?", abort=True)
    with writing_alone(warehouse):
        done = delete_device(spark, warehouse, namespace, device, report=lambda table: say(f"deleted from {table}"))
    until = f"{done.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    say(f"{done.records} records of {whose} are deleted; what it measured before {until} is refused from now on")
