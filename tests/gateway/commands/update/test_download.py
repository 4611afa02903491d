"""Files by https: whole after any breaks, never a mix of two files, and told in words if they cannot be had."""

import os
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import main
from gateway.clock.floor import RELEASED_US
from gateway.commands.update import download, update_command
from gateway.commands.update.programs import UpdateError
from gateway.tls.dates import TrueTime, by_system_clock
from tests.support.certificates import Authority, make_authority
from tests.support.https_site import HttpsSite, https_site

CONTENT = os.urandom(200_000)
PATH = "/sluice/gateway.deb"
MAX = 10_000_000


def unsynced() -> TrueTime:
    return TrueTime(RELEASED_US, None)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[HttpsSite]:
    with https_site(authority.sign("server")) as site:
        yield site


@pytest.fixture(autouse=True)
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    monkeypatch.setattr(download, "PAUSES_S", (0.0,))


@pytest.fixture
def site(server: HttpsSite) -> HttpsSite:
    """As a plain web server is, with one file."""
    return anew(server)


def anew(server: HttpsSite) -> HttpsSite:
    vars(server).update(vars(HttpsSite(server.port, {PATH: CONTENT})))
    return server


def fetch(site: HttpsSite, file: Path, path: str = PATH) -> bytes:
    download.fetch(site.address(path), file, MAX, by_system_clock)
    return file.read_bytes()


def refused(site: HttpsSite, folder: Path, path: str = PATH, host: str = "127.0.0.1") -> str:
    with pytest.raises(UpdateError) as told:
        download.fetch(site.address(path, host), folder / "file", MAX, by_system_clock)
    return str(told.value)


