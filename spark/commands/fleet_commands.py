"""`sluice-cloud fleet`: checks and signs the file that says what gateways are to have, and shows who has it."""

import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from msgspec.structs import replace

from gateway import fleet_file
from gateway.fleet_file import Fleet, Group
from gateway.host.terminal import say
from gateway.host.terminal_text import counted
from gateway.toml_files.mistakes import ConfigError, Place, lines_of
from spark.commands.answers import Form, beside, print_relation, replaced
from spark.commands.asked_options import asks
from spark.commands.cli_options import warehouse_option
from spark.commands.desk_session import asking
from spark.desk.asked import Asked

if TYPE_CHECKING:
    from spark.desk.fleet_standing import Standing

FINDING: Final = 1
WHOLE: Final = 100
"""Share in per cent that has all of a group."""
SIGNATURE_BYTES: Final = 64
"""Length of an Ed25519 signature (RFC 8032)."""
_file = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def fleet() -> None:
    """Check, sign and follow fleet.toml: which version and settings gateways are to have."""


@fleet.command(
    short_help="Check fleet.toml. Nothing is changed.", epilog="Example: sluice-cloud fleet check fleet.toml"
)
@_file
def check(file: Path) -> None:
    """Check a fleet's file. Each mistake is told with its line, and the exit code is 1 then.

    Names and values of settings are checked as this version has them. Whether they go together with the others of a
    gateway is checked there, before they are tried.
    """
    found = _loaded(file)
    say(f"serial {found.serial}: {counted(len(found.groups), 'group')}")
    for group in found.groups:
        wanted = [f"version {group.version}"] if group.version is not None else []
        wanted += [f"settings in {', '.join(group.settings)}"] if group.settings else []
        hours = "" if group.hours is None else f", {group.hours} UTC"
        say(f"{group.name}: {' and '.join(wanted)}, for {group.share} per cent of {', '.join(group.gateways)}{hours}")


