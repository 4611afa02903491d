"""`devices.json`: made, changed and read so that no secret is kept, no change is lost, and no file is half-written."""

import os
import string
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.listener import credentials
from gateway.listener.credentials import (
    ALPHABET,
    NONE,
    SECRETS_MAX,
    CredentialsError,
    CredentialsFileError,
    add,
    digest,
    load,
    new_secret,
    put,
    revoke,
    rotate,
)

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)


def file(directory: Path) -> Path:
    return directory / "devices.json"


def digests(path: Path, name: str, now: datetime = NOW) -> set[str]:
    return {secret.sha256 for secret in load(path).devices.get(name, ()) if secret.is_valid(now.timestamp())}


def test_a_secret_is_random_can_be_typed_and_is_kept_as_its_hash_alone(tmp_path: Path) -> None:
    made = add(file(tmp_path), ["42", "barn-1"], NOW)
    assert [each.name for each in made] == ["42", "barn-1"]
    for each in made:
        assert len(each.secret) * 5 >= 128
        assert set(each.secret) <= set(ALPHABET)
        assert digests(file(tmp_path), each.name) == {digest(each.secret)}
        assert each.secret not in file(tmp_path).read_text()
        assert each.secret not in repr(made)
    assert len(ALPHABET) == len(set(ALPHABET)) == 32
    assert not set(ALPHABET) & set("ilou" + string.ascii_uppercase)
    assert len({new_secret() for _ in range(1_000)}) == 1_000
    assert load(file(tmp_path)).devices["42"][0].made == "2026-11-27T12:00:00Z"
    assert file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_where_the_time_is_not_known_none_is_invented(tmp_path: Path) -> None:
    add(file(tmp_path), ["42"], None)
    assert load(file(tmp_path)).devices["42"][0].made is None
    with pytest.raises(CredentialsError, match="clock is not synced"):
        rotate(file(tmp_path), "42", None, keep_old_hours=1)
    rotate(file(tmp_path), "42", None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: add(path, ["new", "42"], NOW), "42 is there already; sluice devices rotate 42"),
        (lambda path: add(path, ["new", "ops"], NOW), "ops is there already"),
        (lambda path: add(path, ["new", "a b"], NOW), "'a b' is no device name"),
        (lambda path: add(path, ["new", ""], NOW), "'' is no device name"),
        (lambda path: rotate(path, "43", NOW), "no secret of '43' was made"),
        (lambda path: revoke(path, ["42", "43"]), "no secret of '43' was made"),
        (lambda path: put(path, {"new": "0" * 64, "ops": "0" * 64}, NOW), "ops is an operator already"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_of_it_is(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    add(file(tmp_path), ["42"], NOW)
    add(file(tmp_path), ["ops"], NOW, operators=True)
    before = file(tmp_path).read_bytes()
    with pytest.raises(CredentialsError) as caught:
        change(file(tmp_path))
    assert words in str(caught.value)
    assert file(tmp_path).read_bytes() == before


def test_secrets_that_are_kept_for_a_while_are_few(tmp_path: Path) -> None:
    add(file(tmp_path), ["42"], NOW)
    for _ in range(SECRETS_MAX - 1):
        rotate(file(tmp_path), "42", NOW, keep_old_hours=1)
    assert len(digests(file(tmp_path), "42")) == SECRETS_MAX
    with pytest.raises(CredentialsError, match="rotate it without --keep-old"):
        rotate(file(tmp_path), "42", NOW, keep_old_hours=1)
    rotate(file(tmp_path), "42", NOW + timedelta(hours=1), keep_old_hours=1)
    rotate(file(tmp_path), "42", NOW)
    assert len(load(file(tmp_path)).devices["42"]) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2}',
        b'{"version": 1, "devices": {"42": [{"sha256": "hush-hush", "made": null}]}}',
        b'{"version": 1, "devices": {"hush hush": []}}',
        b'{"version": 1, "devices": {"42": []}, "operators": {"42": []}}',
        b'{"version": 1, "devices": {"42": [{"sha256": "%s", "made": "2026-13-01T00:00:00Z"}]}}' % (b"0" * 64),
        b'{"version": 1, "devices": {"42": [{"sha256": "%s", "made": null, "until": 7}]}}' % (b"0" * 64),
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_told_without_what_stands_in_it_and_never_overwritten(text: bytes, tmp_path: Path) -> None:
    file(tmp_path).write_bytes(text)
    for change in (
        load,
        lambda path: add(path, ["1"], NOW),
        lambda path: rotate(path, "42", NOW),
        lambda path: revoke(path, ["42"]),
        lambda path: put(path, {"1": "0" * 64}, NOW),
    ):
        with pytest.raises(CredentialsFileError, match=r"devices\.json") as caught:
            change(file(tmp_path))
        assert "hush" not in str(caught.value)
        assert caught.value.__cause__ is None
    assert file(tmp_path).read_bytes() == text


@given(text=st.binary(max_size=200).filter(lambda text: not text.strip().startswith(b"{")))
@example(text=b'{"devices": 3}')
@example(text=b'{"devices": {}')
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_devices_file_raises_its_own_error(text: bytes, tmp_path: Path) -> None:
    file(tmp_path).write_bytes(text)
    with pytest.raises(CredentialsFileError):
        load(file(tmp_path))


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "FILE_BYTES_MAX", 1_000)
    file(tmp_path).write_bytes(b" " * 1_001)
    with pytest.raises(CredentialsFileError, match="more than 1000 bytes"):
        load(file(tmp_path))


