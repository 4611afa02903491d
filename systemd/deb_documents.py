"""Writes the documents of a .deb: man pages, shell completion, licences, the list of packages inside (SBOM)."""

import gzip
import hashlib
import inspect
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from click_man.man import ManPage
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/sluice",
    "zsh": "usr/share/zsh/vendor-completions/_sluice",
    "fish": "usr/share/fish/vendor_completions.d/sluice.fish",
}
_LICENCE = re.compile(r"licen[cs]e|copying|notice|authors|e[dp]l-v", re.IGNORECASE)
_NAMESPACE = uuid.UUID("6f0b3a52-5b0f-4c0e-9c80-3f1e7f0a8f0d")
"""Random. The SBOM's serial number follows from it and from the packages inside, so that equal builds have one."""


@dataclass(frozen=True, slots=True)
class Inside:
    """A package inside the .deb."""

    name: str
    version: str
    sha256: str
    """Digest of its wheel."""
    licence: str
    """Licence as the package itself names it."""
    licence_files: tuple[Path, ...]


def read_inside(wheel: Path, library: Path) -> Inside:
    """Read what an unpacked wheel says of itself. Raises FileNotFoundError if it is not unpacked in `library`."""
    prefix = "-".join(wheel.name.split("-")[:2])
    folder = library / f"{prefix}.dist-info"
    told = HeaderParser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _LICENCE.search(path.name))
    return Inside(
        told["Name"], told["Version"], hashlib.sha256(wheel.read_bytes()).hexdigest(), _licence(told), tuple(files)
    )


def _licence(told: Message) -> str:
    named = told["License-Expression"] or told["License"] or ""
    classified = (line.rpartition("::")[2].strip() for line in told.get_all("Classifier", []) if "License ::" in line)
    # Some packages put the whole text there.
    short = named if named and "\n" not in named and len(named) < 80 else ""
    return short or next(classified, "") or "see its licence files"


def write_licences(inside: Iterable[Inside], folder: Path) -> None:
    """Copy each package's licence files to a folder of its own in `folder`."""
    for package in inside:
        for path in package.licence_files:
            place = folder / package.name.lower() / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def copyright_text(inside: Sequence[Inside]) -> str:
    """Write `debian/copyright`: this project's licence, and where those of the packages inside stand."""
    ours = (
        "Files: *\nCopyright: the Sluice maintainers\nLicense: Apache-2.0\n"
        " On Debian systems the full text of the Apache License 2.0 is in /usr/share/common-licenses/Apache-2.0."
    )
    form = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: sluice"
    paragraphs = [form, ours]
    for package in inside:
        place = (
            f"The full text is in /usr/share/doc/sluice-gateway/licenses/{package.name.lower()}/."
            if package.licence_files
            else "The package comes without the licence's text."
        )
        short = re.sub(r"[^A-Za-z0-9.+-]+", "-", package.licence).strip("-")
        paragraphs.append(
            f"Files: usr/lib/sluice/{package.name.lower().replace('-', '_')}*\n"
            f"Copyright: the authors of {package.name} {package.version}\n"
            f"License: {short}\n {package.licence}. {place}"
        )
    return "\n\n".join(paragraphs) + "\n"


def sbom(name: str, version: str, inside: Sequence[Inside], made: datetime) -> str:
    """List the packages inside as CycloneDX 1.6 in JSON. Equal packages, version and time give equal text."""
    licences = LicenseFactory()

    def component(package: Inside) -> Component:
        return Component(
            name=package.name,
            version=package.version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{package.name}@{package.version}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)],
            licenses=[licences.make_from_string(package.licence)],
            purl=PackageURL("pypi", name=package.name.lower(), version=package.version),
        )

    whole = Component(
        name=name,
        version=version,
        type=ComponentType.APPLICATION,
        bom_ref=f"{name}@{version}",
        licenses=[licences.make_from_string("Apache-2.0")],
        purl=PackageURL("deb", name=name, version=version),
    )
    return bom_text(whole, [component(package) for package in inside], made)


def bom_text(whole: Component, components: Sequence[Component], made: datetime) -> str:
    """Write a list of what a whole is made of."""
    told = [f"{found.bom_ref} {' '.join(digest.content for digest in found.hashes)}" for found in (whole, *components)]
    bom = Bom(components=components, serial_number=uuid.uuid5(_NAMESPACE, "\n".join(told)))
    bom.metadata.component = whole
    bom.metadata.timestamp = made
    bom.register_dependency(whole, components)
    return str(JsonV1Dot6(bom).output_as_string(indent=1)) + "\n"


def write_man_pages(command: click.Command, version: str, made: datetime, folder: Path) -> None:
    """Write a man page of `sluice`, and one of each of its commands, compressed, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_man_page(click.Context(command, info_name="sluice", **command.context_settings), version, made, folder)


def _write_man_page(context: click.Context, version: str, made: datetime, folder: Path) -> None:
    command = context.command
    page = ManPage(context.command_path)
    page.version, page.date = version, f"{made:%Y-%m-%d}"
    page.short_help = _roff(command.get_short_help_str(200))
    page.synopsis = " ".join(command.collect_usage_pieces(context))
    page.description = _roff(inspect.cleandoc(command.help or ""))
    for parameter in command.get_params(context):
        told = parameter.get_help_record(context)
        # A hidden option has no help; an argument stands in the synopsis.
        if isinstance(parameter, click.Option) and told is not None:
            # click-man escapes the option's names itself.
            page.options.append((told[0], _roff(told[1])))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                page.commands.append((name, _roff(found.get_short_help_str(60))))
                _write_man_page(click.Context(found, info_name=name, parent=context), version, made, folder)
    text = str(page)
    if command.epilog:
        text += f".SH EXAMPLE\n.nf\n{_roff(command.epilog.removeprefix('Example: '))}\n.fi\n"
    path = folder / f"{context.command_path.replace(' ', '-')}.1"
    path.write_text(text)
    compress(path)


def _roff(text: str) -> str:
    """Escape text for roff: no line begins with a request, no backslash begins an escape."""
    # click puts \b on a line of its own before a paragraph that is not wrapped.
    plain = text.replace("\b\n", "").replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^(?=[.'])", r"\\&", plain)


def write_completions(command: click.Command, root: Path) -> None:
    """Write completions of `sluice` for bash, zsh and fish, where Debian's shells look for them below `root`."""
    for shell, place in _COMPLETIONS.items():
        kind = get_completion_class(shell)
        if kind is None:
            raise LookupError(f"click has no completion for {shell}")
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kind(command, {}, "sluice", "_SLUICE_COMPLETE").source() + "\n")


def compress(path: Path) -> None:
    """Replace a file by its gzip, which has no time and no name in it."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    path.unlink()


def at(epoch_s: int) -> datetime:
    """Return the moment of a number of seconds since 1970."""
    return datetime.fromtimestamp(epoch_s, UTC)
