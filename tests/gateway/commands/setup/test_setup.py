"""`sluice setup --answers`: settings from answers, words for wrong answers, and that nothing is half-written."""

import os
import pwd
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import main
from gateway.commands.check import clock
from gateway.commands.setup import hardware
from gateway.commands.setup.answers import (
    ANONYMOUS_WORDS,
    EXAMPLE,
    SECRETS_NAME,
    Answers,
    Secrets,
    load,
    parse,
    parse_secrets,
)
from gateway.commands.setup.hardware import proposed_id
from gateway.commands.setup.new_settings import Existing
from gateway.commands.setup.plan import carry_out, new_page_password, plan
from gateway.commands.setup.setup_command import typed
from gateway.commands.setup.write import (
    Folder,
    NewFile,
    Owner,
    SetupWriteError,
    make_folders,
    owners_for,
    writable_trouble,
    write_files,
)
from gateway.config import config_file
from gateway.host import service_user
from gateway.host.safe_files import wipe
from gateway.listener import credentials
from gateway.page.password import read_password_line, verify_password
from gateway.settings import DEFAULT_CONFIG
from gateway.toml_files.mistakes import ConfigError, unseen_mistakes
from gateway.toml_files.writer import toml_text
from tests.support.waiting import patience

ANSWERS = """\
[gateway]
id = "barn-1"
namespace = "north-farm"
[kafka]
bootstrap = ["127.0.0.1:1"]
tls = true
user = "barn-1"
[sensors]
devices = ["42", "43"]
"""
SECRETS = """\
kafka_password = "kafka-9d2c1b77"
page_password = "page-51ab03fe"
[devices]
"42" = "device-0123456789"
[devices_sha256]
"43" = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
"""
NOW = datetime(2026, 3, 14, tzinfo=UTC)


def write(folder: Path, answers: str = ANSWERS, secrets: str = SECRETS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "barn-1.toml").write_text(answers)
    if secrets:
        (folder / SECRETS_NAME).write_text(secrets)
    return folder / "barn-1.toml"


def setup(config: Path, *arguments: str | Path) -> Result:
    words = ["setup", "--config", str(config), *map(str, arguments)]
    return CliRunner(env={"COLUMNS": "1000"}).invoke(main, words)


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, Path("a.toml"))
    return str(caught.value).splitlines()