def test_no_more_names_than_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "NAMES_MAX", 2)
    add(file(tmp_path), ["1", "2"], NOW)
    with pytest.raises(CredentialsError, match="more than 2 names"):
        add(file(tmp_path), ["3"], NOW)
    with pytest.raises(CredentialsError, match="more than 2 names"):
        put(file(tmp_path), {"3": "0" * 64}, NOW)
    put(file(tmp_path), {"2": "0" * 64}, NOW)


def test_what_is_no_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("hush-hush")
    file(tmp_path).symlink_to(other)
    with pytest.raises(CredentialsFileError):
        add(file(tmp_path), ["42"], NOW)
    assert other.read_text() == "hush-hush"
    file(tmp_path).unlink()
    os.mkfifo(file(tmp_path))
    with pytest.raises(CredentialsFileError, match="is no file"):
        load(file(tmp_path))


def test_a_link_in_the_place_of_a_folder_leads_nowhere_where_others_can_have_made_it(tmp_path: Path) -> None:
    elsewhere, between = tmp_path / "elsewhere", tmp_path / "between"
    for folder in (elsewhere, between):
        folder.mkdir()
    (between / "place").symlink_to(elsewhere)
    between.chmod(0o777)
    with pytest.raises(CredentialsError, match=r"nothing was changed: .*symbolic link .*mqtt_listener.devices_file"):
        add(between / "place" / "devices.json", ["42"], NOW)
    assert list(elsewhere.iterdir()) == []
    between.chmod(0o755)
    add(between / "place" / "devices.json", ["42"], NOW)
    assert digests(elsewhere / "devices.json", "42")


