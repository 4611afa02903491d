"""`sluice-cloud maintain` and `sluice-cloud devices delete`: remove data from the tables."""

from datetime import UTC

import click

from gateway.host.terminal import confirm, say
from gateway.host.terminal_text import counted, escaped
from spark.commands.cli_options import warehouse_option
from spark.commands.command_session import session
from spark.engine.warehouse_folder import only_writer


@click.command("maintain", short_help="Remove expired data, and files that nothing needs.")
@warehouse_option
@click.option(
    "--keep-days",
    type=click.FloatRange(0, 36_500),
    default=7.0,
    show_default=True,
    help="Days to keep files that no table needs any more. A query that runs for longer than this may fail.",
)
@click.option("--old-versions", is_flag=True, help="Remove the tables of all versions that readers do not see.")
def maintain_command(warehouse: str, keep_days: float, old_versions: bool) -> None:  # noqa: FBT001 - a flag
    """Remove data that is older than streams.toml keeps it, and files that no table needs any more.

    `ingest` does this once a day by itself, and merges small files as it goes. Stop `ingest` first.
    """
    spark = session("sluice-maintain")
    from spark.batch_job import BatchJob  # noqa: PLC0415
    from spark.log.warehouse_version import open_version  # noqa: PLC0415
    from spark.upkeep.table_upkeep import maintain, newest_day, remove_old_versions  # noqa: PLC0415

    open_version(spark, warehouse)
    with only_writer(warehouse):
        # First: if a replay died before it told `window_changes`, opening the job compares the versions and tells it.
        job = BatchJob(spark, warehouse)
        if old_versions:
            for number in remove_old_versions(spark, warehouse):
                say(f"removed v{number}")
        failed = maintain(job, newest_day(job), keep_days=keep_days, report=say)
        if failed:
            raise click.ClickException("\n".join([*failed, "all other tables are done"]))


@click.command("delete", short_help="Delete all that a device ever sent.")
@warehouse_option
@click.option("--namespace", required=True, help="Namespace of the device.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@click.option("--unheard", is_flag=True, help="Refuse a device's data although nothing of it is here yet.")
@click.argument("device")
def delete_device_command(warehouse: str, namespace: str, yes: bool, unheard: bool, device: str) -> None:  # noqa: FBT001 - flags
    """Delete all that a device ever sent, from every table. Nobody can bring it back. Stop `ingest` first.

    Kafka or a gateway may still hold data of the device. Such data is refused when it comes, and in a replay. Readings
    that are measured from now on are taken. Files on the disk are removed once nothing has needed them for a week. To
    remove them at once, run `sluice-cloud maintain --keep-days 0`.
    """
    spark = session("sluice-devices")
    from spark.upkeep.device_deletion import delete_device, is_known, rows_of_device  # noqa: PLC0415

    rows = rows_of_device(spark, warehouse, namespace, device)
    whose = f"{escaped(device)} in namespace {escaped(namespace)}"
    if not rows and not unheard and not is_known(spark, warehouse, namespace, device):
        raise click.ClickException(
            f"there is nothing of {whose} here: is the name right? To refuse what Kafka or a gateway still holds of "
            "it, add --unheard"
        )
    if not yes:
        delete = f"delete {counted(rows, 'record')} of {whose} for good, and " if rows else ""
        confirm(f"{delete}refuse all that {'it' if rows else whose} measured before now?", abort=True)
    with only_writer(warehouse):
        done = delete_device(spark, warehouse, namespace, device, report=lambda table: say(f"deleting from {table}"))
    until = f"{done.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    say(f"deleted: {counted(done.records, 'record')} of {whose}; readings from before {until} are refused from now on")