def state(folder: Path) -> dict[str, bytes]:
    """Every file with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what answers become ----------------------------------------------------------------------------


def test_a_file_of_answers_sets_a_gateway_up(tmp_path: Path) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    done = setup(config, "--answers", write(tmp_path / "given"), "--no-check")
    assert done.exit_code == 0, done.output
    settings = config_file.load(config)
    assert settings.gateway.namespace == "north-farm"
    assert settings.kafka.sasl is not None
    assert settings.kafka.sasl.password_file == tmp_path / "etc" / "secrets" / "kafka.password"
    assert settings.kafka.sasl.password_file.read_text() == "kafka-9d2c1b77\n"
    assert settings.status_page is not None
    assert verify_password("page-51ab03fe", read_password_line(settings.status_page.password_file))
    (known,) = credentials.load(tmp_path / "etc" / "devices.json").devices["42"]
    assert known.sha256 == credentials.digest("device-0123456789")
    for secret in ("kafka-9d2c1b77", "page-51ab03fe", "device-0123456789"):
        assert secret not in done.output
        assert secret not in config.read_text()
    assert not list(tmp_path.rglob(".*")), "nothing is left of the writing"


def test_settings_in_this_folder_name_places_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = write(tmp_path / "given")
    monkeypatch.chdir(tmp_path)
    assert setup(Path("gateway.toml"), "--answers", answers, "--no-check").exit_code == 0
    monkeypatch.chdir("/")
    settings = config_file.load(tmp_path / "gateway.toml")
    assert settings.status_page is not None
    assert settings.kafka.sasl is not None
    for path in (settings.buffer.path, settings.status_page.password_file, settings.kafka.sasl.password_file):
        assert path.is_relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["reset", "--config", "gateway.toml", "--yes-wipe", "barn-1"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert set(state(tmp_path)) == {"given/barn-1.toml", "given/sluice-secrets.toml"}


def test_kafka_that_cannot_be_reached_is_told_and_everything_is_written(tmp_path: Path, config: Path) -> None:
    done = setup(config, "--answers", write(tmp_path / "given"))
    assert done.exit_code == 1, done.output
    assert "FAIL  Kafka at 127.0.0.1:1: cannot be reached: nothing listens at 127.0.0.1:1" in done.output
    assert config_file.load(config).gateway.id == "barn-1"


def test_secrets_that_nobody_gave_are_made_and_shown_once(tmp_path: Path, config: Path) -> None:
    answers = write(tmp_path / "given", secrets='kafka_password = "kafka-9d2c1b77"')
    shown = setup(config, "--answers", answers, "--no-check").output
    made = credentials.load(tmp_path / "devices.json").devices
    lines = dict(line.split()[-2:] for line in shown.splitlines() if line.startswith("    "))
    assert {credentials.digest(lines[name]) for name in ("42", "43")} == {each.sha256 for (each,) in made.values()}
    assert "Shown only once" in shown
    again = setup(config, "--answers", answers, "--no-check").output
    assert "Shown only once" not in again
    assert f"42 keeps its present secret: sluice devices rotate 42 --config {config} makes a new one" in again
    assert credentials.load(tmp_path / "devices.json").devices == made


@pytest.mark.parametrize(
    ("runs", "inside", "told"),
    [
        ("", "", "no time daemon runs (sudo apt install systemd-timesyncd)"),
        ("chronyd", "", "chronyd runs (timedatectl shows its state)"),
        ("", "virtual machine (kvm)", "no time daemon runs (sudo apt install systemd-timesyncd)"),
        ("", "container (lxc)", "no time daemon runs here\n"),
        ("", "container (lxc)", 'this is a container (lxc): if its host keeps the clock, write clock = "system"'),
    ],
)
def test_a_clock_that_is_not_synced_is_told_first_with_what_to_do(
    runs: str, inside: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsynced:
        synced = False

    monkeypatch.setattr(hardware, "read_wall_clock", lambda _gateway: Unsynced)
    monkeypatch.setattr(clock, "time_daemons", lambda: runs)
    monkeypatch.setattr(hardware, "virtualization", lambda: inside)
    config, answers = tmp_path / "gateway.toml", write(tmp_path / "given")
    shown = setup(config, "--answers", answers, "--no-check").output
    assert "readings wait for it, at most 10 min: " in shown
    assert told in shown
    assert shown.index(told) < shown.index("next: ")
    assert inside or "this is a" not in shown
    # A vouched clock is not doubted.
    answers = write(tmp_path / "given", ANSWERS.replace("[kafka]", 'clock = "system"\n[kafka]'))
    assert "is not synced" not in setup(config, "--answers", answers, "--no-check").output
    assert config_file.load(config).gateway.clock == "system"
    answers = write(tmp_path / "given")
    assert "is not synced" not in setup(config, "--answers", answers, "--no-check").output, "it stays"


def test_commands_are_told_as_they_are_typed(tmp_path: Path) -> None:
    assert typed(DEFAULT_CONFIG, "check") == "sudo sluice check"
    config = tmp_path / "my barn" / "gateway.toml"
    assert typed(config, "check") == f"sluice check --config '{config}'"
    shown = setup(config, "--answers", write(tmp_path / "given"), "--no-check").output
    assert f"next: {typed(config, 'check')} checks every link" in shown
    assert typed(config, "devices add NAME") in shown


def test_the_example_sets_a_gateway_up_once_it_names_a_broker(tmp_path: Path, config: Path) -> None:
    printed = CliRunner().invoke(main, ["setup", "--example-answers"])
    assert printed.output == EXAMPLE
    assert max(map(len, EXAMPLE.splitlines())) <= 120
    refused = setup(config, "--answers", write(tmp_path / "unchanged", EXAMPLE, ""), "--no-check")
    assert refused.exit_code == 2
    assert "kafka.bootstrap: kafka.example:9093 is only an example; write your own brokers" in refused.output
    assert not config.exists()
    answers = write(tmp_path / "given", EXAMPLE.replace("kafka.example", "kafka.farm.example"), "")
    assert setup(config, "--answers", answers, "--no-check").exit_code == 0


def test_every_answer_stands_in_the_example() -> None:
    for name, section in Answers.__annotations__.items():
        if name == "secrets":
            continue
        for answer in section.__struct_fields__:
            assert f"{answer} = " in EXAMPLE, answer
    for secret in Secrets.__struct_fields__:
        assert secret in EXAMPLE


def test_what_is_not_asked_for_stays(tmp_path: Path, config: Path) -> None:
    config.write_text(
        """\
