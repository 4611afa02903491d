"""`sluice settings`: lists every setting with its default, bounds and purpose, as `settings.py` states them."""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo

from gateway import settings
from gateway.commands.options import FINDING, json_option
from gateway.host.terminal import say, say_json
from gateway.host.terminal_text import escaped, hanging
from gateway.settings import Settings
from gateway.toml_files.schema import sections_of, wanted
from gateway.toml_files.writer import value_text


class Setting(Struct, frozen=True):
    """One setting, described for a person."""

    section: str
    """Header of its section, such as `[kafka]` or `[[routes]]`; empty for a setting above all sections."""
    name: str
    takes: str
    default: str | None
    """Default as TOML; None if there is none. Then `needed` tells whether the setting must be given."""
    needed: bool
    about: str


class Section(Struct, frozen=True):
    """A section with its purpose and its settings."""

    header: str
    about: str
    settings: tuple[Setting, ...]


@click.command(
    "settings",
    short_help="Every setting of gateway.toml: default, bounds, purpose.",
    epilog="Example: sluice settings kafka",
)
@click.argument("words", metavar="[WORD]...", nargs=-1)
@json_option
def settings_command(words: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show every setting of gateway.toml, or only those that have each WORD in their section or name."""
    found = list(matching(tuple(sections()), [word.lower() for word in words]))
    if as_json:
        say_json([setting for section in found for setting in section.settings])
    elif not found:
        say(
            f"no setting has {' and '.join(map(escaped, words))} in its section or name; sluice settings shows them all"
        )
    else:
        for number, section in enumerate(found):
            if number:
                say()
            for bold, line in _lines(section):
                say(line, bold=bold)
    sys.exit(0 if found else FINDING)


def matching(all_sections: tuple[Section, ...], words: list[str]) -> Iterator[Section]:
    """Sections with those of their settings that have all words in their section or name."""
    for section in all_sections:
        kept = tuple(
            setting
            for setting in section.settings
            if all(word in f"{section.header} {setting.name}".lower() for word in words)
        )
        if kept:
            yield Section(section.header, section.about, kept)


def sections() -> Iterator[Section]:
    """Every section in the order of `settings.py`. A section's own sections follow it."""
    for header, struct, own in sections_of(Settings):
        about = _notes()[struct.__name__]
        if own:
            described = tuple(_setting(field, header, about.get(field.name, "")) for field in own)
            # A docstring begins with the header, which is told by itself.
            yield Section(header, about[""].removeprefix(f"`{header}`: "), described)


def _setting(field: FieldInfo, header: str, about: str) -> Setting:
    default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
    if isinstance(default, Path):
        default = str(default)
    if isinstance(default, tuple):
        default = list(default)
    written = None if default is None or default is NODEFAULT else value_text(default)
    return Setting(header, field.name, wanted(field.type), written, field.required, about)


@cache
def _notes() -> dict[str, dict[str, str]]:
    """Text below each setting in the source, by class and setting. The name "" has the docstring of the class."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        about = found[node.name] = {"": _plain(ast.get_docstring(node) or "")}
        for field, note in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(note, ast.Expr)
                and isinstance(note.value, ast.Constant)
                and isinstance(note.value.value, str)
            ):
                about[field.target.id] = _plain(note.value.value)
    return found


def _plain(text: str) -> str:
    return " ".join(text.split())


def _lines(section: Section) -> Iterator[tuple[int, str]]:
    """Lines of a section, each with the number of first characters that are bold."""
    header = section.header or "above all sections"
    yield len(header), hanging(f"{header}  {section.about}", 4)
    for setting in section.settings:
        without = "(needed)" if setting.needed else "(none)"
        value = without if setting.default is None else f"= {setting.default}"
        yield 0, hanging(f"  {setting.name} {value}", 4)
        for line in (setting.takes, setting.about):
            if line:
                yield 0, hanging(f"      {line}", 6)
