"""Packs an image, and writes beside it what its users need: digest, signature, SBOM, Raspberry Pi Imager's manifest."""

import hashlib
import json
import lzma
import shutil
from dataclasses import dataclass
from pathlib import Path

from systemd import deb_documents, deb_signing

MANIFEST = "sluice.rpi-imager-manifest"
BOARDS = {
    "Raspberry Pi 4, 400, CM4": "pi4-64bit",
    "Raspberry Pi 3, 3+, CM3": "pi3-64bit",
    "Raspberry Pi Zero 2 W": "pi3-64bit",
}
"""Boards for Raspberry Pi Imager's first question, each with Imager's own tag."""
ICON = "icons/use_custom.png"
"""One of Imager's own, so that it has nothing to fetch."""
_XZ_PRESET = 1
"""Higher ones take minutes for a tenth less."""


@dataclass(frozen=True, slots=True)
class Edition:
    """What is told of an image."""

    version: str
    epoch_s: int
    private_key: Path
    sbom: str
    folder_url: str | None = None
    """Address of the folder that it will be fetched from. Without one it is where it was made."""


def publish(raw: Path, edition: Edition) -> Path:
    """Replace a raw image by its packed form, and write the files beside it. Returns the packed image."""
    packed = raw.with_name(f"{raw.name}.xz")
    with raw.open("rb") as source, lzma.open(packed, "wb", preset=_XZ_PRESET) as target:
        shutil.copyfileobj(source, target, 1 << 20)
    (raw.parent / MANIFEST).write_text(manifest(raw, packed, edition))
    packed.with_name(f"{packed.name}.sha256").write_text(f"{_sha256(packed)}  {packed.name}\n")
    packed.with_name(f"{packed.name}.cdx.json").write_text(edition.sbom)
    deb_signing.sign(packed, edition.private_key)
    raw.unlink()
    return packed


def manifest(raw: Path, packed: Path, edition: Edition) -> str:
    """Describe an image to Raspberry Pi Imager, which offers its dialog for no other image of one's own.

    The format is Imager's os_list (doc/json-schema in its repository). It resolves no relative address.
    """
    url = packed.resolve().as_uri() if edition.folder_url is None else f"{edition.folder_url.rstrip('/')}/{packed.name}"
    system = {
        "name": f"Sluice {edition.version}",
        "description": "Edge gateway: MQTT and serial in, Kafka out",
        "icon": ICON,
        "url": url,
        "release_date": f"{deb_documents.at(edition.epoch_s):%Y-%m-%d}",
        "extract_size": raw.stat().st_size,
        "extract_sha256": _sha256(raw),
        "image_download_size": packed.stat().st_size,
        "image_download_sha256": _sha256(packed),
        "devices": sorted(set(BOARDS.values())),
        "architecture": "armv8",
        # Imager 1.x knows this one, and drops none of it in 2.x.
        "init_format": "cloudinit",
    }
    boards = [
        {"name": name, "description": "", "tags": [tag], "matching_type": "exclusive"} for name, tag in BOARDS.items()
    ]
    return json.dumps({"imager": {"devices": boards}, "os_list": [system]}, indent=1) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
