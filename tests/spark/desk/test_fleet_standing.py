"""`sluice-cloud fleet`: mistakes with their lines, signatures that a gateway takes, and who has what the file wants."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.commands.update.programs import UpdateError
from gateway.commands.update.update_command import verify
from gateway.fleet_file import Fleet, parse
from gateway.record_contract import HEARTBEAT_TYPE
from spark.cli import main
from spark.commands import fleet_commands
from spark.decode.record_types import STATE_TYPE
from spark.desk import tables
from spark.desk.asked import microseconds
from spark.desk.fleet_standing import Standing, standings
from spark.finality.gateway_states import GatewayEvent, GatewayStates
from spark.log.edges import Edge
from systemd import deb_signing
from tests.support import hostile
from tests.support.plain_warehouse import NOON, PlainWarehouse
from tests.support.spark_records import NOTHING_WAITS

TEXT = """\
serial = 8

[[groups]]
name = "first"
gateways = ["plant/a", "plant/b", "plant/lost"]
version = "1.2.0"

[[groups]]
name = "others"
gateways = ["plant/*"]
share = 0

[groups.settings.kafka]
linger_ms = 100
"""
FLEET = parse(TEXT, Path("fleet.toml"))
FIRST, OTHERS = FLEET.groups


class Site:
    """Gateways, and how they stand to a fleet's file."""

    def __init__(self, folder: Path) -> None:
        self.warehouse = PlainWarehouse(folder)
        self._states = GatewayStates()

    def gateway(self, name: str, version: str, fleet: dict[str, Any] | None, later_s: int = 0) -> None:
        body = {**hostile.STATE, "version": version, "fleet": fleet}
        at_us = microseconds(NOON) + self.warehouse.ordinal + later_s * 1_000_000
        edge = Edge(at_us, 500, "synced", name, "boot-1", 10**12 + self.warehouse.ordinal, None)
        for kind, value in ((HEARTBEAT_TYPE, NOTHING_WAITS), (STATE_TYPE, json.dumps(body).encode())):
            place = (at_us, "gateway-events", 0, 0)
            self._states.take([GatewayEvent(kind, "plant", name, "0011", place, edge, value)], {})
        self.warehouse.ordinal += 1
        state = msgspec.json.encode(self._states.gateways["plant", name])
        self.warehouse.note(
            "gateway_states",
            {"namespace": "plant", "gateway": name, "state": state, "ordinal": self.warehouse.ordinal},
        )

    def standings(self, fleet: Fleet = FLEET) -> list[Standing]:
        return standings(fleet, tables.open(str(self.warehouse.path)).evidence())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(fleet_commands, "time", SimpleNamespace(time_ns=lambda: 1_000 * microseconds(NOON)))
    return Site(tmp_path / "warehouse")


def told(wish: str, result: str, reason: str | None = None, trouble: str | None = None) -> dict[str, Any]:
    return {"serial": 7, "wish": wish, "result": result, "reason": reason, "trouble": trouble}


def test_each_gateway_stands_to_the_file_as_it_told(site: Site) -> None:
    site.gateway("a", "1.2.0", told(FIRST.wish, "good"))
    site.gateway("b", "1.1.0", told(FIRST.wish, "went-back", "no reading came in"))
    site.gateway("c", "1.1.0", told("0" * 16, "good"))
    site.gateway("d", "1.1.0", told(OTHERS.wish, "good"))
    found = {each.gateway: each[2:] for each in site.standings()}
    assert found == {
        "a": ("first", "good", "1.2.0", "1.2.0", None),
        "b": ("first", "went-back", "1.1.0", "1.2.0", "no reading came in"),
        "lost": ("first", "unknown", None, "1.2.0", None),
        "c": ("others", "not-drawn", "1.1.0", None, None),
        "d": ("others", "good", "1.1.0", None, None),
    }
    assert [each.gateway for each in site.standings()] == ["b", "a", "lost", "c", "d"]


def test_why_a_gateway_went_back_is_told_although_its_folder_is_dead_now(site: Site) -> None:
    site.gateway("b", "1.1.0", told(FIRST.wish, "went-back", "no reading came in", "the server answers 404"))
    assert site.standings()[0][3::3] == ("went-back", "no reading came in; the server answers 404")


