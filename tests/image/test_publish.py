"""What lies beside an image says the truth of it."""

import json
import lzma
import subprocess
import urllib.parse
from pathlib import Path

import pytest
from cyclonedx.model.bom import Bom

from gateway.commands.update.update_command import verify
from image import packages_inside, publish
from image.publish import Edition
from systemd import build_deb, deb_documents, deb_signing

RAW = b"a partition table" + bytes(300_000) + bytes(range(256)) * 100
EPOCH_S = 1_790_000_000
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: arm64
Source: glibc
Version: 2.41-12

Package: sluice-gateway
Status: install ok installed
Architecture: arm64
Version: 1.2.0~deb13

Package: tzdata
Status: deinstall ok config-files
Architecture: all
Version: 2025b-4
"""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "release.key"
    deb_signing.make_key(path)
    return path


def published(folder: Path, key: Path, folder_url: str | None = None) -> Path:
    raw = folder / "sluice-1.2.0-arm64.img"
    raw.write_bytes(RAW)
    packed = publish.publish(raw, Edition("1.2.0", EPOCH_S, key, "{}\n", folder_url))
    assert not raw.exists()
    return packed


def test_the_packed_image_has_its_digest_and_the_signature_that_updates_have(tmp_path: Path, key: Path) -> None:
    packed = published(tmp_path, key)
    assert lzma.decompress(packed.read_bytes()) == RAW
    subprocess.run(["sha256sum", "--check", "--strict", f"{packed.name}.sha256"], cwd=tmp_path, check=True)
    public = tmp_path / "release.pem"
    public.write_text(deb_signing.public_key(key))
    verify(packed, packed.with_name(f"{packed.name}.sig").read_bytes(), [public])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "release.pem",
        "sluice-1.2.0-arm64.img.xz",
        *(f"sluice-1.2.0-arm64.img.xz.{suffix}" for suffix in ("cdx.json", "sha256", "sig")),
        "sluice.rpi-imager-manifest",
    ]


def test_imagers_manifest_names_the_image_by_a_whole_address_with_its_sizes_and_digests(
    tmp_path: Path, key: Path
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    packed = published(folder, key)
    told = json.loads((folder / publish.MANIFEST).read_text())
    (entry,) = told["os_list"]
    address = urllib.parse.urlsplit(entry["url"])
    assert (address.scheme, Path(urllib.parse.unquote(address.path))) == ("file", packed)
    sums = subprocess.run(["sha256sum", "-", packed], input=RAW, capture_output=True, check=True).stdout.split()
    assert entry["extract_sha256"] == sums[0].decode()
    assert entry["image_download_sha256"] == sums[2].decode()
    assert (entry["extract_size"], entry["image_download_size"]) == (len(RAW), packed.stat().st_size)
    assert (entry["init_format"], entry["release_date"]) == ("cloudinit", "2026-09-21")
    # Imager shows an image only for boards whose tags it has.
    assert {tag for board in told["imager"]["devices"] for tag in board["tags"]} == set(entry["devices"])


def test_imagers_manifest_names_the_folder_that_the_image_is_fetched_from(tmp_path: Path, key: Path) -> None:
    published(tmp_path, key, "https://example.com/sluice/")
    (entry,) = json.loads((tmp_path / publish.MANIFEST).read_text())["os_list"]
    assert entry["url"] == "https://example.com/sluice/sluice-1.2.0-arm64.img.xz"


def make_root(folder: Path) -> Path:
    """A root as far as the list of packages looks at it."""
    dpkg, documents = folder / "var/lib/dpkg", folder / build_deb.DOCUMENTS
    for made in (dpkg / "info", dpkg / "updates", documents):
        made.mkdir(parents=True)
    (dpkg / "status").write_text(STATUS)
    inside = [deb_documents.Inside("msgspec", "0.20.0", "ab" * 32, "BSD-3-Clause", ())]
    (documents / "sbom.cdx.json").write_text(
        deb_documents.sbom("sluice-gateway", "1.2.0", inside, deb_documents.at(EPOCH_S))
    )
    return folder


def make_package(folder: Path) -> Path:
    control = folder / "package/DEBIAN/control"
    control.parent.mkdir(parents=True)
    control.write_text(
        "Package: u-boot-rpi\nSource: u-boot (2025.01-3)\nVersion: 2025.01-3+b1\nArchitecture: arm64\n"
        "Maintainer: Nobody <nobody@example.com>\nDescription: boot loader\n"
    )
    path = folder / "u-boot-rpi.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", folder / "package", path], check=True)
    return path


def test_the_list_of_packages_has_debians_by_their_sources_and_what_our_own_package_holds(tmp_path: Path) -> None:
    root, package = make_root(tmp_path / "root"), make_package(tmp_path)
    text = packages_inside.sbom(root, [package], "1.2.0", deb_documents.at(EPOCH_S))
    assert text == packages_inside.sbom(root, [package], "1.2.0", deb_documents.at(EPOCH_S))
    told = json.loads(text)
    assert {one["purl"] for one in told["components"]} == {
        "pkg:deb/debian/libc6@2.41-12?arch=arm64&upstream=glibc%402.41-12",
        "pkg:deb/debian/sluice-gateway@1.2.0~deb13?arch=arm64&upstream=sluice-gateway%401.2.0~deb13",
        "pkg:deb/debian/u-boot-rpi@2025.01-3%2Bb1?arch=arm64&upstream=u-boot%402025.01-3",
        "pkg:pypi/msgspec@0.20.0",
    }
    bom = Bom.from_json(told)  # type: ignore[attr-defined] # serialisation is added by a decorator
    assert bom.validate()
    assert (told["bomFormat"], told["specVersion"], told["metadata"]["component"]["version"]) == (
        "CycloneDX",
        "1.6",
        "1.2.0",
    )
