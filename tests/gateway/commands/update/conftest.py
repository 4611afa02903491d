"""A box with our image, as far as RAUC sees it."""

from collections.abc import Iterator

import pytest

from tests.support.rauc_site import RaucSite, begin_anew, rauc_site


@pytest.fixture(scope="package")
def rauc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaucSite]:
    with rauc_site(tmp_path_factory.mktemp("rauc")) as site:
        yield site


@pytest.fixture
def site(rauc: RaucSite, monkeypatch: pytest.MonkeyPatch) -> RaucSite:
    """As before the first update."""
    begin_anew(rauc, monkeypatch)
    return rauc