fallback_topic = "strays"
[gateway]
id = "old"
clock = "system" # a container
[kafka]
bootstrap = ["old:9092"]
lanes_max = 7
[kafka.tls]
certificate = "/x.pem"
key = "/x.key"
[mqtt_listener]
port = 1900
[mqtt_listener.users]
"7" = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
[serial]
ports = []
[[serial.text]]
port = "/dev/ttyUSB9"
device = "scale"
format = "csv"
columns = ["a"]
[[routes]]
topic = "device/{device}/{stream}"
kafka = "device-{stream}"
identity = "json"
"""
    )
    before = config.read_text()
    done = setup(config, "--answers", write(tmp_path / "given"), "--no-check")
    assert done.exit_code == 0, done.output
    assert 'clock = "system" # a container\n' in config.read_text()
    settings = config_file.load(config)
    assert settings.fallback_topic == "strays"
    assert (settings.gateway.id, settings.gateway.clock) == ("barn-1", "system")
    assert (settings.kafka.bootstrap, settings.kafka.lanes_max) == (("127.0.0.1:1",), 7)
    assert settings.kafka.tls is not None
    assert settings.kafka.tls.key == Path("/x.key")
    assert settings.mqtt_listener is not None
    assert (settings.mqtt_listener.port, list(settings.mqtt_listener.users)) == (1900, ["7"])
    assert settings.serial is not None
    assert settings.serial.text[0].columns == ("a",)
    assert settings.routes[0].identity == "json"
    (kept,) = tmp_path.glob("gateway.toml.*")
    assert kept.read_text() == before


def test_files_of_root_are_the_folders_owners(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    folder = tmp_path / "etc"
    folder.mkdir()
    os.chown(folder, 4711, 4712)
    assert setup(folder / "gateway.toml", "--answers", write(tmp_path / "given"), "--no-check").exit_code == 0
    for path in folder.rglob("*"):
        assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712), path


def test_files_in_the_services_place_are_whose_the_service_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class User:
        pw_uid, pw_gid = 990, 991

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", lambda _name: User)
    owners = owners_for(Path("/etc/sluice/gateway.toml"))
    assert (owners.settings, owners.secrets) == (Owner(0, 991), Owner(990, 991))
    assert owners.credentials == Owner(0, 0)


@pytest.mark.parametrize(
    ("model", "serial", "proposal"),
    [
        ("Raspberry Pi 4 Model B Rev 1.4\0", "10000000A1B2C3D4\0", "rpi-a1b2c3d4"),
        ("Some Board\0", "0042\0", "gateway-0042"),
    ],
)
def test_a_name_is_proposed_from_the_board(model: str, serial: str, proposal: str, tmp_path: Path) -> None:
    (tmp_path / "model").write_text(model)
    (tmp_path / "serial-number").write_text(serial)
    assert proposed_id(tmp_path, tmp_path / "machine-id") == proposal


def test_without_a_serial_number_the_installation_names_it(tmp_path: Path) -> None:
    (tmp_path / "serial-number").write_text("0000000000000000\0")
    machine = tmp_path / "machine-id"
    machine.write_text("0123456789abcdef0123456789abcdef\n")
    first = proposed_id(tmp_path, machine)
    assert "01234567" not in first, "a machine-id is nobody's business"
    machine.write_text("1123456789abcdef0123456789abcdef\n")
    assert first != proposed_id(tmp_path, machine)
    assert parse(f'[gateway]\nid = "{first}"\n[kafka]\nbootstrap = ["a:1"]\ntls = true', Path("a"))


def test_passwords_that_are_made_can_be_read_out() -> None:
    made = {new_page_password() for _ in range(100)}
    assert len(made) == 100
    assert all(len(password) == 14 and not set(password) & set("01ilo") for password in made)


# -- what is told of wrong ones -----------------------------------------------------------------------

KAFKA = '[kafka]\nbootstrap = ["a:1"]\ntls = true\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a.toml: kafka is missing; write [kafka] with bootstrap"),
        ('kafka = "a:1"', "a.toml:1: kafka: this value will not do; write [kafka] on a line of its own"),
        ('[kafka]\nbootstrap = ["a:1"]', "a.toml:1: kafka: tls is missing; write tls = true, or tls = false if"),
        ("[kafka]\nbootstrap = 3\ntls = true",
         'a.toml:2: kafka.bootstrap: 3 will not do; write a list of texts, such as ["...'),
        (KAFKA + "mechanisn = 3", "a.toml:4: kafka.mechanisn: there is no such answer; write 'mechanism' instead"),
        (KAFKA + 'password = "secret-1"', "a.toml:4: kafka.password: there is no such answer; write kafka_password"),
        (KAFKA + "devices = []", "a.toml:4: kafka.devices: there is no such answer; `devices` belongs below [sensors]"),
        (KAFKA + "mechanism = 'GSSAPI'",
         'a.toml:4: kafka.mechanism: "GSSAPI" will not do; write one of "SCRAM-SHA-512"'),
        (KAFKA + "[sensors]\nanonymous = 'yes'", f'write exactly anonymous = "{ANONYMOUS_WORDS}"'),
        (KAFKA + f"[sensors]\ndevices = ['a']\nanonymous = '{ANONYMOUS_WORDS}'",
         "makes the secrets of devices useless"),
        (KAFKA + "[sensors]\nmqtt = false\ndevices = ['a']", "a.toml:5: sensors.mqtt: is false, but devices need it"),
        (KAFKA + "[sensors]\ndevices = ['a b']",
         'a.toml:5: sensors.devices: ["a b"] will not do; write a list of names'),
        (KAFKA + "[secrets]\nkafka_password = 'x'", "a.toml:1: kafka.user: is missing, but there is a kafka_password"),
        (KAFKA + "[secrets]\npage_password = 'short'", "this value will not do; write a text of at least 8"),
        (KAFKA + "[secrets.devices]\n7 = 'short'", "secrets.devices: this value will not do; write a secret of"),
        ('[kafka]\nbootstrap = ["a:1"]\ntls = false\nca = "x"', "a.toml:4: kafka.ca: is useless with tls = false"),
        ('[kafka]\nbootstrap = ["a:1"]\ntls = false\nmechanism = "PLAIN"', "is PLAIN, which sends the password itself"),
        (KAFKA + "[gateway]\nclock = 'ntp'", 'a.toml:5: gateway.clock: "ntp" will not do; write one of "kernel", "sys'),
        ("[kafka", "a.toml:1: is not TOML"),
        (KAFKA + "[sensors]\u00a0# here", "a.toml:4: column 10: here stands no-break space (U+00A0)"),
    ],
)  # fmt: skip
def test_a_mistake_has_its_line_and_what_to_write_instead(text: str, told: str) -> None:
    assert any(told in line for line in mistakes(text)), mistakes(text)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (ANSWERS.replace("127.0.0.1:1", "kafka"), ':5: kafka.bootstrap: "kafka" is no address; write host:port'),
        (ANSWERS.replace("[sensors]", "[sensors]\nserial = ['/dev/tty USB']"), ""),
    ],
)
def test_what_the_settings_themselves_refuse_is_told_at_the_answer(answers: str, told: str, tmp_path: Path) -> None:
    done = setup(tmp_path / "gateway.toml", "--answers", path := write(tmp_path / "given", answers), "--no-check")
    if not told:
        assert done.exit_code == 0, done.output
        return
    assert done.exit_code == 2
    assert f"{path}{told}" in done.output
    assert "nothing was written: correct this first" in done.output
    assert not (tmp_path / "gateway.toml").exists()


def test_names_that_are_somebody_elses_are_told(tmp_path: Path, config: Path) -> None:
    credentials.add(tmp_path / "devices.json", ["43"], None, operators=True)
    answers = write(tmp_path / "given")
    told = setup(config, "--answers", answers, "--no-check")
    assert told.exit_code == 2
    assert "barn-1.toml:9: sensors.devices: 43 is the name of an operator" in told.output
    credentials.revoke(tmp_path / "devices.json", ["43"])
    assert setup(config, "--answers", answers, "--no-check").exit_code == 0
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    config.write_text(config.read_text() + f'[mqtt_listener.users]\n"42" = "{digest}"\n')
    told = setup(config, "--answers", answers, "--no-check")
    assert "42 has its secret in gateway.toml" in told.output


def test_secrets_that_nothing_needs_any_more_go(tmp_path: Path) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    assert setup(config, "--answers", write(tmp_path / "given"), "--no-check").exit_code == 0
    assert (config.parent / "secrets" / "kafka.password").exists()
    answers = ANSWERS.replace('user = "barn-1"\n', "") + "[status_page]\nenabled = false\n"
    assert setup(config, "--answers", write(tmp_path / "other", answers, ""), "--no-check").exit_code == 0
    assert not list((config.parent / "secrets").iterdir())
    assert not list((config.parent / "credentials").iterdir())


def test_an_identity_that_is_not_said_stays(tmp_path: Path, config: Path) -> None:
    assert setup(config, "--answers", write(tmp_path / "given"), "--no-check").exit_code == 0
    nameless = ANSWERS.partition("[kafka]")[1] + ANSWERS.partition("[kafka]")[2]
    assert setup(config, "--answers", write(tmp_path / "given", nameless), "--no-check").exit_code == 0
    gateway = config_file.load(config).gateway
    assert (gateway.id, gateway.namespace) == ("barn-1", "north-farm")


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    answers = ANSWERS.replace("127.0.0.1:1", "kafka")
    done = setup(tmp_path / "gateway.toml", "--answers", write(tmp_path / "given", answers, ""), "--no-check")
    assert "kafka.user: has no password; write kafka_password into sluice-secrets.toml" in done.output
    assert "is no address" in done.output


def test_secrets_stand_in_one_place(tmp_path: Path) -> None:
    answers = write(tmp_path / "given", ANSWERS + "[secrets]\nkafka_password = 'x'")
    assert "is here and in sluice-secrets.toml too" in setup(tmp_path / "g.toml", "--answers", answers).output


def test_an_authority_that_is_none_is_told(tmp_path: Path) -> None:
    answers = write(tmp_path / "given", ANSWERS.replace("tls = true", 'tls = true\nca = "ca.pem"'))
    told = setup(tmp_path / "g.toml", "--answers", answers, "--no-check")
    assert told.exit_code == 2
    assert "barn-1.toml:7: kafka.ca: " in told.output
    (tmp_path / "given" / "ca.pem").write_text("nothing")
    assert "holds no certificate" in setup(tmp_path / "g.toml", "--answers", answers, "--no-check").output


def test_without_a_terminal_it_says_how_else(tmp_path: Path) -> None:
    done = setup(tmp_path / "gateway.toml")
    assert done.exit_code == 2
    assert "sluice setup --answers FILE" in done.output
    assert setup(tmp_path / "gateway.toml", "--no-check").exit_code == 2


def test_a_folder_that_may_not_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_user, "_may_read_program", lambda: True)
    theirs, closed = tmp_path / "theirs", tmp_path / "closed"
    theirs.mkdir()
    closed.mkdir(mode=0)
    (tmp_path / "file").touch()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    with service_user.as_service(tmp_path / "gateway.toml", theirs / "buffer.db"):
        trouble = writable_trouble(closed / "inner" / "gateway.toml")
    assert trouble is not None
    assert trouble.startswith("this user may not write in /")
    trouble = writable_trouble(tmp_path / "file" / "gateway.toml")
    assert trouble == f"{tmp_path}/file is no folder; name another path with --config"


def test_the_services_place_is_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    told = writable_trouble(Path("/etc/sluice/gateway.toml"))
    assert told is not None
    assert "sudo sluice setup" in told


scalars = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=20))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
names = st.sampled_from(
    [*Answers.__struct_fields__, *Secrets.__struct_fields__, "bootstrap", "tls", "user", "sites", "x"]
)
documents = st.dictionaries(names, st.one_of(values, st.dictionaries(names, values, max_size=4)), max_size=6)


@given(documents)
def test_any_document_is_read_back_as_it_was_written(document: dict[str, Any]) -> None:
    text = toml_text(document, {})
    assert tomllib.loads(text) == document
    assert unseen_mistakes(text) == [], "what is written is taken"


def told_of(read: Callable[[str, Path], object], text: str) -> tuple[object, str | None]:
    """The value that was read, or the mistakes that were reported."""
    try:
        return read(text, Path("a.toml")), None
    except ConfigError as error:
        return None, str(error)


@given(documents)
def test_whatever_answers_are_they_are_taken_or_told(document: dict[str, Any]) -> None:
    assert told_of(parse, toml_text(document, {}))[1] != ""


@given(st.text(max_size=200) | st.text(alphabet="[]=\"{}\n#\\'abc123,.", max_size=60))
def test_whatever_stands_in_the_file_is_taken_or_told(text: str) -> None:
    assert told_of(parse, text)[1] != ""
    assert told_of(parse_secrets, text)[1] != ""


MARK = "hunter2"
marked = st.one_of(
    st.just(MARK),
    st.just([MARK]),
    st.just({MARK: MARK}),
    st.just({"x": {MARK: 1}}),
    st.just(MARK + "\x00"),
    st.just({MARK: MARK * 9, "y": 3}),
)


@given(st.dictionaries(st.sampled_from(Secrets.__struct_fields__), marked, min_size=1))
def test_no_mistake_of_secrets_tells_a_secret(document: dict[str, Any]) -> None:
    ways = [(parse_secrets, toml_text(document, {})), (parse, KAFKA + toml_text({"secrets": document}, {}))]
    for read, text in ways:
        found, told = told_of(read, text)
        assert MARK not in repr(found)
        assert MARK not in (told or "")


def test_a_secret_in_the_place_of_a_section_is_not_told() -> None:
    for name in Answers.__struct_fields__:
        found, told = told_of(parse, f'{name} = "{MARK}"')
        assert MARK not in f"{found} {told}"
        assert f"{name}: this value will not do; write [{name}] on a line of its own" in (told or "")


def test_a_secret_that_is_no_toml_is_not_told() -> None:
    for text in (f'kafka_password = "{MARK}', f"kafka_password = {MARK}", f"kafka_password = '{MARK}\n'", f"{MARK}\n"):
        with pytest.raises(ConfigError) as caught:
            parse_secrets(text, Path("a.toml"))
        assert MARK not in str(caught.value)


# -- nothing half-written -----------------------------------------------------------------------------

KILLED = """\
import os, signal, sys
from pathlib import Path
from gateway.commands.setup import write
from gateway.cli import main

