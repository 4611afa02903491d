"""`sluice-cloud`: the commands of the cloud side."""

import os
import signal
import sys
from typing import Any

import click

from gateway.host.terminal import SpeakingGroup, say
from spark.commands.catalog_command import catalog
from spark.commands.desk_command import desk
from spark.commands.device_command import command as device_command
from spark.commands.explain_command import explain
from spark.commands.failure_words import TOLD, known, told_failure, unforeseen
from spark.commands.fleet_commands import fleet
from spark.commands.ingest_command import ingest
from spark.commands.peek_command import peek
from spark.commands.publish_command import publish
from spark.commands.registry_commands import devices, registry
from spark.commands.replay_command import replay_command
from spark.commands.report_command import report
from spark.commands.table_commands import gaps, gateways, losses, quarantine, readings, sql, windows
from spark.commands.upkeep_commands import delete_device_command, maintain_command
from spark.engine.told_error import ToldError
from spark.engine.warehouse_folder import MomentsError

FAILED = 3
"""Exit code of a command that failed. 1 is for findings that a command's help tells of, and 2 for wrong usage."""
BY_SIGNAL = 128
"""Added to a signal's number, this is the exit code of a command that the signal ends, as shells say it."""


class _Commands(SpeakingGroup):
    """A group that turns the failures of any command into messages."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._in_words(ctx)
        except click.ClickException as error:
            if not isinstance(error, click.UsageError):
                # Only this error is changed: its class has the exit code of other programs.
                error.exit_code = FAILED  # type: ignore[misc]
            raise
        except (KeyboardInterrupt, click.Abort):
            say("\nstopped", err=True)
            raise click.exceptions.Exit(BY_SIGNAL + signal.SIGINT) from None
        except BrokenPipeError:
            # Whoever read the rows wants no more. Python would flush the rest at its end, and print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BY_SIGNAL + signal.SIGPIPE) from None

    def _in_words(self, ctx: click.Context) -> Any:
        with self.harmless_errors():
            try:
                return super().invoke(ctx)
            except ToldError as error:
                kind = click.UsageError if error.is_usage else click.ClickException
                raise kind(str(error)) from error
            except MomentsError as error:
                raise click.ClickException(
                    f"{error}. Start `sluice-cloud ingest`, which does that first, or run `sluice-cloud replay`"
                ) from error
            except Exception as error:
                if isinstance(error, (*TOLD, BrokenPipeError)):
                    raise
                raise (told_failure(error, known(ctx)) or unforeseen(error, known(ctx))) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sluice", message="sluice-cloud %(version)s")
def main() -> None:
    """The cloud side of Sluice. It turns Kafka's records into Delta tables that can be trusted."""


for command in (
    ingest,
    readings,
    windows,
    gaps,
    losses,
    gateways,
    fleet,
    explain,
    report,
    quarantine,
    sql,
    desk,
    publish,
    peek,
    device_command,
    catalog,
    replay_command,
    maintain_command,
    devices,
    registry,
):
    main.add_command(command)
devices.add_command(delete_device_command)


if __name__ == "__main__":
    main()
