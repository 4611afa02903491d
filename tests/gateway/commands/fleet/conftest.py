"""A box that looks at a folder by https, and the fleet's owner who signs what lies there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import make_authority
from tests.support.fleet_box import FleetBox, FleetFolder, boxed
from tests.support.https_site import https_site


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetFolder]:
    place = tmp_path_factory.mktemp("fleet")
    authority = make_authority(place / "ca")
    with https_site(authority.sign("server")) as site:
        yield FleetFolder(site, authority.certificate, place)


@pytest.fixture
def box(folder: FleetFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetBox:
    """A box with an empty folder, as before its first look."""
    folder.anew()
    return boxed(folder, tmp_path, monkeypatch)
