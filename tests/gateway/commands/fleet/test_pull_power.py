"""The power goes at any step of a change: the box has the old state or the new one, and ends on a good one."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.clock.gateway_clock import WallClock
from gateway.commands.fleet import look, package_change
from gateway.commands.fleet.trial_steps import STARTS_MAX, ChangeError
from gateway.commands.update import download, update_command
from gateway.commands.update.programs import UpdateError
from gateway.commands.update.trial import Seen
from gateway.commands.update.update_command import PACKAGE, Box, Package
from gateway.host import fleet_report, service
from tests.support.fleet_box import WELL, FleetBox, FleetFolder, PowerCutError, PowerCuts

LINGER = "[groups.settings.kafka]\nlinger_ms = 100"
Judge = Callable[[str], Seen]


@pytest.fixture(autouse=True)
def near(folder: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TLS and processes of openssl, which a thousand looks would wait for: `test_pull.py` has them."""

    def fetch(address: str, file: Path, *_: object) -> None:
        found = folder.site.files.get(urlsplit(address).path)
        if found is None:
            raise UpdateError("the server answers 404")
        file.write_bytes(found)

    def verify(file: Path, signature: bytes, _keys: object) -> None:
        if signature != signature_of(file.read_bytes()):
            raise UpdateError("its signature fits none of the keys")

    def signature_of(content: bytes, _key: object = None) -> bytes:
        return hashlib.sha512(content).digest()

    monkeypatch.setattr(download, "fetch", fetch)
    monkeypatch.setattr(folder, "signature", signature_of)
    for module in (look, package_change):
        monkeypatch.setattr(module, "verify", verify)


def well(_settings: str) -> Seen:
    return WELL


def not_with_the_new(settings: str) -> Seen:
    return replace(WELL, kafka="linger_ms = 100" not in settings)


def begin_anew(box: FleetBox, old: str) -> None:
    """As before the first look."""
    box.config.write_text(old)
    box.power_on()
    box.now_s = 0
    for path in fleet_report.FOLDER.rglob("*"):
        if path.is_file():
            path.unlink()


def cut_off(box: FleetBox, patched: pytest.MonkeyPatch, at: int, *, names: bool) -> PowerCuts:
    """One look that the power ends at a step, if it has so many."""
    cuts = PowerCuts(box.place, at, names=names)
    restart = box.restart

    def restarted() -> None:
        cuts.step()
        restart()

    with patched.context() as steps, cuts.on(steps):
        steps.setattr(service, "restart", restarted)
        with suppress(PowerCutError):
            box.pull()
    return cuts


def settle(box: FleetBox) -> None:
    """Looks as the timer begins them, until nothing changes any more."""
    for _ in range(STARTS_MAX + 2):
        box.pull()
        if box.report.trial is None and box.report.result != "waits":
            return


@pytest.mark.parametrize("names", [False, True], ids=["synced", "names-lost"])
@pytest.mark.parametrize("judge", [well, not_with_the_new])
def test_settings_are_old_or_new_wherever_the_power_goes(
    box: FleetBox,
    folder: FleetFolder,
    judge: Judge,
    names: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder.publish(LINGER)
    old, box.judged = box.text, judge
    new = old.replace("linger_ms = 50", "linger_ms = 100")
    at, seen = 0, set()
    while True:
        at += 1
        begin_anew(box, old)
        cuts = cut_off(box, monkeypatch, at, names=names)
        if not cuts.is_off:
            break
        assert box.text in {old, new}, f"step {at}"
        seen.add(box.text)
        box.power_on()
        settle(box)
        good = judge is well
        assert (box.text, box.running) == ((new, new) if good else (old, old)), f"step {at}"
        assert (box.report.result, box.report.trial) == ("good" if good else "went-back", None), f"step {at}"
    assert seen == {old, new}
    assert at > 20, "it has that many steps"


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.lists(st.integers(1, 40), min_size=2, max_size=5), names=st.booleans(), is_good=st.booleans())
def test_a_box_ends_on_good_settings_after_any_cuts(
    box: FleetBox,
    folder: FleetFolder,
    at: list[int],
    names: bool,  # noqa: FBT001 - drawn
    is_good: bool,  # noqa: FBT001 - drawn
) -> None:
    folder.publish(LINGER)
    old = box.text.replace("linger_ms = 100", "linger_ms = 50")
    new = old.replace("linger_ms = 50", "linger_ms = 100")
    begin_anew(box, old)
    box.judged = well if is_good else not_with_the_new
    with pytest.MonkeyPatch.context() as patched:
        for each in at:
            cut_off(box, patched, each, names=names)
            assert box.text in {old, new}
            box.power_on()
    settle(box)
    assert box.report.trial is None
    assert box.text == box.running
    # Cuts in trial after trial count against the settings too.
    expected = {(new, "good"), (old, "went-back")} if is_good else {(old, "went-back")}
    assert (box.text, box.report.result) in expected


