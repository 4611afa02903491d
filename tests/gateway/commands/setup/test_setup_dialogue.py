"""`sluice setup` as a person meets it, at a real terminal: without a network, with wrong answers, cut off."""

import ast
import inspect
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.clock.gateway_clock import WallClock
from gateway.commands.check.finding import Finding
from gateway.commands.setup import dialogue, hardware
from gateway.commands.setup.answers import ANONYMOUS_WORDS, Given
from gateway.commands.setup.dialogue import QUESTIONS_MAX, Dialogue
from gateway.commands.setup.kafka_trial import IN_ANSWERS, IN_QUESTIONS, Broker
from gateway.commands.setup.new_settings import Existing
from gateway.commands.setup.plan import plan
from gateway.config import config_file
from gateway.kafka import reach
from gateway.listener import credentials
from gateway.page.password import verify_password
from tests.support.setup_dialogue import ANYWAY, CTRL_C, ENTER, PROMPT, TLS, at_a_terminal, questions_asked, set_up

NOWHERE = "127.0.0.1:1"
"""Address without a Kafka."""
PASSWORD = "right-9d2c1b77"  # noqa: S105 - lives for the length of a test
WITHOUT_KAFKA = ["north-farm/barn-1", NOWHERE, "y", "barn-1", PASSWORD, ENTER, "42, 43", ENTER, ENTER]
"""Answers to all that is asked where Kafka cannot be reached."""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_whole_setup_without_a_network(tmp_path: Path, config: Path) -> None:
    shown, code = set_up(config, WITHOUT_KAFKA)
    # Something is to be mended, and everything is written.
    assert code == 1, shown
    asked = questions_asked(shown)
    assert len(asked) == len(set(asked)) <= QUESTIONS_MAX
    settings = config_file.load(config)
    assert (settings.gateway.id, settings.gateway.namespace) == ("barn-1", "north-farm")
    assert settings.kafka.bootstrap == (NOWHERE,)
    assert settings.kafka.tls is not None, "what cannot be asked is taken for safe"
    assert settings.kafka.sasl is not None
    assert settings.kafka.sasl.password_file.read_text() == f"{PASSWORD}\n"
    assert settings.serial is not None
    assert settings.serial.ports == ("all",)
    assert settings.mqtt_listener is not None
    assert not settings.mqtt_listener.anonymous
    assert files_below(tmp_path) == {
        "gateway.toml",
        "devices.json",
        "secrets/kafka.password",
        "credentials/status-page",
    }
    assert mode(config) == 0o640
    assert mode(settings.kafka.sasl.password_file) == 0o400
    assert mode(tmp_path / "credentials") == 0o700
    assert PASSWORD not in shown
    assert PASSWORD not in config.read_text()
    # The secret that is shown once is the one that counts.
    secrets = dict(re.findall(r"^    (status page|42|43) +(\S+)\r$", shown, re.MULTILINE))
    assert verify_password(secrets["status page"], (tmp_path / "credentials" / "status-page").read_text())
    devices = credentials.load(tmp_path / "devices.json").devices
    assert {name: each.sha256 for name, (each,) in devices.items()} == {
        name: credentials.digest(secrets[name]) for name in ("42", "43")
    }


def test_enter_all_the_way_changes_nothing(tmp_path: Path, config: Path) -> None:
    set_up(config, WITHOUT_KAFKA)
    config.write_text(config.read_text() + "\n[log]\nlevel = 'debug' # by hand\n")
    before = {name: (tmp_path / name).read_bytes() for name in files_below(tmp_path)}
    shown, code = set_up(config, [ENTER, ENTER, "y", ENTER, ENTER, ENTER, ENTER, ENTER, ENTER])
    assert code == 1, shown
    assert {name: (tmp_path / name).read_bytes() for name in files_below(tmp_path)} == before


def test_a_second_setup_keeps_what_it_does_not_ask_for_and_the_old_file(tmp_path: Path, config: Path) -> None:
    set_up(config, WITHOUT_KAFKA)
    config.write_text(config.read_text() + "\n[log]\nlevel = 'debug' # by hand\n")
    before = config.read_text()
    other = "other-51ab03fe"
    shown, _ = set_up(config, ["south/barn-2", ENTER, "y", "barn-2", other, "none", "44", ENTER, "YES"])
    settings = config_file.load(config)
    assert (settings.gateway.id, settings.log.level) == ("barn-2", "debug")
    assert settings.serial is None
    assert settings.kafka.sasl is not None
    assert settings.kafka.sasl.password_file.read_text() == f"{other}\n"
    (old,) = tmp_path.glob("gateway.toml.*")
    assert old.read_text() == before
    assert f"written: {old} (as it was before)" in " ".join(shown.split())
    # The password in place was not written over before the settings that go with it.
    assert files_below(tmp_path / "secrets") == {"kafka-2.password"}
    assert set(credentials.load(tmp_path / "devices.json").devices) == {"42", "43", "44"}