step, name = int(sys.argv[1]), sys.argv[2]
real = getattr(write, name)

def until_killed(*arguments):
    global step
    if step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    step -= 1
    return real(*arguments)

setattr(write, name, until_killed)
main(sys.argv[3:])
"""
OTHER = ANSWERS.replace('user = "barn-1"', 'user = "barn-2"').replace('"43"]', '"43", "44"]')
OTHER_SECRETS = SECRETS.replace("kafka-9d2c1b77", "other-9d2c1b77").replace(
    '"42" =', '"44" = "device-1123456789"\n"42" ='
)


def killed_at(name: str, step: int, config: Path, answers: Path) -> int:
    """Run a setup that is killed as it comes to a step the so manieth time; its exit code."""
    words = ["setup", "--config", str(config), "--answers", str(answers), "--no-check"]
    command = [sys.executable, "-c", KILLED, str(step), name, *words]
    return subprocess.run(command, capture_output=True, timeout=patience(60), check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_prepare", "_rename", "sync_folder"])
def test_a_first_setup_that_is_killed_leaves_no_settings_and_the_next_one_completes_it(
    name: str, tmp_path: Path
) -> None:
    config, answers = tmp_path / "etc" / "gateway.toml", write(tmp_path / "given")
    steps = 0
    while killed_at(name, steps, config, answers) == -signal.SIGKILL:
        # The last renaming counts. After it, only the folder is synced.
        if config.exists():
            assert name == "sync_folder"
            assert_set_up(config, "barn-1", "kafka-9d2c1b77")
            config.unlink()
        steps += 1
    assert steps >= 3
    assert_set_up(config, "barn-1", "kafka-9d2c1b77")
    assert not list(config.parent.rglob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_prepare", "_rename"])
def test_a_second_setup_that_is_killed_leaves_what_was_in_place(name: str, tmp_path: Path) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    assert setup(config, "--answers", write(tmp_path / "given"), "--no-check").exit_code == 0
    before = config.read_text()
    answers, steps = write(tmp_path / "other", OTHER, OTHER_SECRETS), 0
    while killed_at(name, steps, config, answers) == -signal.SIGKILL:
        assert config.read_text() == before
        assert_set_up(config, "barn-1", "kafka-9d2c1b77")
        steps += 1
    assert steps >= 3
    assert_set_up(config, "barn-2", "other-9d2c1b77")


def test_the_next_setup_wipes_the_files_of_a_killed_one(tmp_path: Path) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    assert killed_at("_rename", 0, config, write(tmp_path / "given")) == -signal.SIGKILL
    assert b"kafka-9d2c1b77\n" in state(config.parent).values()
    without_kafkas = SECRETS.splitlines()[1]
    answers = ANSWERS.replace('user = "barn-1"\n', "").partition("[sensors]")[0]
    assert setup(config, "--answers", write(tmp_path / "given", answers, without_kafkas), "--no-check").exit_code == 0
    assert set(state(config.parent)) == {"gateway.toml", "devices.json", "credentials/status-page"}


def assert_set_up(config: Path, user: str, password: str) -> None:
    """The settings are whole, and go with the password that they name."""
    sasl = config_file.load(config).kafka.sasl
    assert sasl is not None
    assert (sasl.user, sasl.password_file.read_text()) == (user, f"{password}\n")
    assert {"42", "43"} <= set(credentials.load(config.with_name("devices.json")).devices)


@pytest.mark.slow
def test_setups_killed_at_any_moment_leave_the_old_or_the_new(tmp_path: Path) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    first, second = write(tmp_path / "given"), write(tmp_path / "other", OTHER, OTHER_SECRETS)
    assert setup(config, "--answers", first, "--no-check").exit_code == 0
    allowed = {("barn-1", "kafka-9d2c1b77"), ("barn-2", "other-9d2c1b77")}
    for attempt in range(16):
        words = [
            "-m",
            "gateway.cli",
            "setup",
            "--config",
            config,
            "--no-check",
            "--answers",
            (second, first)[attempt % 2],
        ]
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(0.3 + attempt * 0.02)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        sasl = config_file.load(config).kafka.sasl
        assert sasl is not None
        assert (sasl.user, sasl.password_file.read_text().strip()) in allowed


@pytest.mark.parametrize("call", ["open", "fchmod", "fsync", "replace", "write"])
def test_a_disk_that_fails_leaves_what_was_in_place(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("old")
    files = [NewFile(tmp_path / "secret", b"s", 0o400), NewFile(config, b"new", 0o640)]

    def failing(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(28, "No space left on device", str(config))

    opened = os.open

    def failing_to_make(path: Path, flags: int, *mode: int) -> int:
        return failing() if flags & os.O_CREAT else opened(path, flags, *mode)

    faults: dict[str, tuple[object, str, object]] = {
        "open": (os, "open", failing_to_make),
        "write": (os, "fdopen", failing),
        "replace": (Path, "replace", failing),
    }
    monkeypatch.setattr(*faults.get(call, (os, call, failing)))
    with pytest.raises(SetupWriteError, match="No space left on device; the settings are as they were"):
        write_files(files, config, "old")
    monkeypatch.undo()
    assert config.read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def test_settings_that_were_changed_meanwhile_are_not_overwritten(tmp_path: Path) -> None:
    config = tmp_path / "etc" / "gateway.toml"
    planned = plan(load(write(tmp_path / "given")), config, Existing(), is_watched=True)
    config.parent.mkdir()
    config.write_text("somebody else's")
    with pytest.raises(SetupWriteError, match="was changed meanwhile, so nothing was written: run this again"):
        carry_out(planned)
    assert state(tmp_path / "etc") == {"gateway.toml": b"somebody else's"}, "nor is anything else written"


@pytest.mark.parametrize("name", ["refuse_changed", "make_folders", "_prepare", "_rename", "sync_folder"])
def test_no_secret_that_was_made_here_is_stored_unseen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    answers = write(tmp_path / "given", secrets='kafka_password = "kafka-9d2c1b77"')
    planned = plan(load(answers), config, Existing(), is_watched=True)

    def failing(*_arguments: object) -> NoReturn:
        raise SetupWriteError("the disk is full")

    where = "plan" if name in {"refuse_changed", "make_folders"} else "write"
    monkeypatch.setattr(f"gateway.commands.setup.{where}.{name}", failing)
    with pytest.raises(SetupWriteError):
        carry_out(planned)
    monkeypatch.undo()
    assert credentials.load(tmp_path / "devices.json").devices == {}
    assert setup(config, "--answers", answers, "--no-check").output.count("Shown only once") == 1


def test_secrets_that_nobody_can_be_shown_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    config = tmp_path / "gateway.toml"
    answers = write(tmp_path / "given", secrets='kafka_password = "kafka-9d2c1b77"')
    monkeypatch.setattr(click, "echo", gone)
    assert isinstance(setup(config, "--answers", answers, "--no-check").exception, OSError)
    monkeypatch.undo()
    assert config.exists()
    assert credentials.load(tmp_path / "devices.json").devices == {}
    shown = setup(config, "--answers", answers, "--no-check").output
    assert set(credentials.load(tmp_path / "devices.json").devices) == {"42", "43"}
    assert shown.count("Shown only once") == 1


def test_secrets_that_cannot_be_stored_are_not_shown_and_the_page_password_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    def failing(*_arguments: object) -> NoReturn:
        raise credentials.CredentialsError("the disk is full")

    monkeypatch.setattr(credentials, "put", failing)
    answers = write(tmp_path / "given", secrets='kafka_password = "kafka-9d2c1b77"')
    done = setup(config, "--answers", answers, "--no-check")
    assert done.exit_code == 1
    again = f"sluice devices add 42 43 --config {config}"
    assert (
        f"the settings are written, but 42 43 have no secrets: the disk is full. Correct that, then: {again}"
        in done.output
    )
    assert [line.split()[:2] for line in done.output.splitlines() if line.startswith("    ")] == [["status", "page"]]


def test_a_plan_tells_no_secret(tmp_path: Path) -> None:
    planned = plan(load(write(tmp_path / "given")), tmp_path / "g.toml", Existing(), is_watched=True)
    for secret in ("kafka-9d2c1b77", "page-51ab03fe", "device-0123456789"):
        assert secret not in repr(planned)
    assert "[kafka.sasl]" in planned.made.files[-1].content.decode()


def test_folders_and_files_have_their_modes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folders([Folder(tmp_path / "secrets", 0o750)])
        write_files([NewFile(tmp_path / "secrets" / "a", b"x", 0o400)], tmp_path / "none", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "secrets" / "a").stat().st_mode) == 0o400


def test_a_link_in_the_place_of_secrets_is_not_followed(tmp_path: Path) -> None:
    elsewhere, config = tmp_path / "cron.d", tmp_path / "etc" / "gateway.toml"
    elsewhere.mkdir()
    config.parent.mkdir()
    (config.parent / "secrets").symlink_to(elsewhere)
    told = setup(config, "--answers", write(tmp_path / "given"), "--no-check")
    assert told.exit_code == 2
    assert "secrets cannot be made: it is a link" in told.output
    assert not list(elsewhere.iterdir())
    assert not config.exists()


def test_what_is_wiped_is_overwritten_first(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o400)
    # An open descriptor shows the overwritten bytes.
    with secret.open("rb") as seen:
        wipe(secret)
        assert seen.read() == bytes(7)
    assert not secret.exists()
    wipe(secret)