def test_settings_that_hang_the_box_are_taken_back(box: FleetBox, folder: FleetFolder) -> None:
    folder.publish(LINGER)
    old = box.text

    def judged(settings: str) -> Seen:
        if "linger_ms = 100" in settings:
            raise PowerCutError
        return WELL

    box.judged = judged
    for _ in range(STARTS_MAX):
        with pytest.raises(PowerCutError):
            box.pull()
        box.power_on()
    assert box.pull().exit_code == 1
    assert (box.text, box.running, box.report.result) == (old, old, "went-back")
    assert "it was begun 3 times" in box.report.reason


# -- packages ------------------------------------------------------------------------------------------


@dataclass
class Dpkg:
    """A package database: a version that is in place, whole or not."""

    cuts: PowerCuts | None = None
    version: str = "1.1.0~deb12"
    is_whole: bool = True
    fails: bool = False
    installs: int = 0
    locked: int = 0
    """Calls of dpkg that find it locked."""
    restarted: Callable[[], None] = lambda: None

    def step(self) -> None:
        if self.cuts is not None:
            self.cuts.step()

    def install(self, source: str, *, allow_downgrade: bool) -> None:
        """`sluice update` of a file."""
        self.step()
        if not self.is_whole:
            raise ChangeError("dpkg was interrupted, you must manually run 'dpkg --configure -a'")
        if Path(source).read_text() < self.version and not allow_downgrade:
            raise ChangeError("it is older")
        self.put(source)

    def put(self, source: str) -> None:
        wanted = Path(source).read_text()
        self.installs += 1
        self.is_whole = False
        self.version = wanted
        self.step()
        if self.fails and wanted.startswith("1.2"):
            raise ChangeError("this version does not work on this box")
        self.is_whole = True
        self.restarted()
        self.step()

    def call(self, *words: str, patience_s: float | None = None) -> object:  # noqa: ARG002 - see `programs.call`
        if words[0] == "dpkg":
            self.step()
            if self.locked:
                self.locked -= 1
                return CompletedProcess(words, 2, "", "dpkg: error: dpkg frontend lock was locked by another process")
            self.put(words[-1])
        return CompletedProcess(words, 0, "installed" if self.is_whole else "half-configured", "")


@pytest.fixture
def dpkg(box: FleetBox, folder: FleetFolder, monkeypatch: pytest.MonkeyPatch) -> Dpkg:
    """A box of Debian 12 with version 1.1.0, whose package is in the folder too."""
    found = Dpkg(restarted=box.power_on)
    for module in (look, package_change):
        monkeypatch.setattr(module, "this_box", lambda: Box("arm64", "12", found.version))
    monkeypatch.setattr(look, "compare_versions", lambda one, _, other: one < other)
    monkeypatch.setattr(package_change, "install", found.install)
    monkeypatch.setattr(package_change, "call", found.call)
    monkeypatch.setattr(update_command, "CACHE", box.place / "cache")
    monkeypatch.setattr(package_change, "read_package", read_package)
    for version in ("1.1.0", "1.2.0"):
        folder.put(f"{PACKAGE}_{version}_arm64_deb12.deb", f"{version}~deb12".encode())
    box.judged = lambda _settings: replace(WELL, readings=not (found.version.startswith("1.2") and found_bad(folder)))
    return found


def read_package(path: Path) -> Package:
    """The fields of a package whose content is its version, and its architecture and name if they are others."""
    version, *others = path.read_text().split()
    architecture, name = (*others, *("arm64", PACKAGE)[len(others) :])
    return Package(name, version, architecture, "12")


def found_bad(folder: FleetFolder) -> bool:
    return b"bad" in folder.site.files["/fleet/fleet.toml"]