def test_a_password_goes_nowhere_in_the_clear_where_tls_is_given_up(config: Path) -> None:
    set_up(config, WITHOUT_KAFKA)
    config.write_text(config.read_text().replace("SCRAM-SHA-512", "PLAIN"))
    assert config_file.load(config).kafka.tls is not None
    shown, _ = set_up(config, [ENTER, f"plain://{NOWHERE}", "y", ENTER, ENTER, ENTER, ENTER, ENTER, ENTER])
    kafka = config_file.load(config).kafka
    assert kafka.tls is None, shown
    assert kafka.sasl is not None
    assert kafka.sasl.mechanism == "SCRAM-SHA-512"


def test_wrong_answers_are_told_and_asked_again(tmp_path: Path, config: Path) -> None:
    with at_a_terminal("setup", "--config", config) as terminal:
        terminal.answer("no name/barn")
        assert "'no name' will not do" in terminal.until(PROMPT)
        terminal.type("north/barn-1")
        terminal.answer("http://kafka")
        assert "Write before an address tls://" in terminal.until(PROMPT)
        terminal.type("kafka.example")
        assert "is no address; write host:port" in terminal.until(PROMPT)
        terminal.type(NOWHERE)
        assert "nothing listens at 127.0.0.1:1" in terminal.until(ANYWAY)
        terminal.type("n")
        terminal.answer(f"plain://{NOWHERE}")
        terminal.until(ANYWAY)
        terminal.type("y")
        terminal.answer("none")
        terminal.answer("COM3")
        assert "'COM3' is no port" in terminal.until(PROMPT)
        terminal.type("/dev/ttyUSB97")
        assert "/dev/ttyUSB97 is not there now" in terminal.until(ANYWAY)
        terminal.type("maybe")
        assert "Type y or n." in terminal.until(ANYWAY)
        terminal.type("y")
        terminal.answer("stall 7, 42")
        assert "'stall 7' is no device name" in terminal.until(PROMPT)
        terminal.type("anybody may write")
        assert "That is not the whole sentence." in terminal.until(PROMPT)
        terminal.type("'later'")
        terminal.answer("1234567")
        assert "at least 8 characters" in terminal.until(PROMPT)
        terminal.type("12345678")
        terminal.answer("12345679")
        assert "two different passwords" in terminal.until(PROMPT)
        terminal.type("12345678")
        terminal.answer("12345678")
        assert "12345678" not in terminal.until(PROMPT)
        terminal.type("si")
        assert "Write yes or no." in terminal.until(PROMPT)
        terminal.type("y")
        terminal.end()
    assert "12345678" not in terminal.text
    settings = config_file.load(config)
    assert settings.kafka.tls is None
    assert settings.serial is not None
    assert settings.serial.ports == ("/dev/ttyUSB97",)
    assert verify_password("12345678", (tmp_path / "credentials" / "status-page").read_text())


def test_nobody_is_anonymous_but_in_so_many_words(tmp_path: Path, config: Path) -> None:
    with at_a_terminal("setup", "--config", config) as terminal:
        terminal.answer("north/barn-1")
        terminal.answer(f"plain://{NOWHERE}")
        terminal.until(ANYWAY)
        terminal.type("y")
        terminal.answer("none")
        terminal.answer("none")
        terminal.answer("anonymous = true")
        assert "'anonymous = true' is no device name" in terminal.until(PROMPT)
        terminal.type(ANONYMOUS_WORDS)
        terminal.answer('"NONE"')
        terminal.answer(ENTER)
        terminal.end()
    settings = config_file.load(config)
    assert settings.mqtt_listener is not None
    assert settings.mqtt_listener.anonymous
    assert settings.status_page is None
    assert files_below(tmp_path) == {"gateway.toml"}


