"""Lists what an image is made of (SBOM): Debian's packages in its root and on its boot partition, and our own."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from packageurl import PackageURL

from systemd import build_deb, deb_documents

_FIELDS = ("Package", "Version", "Architecture", "Source")
_FORMAT = "${Package}\t${Version}\t${Architecture}\t${source:Package} (${source:Version})\t${db:Status-Status}\n"


def sbom(root: Path, boot_packages: Sequence[Path], version: str, made: datetime) -> str:
    """List the packages of a root, and these .deb files, as CycloneDX 1.6 in JSON.

    Scanners match Debian's packages by their source, which stands in each `purl` as `upstream`.
    """
    whole = Component(
        name="sluice-image",
        version=version,
        type=ComponentType.OPERATING_SYSTEM,
        bom_ref=f"sluice-image@{version}",
    )
    found = {component.bom_ref.value: component for component in (*_installed(root), *map(_unpacked, boot_packages))}
    ours = json.loads((root / build_deb.DOCUMENTS / "sbom.cdx.json").read_text())
    parsed: Bom = Bom.from_json(ours)  # type: ignore[attr-defined] # serialisation is added by a decorator
    components = [*found.values(), *parsed.components]
    return deb_documents.bom_text(whole, sorted(components, key=lambda one: str(one.bom_ref)), made)


def _installed(root: Path) -> Iterator[Component]:
    command = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", f"--showformat={_FORMAT}"]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        name, version, architecture, source, status = line.split("\t")
        if status == "installed":
            yield _component(name, version, architecture, source)


def _unpacked(package: Path) -> Component:
    command = ["dpkg-deb", "--field", str(package), *_FIELDS]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = dict(line.split(": ", 1) for line in told)
    return _component(fields["Package"], fields["Version"], fields["Architecture"], fields.get("Source", ""))


def _component(name: str, version: str, architecture: str, source: str) -> Component:
    """One of Debian's packages. Its source is `NAME (VERSION)`, without what is as in the package."""
    source_name, _, source_version = source.partition(" (")
    upstream = f"{source_name or name}@{source_version.rstrip(')') or version}"
    purl = PackageURL("deb", "debian", name, version, {"arch": architecture, "upstream": upstream})
    return Component(
        name=name, version=version, type=ComponentType.LIBRARY, bom_ref=f"{name}:{architecture}@{version}", purl=purl
    )