def test_a_version_is_installed_and_then_its_settings_follow(box: FleetBox, folder: FleetFolder, dpkg: Dpkg) -> None:
    folder.publish(LINGER, more='version = "1.2.0"')
    assert box.pull().exit_code == 0
    assert (dpkg.version, dpkg.installs, box.report.result) == ("1.2.0~deb12", 1, "waits")
    assert box.report.reason == "the version is good; the settings follow"
    assert box.pull().exit_code == 0
    assert ("linger_ms = 100" in box.text, box.report.result) == (True, "good")
    assert dpkg.installs == 1


def test_a_version_that_takes_no_reading_is_taken_back(box: FleetBox, folder: FleetFolder, dpkg: Dpkg) -> None:
    folder.publish("# bad", more='version = "1.2.0"')
    assert box.pull().exit_code == 1
    assert (dpkg.version, dpkg.installs, box.report.result) == ("1.1.0~deb12", 2, "went-back")
    assert box.report.reason == "within 5 min no reading came in, although sensors sent before"
    box.pull()
    assert dpkg.installs == 2, "it is not tried again"


def test_a_version_that_dpkg_leaves_half_is_taken_back(box: FleetBox, folder: FleetFolder, dpkg: Dpkg) -> None:
    folder.publish("", more='version = "1.2.0"')
    dpkg.fails, dpkg.locked = True, 3
    assert box.pull().exit_code == 1
    assert (dpkg.version, dpkg.is_whole, box.report.result) == ("1.1.0~deb12", True, "went-back")
    assert box.report.reason == "this version does not work on this box"
    assert (box.place / "cache/installed.deb").read_text() == dpkg.version, "it is a way back again"


@pytest.mark.parametrize("content", ["1.1.5~deb12", "1.3.0~deb12"])
def test_a_package_under_another_ones_name_is_not_installed(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, content: str
) -> None:
    """Whoever reaches the folder, and has no key, can put any signed package there."""
    folder.publish("", more='version = "1.2.0"\nallow_downgrade = true')
    folder.put(f"{PACKAGE}_1.2.0_arm64_deb12.deb", content.encode())
    assert box.pull().exit_code == 1
    assert (dpkg.installs, box.report.result) == (0, "refused")
    assert box.report.reason == f"it is version {content[:5]} by its own words, not 1.2.0"