@pytest.mark.parametrize("what", ["symlink", "file"])
def test_a_leftover_in_the_place_of_the_new_file_is_replaced(what: str, tmp_path: Path) -> None:
    other, new = tmp_path / "other", tmp_path / "devices.json.new"
    other.write_text("of somebody else")
    if what == "symlink":
        new.symlink_to(other)
    else:
        new.write_text("half of it")
    add(file(tmp_path), ["42"], NOW)
    assert other.read_text() == "of somebody else"
    assert digests(file(tmp_path), "42")
    assert not new.exists()


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_leaves_what_was_there(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(file(tmp_path), ["42"], NOW)
    before = file(tmp_path).read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(CredentialsError, match=r"nothing was changed: .*Input/output error"):
            add(file(tmp_path), ["43"], NOW)
    assert file(tmp_path).read_bytes() == before
    add(file(tmp_path), ["43"], NOW)


def test_a_folder_that_is_not_there_or_not_ones_own_is_told(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"directory .* is not there"):
        add(tmp_path / "none" / "devices.json", ["42"], NOW)
    assert load(tmp_path / "none" / "devices.json") == NONE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_root_makes_the_file_for_whose_folder_it_is(tmp_path: Path) -> None:
    os.chown(tmp_path, 65_534, 65_534)
    add(file(tmp_path), ["42"], NOW)
    found = file(tmp_path).stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65_534, 65_534, 0o600)
    os.chown(tmp_path, 0, 65_534)
    add(file(tmp_path), ["43"], NOW)
    found = file(tmp_path).stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, 65_534, 0o640), "by the group, as in /etc/sluice"


ADDS = """\
import sys
from datetime import datetime, UTC
from pathlib import Path
from gateway.listener.credentials import add
for number in range(20):
    add(Path(sys.argv[1]), [f"{sys.argv[2]}-{number}"], datetime.now(UTC))
"""


def test_commands_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", ADDS, file(tmp_path), name], cwd=Path(__file__).parents[3])
        for name in ("a", "b", "c")
    ]
    assert [other.wait(60) for other in others] == [0, 0, 0]
    assert len(load(file(tmp_path)).devices) == 60


def test_a_command_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "LOCK_WAIT_S", 0.1)
    with (
        credentials._changing(file(tmp_path)),
        pytest.raises(CredentialsError, match="another command has been changing"),
    ):
        add(file(tmp_path), ["42"], NOW)


class Changes(RuleBasedStateMachine):
    """Against a model: by name, which secrets work until when."""

    NAMES = st.sampled_from(["1", "2", "3"])

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = file(Path(self.folder.name))
        self.now = NOW
        self.model: dict[str, dict[str, datetime]] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(names=st.lists(NAMES, max_size=3))
    def add(self, names: list[str]) -> None:
        if self.model.keys() & set(names):
            with pytest.raises(CredentialsError):
                add(self.path, names, self.now)
            return
        for made in add(self.path, names, self.now):
            self.model[made.name] = {digest(made.secret): datetime.max.replace(tzinfo=UTC)}

    @rule(name=NAMES, hours=st.sampled_from([0.0, 0.5, 24.0]))
    def rotate(self, name: str, hours: float) -> None:
        known = self.working(name)
        if name not in self.model or (hours and len(known) >= SECRETS_MAX):
            with pytest.raises(CredentialsError):
                rotate(self.path, name, self.now, hours)
            return
        made = rotate(self.path, name, self.now, hours)
        latest = self.now + timedelta(hours=hours)
        self.model[name] = {each: min(self.model[name][each], latest) for each in known}
        self.model[name][digest(made.secret)] = datetime.max.replace(tzinfo=UTC)

    @rule(names=st.lists(NAMES, max_size=3))
    def revoke(self, names: list[str]) -> None:
        if set(names) - self.model.keys():
            with pytest.raises(CredentialsError):
                revoke(self.path, names)
            return
        revoke(self.path, names)
        for name in set(names):
            del self.model[name]

    @rule(minutes=st.sampled_from([1, 30, 600]))
    def wait(self, minutes: int) -> None:
        self.now += timedelta(minutes=minutes)

    def working(self, name: str) -> set[str]:
        return {each for each, until in self.model.get(name, {}).items() if self.now < until}

    @invariant()
    def the_file_says_the_same(self) -> None:
        assert load(self.path).devices.keys() == self.model.keys()
        for name in self.model:
            assert digests(self.path, name, self.now) == self.working(name)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