def test_a_gateway_that_has_not_taken_in_the_file_says_why(site: Site) -> None:
    site.gateway("a", "1.1.0", told("0" * 16, "good", trouble="the server answers 404"))
    site.gateway("b", "1.1.0", None)
    site.gateway("lost", "1.1.0", told("0" * 16, "good"))
    assert [each[3::3] for each in site.standings()] == [
        ("unseen", "the server answers 404"),
        ("unseen", "it looks at no folder: its settings have no section [fleet]"),
        ("unseen", "it has taken in number 7, and this is 8"),
    ]


def asked(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["fleet", *map(str, words)])


def test_the_status_is_a_finding_if_a_gateway_went_back(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(TEXT)
    site.gateway("a", "1.2.0", told(FIRST.wish, "good"))
    shown = asked("status", file, "--warehouse", site.warehouse.path, "--json")
    assert shown.exit_code == 0, shown.output
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(row["gateway"], row["standing"]) for row in rows] == [("a", "good"), ("b", "unknown"), ("lost", "unknown")]
    assert "first: 1 good, 2 unknown" in shown.stderr
    site.gateway("b", "1.1.0", told(FIRST.wish, "went-back", "Kafka is not reached"))
    shown = asked("status", file, "--warehouse", site.warehouse.path)
    assert shown.exit_code == 1
    assert "first: 1 good, 1 unknown, 1 went-back" in shown.stderr


