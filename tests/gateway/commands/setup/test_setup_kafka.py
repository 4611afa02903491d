"""`sluice setup` with a real Kafka: the facts that it finds out by itself, and its words about wrong answers."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands.check.kafka import check_kafka
from gateway.commands.setup.kafka_trial import best_mechanism, look_at
from gateway.config import config_file
from tests.support import kafka_admin
from tests.support.certificates import Authority, make_authority
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.setup_dialogue import ANYWAY, ENTER, PROMPT, at_a_terminal, questions_asked

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

USER = "barn-1"
PASSWORD = "right-9d2c1b77"  # noqa: S105 - lives for the length of a test
WRONG = "wrong-51ab03fe"


@dataclass(frozen=True, slots=True)
class Broker:
    cluster: Cluster
    authority: Authority

    def at(self, listener: str) -> str:
        (address,) = self.cluster.addresses(listener)
        return address


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("secure")
    authority = make_authority(folder / "ca")
    own = authority.sign("broker").key_store
    listeners = [
        Listener("TLS", "SSL", key_store=own),
        Listener("MUTUAL", "SSL", key_store=own, client_ca=authority.certificate),
        Listener(
            "LOGIN", "SASL_SSL", key_store=own, mechanisms=("PLAIN", "SCRAM-SHA-256"), plain_users=((USER, PASSWORD),)
        ),
        Listener("OPEN", "SASL_PLAINTEXT", mechanisms=("SCRAM-SHA-512",)),
    ]
    with kafka_cluster(folder / "nodes", 1, listeners) as cluster:
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            asyncio.run(kafka_admin.set_password(cluster.bootstrap, USER, mechanism, PASSWORD))
        yield Broker(cluster, authority)


def test_what_brokers_speak_and_want_is_found_out(broker: Broker) -> None:
    names = ("TLS", "LOGIN", "OPEN", "MUTUAL")
    tls, login, in_the_open, mutual = look_at([broker.at(name) for name in names])
    (plain,) = look_at([broker.cluster.bootstrap])
    assert (plain.tls, plain.mechanisms) == (False, ())
    assert (tls.tls, tls.mechanisms) == (True, ())
    assert login.mechanisms is not None
    assert (login.tls, set(login.mechanisms)) == (True, {"PLAIN", "SCRAM-SHA-256"})
    assert (in_the_open.tls, in_the_open.mechanisms) == (False, ("SCRAM-SHA-512",))
    assert (mutual.tls, mutual.mechanisms) == (True, None)
    assert best_mechanism([login], tls=True) == "SCRAM-SHA-256"
    assert best_mechanism([login, in_the_open], tls=True) is None


def test_a_whole_setup_with_a_log_in(broker: Broker, tmp_path: Path, config: Path) -> None:
    with at_a_terminal("setup", "--config", config) as terminal:
        terminal.answer("north-farm/barn-1")
        terminal.answer(broker.at("LOGIN"))
        shown = terminal.until(PROMPT)
        assert "Reached: it speaks TLS." in shown
        assert "Kafka wants a log-in (SCRAM-SHA-256)" in shown
        terminal.type(USER)
        terminal.answer(WRONG)
        # Nobody whom this box trusts has signed the broker's certificate.
        assert "is signed by nobody whom this box trusts" in " ".join(terminal.until(PROMPT).split())
        terminal.type("/nowhere/ca.pem")
        assert "/nowhere/ca.pem does not exist" in " ".join(terminal.until(PROMPT).split())
        terminal.type(str(broker.authority.certificate))
        assert "user or password is wrong" in " ".join(terminal.until(ANYWAY).split())
        terminal.type("n")
        terminal.answer(PASSWORD)
        assert "answers; its cluster is one broker" in " ".join(terminal.until(PROMPT).split())
        terminal.type("none")
        terminal.answer("42")
        terminal.answer(ENTER)
        terminal.answer(ENTER)
        terminal.end()
    assert len(questions_asked(terminal.text)) == 8
    for secret in (PASSWORD, WRONG):
        assert secret not in terminal.text
    settings = config_file.load(config)
    assert settings.kafka.sasl is not None
    assert settings.kafka.sasl.mechanism == "SCRAM-SHA-256"
    assert settings.kafka.tls is not None
    assert settings.kafka.tls.ca == tmp_path / "kafka-ca.pem"
    first, *_ = asyncio.run(check_kafka(settings, create=False))
    assert first.ok, first.words


def test_setup_asks_for_no_log_in_that_kafka_does_not_want(broker: Broker, config: Path) -> None:
    with at_a_terminal("setup", "--config", config) as terminal:
        terminal.answer("north-farm/barn-1")
        terminal.answer(f"tls://{broker.cluster.bootstrap}")
        told = " ".join(terminal.until(PROMPT).split())
        assert "The brokers speak no TLS: write the addresses without tls:// or plain://" in told
        terminal.type(broker.cluster.bootstrap)
        for answer in (ENTER, "none", ENTER, ENTER):
            terminal.answer(answer)
        code = terminal.end()
    assert len(questions_asked(terminal.text)) == 6
    assert code == 0, terminal.text
    assert config_file.load(config).kafka.sasl is None


ANSWERS = """\
[kafka]
bootstrap = ["{address}"]
tls = {tls}
user = "{user}"
{more}
[secrets]
kafka_password = "{password}"
"""


def answered(tmp_path: Path, address: str, tls: str, password: str, more: str = "") -> tuple[int, str]:
    answers = tmp_path / "answers.toml"
    answers.write_text(ANSWERS.format(address=address, tls=tls, user=USER, more=more, password=password))
    words = ["setup", "--config", str(tmp_path / "gateway.toml"), "--answers", str(answers)]
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(main, words)
    assert password not in done.output
    return done.exit_code, done.output


def test_answers_are_tried_before_they_are_written(broker: Broker, tmp_path: Path) -> None:
    code, told = answered(tmp_path, broker.at("OPEN"), "false", PASSWORD)
    assert code == 0, told
    assert f"ok    Kafka at {broker.at('OPEN')}: answers" in told
    # No files of a trial are left.
    assert {path.name for path in tmp_path.iterdir()} == {"answers.toml", "gateway.toml", "secrets", "credentials"}


def test_a_wrong_password_is_told_and_written_all_the_same(broker: Broker, tmp_path: Path) -> None:
    code, told = answered(tmp_path, broker.at("OPEN"), "false", WRONG)
    assert code == 1
    assert "FAIL" in told
    assert "user or password is wrong; mend kafka.user, or the password, which is read again" in told
    assert "/proc/self" not in told
    assert (tmp_path / "gateway.toml").exists()


def test_topics_that_are_missing_are_told_where_nobody_makes_them(broker: Broker, tmp_path: Path) -> None:
    code, told = answered(tmp_path, broker.at("OPEN"), "false", PASSWORD, "create_topics = false")
    assert code == 1
    assert "FAIL  topic gateway-events" in told
    assert "route to device-{stream}: no such topic exists" in told


def test_what_is_wrong_is_told_in_the_words_of_the_answers(broker: Broker, tmp_path: Path) -> None:
    code, told = answered(tmp_path, broker.at("LOGIN"), "false", PASSWORD)
    assert code == 1
    assert "tls = false was given; write tls = true, with ca" in told
    assert "[kafka.tls]" not in told
    assert told.count(f"to be corrected: Kafka at {broker.at('LOGIN')}") == 1


def test_an_authority_beside_the_answers_is_copied(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "authority.pem").write_bytes(broker.authority.certificate.read_bytes())
    code, told = answered(tmp_path, broker.at("LOGIN"), "true", PASSWORD, 'ca = "authority.pem"\nmechanism = "PLAIN"')
    assert code == 0, told
    assert (tmp_path / "kafka-ca.pem").read_bytes() == broker.authority.certificate.read_bytes()
    assert (tmp_path / "kafka-ca.pem").stat().st_mode & 0o777 == 0o644
