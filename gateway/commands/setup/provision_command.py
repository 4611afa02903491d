"""The command `sluice provision`: sets the gateway up from files on the boot partition or on a stick."""

import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gateway.commands.options import FINDING, config_option
from gateway.commands.setup.provision import BOOT_FOLDERS, Provisioned, is_asked, provision
from gateway.commands.setup.setup_command import written_lines
from gateway.host import service
from gateway.host.terminal import say
from gateway.host.usb_sticks import MediumError, make_writable, mounted, sticks

_NOTHING = "no sluice.toml was found: there is nothing to do"


@click.command(
    name="provision",
    short_help="Take in sluice.toml from the boot partition or a stick.",
    epilog="Example: sluice provision /media/stick",
)
@config_option
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, metavar="[FOLDER]...")
def provision_command(config: Path, folders: tuple[Path, ...]) -> None:
    """Set this gateway up from the files sluice.toml and sluice-secrets.toml.

    sluice setup --example-answers prints an example of sluice.toml. The files are looked for in each FOLDER. Without a
    FOLDER they are looked for on the boot partition and, until this gateway is set up, on USB sticks. Once it is set
    up, a stick that somebody plugs in changes nothing.

    The answers are taken in once. Then sluice.toml is renamed sluice.toml.done, and the secrets are overwritten and
    removed. sluice-report.txt, beside sluice.toml, says what was set. If something is wrong, nothing is changed, and
    the report says what to correct.

    The exit code is 1 if something was found and not taken in.
    """
    config = config.absolute()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for folder in folders:
        if not folder.is_dir():
            raise click.UsageError(f"{folder} is no folder; name the folder that sluice.toml is in")
    done = [outcome for outcome in _outcomes(config, folders) if outcome.taken is not None or outcome.trouble]
    for outcome in done:
        _tell(outcome)
    if not done:
        say(_NOTHING)
    if any(outcome.starts for outcome in done) and service.is_there(config) and service.may_be_changed():
        try:
            # Do not wait: at boot this command itself runs before the service.
            service.start(wait=False)
        except service.ServiceError as error:
            raise click.ClickException(str(error)) from error
    sys.exit(FINDING if any(outcome.trouble for outcome in done) else 0)


def _outcomes(config: Path, folders: Sequence[Path]) -> Iterator[Provisioned]:
    yield from (provision(folder, config) for folder in folders or BOOT_FOLDERS)
    if folders or config.exists():
        return
    for name in sticks():
        try:
            with mounted(name) as folder:
                if is_asked(folder):
                    make_writable(folder)
                    yield provision(folder, config)
        except MediumError as error:
            yield Provisioned(Path("/dev", name), None, str(error))
        if config.exists():
            return


def _tell(outcome: Provisioned) -> None:
    """Print an outcome for the journal: lines are not wrapped, and hold no secret."""
    if outcome.trouble:
        say(outcome.trouble, err=True)
    if outcome.taken is not None:
        gateway = outcome.taken.made.settings.gateway
        say(f"set up from {outcome.folder}: {gateway.namespace}/{gateway.id}")
        for line in written_lines(outcome.taken):
            say(line)
