"""`sluice check` against a real daemon and a real broker: the whole chain, and each of its links broken."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.kafka_broker import Broker
from gateway.commands.check.chain import LINKS, check_chain
from gateway.commands.check.finding import Finding
from gateway.commands.check.mqtt_probe import NoAnswerError, conversing
from gateway.config.config_file import load
from tests.support import kafka_admin
from tests.support.certificates import Authority, make_authority
from tests.support.gateways import SLUICE, consume, daemon, free_port, header, write_config
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

USER = "gateway-1"
PASSWORD = "right-9d2c1b77"  # noqa: S105 - lives for the length of a test
MECHANISM = "SCRAM-SHA-512"


@dataclass(frozen=True, slots=True)
class Secured:
    """A node that wants TLS and a log-in, and another listener whose certificate is for another name."""

    cluster: Cluster
    authority: Authority
    stranger: Authority
    folder: Path

    def write(self, folder: Path, port: int, prefix: str, **changes: str) -> Path:
        """Settings with all that is right, but for `changes`."""
        password = folder / "kafka.password"
        password.write_text(changes.get("password", PASSWORD) + "\n")
        password.chmod(0o400)
        authority = self.stranger if changes.get("ca") == "stranger" else self.authority
        bootstrap = changes.get("bootstrap") or self.cluster.addresses(changes.get("listener", "LOGIN"))[0]
        config = write_config(folder, bootstrap, port, prefix)
        config.write_text(
            f'{config.read_text()}\n[kafka.tls]\nca = "{authority.certificate}"\n'
            f'[kafka.sasl]\nmechanism = "{MECHANISM}"\nuser = "{USER}"\npassword_file = "{password}"\n'
        )
        return config


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("chain")
    authority, stranger = make_authority(folder / "ca"), make_authority(folder / "stranger")
    own, other = authority.sign("broker").key_store, authority.sign("other", "DNS:other.example").key_store
    listeners = [
        Listener("LOGIN", "SASL_SSL", key_store=own, mechanisms=(MECHANISM,)),
        Listener("OTHERNAME", "SASL_SSL", key_store=other, mechanisms=(MECHANISM,)),
    ]
    with kafka_cluster(folder / "nodes", 1, listeners) as cluster:
        asyncio.run(kafka_admin.set_password(cluster.bootstrap, USER, MECHANISM, PASSWORD))
        yield Secured(cluster, authority, stranger, folder)


def checked(config: Path, *, create: bool = False) -> list[Finding]:
    return list(check_chain(load(config), config, create=create))


def results(findings: list[Finding], *links: str) -> dict[str, set[str]]:
    return {link: {each.result for each in findings if each.link == link} for link in links}


def of(findings: list[Finding], subject: str) -> Finding:
    return next(each for each in findings if each.subject.startswith(subject))


UPLINK = ("dns", "tcp", "tls", "sasl", "kafka", "topics")


def test_a_test_reading_goes_the_whole_way_and_is_read_back(kafka: Broker, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, kafka.bootstrap, port, "whole")
    with daemon(config, port):
        findings = checked(config)
        assert not [each for each in findings if not each.ok]
        again = checked(config)
    assert [each.subject for each in findings if each.link == "end-to-end"] == [
        "acknowledgement",
        "in Kafka",
        "read back",
    ]
    words = of(findings, "acknowledgement").words
    assert re.fullmatch(
        rf"a test reading went in at 127\.0\.0\.1:{port} and was acknowledged after .* ms: it is .*", words
    )
    assert re.search(
        r"\(acks=all\) .* ms after it was sent: topic whole-events, partition \d, offset \d",
        of(findings, "in Kafka").words,
    )
    ids = [re.findall(r"ce_id (\S+)\)", of(found, "read back").words)[0] for found in (findings, again)]
    events = asyncio.run(consume(kafka.bootstrap, "whole-events"))
    told = {header(each, "ce_id"): each for each in events if header(each, "ce_type") == "sluice.gateway.check"}
    assert list(told) == ids
    record = told[ids[0]]
    assert (record.key, set(json.loads(record.value))) == (b"gw1", {"check"})
    # It is nobody's reading, and no device was seen.
    kinds = {header(each, "ce_type").removeprefix("sluice.gateway.") for each in events}
    assert not kinds & {"device-appeared", "quarantined"}
    assert list(dict.fromkeys(each.link for each in findings)) == [
        link for link in LINKS if link not in {"serial", "broker", "sasl"}
    ]


def test_it_goes_behind_the_listener_where_there_is_none(kafka: Broker, tmp_path: Path) -> None:
    config = write_config(tmp_path, kafka.bootstrap, 1, "silent")
    text = config.read_text()
    config.write_text(re.sub(r"\[mqtt_listener\]\nport = 1\nanonymous = true\n", "", text))
    log = (tmp_path / "run.log").open("ab")
    process = subprocess.Popen([SLUICE, "run", "--config", config], stderr=log)
    try:
        control = tmp_path / "buffer.db.control"
        asyncio.run(_until_there(control))
        findings = checked(config)
    finally:
        process.terminate()
        process.wait(20)
        log.close()
    assert "as from a serial line, and was acknowledged after" in of(findings, "acknowledgement").words
    assert of(findings, "read back").result == "pass"
    assert not [each for each in findings if each.link == "listener"]


async def _until_there(path: Path) -> None:
    async with asyncio.timeout(patience(20)):
        while not path.exists():
            await asyncio.sleep(0.05)


def test_a_gateway_that_does_not_run_is_to_be_started(kafka: Broker, tmp_path: Path) -> None:
    config = write_config(tmp_path, kafka.bootstrap, free_port(), "stopped")
    findings = checked(config)
    assert not [each for each in findings if not each.ok]
    assert of(findings, "test reading").result == "warning"
    assert "systemctl start sluice" in of(findings, "test reading").words
    assert of(findings, "connecting as a sensor").result == "skipped"


def test_a_service_that_does_not_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.commands.check.chain.is_there", lambda _: True)
    findings = checked(write_config(tmp_path, "127.0.0.1:1", free_port(), "stopped"))
    (whole,) = [each for each in findings if each.link == "end-to-end"]
    assert whole.result == "fail"
    assert "sudo systemctl start sluice (journalctl -u sluice says why it stopped)" in whole.words


def test_tls_and_the_log_in_are_told_and_the_right_to_read_is_not_needed(secured: Secured, tmp_path: Path) -> None:
    port = free_port()
    plain = secured.cluster.bootstrap
    config = secured.write(tmp_path, port, "rights")
    for topic in ("rights-events", "rights-quarantine"):
        asyncio.run(kafka_admin.create_topic(plain, topic))
        asyncio.run(kafka_admin.allow(plain, USER, topic, "WRITE", "DESCRIBE_CONFIGS"))
    with daemon(config, port):
        findings = checked(config)
        asyncio.run(kafka_admin.allow(plain, USER, "rights-events", "READ"))
        then = checked(config)
    assert not [each for each in findings if not each.ok]
    assert re.search(
        r"^TLS 1\.3; the certificate, signed by test CA, is valid until 20\d\d-", of(findings, "TLS with").words
    )
    assert of(findings, "log-in at").words.startswith(f"logged in as {USER} ({MECHANISM}), all in ")
    assert of(findings, "in Kafka").result == "pass"
    back = of(findings, "read back")
    assert back.result == "warning"
    assert f"--add --allow-principal User:{USER} --operation Read --topic rights-events" in back.words
    assert "kafka-acls.sh --bootstrap-server" in back.words
    assert of(then, "read back").result == "pass"
    assert not any(PASSWORD in each.words for each in (*findings, *then))


@pytest.mark.parametrize(
    ("changes", "link", "words"),
    [
        ({"bootstrap": "127.0.0.1:1"}, "tcp", r"nothing listens at 127\.0\.0\.1:1; is the broker up"),
        ({"bootstrap": "kafka.invalid:9092"}, "dns", r"the name kafka\.invalid does not resolve"),
        ({"ca": "stranger"}, "tls", r"signed by nobody whom kafka\.tls\.ca names"),
        ({"listener": "OTHERNAME"}, "tls", r"for other\.example, and not for 127\.0\.0\.1"),
        ({"password": "wrong-51ab03fe"}, "sasl", rf"refuses the log-in of user {USER}: user or password is wrong"),
    ],
)
def test_a_link_that_fails_is_the_only_one_that_does(
    secured: Secured, tmp_path: Path, changes: dict[str, str], link: str, words: str
) -> None:
    findings = checked(secured.write(tmp_path, free_port(), "broken", **changes))
    (failed,) = [each for each in findings if not each.ok]
    assert failed.link == link
    assert re.search(words, failed.words), failed.words
    before, behind = UPLINK[: UPLINK.index(link)], UPLINK[UPLINK.index(link) + 1 :]
    # Files on this box are checked all the same.
    asked = [each for each in findings if not each.subject.startswith("kafka.")]
    assert results(asked, *before) == {each: {"pass"} for each in before}
    assert results(asked, *behind) == {each: {"skipped"} for each in behind}


def test_a_topic_that_is_missing(kafka: Broker, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, kafka.bootstrap, port, "missing")
    config.write_text(config.read_text().replace("create_topics = true", "create_topics = false"))
    failed = [each for each in checked(config) if not each.ok]
    assert {each.link for each in failed} == {"topics"}
    assert "topic missing-events" in {each.subject for each in failed}
    with daemon(config, port):
        findings = checked(config)
    assert of(findings, "acknowledgement").result == "pass", "it is on disk, whatever Kafka is like"
    skipped = of(findings, "in Kafka")
    assert skipped.result == "skipped"
    assert "topic missing-events" in skipped.words


def test_without_kafka_the_front_door_is_looked_at(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, "127.0.0.1:1", port, "alone")
    with daemon(config, port):
        findings = checked(config)
    assert [each.link for each in findings if not each.ok] == ["tcp"]
    assert of(findings, f"connecting to 127.0.0.1:{port}").result == "pass"
    assert of(findings, "acknowledgement").result == "pass"
    assert of(findings, "in Kafka").result == "skipped"


def test_a_full_disk(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, "127.0.0.1:1", port, "full")
    config.write_text(
        config.read_text().replace(
            "[buffer]", f"[buffer]\nfree_bytes_min = {2**40}\nbytes_max = 1000000\nfair_from = 1"
        )
    )
    with daemon(config, port):
        fill(port)
        findings = checked(config)
    failed = {each.link: each for each in findings if not each.ok}
    assert set(failed) == {"disk", "listener", "tcp"}
    assert "would be full from the start" in failed["disk"].words
    assert (
        "refused (CONNACK 3): it lets nobody in just now, because readings cannot be stored" in failed["listener"].words
    )
    (whole,) = [each for each in findings if each.link == "end-to-end"]
    assert (whole.subject, whole.result) == ("test reading", "skipped")
    assert f"connecting to 127.0.0.1:{port} fails" in whole.words


def fill(port: int) -> None:
    """Publish until nothing is acknowledged any more."""
    with conversing(socket.create_connection(("127.0.0.1", port)), timeout_s=1) as conversation:
        assert conversation.connect("filler", None, None) == 0
        with suppress(NoAnswerError):
            while True:
                conversation.publish("device/filler/thermo", b"x" * 60_000)


def test_the_command_says_the_same_to_people_and_programs(kafka: Broker, tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, kafka.bootstrap, port, "said")
    with daemon(config, port):
        command = [str(SLUICE), "check", "--config", str(config)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
        told = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, told.returncode) == (0, 0)
    assert shown.stderr == told.stderr == ""
    findings = json.loads(told.stdout)
    assert {each["result"] for each in findings} == {"pass"}
    lines = [line for line in shown.stdout.splitlines() if line.startswith("  ok    ")]
    assert len(lines) == len(findings)
    assert shown.stdout.splitlines()[-1] == "all is well"