def test_an_older_file_is_not_taken_in_after_a_power_cut_while_a_package_comes(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("", serial=7, more='version = "1.2.0"')
    fetch = download.fetch

    def cut(address: str, file: Path, *more: object) -> None:
        if address.endswith(".deb"):
            raise PowerCutError
        fetch(address, file, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as net:
        net.setattr(download, "fetch", cut)
        with pytest.raises(PowerCutError):
            box.pull()
    folder.publish("", serial=6, more='version = "1.1.5"')
    folder.put(f"{PACKAGE}_1.1.5_arm64_deb12.deb", b"1.1.5~deb12")
    assert box.pull().exit_code == 1
    assert (box.report.serial, "it is an old file" in box.report.trouble, dpkg.installs) == (7, True, 0)


@pytest.mark.parametrize("other", ["armhf", "arm64 sluice-others"])
def test_a_way_back_that_is_not_for_this_box_is_none(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, other: str
) -> None:
    """Signed by the same key and of the same version: dpkg could not go back with it."""
    folder.publish("# bad", more='version = "1.2.0"')
    folder.put(f"{PACKAGE}_1.1.0_arm64_deb12.deb", f"1.1.0~deb12 {other}".encode())
    assert box.pull().exit_code == 1
    assert (dpkg.version, dpkg.installs, box.report.result) == ("1.1.0~deb12", 0, "refused")
    assert "there would be no way back" in box.report.reason
    assert f"by its own words, not {PACKAGE} for arm64" in box.report.reason


def test_a_version_that_trusts_another_key_is_taken_back(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("# bad", more='version = "1.2.0"')
    verify = vars(package_change)["verify"]

    def verified(file: Path, signature: bytes, keys: list[Path]) -> None:
        if dpkg.version.startswith("1.2"):
            raise UpdateError("its signature fits none of the keys")
        verify(file, signature, keys)

    monkeypatch.setattr(package_change, "verify", verified)
    box.pull()
    assert (dpkg.version, box.report.result) == ("1.1.0~deb12", "went-back")


@pytest.mark.parametrize("kept", [(b"", None), (None, b""), (b"1.1.0~deb12", b"")])
def test_a_kept_package_that_a_power_cut_has_damaged_is_fetched_instead(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, kept: tuple[bytes | None, bytes | None]
) -> None:
    (box.place / "cache").mkdir()
    for content, name in zip(kept, ("installed.deb", "installed.deb.sig"), strict=True):
        if content is not None:
            (box.place / "cache" / name).write_bytes(content)
    folder.publish("", more='version = "1.2.0"')
    box.pull()
    assert (dpkg.version, box.report.result) == ("1.2.0~deb12", "good")


@pytest.mark.parametrize("names", [False, True], ids=["synced", "names-lost"])
def test_what_sluice_update_keeps_is_never_empty(
    box: FleetBox,
    monkeypatch: pytest.MonkeyPatch,
    names: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    cache = box.place / "cache"
    monkeypatch.setattr(update_command, "CACHE", cache)
    cache.mkdir()
    at, cuts = 0, None
    while cuts is None or cuts.is_off:
        at += 1
        for path in cache.iterdir():
            path.unlink()
        for name in ("installed.deb", "installed.deb.sig"):
            (cache / name).write_bytes(name.encode())
        cuts = PowerCuts(box.place, at, names=names)
        with pytest.MonkeyPatch.context() as steps, cuts.on(steps), suppress(PowerCutError):
            # Not synced: it was just copied.
            (cache / "new.deb").write_bytes(b"new")
            vars(update_command)["_keep"](cache / "new.deb", b"new.sig")
        for suffix in ("", ".sig"):
            for name in ("installed.deb", "previous.deb"):
                path = cache / f"{name}{suffix}"
                assert not path.exists() or path.read_bytes(), f"step {at}"
    assert at > 2


def test_a_package_that_came_after_the_hours_waits_and_is_kept(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("", more='version = "1.2.0"\nhours = "01:00-04:00"')
    name = f"{PACKAGE}_1.2.0_arm64_deb12.deb"
    has_come = (fleet_report.FOLDER / f"work/fetched-{name}").exists
    monkeypatch.setattr(look, "read_wall_clock", lambda _gateway: WallClock(0, 0))
    monkeypatch.setattr(look, "is_within", lambda hours, _: hours is None or not has_come())
    box.pull()
    assert (dpkg.installs, box.report.result, has_come()) == (0, "waits", True)
    monkeypatch.setattr(look, "is_within", lambda *_: True)
    box.pull()
    assert (dpkg.version, box.report.result, has_come()) == ("1.2.0~deb12", "good", False)


@pytest.mark.parametrize("at", ["apply", "half"])
def test_a_version_whose_installing_takes_the_box_down_is_given_up(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("", more='version = "1.2.0"')
    tried = []

    def installed(source: str, *, allow_downgrade: bool) -> None:  # noqa: ARG001 - see `install`
        tried.append(source)
        dpkg.is_whole = at == "apply"
        raise PowerCutError

    monkeypatch.setattr(package_change, "install", installed)
    for _ in range(2 * STARTS_MAX):
        with suppress(PowerCutError):
            box.pull()
    assert (dpkg.version, dpkg.is_whole, box.report.result) == ("1.1.0~deb12", True, "went-back")
    assert len(tried) == STARTS_MAX
    assert "it was begun 3 times" in box.report.reason


def test_without_a_way_back_no_version_is_tried(box: FleetBox, folder: FleetFolder, dpkg: Dpkg) -> None:
    folder.publish("", more='version = "1.2.0"')
    del folder.site.files[f"/fleet/{PACKAGE}_1.1.0_arm64_deb12.deb"]
    assert box.pull().exit_code == 1
    assert (dpkg.installs, box.report.result) == (0, "waits")
    assert "there would be no way back" in box.report.trouble
    folder.put(f"{PACKAGE}_1.1.0_arm64_deb12.deb", b"1.1.0~deb12")
    folder.site.files[f"/fleet/{PACKAGE}_1.1.0_arm64_deb12.deb.sig"] = bytes(64)
    for _ in range(3):
        box.pull()
    assert (dpkg.installs, box.report.result) == (0, "refused")
    assert "its signature fits none" in box.report.reason


def test_a_connection_that_breaks_is_no_fault_of_the_wish(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("", more='version = "1.2.0"')
    fetch = download.fetch

    def broken(address: str, file: Path, *more: object) -> None:
        if address.endswith("1.2.0_arm64_deb12.deb"):
            file.write_bytes(b"1.2")
            raise UpdateError("the connection broke. 3 B of 11 B came; the same command goes on from there")
        fetch(address, file, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as net:
        net.setattr(download, "fetch", broken)
        for _ in range(2):
            assert box.pull().exit_code == 1
            assert (box.report.result, "the connection broke" in box.report.trouble) == ("waits", True)
    assert dpkg.installs == 0
    assert [path.read_bytes() for path in (fleet_report.FOLDER / "work").glob("*1.2.0*.deb")] == [b"1.2"]
    folder.publish(LINGER, serial=2)
    box.pull()
    assert (box.report.result, list((fleet_report.FOLDER / "work").iterdir())) == ("good", [])


def test_a_trial_is_judged_although_dpkg_does_not_answer_meanwhile(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow card it may take longer than it may."""
    folder.publish("# bad", more='version = "1.2.0"')
    this_box = vars(package_change)["this_box"]

    def slow() -> Box:
        if dpkg.version.startswith("1.2"):
            raise UpdateError("`dpkg-query` did not end within 60 s; is the disk sound?")
        found: Box = this_box()
        return found

    with monkeypatch.context() as card:
        card.setattr(package_change, "this_box", slow)
        for _ in range(2):
            assert box.pull().exit_code == 1
            assert (box.report.result, "did not end" in box.report.trouble) == ("on-trial", True)
    box.pull()
    assert (dpkg.version, box.report.result, box.report.trouble) == ("1.1.0~deb12", "went-back", "")


def test_a_package_that_is_refused_is_fetched_less_and_less_often(
    box: FleetBox, folder: FleetFolder, dpkg: Dpkg, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.publish("", more='version = "1.2.0"')
    looks, tried = 0, []

    def refused(_source: str, *, allow_downgrade: bool) -> None:
        tried.append((looks, allow_downgrade))
        raise ChangeError("it needs other Debian packages")

    monkeypatch.setattr(package_change, "install", refused)
    while looks < 100:
        looks += 1
        box.pull()
    assert tried == [(number, False) for number in (1, 3, 7, 15, 31, 54, 77, 100)]
    assert box.report.reason == "it needs other Debian packages"
    assert dpkg.installs == 0
    monkeypatch.setattr(package_change, "install", dpkg.install)
    folder.publish("", serial=2, more='version = "1.2.0"\nattempt = 2')
    box.pull()
    assert box.report.result == "good", "another wish is tried at once"


def test_an_older_version_needs_to_be_allowed(box: FleetBox, folder: FleetFolder, dpkg: Dpkg) -> None:
    folder.publish("", more='version = "1.0.0"')
    box.pull()
    assert (box.report.result, dpkg.installs) == ("refused", 0)
    assert "write allow_downgrade = true" in box.report.reason
    folder.publish("", serial=2, more='version = "1.0.0"\nallow_downgrade = true')
    folder.put(f"{PACKAGE}_1.0.0_arm64_deb12.deb", b"1.0.0~deb12")
    box.pull()
    assert (box.report.result, dpkg.version) == ("good", "1.0.0~deb12")


@pytest.mark.parametrize(("names", "words"), [(False, ""), (True, ""), (False, "# bad"), (True, "# bad")])
def test_a_version_is_old_or_new_wherever_the_power_goes(
    box: FleetBox,
    folder: FleetFolder,
    dpkg: Dpkg,
    names: bool,  # noqa: FBT001 - a parameter of the test
    words: str,
) -> None:
    folder.publish(words, more='version = "1.2.0"')
    text, at, seen = box.text, 0, set()
    while True:
        at += 1
        begin_anew(box, text)
        dpkg.version, dpkg.is_whole = "1.1.0~deb12", True
        dpkg.cuts = cuts = PowerCuts(box.place, at, names=names)
        with pytest.MonkeyPatch.context() as steps, cuts.on(steps), suppress(PowerCutError):
            box.pull()
        dpkg.cuts = None
        if not cuts.is_off:
            break
        seen.add((dpkg.version, dpkg.is_whole))
        settle(box)
        expected = ("1.1.0~deb12", "went-back") if words else ("1.2.0~deb12", "good")
        assert (dpkg.version, box.report.result, dpkg.is_whole) == (*expected, True), f"step {at}"
        assert box.report.trial is None
    assert {whole for _, whole in seen} == {True, False}
