"""`sluice devices add`, `rotate`, `revoke`, `list`: the output for a person and a program, and who may then log in."""

import asyncio
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import segno
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.commands import devices_commands, handout
from gateway.commands.handout import is_only_for_this_box, qr_code
from gateway.daemon import control
from gateway.listener.credentials import digest, load
from tests.support.gateways import answering
from tests.support.mosquitto import self_signed

CONFIG = """\
[gateway]
id = "gw1"
clock = "system"
[buffer]
path = "{path}/buffer.db"
[kafka]
bootstrap = ["127.0.0.1:1"]
[mqtt_listener]
host = "192.0.2.7"
"""
WRITTEN = f'[mqtt_listener.users]\n"m001" = "{"0" * 64}"\n[mqtt_listener.operators]\n"ops" = "{"1" * 64}"\n'


def write(directory: Path, extra: str = "") -> Path:
    config = directory / "gateway.toml"
    config.write_text(CONFIG.format(path=directory) + extra)
    return config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path)


def devices(config: Path, *words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["devices", *words, "--config", str(config)], input=given, catch_exceptions=False)


def as_json(config: Path, *words: str) -> Any:
    result = devices(config, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_person_is_shown_what_to_type_once(tmp_path: Path, config: Path) -> None:
    result = devices(config, "add", "42", "barn-1", "--no-qr")
    assert result.exit_code == 0
    first, second, _ = result.stdout.split("\n\n")
    words = dict(line.split(maxsplit=1) for line in first.splitlines())
    secret = words.pop("password")
    assert words == {"host": "192.0.2.7", "port": "1883", "user": "42", "topic": "device/42/STREAM"}
    assert "user      barn-1" in second
    kept = load(tmp_path / "devices.json").devices
    assert [each.sha256 for each in kept["42"]] == [digest(secret)]
    assert "shown only this once" in result.stdout
    assert "from when sluice starts" in result.stdout
    shown = devices(config, "list").stdout
    assert secret not in shown
    assert digest(secret) not in shown
    assert [line.split()[:2] for line in shown.splitlines()[1:]] == [["42", "added"], ["barn-1", "added"]]


def test_a_program_is_told_the_same(config: Path) -> None:
    told = as_json(config, "add", "42")
    (device,) = told["devices"]
    assert device == {
        "user": "42",
        "secret": device["secret"],
        "hosts": ["192.0.2.7"],
        "port": 1883,
        "tls": False,
        "plain_port": None,
        "topics": ["device/42/STREAM"],
        "uri": f"mqtt://42:{device['secret']}@192.0.2.7:1883",
    }
    assert (told["counts"], told["warnings"]) == ("at start", [])
    rotated = as_json(config, "rotate", "42", "--keep-old", "1.5")
    assert rotated["devices"][0]["secret"] != device["secret"]
    (listed,) = as_json(config, "list")["logins"]
    assert (listed["name"], listed["operator"], listed["in_settings"], listed["heard_s"]) == ("42", False, False, None)
    new, old = listed["secrets"]
    assert rotated["old_until"] == old["until"]
    assert new["until"] is None
    assert old["until"] > old["made"]
    assert as_json(config, "revoke", "42", "--yes")["revoked"] == ["42"]
    assert as_json(config, "list")["logins"] == []


def test_before_the_word_options_mean_the_same(config: Path) -> None:
    result = CliRunner().invoke(main, ["devices", "--config", str(config), "--json", "add", "42"])
    assert json.loads(result.stdout)["devices"][0]["user"] == "42"
    result = CliRunner().invoke(main, ["devices", "--config", "/nowhere", "list", "--config", str(config), "--json"])
    assert [each["name"] for each in json.loads(result.stdout)["logins"]] == ["42"]


def test_with_tls_the_names_are_those_that_the_certificate_is_for(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = f'[mqtt_listener.tls]\ncertificate = "{certificate}"\nkey = "{key}"\n'
    (device,) = as_json(write(tmp_path, tls), "add", "42")["devices"]
    assert (device["port"], device["tls"], device["plain_port"]) == (8883, True, 1883)
    assert set(device["hosts"]) <= {"localhost", "127.0.0.1", "::1"}
    assert device["uri"].startswith(f"mqtts://42:{device['secret']}@{device['hosts'][0]}:8883")
    shown = devices(write(tmp_path, tls.replace("[mqtt", "port = 0\n[mqtt")), "add", "43", "--no-qr").stdout
    assert "port      8883 with TLS\n" in shown


def test_listening_everywhere_gives_this_boxs_name_and_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "barn-1.example")
    monkeypatch.setattr(handout, "_AVAHI", tmp_path / "avahi")
    monkeypatch.setattr(handout, "running", lambda _program: 7)
    monkeypatch.setattr(handout, "_UDP", tmp_path)
    (tmp_path / "udp").write_text("   1: 00000000:14EB 00000000:0000 07\n")
    config.write_text(config.read_text().replace("192.0.2.7", "0.0.0.0"))  # noqa: S104 - no listener is started
    (device,) = as_json(config, "add", "41")["devices"]
    assert not any(host.endswith(".local") for host in device["hosts"]), "nothing announces it"
    (tmp_path / "udp").write_text("   1: 00000000:14E9 00000000:0000 07\n")
    (device,) = as_json(config, "add", "resolved")["devices"]
    assert device["hosts"][0] == "barn-1.local"
    (tmp_path / "udp").unlink()
    (tmp_path / "avahi").touch()
    (device,) = as_json(config, "add", "42")["devices"]
    assert device["hosts"][0] == "barn-1.local"
    assert "127.0.0.1" not in device["hosts"]
    config.write_text(config.read_text().replace("0.0.0.0", "2001:db8::7"))  # noqa: S104
    (device,) = as_json(config, "add", "43")["devices"]
    assert device["uri"].endswith("@[2001:db8::7]:1883")


@pytest.mark.parametrize(
    ("host", "only"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("barn", False)],  # noqa: S104
)
def test_who_reaches_a_listener(host: str, only: bool) -> None:  # noqa: FBT001
    assert is_only_for_this_box(host) == only


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ('host = "192.0.2.7"', 'host = "127.0.0.1"', "only programs on this box can connect"),
        ('host = "192.0.2.7"', 'host = "192.0.2.7"\nanonymous = true', "may write as any device"),
    ],
)
def test_what_makes_a_secret_useless_is_warned_of(old: str, new: str, warning: str, config: Path) -> None:
    config.write_text(config.read_text().replace(old, new))
    shown = devices(config, "add", "42", "--no-qr")
    assert shown.exit_code == 0
    assert f"warn  mqtt_listener.{new.split()[-3 if 'anonymous' in new else 0]}" in shown.stdout
    assert warning in " ".join(shown.stdout.split())
    assert warning in as_json(config, "add", "43")["warnings"][0]