def test_mistakes_are_told_with_their_lines_and_not_signed(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(TEXT.replace("linger_ms", "linger").replace("share = 0", "share = 0.5"))
    for words in (("check", file), ("sign", file, __file__)):
        shown = asked(*words)
        assert shown.exit_code == 1
        assert f"{file}:11: groups[1].share: 0.5 will not do" in shown.stderr
    file.write_text(TEXT.replace("linger_ms", "linger"))
    assert f"{file}:14: groups[1].settings.kafka.linger: there is no such setting" in asked("check", file).stderr
    assert not file.with_name("fleet.toml.sig").exists()
    file.write_text(TEXT)
    shown = asked("check", file)
    assert shown.exit_code == 0
    assert "others: settings in kafka, for 0 per cent of plant/*" in shown.stdout


def test_a_signature_is_one_that_updates_are_verified_by(tmp_path: Path) -> None:
    file, key = tmp_path / "fleet.toml", tmp_path / "keys/release.key"
    file.write_text(TEXT)
    deb_signing.make_key(key)
    public = tmp_path / "release.pem"
    public.write_text(deb_signing.public_key(key))
    shown = asked("sign", file, key)
    assert shown.exit_code == 0, shown.output
    signature = file.with_name("fleet.toml.sig").read_bytes()
    verify(file, signature, [public])
    file.write_text(TEXT.replace("linger_ms = 100", "linger_ms = 101"))
    with pytest.raises(UpdateError, match="fits none of the keys"):
        verify(file, signature, [public])
    public.write_text("no key")
    shown = asked("sign", file, public)
    assert shown.exit_code == 3
    assert "is no Ed25519 key that signs updates" in shown.stderr
    assert file.with_name("fleet.toml.sig").read_bytes() == signature, "the former one stays"


def raised(site: Site, file: Path, *words: str) -> Result:
    return asked("raise", file, "--warehouse", site.warehouse.path, *words)


OTHERS_ALONE = f"{TEXT.partition('[[groups]]')[0]}[[groups]]{TEXT.rpartition('[[groups]]')[2]}"


def shares(file: Path) -> tuple[int, ...]:
    fleet = parse(file.read_text(), file)
    return fleet.serial, *(group.share for group in fleet.groups)


def test_a_share_is_raised_once_all_of_it_are_good(site: Site, tmp_path: Path) -> None:
    """Each gateway that is drawn has to be good. The file is otherwise left as a person wrote it."""
    file = tmp_path / "fleet.toml"
    file.write_text(text := OTHERS_ALONE.replace("share = 0", "share = 60   # the first ones"))
    (group,) = parse(text, file).groups
    names = "abcdef"
    drawn = [name for name in names if group.is_drawn(f"plant/{name}")]
    assert 1 < len(drawn) < len(names)
    for name in names:
        site.gateway(name, "1.1.0", told(group.wish, "waits"))
    for left in range(len(drawn), 0, -1):
        shown = raised(site, file)
        more = f" and {left - 1} more" if left > 1 else ""
        assert (shown.exit_code, file.read_text()) == (0, text)
        assert shown.stdout == f"others: 60 per cent until these are good: plant/{drawn[-left]} (waits){more}\n"
        site.gateway(drawn[-left], "1.1.0", told(group.wish, "good"))
    assert raised(site, file, "--by", "30").stdout.startswith("others: from 60 to 90 per cent\n")
    assert file.read_text() == text.replace("serial = 8", "serial = 9").replace("share = 60 ", "share = 90 ")
    for name in names:
        site.gateway(name, "1.1.0", told(group.wish, "good"))
    raised(site, file, "--by", "50")
    assert shares(file) == (10, 100)
    assert raised(site, file).stdout == "others: all of its gateways have it\n"
    assert shares(file) == (10, 100)


def test_nobody_is_no_proof_that_a_change_is_good(site: Site, tmp_path: Path) -> None:
    """A group of patterns may have no gateway, or none in its share. A share of 0 is somebody's will."""
    file = tmp_path / "fleet.toml"
    file.write_text(text := OTHERS_ALONE.replace("share = 0", "share = 1"))
    site.gateway("a", "1.1.0", told("0" * 16, "good"))
    (group,) = parse(text, file).groups
    assert not group.is_drawn("plant/a")
    first = group.draw("plant/a") + 1
    assert raised(site, file).stdout.startswith(f"others: from 1 to {first} per cent\n")
    assert shares(file) == (9, first)
    assert raised(site, file).stdout.startswith(f"others: {first} per cent until these are good: plant/a (unseen)")
    for of_group, words in (("plant/*", "it stays at 0 per cent; begin by hand"), ("plan/*", "the tables know no")):
        file.write_text(OTHERS_ALONE.replace("plant/*", of_group))
        assert words in raised(site, file, "--by", "45").stdout
        assert shares(file) == (8, 0)


def test_no_share_is_raised_if_any_gateway_went_back(site: Site, tmp_path: Path) -> None:
    """Also one that is not drawn any more: the owner has lowered the share since."""
    file = tmp_path / "fleet.toml"
    site.gateway("a", "1.2.0", told(FIRST.wish, "good"))
    site.gateway("b", "1.1.0", told(FIRST.wish, "went-back", "no reading came in"))
    for text in (TEXT, TEXT.replace('version = "1.2.0"', 'version = "1.2.0"\nshare = 1')):
        file.write_text(text)
        shown = raised(site, file)
        assert shown.exit_code == 1
        assert shown.stderr.startswith("first: plant/b went-back: no reading came in\nno share is raised: 1 gateway")
        assert file.read_text() == text


def test_a_gateway_that_is_silent_since_holds_the_share(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was good by its last words. If all are silent, nobody knows, and ingest may stand still."""
    file = tmp_path / "fleet.toml"
    file.write_text(text := OTHERS_ALONE.replace("share = 0", "share = 99"))
    for name in "ab":
        site.gateway(name, "1.1.0", told(OTHERS.wish, "good"), later_s=0 if name == "a" else 200)
    assert "until these are good: plant/a (silent)" in raised(site, file).stdout
    later = SimpleNamespace(time_ns=lambda: 1_000 * microseconds(NOON) + 600_000_000_000)
    monkeypatch.setattr(fleet_commands, "time", later)
    shown = raised(site, file)
    assert (shown.exit_code, file.read_text()) == (1, text)
    assert "no share is raised: the tables have heard of no gateway lately" in shown.stderr


def test_a_file_in_another_form_is_left_to_its_owner(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    text = 'serial = 8\ngroups = [{name = "all", gateways = ["plant/*"], version = "1.2.0", share = 99}]\n'
    file.write_text(text)
    site.gateway("a", "1.2.0", told(parse(text, file).groups[0].wish, "good"))
    shown = raised(site, file)
    assert shown.exit_code != 0
    assert "raise it by hand" in shown.stderr
    assert file.read_text() == text
    other = OTHERS_ALONE.replace("serial = 8", "serial = 0x1_0").replace("share = 0", "share=99# all but one")
    file.write_text(other)
    site.gateway("a", "1.2.0", told(OTHERS.wish, "good"))
    assert raised(site, file).exit_code == 0
    assert file.read_text() == other.replace("0x1_0", "17").replace("=99#", "=100#")
