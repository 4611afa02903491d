"""Pages that follow from the code: `make docs` writes `docs/settings.md` and `docs/commands.md`."""

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from gateway.cli import main as sluice
from gateway.commands.settings_command import Section, Setting, sections
from gateway.settings import DEFAULT_CONFIG
from spark.cli import main as sluice_cloud

DOCS = Path(__file__).parents[2] / "docs"

_SETTINGS = """\
# Settings

Every setting of `gateway.toml`, for installers. On the box, `sluice settings WORD` shows those of your version.
This page is made from `gateway/settings.py` by `make docs`: edit that file.

The page for installers has [an example of a whole file](install.md#the-settings). A wrong setting is answered with
its line and the correction. After a change run `sudo sluice check` and `sudo systemctl restart sluice`.
"""

_COMMANDS = f"""\
# Commands

Every command of `sluice` (on the gateway) and `sluice-cloud` (beside the tables), with its options.
This page is made from the commands' own `--help` by `make docs`: edit their docstrings.

`sluice` reads `{DEFAULT_CONFIG}`, or the file that `--config PATH` names. Every `sluice-cloud` command but
`registry check` needs `--warehouse PATH`, and `peek` may have it. Listings take `--json`.

Look-ups of `sluice-cloud` also take `--csv`, `--out FILE` (it ends in .csv or .parquet) and `--zone ZONE` (such as
Europe/Berlin, for the times that are shown and for those of `--since` and `--until`). `sluice-cloud` ends with 0 if it
did its work, with 2 for wrong usage, and with 3 if it failed.
"""

_COMMON = {"--help", "--version", "--config", "--json", "--warehouse", "--csv", "--out", "--zone"}
"""Options that many commands have: the page's beginning tells of them once."""


def settings_page() -> str:
    """Every section of `gateway.toml` and its settings, as Markdown."""
    return "\n".join([_SETTINGS, *(_section(section) for section in sections())])


def _section(section: Section) -> str:
    title = f"`{section.header}`" if section.header else "Above all sections"
    about = _filled(section.about[:1].upper() + section.about[1:])
    return "\n".join([f"## {title}", about, "", *map(_setting, section.settings), ""])


def _setting(setting: Setting) -> str:
    if setting.needed:
        default = "needed"
    elif setting.default is None:
        default = "no default"
    else:
        default = f"default `{setting.default}`"
    about = f" {setting.about}" if setting.about else ""
    return _filled(f"- **`{setting.name}`** ({default}; {setting.takes}).{about}", "  ")


def commands_page() -> str:
    """Every command, with what its `--help` says, as Markdown."""
    parts = [_COMMANDS]
    for name, group in (("sluice", sluice), ("sluice-cloud", sluice_cloud)):
        parts.append(f"## {name}\n\n{_help(group)}\n")
        parts.extend(_command(" ".join(path), command) for path, command in commands(group, name))
    return "\n".join(parts)


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


def _command(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    lines = [f"### `{' '.join([path, *usage])}`", "", _help(command), ""]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None and not _COMMON & set(parameter.opts):
            lines.append(_filled(f"- `{record[0]}`: {record[1]}", "  "))
    return "\n".join(lines).rstrip() + "\n"


def _help(command: click.Command) -> str:
    """The paragraphs of a command's help; what click does not wrap stays as it stands."""
    parts = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        kept = paragraph.removeprefix("\b\n")
        parts.append(_filled(paragraph) if kept == paragraph else f"```\n{kept}\n```")
    return "\n\n".join(parts)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings_page())
    (DOCS / "commands.md").write_text(commands_page())