def test_a_first_list_is_warned_of_where_certificates_let_all_in(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = f'[mqtt_listener.tls]\ncertificate = "{certificate}"\nkey = "{key}"\nclient_ca = "{certificate}"\n'
    config = write(tmp_path, tls)
    assert "devices that are not on it are refused" in as_json(config, "add", "42")["warnings"][0]
    assert as_json(config, "add", "43")["warnings"] == []


def test_an_operator_has_a_secret_of_its_own_kind(tmp_path: Path, config: Path) -> None:
    (operator,) = as_json(config, "add", "boss", "--operator")["devices"]
    assert operator["topics"] == ["command/DEVICE/#"]
    assert list(load(tmp_path / "devices.json").operators) == ["boss"]
    assert "boss (operator)" in devices(config, "list").stdout
    (again,) = as_json(config, "rotate", "boss")["devices"]
    assert again["topics"] == operator["topics"]
    assert load(tmp_path / "devices.json").operators["boss"][0].sha256 == digest(again["secret"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "42"), "42 is there already; sluice devices rotate 42"),
        (("add", "m001"), "m001 has its secret in gateway.toml"),
        (("rotate", "ops"), "take its line out of [mqtt_listener.operators]"),
        (("revoke", "m001", "--yes"), "m001 has its secret in gateway.toml"),
        (("rotate", "43"), "no secret of '43' was made by sluice devices add"),
        (("revoke", "43"), "no secret of '43' was made"),
        (("add", "a b"), "'a b' is no device name"),
    ],
)
def test_what_cannot_be_done_is_told_with_what_to_do(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    config = write(tmp_path, WRITTEN)
    devices(config, "add", "42")
    before = (tmp_path / "devices.json").read_bytes()
    result = devices(config, *words)
    assert result.exit_code == 1
    assert told in " ".join(result.stderr.split())
    assert (tmp_path / "devices.json").read_bytes() == before


def test_those_of_the_settings_are_listed_as_such(tmp_path: Path) -> None:
    config = write(tmp_path, WRITTEN)
    listed = {each["name"]: each for each in as_json(config, "list")["logins"]}
    assert {name: (each["in_settings"], each["operator"]) for name, each in listed.items()} == {
        "m001": (True, False),
        "ops": (True, True),
    }
    assert "m001            gateway.toml" in devices(config, "list").stdout
    assert "0" * 64 not in devices(config, "list").stdout


def test_without_a_listener_nobody_logs_in(config: Path) -> None:
    config.write_text(config.read_text().partition("[mqtt_listener]")[0])
    for words in (("add", "42"), ("list",), ("rotate", "42"), ("revoke", "42")):
        result = devices(config, *words)
        assert result.exit_code == 1
        assert "gateway.toml has no [mqtt_listener]" in result.stderr
        assert "or run sluice setup again, then add devices" in " ".join(result.stderr.split())


def test_revoking_asks_first(tmp_path: Path, config: Path) -> None:
    devices(config, "add", *map(str, range(8)))
    result = devices(config, "revoke", *map(str, range(8)), given="n\n")
    assert result.exit_code == 1
    assert "Revoke 0, 1, 2, 3, 4 and 3 more? They are disconnected at once." in result.stderr
    result = devices(config, "revoke", "7", given="n\n")
    assert "Revoke 7? It is disconnected at once." in result.stderr
    assert len(load(tmp_path / "devices.json").devices) == 8
    assert devices(config, "revoke", *map(str, range(8)), given="y\n").exit_code == 0
    assert not load(tmp_path / "devices.json").devices
    assert "nobody may log in yet" in devices(config, "list").stdout


def test_a_damaged_file_is_told_and_left_as_it_is(tmp_path: Path, config: Path) -> None:
    (tmp_path / "devices.json").write_text("{}}")
    for words in (("add", "42"), ("list",), ("rotate", "42"), ("revoke", "42"), ("revoke", "42", "--yes")):
        result = devices(config, *words)
        assert result.exit_code == 1
        assert "is damaged" in result.stderr
        assert ".damaged; sluice devices add NAME" in " ".join(result.stderr.split())
    assert (tmp_path / "devices.json").read_text() == "{}}"


def test_without_a_known_clock_an_old_secret_cannot_be_kept_for_hours(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_commands, "_now", lambda _: None)
    devices(config, "add", "42")
    shown = devices(config, "list").stdout.splitlines()
    assert shown[1].split()[2] == "-"
    assert shown[2].startswith("SINCE -: not known, because this box's clock was not synced")
    result = devices(config, "rotate", "42", "--keep-old", "1")
    assert result.exit_code == 1
    assert "clock is not synced" in result.stderr
    assert devices(config, "rotate", "42").exit_code == 0
    assert devices(config, "rotate", "42", "--keep-old", "-1").exit_code == 2
    assert "'1h' is not a valid number of hours." in devices(config, "rotate", "42", "--keep-old", "1h").stderr


def test_an_old_secret_that_works_for_a_while_is_told_until_when_and_listed_below_the_new_one(tmp_path: Path) -> None:
    config = write(tmp_path)
    devices(config, "add", "42")
    shown = devices(config, "rotate", "42", "--keep-old", "2", "--no-qr").stdout
    until = load(tmp_path / "devices.json").devices["42"][1].until
    assert until is not None
    assert f"the old password works beside it until {until[:16].replace('T', ' ')} UTC" in shown
    assert "the old password" not in devices(config, "rotate", "42", "--no-qr").stdout
    devices(config, "rotate", "42", "--keep-old", "2")
    new, old = devices(config, "list").stdout.splitlines()[1:]
    assert (new.split()[0], new.split()[-1]) == ("42", "-")
    # A device was heard, whichever of its secrets it used.
    assert (old[:4].strip(), len(old.split())) == ("", 4)


# -- what the running gateway makes of it ---------------------------------------------------------


async def told_by(directory: Path, answer: object, *words: str) -> Any:
    """Output for programs if the running gateway gives this answer."""

    async def answers(_arguments: dict[str, Any]) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with answering(directory / "buffer.db", {"devices-changed": answers} if answer else {}):
        return await asyncio.to_thread(as_json, directory / "gateway.toml", *words)


async def test_when_a_change_counts_is_told(tmp_path: Path) -> None:
    write(tmp_path)
    state = {"file": str(tmp_path / "devices.json"), "devices": 1, "trouble": None, "ended": 0}
    told = await told_by(tmp_path, state, "add", "42")
    assert (told["counts"], told["said"]) == ("now", "the running gateway knows: it may log in from now on")
    told = await told_by(tmp_path, state, "add", "43", "44")
    assert told["said"] == "the running gateway knows: they may log in from now on"
    told = await told_by(tmp_path, state, "revoke", "43", "44", "--yes")
    assert told["said"] == "the running gateway knows: they are let in no more from now on"
    told = await told_by(tmp_path, {**state, "ended": 2}, "rotate", "42")
    assert told["said"].endswith("it has its new secret from now on; 2 connections ended")
    told = await told_by(tmp_path, {**state, "file": "/elsewhere/devices.json"}, "rotate", "42")
    assert told["counts"] == "at start"
    assert "reads /elsewhere/devices.json, and not" in told["warnings"][0]
    told = await told_by(tmp_path, {**state, "trouble": "the file is not this user's"}, "rotate", "42")
    assert (told["counts"], told["warnings"]) == ("soon", ["the file is not this user's"])
    told = await told_by(tmp_path, None, "rotate", "42")
    assert told["counts"] == "at start"
    assert "restart it" in told["warnings"][0]
    told = await told_by(tmp_path, control.RequestRefusedError("it is busy"), "revoke", "42", "--yes")
    assert "it is busy" in told["said"]


def test_a_gateway_that_cannot_be_asked_looks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise control.ControlError("the gateway cannot be asked")

    monkeypatch.setattr(control, "call", refuse)
    told = as_json(write(tmp_path), "add", "42")
    assert told["counts"] == "soon"
    assert told["said"] == "the gateway cannot be asked. A running gateway looks at the file by itself, each second"


# -- the QR code ----------------------------------------------------------------------------------

URI = "mqtt://barn-1:d51yzaxzb54p6pzp39ayv1aqkm@barn-1.local:1883"


def modules(code: str) -> list[list[bool]]:
    """Modules of a code in half blocks; True for light ones."""
    rows: list[list[bool]] = []
    for line in code.splitlines():
        rows += [[character in "█▀" for character in line], [character in "█▄" for character in line]]
    return rows


def test_the_code_in_the_terminal_is_the_code() -> None:
    drawn = modules(qr_code(URI))
    expected = [[not dark for dark in row] for row in segno.make_qr(URI, error="l").matrix_iter(border=2)]
    assert drawn[: len(expected)] == expected
    assert len(drawn) <= len(expected) + 1
    assert max(map(len, drawn)) <= 60, "it fits a terminal of 80 columns"


@pytest.mark.skipif(shutil.which("zbarimg") is None, reason="no zbarimg (zbar-tools) to read it")
def test_a_reader_reads_it(tmp_path: Path) -> None:
    rows = modules(qr_code(URI))
    size = 8
    width = max(map(len, rows)) * size
    pixels = b"".join(
        b"".join((b"\xff" if light else b"\0") * size for light in row).ljust(width, b"\0") * size for row in rows
    )
    picture = tmp_path / "code.pgm"
    picture.write_bytes(b"P5 %d %d 255\n" % (width, len(rows) * size) + pixels)
    read = subprocess.run(["zbarimg", "-q", "--raw", picture], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == URI


def test_a_code_is_shown_unless_it_is_not_wanted_or_cannot_be(config: Path) -> None:
    shown = devices(config, "add", "42").stdout
    # First, so that the text to type is still in sight on a small screen.
    assert modules(shown.partition("host ")[0])
    assert "host " in "\n".join(shown.splitlines()[-8:])
    result = CliRunner(charset="ascii").invoke(main, ["devices", "add", "43", "--config", str(config)])
    assert result.exit_code == 0
    assert "(this terminal cannot show a QR code)" in result.stdout