def test_answers_are_shown_before_they_are_written_and_troubles_at_the_end(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    with at_a_terminal("setup", "--config", config) as terminal:
        terminal.answer("barn-1")
        assert "No site was given: is it default/barn-1? [y/N]: " in terminal.until("N]: ")
        terminal.type(ENTER)
        assert "Write SITE/NAME, as in north-farm/barn-1." in terminal.answer("default/barn-1")
        assert 'The site is called "default"' in terminal.until(PROMPT)
        terminal.type(NOWHERE)
        shown = " ".join(terminal.until(ANYWAY).split())
        assert "nothing listens at 127.0.0.1:1" in shown
        assert "kafka.bootstrap" not in shown
        assert "Without a network" not in shown, "it was refused: there is one"
        terminal.type("y")
        assert "[Y/n]" in terminal.until(TLS)
        terminal.type("x")
        assert "Type y or n." in terminal.until(TLS)
        terminal.type(ENTER)
        assert "Not reached; assumed to speak TLS." in terminal.until(PROMPT)
        terminal.type("none")
        terminal.answer("NONE")
        terminal.answer("42,43 , 42")
        assert "2 sensors: 42, 43." in terminal.until(PROMPT)
        terminal.type(ENTER)
        shown = terminal.until(PROMPT)
        for line in (
            "gateway  default/barn-1",
            "Kafka    127.0.0.1:1, with TLS, no log-in; NOT REACHED",
            "by MQTT: 42, 43; by",
        ):
            assert line in shown
        assert not config.exists()
        terminal.type("no")
        assert terminal.end() == 2
    assert "stopped: nothing was written" in terminal.text
    assert list(tmp_path.iterdir()) == []
    shown, code = set_up(config, WITHOUT_KAFKA)
    assert code == 1
    assert "to be corrected: Kafka is not reached: nothing listens at 127.0.0.1:1" in " ".join(shown.split())


def test_run_again_it_says_who_has_a_secret_and_keeps_that_kafka_speaks_no_tls(config: Path) -> None:
    set_up(config, [*WITHOUT_KAFKA[:1], f"plain://{NOWHERE}", *WITHOUT_KAFKA[2:]])
    assert config_file.load(config).kafka.tls is None
    shown, _ = set_up(config, [ENTER, NOWHERE, "y", ENTER, ENTER, ENTER, "44", ENTER, ENTER])
    assert "Does it speak TLS? [y/N]: " in shown
    assert "Not reached; assumed to speak no TLS: readings can be read on the way." in " ".join(shown.split())
    assert "42, 43 have a secret already, and keep it. Names of more, with commas" in " ".join(shown.split())
    assert "by MQTT: 42, 43, 44; by" in shown
    assert config_file.load(config).kafka.tls is None


def test_that_kafka_speaks_no_tls_is_answered_where_it_cannot_be_found_out(config: Path) -> None:
    with at_a_terminal("setup", "--config", config) as terminal:
        terminal.answer("north-farm/barn-1")
        terminal.answer(NOWHERE)
        terminal.until(ANYWAY)
        terminal.type("y")
        terminal.until(TLS)
        terminal.type("n")
        for answer in ("none", "none", "none", ENTER):
            terminal.answer(answer)
        # Settings without any source of readings are reported before they are written, and after.
        shown = " ".join(terminal.until(PROMPT).split())
        assert "127.0.0.1:1, without TLS" in shown
        assert "sensors nothing comes in: neither by MQTT nor by serial port" in shown
        terminal.type(ENTER)
        assert terminal.end() == 1
    told = " ".join(terminal.text.split())
    assert (
        f"to be corrected: nothing comes in, neither by MQTT nor by serial port: run sluice setup --config {config}"
        in told
    )
    assert config_file.load(config).kafka.tls is None
    # A broker of the site, which nobody is asked for, is where readings come from.
    config.write_text(config.read_text() + '\n[[mqtt_brokers]]\nhost = "127.0.0.1"\ntopics = ["device/#"]\n')
    shown, _ = set_up(config, [ENTER, ENTER, "y", *[ENTER] * 5])
    assert "nothing comes in" not in shown
    assert "by MQTT: none; by serial port: none" in shown


@pytest.mark.parametrize(
    ("inside", "error_us", "typed_there"),
    [
        ("container (systemd-nspawn)", None, "y"),
        ("container (systemd-nspawn)", None, ENTER),
        ("container (systemd-nspawn)", 1, None),
        ("virtual machine (kvm)", None, None),
        ("", None, None),
    ],
)
def test_a_container_is_offered_the_clock_of_its_host(
    inside: str, error_us: int | None, typed_there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, asked = tmp_path / "gateway.toml", []
    typed_before = ["north/barn-1", f"plain://{NOWHERE}", "y", "none", "none", "later", "none"]
    answers = iter(typed_before)

    def next_answer(question: str, *, default: str = "", **_options: object) -> str:
        asked.append(question)
        if 'clock = "system"' in question:
            assert typed_there is not None
            return typed_there or default
        return next(answers, "yes")

    monkeypatch.setattr(click, "prompt", next_answer)
    monkeypatch.setattr(dialogue, "virtualization", lambda: inside)
    monkeypatch.setattr(hardware, "read_wall_clock", lambda _: WallClock(0, error_us))
    told = Dialogue(config, Existing(), can_start=True).run()
    assert any("[y/N]" in each and "clock" in each for each in asked) == (typed_there is not None)
    made = plan(Given(told.answers, Path("answers"), {}), config, Existing(), is_watched=True).made
    assert made.settings.gateway.clock == ("system" if typed_there == "y" else "kernel")
    # One that has it already is not asked again, and keeps it.
    if typed_there == "y":
        asked, answers = [], iter(typed_before)
        again = Dialogue(config, Existing("", {}, made.settings), can_start=True).run()
        assert again.answers.gateway.clock is None
        assert not any("clock" in each for each in asked)


@pytest.mark.slow
@pytest.mark.parametrize("answered", range(len(WITHOUT_KAFKA)))
def test_ctrl_c_at_any_question_leaves_nothing(answered: int, tmp_path: Path) -> None:
    config = tmp_path / "gateway" / "gateway.toml"
    with at_a_terminal("setup", "--config", config) as terminal:
        for answer in WITHOUT_KAFKA[:answered]:
            terminal.until(f"{PROMPT}|{ANYWAY}")
            terminal.type(answer)
        terminal.until(f"{PROMPT}|{ANYWAY}")
        terminal.press(CTRL_C)
        assert terminal.end() == 2
    assert "stopped: nothing was written" in terminal.text
    assert list(tmp_path.iterdir()) == []


def test_kafkas_troubles_use_the_names_that_answers_and_questions_give_settings() -> None:
    told = "".join(ast.unparse(ast.parse(inspect.getsource(reach))).split())
    for name in {**IN_ANSWERS, **IN_QUESTIONS}:
        assert "".join(name.split()) in told, name


def test_settings_in_place_that_have_mistakes_are_not_guessed_at(config: Path) -> None:
    config.write_text("[gateway]\nid = 3\n")
    with at_a_terminal("setup", "--config", config) as terminal:
        assert terminal.end() == 2
    assert "correct the settings in place first" in terminal.text
    assert config.read_text() == "[gateway]\nid = 3\n"


likely = st.sampled_from(["", "", "none", "y", "later", "yes", "42, 43", NOWHERE])
typed = st.one_of(
    likely,
    likely,
    likely,
    st.text(max_size=30),
    st.sampled_from(["n", "all", "a:1 b:2", "\x1b[A", "~nobody", "tls://a:1"]),
)


@pytest.mark.slow
@given(st.lists(typed, min_size=20, max_size=60), st.booleans())
def test_setup_writes_nothing_before_the_last_answer(answers: list[str], reached: bool) -> None:  # noqa: FBT001
    left = iter(answers)

    def next_answer(*_arguments: object, default: str = "", **_options: object) -> str:
        answer = next(left, None)
        if answer is None:
            raise click.Abort
        return answer or default

    def looked_at(addresses: Sequence[str]) -> list[Broker]:
        return [Broker(address, "" if reached else "nothing answers", mechanisms=()) for address in addresses]

    def tried(*_arguments: object, **_options: object) -> list[Finding]:
        return [Finding("Kafka", ok=False, words="is signed by nobody")]

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(click, "prompt", next_answer)
        patch.setattr(dialogue, "look_at", looked_at)
        patch.setattr(dialogue, "try_settings", tried)
        patch.setattr(dialogue, "ports", list)
        patch.setattr(dialogue, "virtualization", lambda: "container (lxc)")
        config = Path(folder) / "gateway.toml"
        try:
            told = Dialogue(config, Existing(), can_start=True).run()
        except click.Abort:
            return
        finally:
            assert not list(Path(folder).iterdir())
        # Answers that pass the questions make valid settings.
        planned = plan(Given(told.answers, Path("answers"), {}), config, Existing(), is_watched=True, ca=told.ca)
        assert planned.made.settings.gateway.id == told.answers.gateway.id