@fleet.command(
    short_help="Sign fleet.toml by the key that signs updates.",
    epilog="Example: sluice-cloud fleet sign fleet.toml release.key",
)
@_file
@click.argument("key", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def sign(file: Path, key: Path) -> None:
    """Sign a fleet's file by an Ed25519 key, and write the signature beside it as FILE.sig.

    A file with mistakes is not signed. Put both files into the folder together.
    """
    _loaded(file)
    signature = file.with_name(f"{file.name}.sig")
    with replaced(signature) as part:
        command = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(key), "-in", str(file), "-out", str(part)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - words of our own
        except FileNotFoundError:
            raise click.ClickException("there is no `openssl` on this machine: sudo apt install openssl") from None
        if ended.returncode or part.stat().st_size != SIGNATURE_BYTES:
            told = " ".join(ended.stderr.split()) or "its signatures have another length"
            raise click.ClickException(f"{key} is no Ed25519 key that signs updates: {told}")
    say(f"signed: {signature}")


@fleet.command(
    short_help="Show which gateways have what fleet.toml wants.",
    epilog="Example: sluice-cloud fleet status fleet.toml --warehouse tables",
)
@_file
@warehouse_option
@asks()
def status(file: Path, warehouse: str, asked: Asked, form: Form) -> None:  # noqa: ARG001 - it has no limits
    """Show how each gateway of a fleet's file stands to it, by the state that the gateway told last.

    `good` has what the file wants. `went-back` tried it and gave it up, and `refused` could not try it. `waits` is not
    within its hours. `not-drawn` is not in the group's share. `unseen` has not taken in this file. `silent` is not
    heard any more. Of `unknown` the tables have nothing. The exit code is 1 if a gateway went back or refused.
    """
    found = _loaded(file)
    with asking(warehouse) as tables:
        from spark.desk.fleet_standing import COLUMNS, TROUBLES, standings  # noqa: PLC0415 - as `asking` says

        told = standings(found, tables.evidence())
        rows = tables.source.db.sql(f"SELECT * FROM ({tables.source.values(COLUMNS, told)})")
        print_relation(tables.source.db, rows, form, spare=("namespace", "group", "wanted"))
    counts = Counter((each.group, each.standing) for each in told)
    for group in found.groups:
        of_group = [f"{count} {standing}" for (name, standing), count in sorted(counts.items()) if name == group.name]
        beside(f"{group.name}: {', '.join(of_group) or 'no gateway'}")
    if any(each.standing in TROUBLES for each in told):
        raise click.exceptions.Exit(FINDING)


@fleet.command(
    "raise",
    short_help="Raise the share of each group that is well so far.",
    epilog="Example: sluice-cloud fleet raise fleet.toml --warehouse tables",
)
@_file
@warehouse_option
@click.option("--by", type=click.IntRange(1, 100), default=10, show_default=True, help="Per cent of the group.")
def raise_share(file: Path, warehouse: str, by: int) -> None:
    """Raise the share of each group if every gateway in its present share is good.

    The serial number is raised too. Sign the file then, and put both files into the folder. A group that still waits
    for a gateway keeps its share. A group without a gateway in its share gets the share that has one. A share of 0
    stays, for it is somebody's will.

    If any gateway went back or refused, nothing is raised, and the exit code is 1. So a roll-out whose next steps a
    timer takes stops by itself. The exit code is 1 too if the tables are old.
    """
    found = _loaded(file)
    with asking(warehouse) as tables:
        from spark.desk.fleet_standing import TROUBLES, standings  # noqa: PLC0415 - as `asking` says
        from spark.finality.gateway_troubles import heard_us, is_old  # noqa: PLC0415 - as `asking` says

        evidence = tables.evidence()
        told = standings(found, evidence)
    stopped = [each for each in told if each.standing in TROUBLES]
    for each in stopped:
        say(f"{each.group}: {each.name} {each.standing}{f': {each.reason}' if each.reason else ''}", err=True)
    if stopped:
        why = f"{counted(len(stopped), 'gateway')} did not take what {file} wants"
    elif is_old(heard_us(evidence.states), time.time_ns() // 1_000):
        why = "the tables have heard of no gateway lately; does ingest run?"
    else:
        why = ""
    if why:
        say(f"no share is raised: {why}", err=True)
        raise click.exceptions.Exit(FINDING)
    shares = {}
    for number, group in enumerate(found.groups):
        share, words = _next_share(group, [each for each in told if each.group == group.name], by)
        say(f"{group.name}: {words}")
        if share != group.share:
            shares[number] = share
    if shares:
        _write_shares(file, found, shares)
        say(f"{file} has the serial number {found.serial + 1} now: sign it, and put both files into the folder")


def _next_share(group: Group, told: "Sequence[Standing]", by: int) -> tuple[int, str]:
    """The next share of a group in per cent, and words for it."""
    waits_for = [each for each in told if group.is_drawn(each.name) and each.standing != "good"]
    if waits_for:
        first, more = waits_for[0], f" and {len(waits_for) - 1} more" if len(waits_for) > 1 else ""
        return group.share, f"{group.share} per cent until these are good: {first.name} ({first.standing}){more}"
    if not told:
        return group.share, f"it stays at {group.share} per cent, for the tables know no gateway of it"
    if group.share == WHOLE:
        return group.share, "all of its gateways have it"
    if not group.share:
        return group.share, "it stays at 0 per cent; begin by hand"
    first_share = min(group.draw(each.name) for each in told) + 1
    share = min(group.share + by, WHOLE) if first_share <= group.share else first_share
    return share, f"from {group.share} to {share} per cent"


def _write_shares(file: Path, before: Fleet, shares: Mapping[int, int]) -> None:
    """Write shares by the number of their group, and the next serial number. All else stays as it was written."""
    text = file.read_text(encoding="utf-8-sig")
    lines, places = text.split("\n"), lines_of(text)
    numbers: dict[Place, int] = {("groups", number, "share"): share for number, share in shares.items()}
    for place, number in {("serial",): before.serial + 1, **numbers}.items():
        if place in places:
            line = places[place] - 1
            lines[line] = re.sub(r"(=\s*)[^\s#]+", rf"\g<1>{number}", lines[line], count=1)
    groups = tuple(replace(group, share=shares.get(at, group.share)) for at, group in enumerate(before.groups))
    text = "\n".join(lines)
    try:
        is_well = fleet_file.parse(text, file) == replace(before, serial=before.serial + 1, groups=groups)
    except ConfigError:
        is_well = False
    if not is_well:
        raise click.ClickException(f"{file} is written in a form that this command does not change: raise it by hand")
    with replaced(file) as part:
        part.write_text(text, encoding="utf-8")


def _loaded(file: Path) -> Fleet:
    """Read a file. If it has mistakes, print them, and end with FINDING."""
    try:
        return fleet_file.load_known(file)
    except ConfigError as error:
        say(str(error), err=True)
        raise click.exceptions.Exit(FINDING) from error