def give_up_at_once(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(download, "GIVE_UP_S", -1.0)


# -- breaks -------------------------------------------------------------------------------------------


@given(
    length=st.integers(1, len(CONTENT)),
    cuts=st.lists(st.integers(0, 100_000), max_size=6),
    ends=st.tuples(st.sets(st.integers(0, 6)), st.booleans()),
)
def test_a_file_comes_whole_wherever_connections_break_and_calls_end(
    tmp_path_factory: pytest.TempPathFactory,
    server: HttpsSite,
    length: int,
    cuts: list[int],
    ends: tuple[set[int], bool],
) -> None:
    """Some calls end at their first break, and cuts are resets or ends."""
    site, file, (calls, resets) = anew(server), tmp_path_factory.mktemp("fetched") / "file", ends
    site.files[PATH], site.cuts, site.resets = CONTENT[:length], list(cuts), resets
    ended = 0
    with pytest.MonkeyPatch.context() as patched:
        while True:
            patched.setattr(download, "GIVE_UP_S", -1.0 if ended in calls else 900.0)
            try:
                got = fetch(site, file)
            except UpdateError:
                ended += 1
                assert ended <= len(cuts)
            else:
                break
    assert got == CONTENT[:length]
    if not resets:
        # A reset takes away what was under way. Else nothing is sent twice, but the byte before each break.
        assert site.sent <= length + len(cuts)


def test_a_later_call_asks_for_the_rest_alone(
    site: HttpsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.cuts = [50_000]
    with monkeypatch.context() as patched:
        give_up_at_once(patched)
        told = refused(site, tmp_path)
    assert "the connection broke" in told
    assert "50.0 kB of 200.0 kB came; the same command goes on from there" in told
    site.cuts = [10_000]
    assert fetch(site, tmp_path / "file") == CONTENT
    assert [asked for _, asked in site.asked] == ["", "bytes=49999-", "bytes=59998-"]
    assert "It goes on in 0 s" in capsys.readouterr().out
    download.forget(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_whole_before_is_asked_for_by_its_last_byte(site: HttpsSite, tmp_path: Path) -> None:
    assert fetch(site, tmp_path / "file") == CONTENT
    assert fetch(site, tmp_path / "file") == CONTENT
    assert site.asked[-1] == (PATH, f"bytes={len(CONTENT) - 1}-")


@pytest.mark.parametrize("mark", ["ETag", "Last-Modified", ""])
def test_two_files_are_never_mixed(site: HttpsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    give_up_at_once(monkeypatch)
    site.marks_by, site.cuts = mark, [50_000]
    assert ("goes on from there" in refused(site, tmp_path)) == bool(mark)
    site.files[PATH] = CONTENT[::-1]
    assert fetch(site, tmp_path / "file") == CONTENT[::-1]
    site.files["/other"] = CONTENT[:70_000]
    assert fetch(site, tmp_path / "file", "/other") == CONTENT[:70_000], "another address"


def test_a_server_that_knows_no_ranges_gives_it_from_the_beginning(site: HttpsSite, tmp_path: Path) -> None:
    site.knows_ranges, site.cuts = False, [150_000]
    assert fetch(site, tmp_path / "file") == CONTENT


def test_a_part_that_was_not_asked_for_is_not_taken(site: HttpsSite, tmp_path: Path) -> None:
    site.cuts = [50_000]
    with pytest.MonkeyPatch.context() as patched:
        give_up_at_once(patched)
        refused(site, tmp_path)
        site.answers[PATH] = (206, {"Content-Range": "bytes 0-9/10"})
        assert "another part of the file" in refused(site, tmp_path)
    site.answers.clear()
    assert fetch(site, tmp_path / "file") == CONTENT


def test_a_server_that_is_busy_is_asked_again_once_something_came(site: HttpsSite, tmp_path: Path) -> None:
    site.answers[PATH] = (503, {})
    assert "503 Service Unavailable. Nothing came" in refused(site, tmp_path)
    site.answers.clear()
    site.cuts = [50_000]
    asked = []

    def mend(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == 1:
            site.answers[PATH] = (503, {})
        else:
            site.answers.clear()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "sleep", mend)
        assert fetch(site, tmp_path / "file") == CONTENT
    assert len(asked) == 2


def test_pauses_grow_until_bytes_come_again(site: HttpsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSES_S", (1.0, 2.0, 5.0))
    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    site.cuts = [50_000, 0, 0, 0, 50_000, 0]
    assert fetch(site, tmp_path / "file") == CONTENT
    # The byte before a break comes again, so a connection cut at once brings nothing.
    assert paused == [1.0, 2.0, 5.0, 5.0, 1.0, 2.0]


# -- refusals -----------------------------------------------------------------------------------------


def test_a_wrong_address_is_told_at_once(site: HttpsSite, tmp_path: Path) -> None:
    told = refused(site, tmp_path, "/none")
    assert f"{site.address('/none')}: the server answers 404 Not Found; is the address right?" in told
    assert "gateway.invalid cannot be reached" in refused(site, tmp_path, host="gateway.invalid")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://barn/sluice.deb", "fetched by https:// and by nothing else"),
        ("ftp://barn/sluice.deb", "fetched by https:// and by nothing else"),
        ("https:///sluice.deb", "give an address with a host"),
        ("https://anna:secret@barn/sluice.deb", "without user and password"),
        ("https://barn:port/sluice.deb", "is no address"),
        ("https://[::1/sluice.deb", "is no address"),
        (f"https://{'a' * 70}/sluice.deb", "is no name of a server"),
    ],
)
def test_an_address_that_will_not_do_is_told(tmp_path: Path, address: str, words: str) -> None:
    with pytest.raises(UpdateError, match=words):
        download.fetch(address, tmp_path / "file", MAX, by_system_clock)


def test_a_server_may_lead_to_another_address_of_https(site: HttpsSite, tmp_path: Path) -> None:
    site.answers["/latest"] = (302, {"Location": PATH})
    assert fetch(site, tmp_path / "file", "/latest") == CONTENT
    site.answers["/plain"] = (301, {"Location": f"http://127.0.0.1:{site.port}{PATH}"})
    assert "by https:// and by nothing else" in refused(site, tmp_path, "/plain")
    site.answers["/circle"] = (307, {"Location": "/circle"})
    assert "5 times and more" in refused(site, tmp_path, "/circle")


def test_the_address_is_asked_for_as_it_was_given(site: HttpsSite, tmp_path: Path) -> None:
    site.files["/a%20b/caf%C3%A9"] = CONTENT
    assert fetch(site, tmp_path / "file", "/a b/café?version=ü&x=%2F") == CONTENT
    assert site.asked[-1][0] == "/a%20b/caf%C3%A9?version=%C3%BC&x=%2F"
    assert download.beside("https://barn/a.deb?x=1", ".sig") == "https://barn/a.deb.sig?x=1"


def test_a_file_without_a_size_or_with_too_large_a_one_is_not_begun(
    site: HttpsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gateway.commands.update.test_download.MAX", 100_000)
    assert "200.0 kB, and such a file of this gateway has 100.0 kB at most" in refused(site, tmp_path)
    site.knows_sizes = False
    assert "does not say how large it is" in refused(site, tmp_path)
    assert (tmp_path / "file").read_bytes() == b""


def test_room_for_readings_is_left(site: HttpsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=download.FREE_BYTES_MIN + len(CONTENT) - 1)
    monkeypatch.setattr(download, "disk_usage", lambda _: usage)
    assert "has 100.2 MB free, of which 100.0 MB are kept for readings" in refused(site, tmp_path)
    monkeypatch.setattr(download, "disk_usage", lambda _: usage._replace(free=usage.free + 1))
    assert fetch(site, tmp_path / "file") == CONTENT


def test_two_calls_do_not_write_one_file(site: HttpsSite, tmp_path: Path) -> None:
    site.cuts = [50_000]
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "sleep", lambda _: told.append(refused(site, tmp_path)))
        assert fetch(site, tmp_path / "file") == CONTENT
    assert told == ["another `sluice update` fetches a file now: wait for its end"]


# -- certificates and clocks --------------------------------------------------------------------------


def test_a_server_of_an_unknown_authority_is_told_with_what_to_do(
    site: HttpsSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_authority(tmp_path / "another")
    monkeypatch.setenv("SSL_CERT_FILE", str(other.certificate))
    told = refused(site, tmp_path)
    assert "signed by nobody whom this box trusts" in told
    assert "SSL_CERT_FILE=FILE" in told


def test_a_certificate_for_another_name_is_told(authority: Authority, tmp_path: Path) -> None:
    with https_site(authority.sign("elsewhere", "DNS:elsewhere.example")) as site:
        assert "the certificate of 127.0.0.1 is for another name" in refused(site, tmp_path)


def test_a_certificate_that_has_expired_is_told_with_the_clock(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = authority.sign("old", valid=(timedelta(days=-2000), timedelta(days=-1000)))
    with https_site(old) as site:
        told = refused(site, tmp_path)
        assert "the certificate of 127.0.0.1 has expired on" in told
        assert "or see to this box's clock" in told
        assert capsys.readouterr().out == ""
        with pytest.raises(UpdateError, match="has expired on"):
            download.fetch(site.address(PATH), tmp_path / "file", MAX, unsynced)
    assert "this box's clock is not to be trusted" in capsys.readouterr().out


def test_an_unsynced_clock_hinders_no_update(authority: Authority, tmp_path: Path) -> None:
    """Its certificate begins tomorrow, as it seems to a box that believes it is yesterday."""
    with https_site(authority.sign("new", valid=(timedelta(days=1), timedelta(days=2)))) as site:
        site.files[PATH] = CONTENT
        assert "is not valid before" in refused(site, tmp_path)
        download.fetch(site.address(PATH), tmp_path / "file", MAX, unsynced)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_tls_is_told(tmp_path: Path) -> None:
    with https_site(None) as site:
        assert "TLS with 127.0.0.1 fails" in refused(site, tmp_path)


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[bytes, bytes]]:
    """Packages and signatures that were to be installed, by root."""
    found: list[tuple[bytes, bytes]] = []

    def take(package: Path, signature: Path, *, allow_downgrade: bool) -> None:
        assert not allow_downgrade
        found.append((package.read_bytes(), signature.read_bytes()))
        if signature.read_bytes() == b"bad":
            raise UpdateError("its signature is bad")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(update_command, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(update_command, "_update", take)
    return found


def test_a_package_is_fetched_with_its_signature_and_nothing_is_left(
    site: HttpsSite, tmp_path: Path, taken: list[tuple[bytes, bytes]]
) -> None:
    address = site.address(f"{PATH}?token=1")
    shown = CliRunner().invoke(main, ["update", address])
    assert (shown.exit_code, taken) == (1, [])
    assert "gateway.deb.sig?token=1: the server answers 404" in " ".join(shown.output.split())
    for signature in (b"good", b"bad"):
        site.files[f"{PATH}.sig"] = signature
        shown = CliRunner().invoke(main, ["update", address])
        assert shown.exit_code == (signature == b"bad"), shown.output
        assert taken.pop() == (CONTENT, signature)
        assert list((tmp_path / "cache").iterdir()) == []
    mine = tmp_path / "mine.sig"
    mine.write_bytes(b"mine")
    del site.files[f"{PATH}.sig"]
    assert CliRunner().invoke(main, ["update", address, "--signature", str(mine)]).exit_code == 0
    assert taken == [(CONTENT, b"mine")]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_file_that_is_not_there_is_no_address(taken: list[tuple[bytes, bytes]]) -> None:
    shown = CliRunner().invoke(main, ["update", "sluice.deb"])
    assert (shown.exit_code, taken) == (2, [])
    assert "does not exist" in shown.output


def test_a_box_without_our_image_fetches_no_bundle(site: HttpsSite, taken: list[tuple[bytes, bytes]]) -> None:
    shown = CliRunner().invoke(main, ["update", site.address("/sluice.raucb")])
    assert (shown.exit_code, taken, site.asked) == (1, [], [])
    assert "take the .deb file" in " ".join(shown.output.split())
