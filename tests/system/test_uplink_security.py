"""TLS and SASL between the daemon and a real broker: what is let in, how it is told what is refused, what rotates.

Whatever happens, no secret stands in a log, a status, a finding or an export.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from click.testing import CliRunner

from gateway.cli import main
from gateway.tls.client import client_context
from tests.support import kafka_admin
from tests.support.certificates import Authority, Identity, make_authority
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.sizes import left_to_long
from tests.support.uplink_site import BACK_S_MAX, Site, records_of, records_until
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

USER = "gateway-1"
PASSWORD = "right-9d2c1b77"  # noqa: S105 - lives for the length of a test
WRONG_PASSWORD = "wrong-51ab03fe"  # noqa: S105
TOLD_S_MAX = 15.0
"""Most seconds until a daemon whose uplink is refused says why."""
LINES_MAX = 2
"""Lines of the log that one refusal may cost, however often it is tried."""
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True, slots=True)
class Broker:
    """A node whose listeners each want something else, and the papers that go with them."""

    cluster: Cluster
    authority: Authority
    stranger: Authority
    """A CA of the same name that the broker has nothing to do with."""
    client: Identity

    @property
    def plain(self) -> str:
        return self.cluster.bootstrap

    def at(self, listener: str) -> list[str]:
        return self.cluster.addresses(listener)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("secure")
    authority, stranger = make_authority(folder / "ca"), make_authority(folder / "stranger")
    own = authority.sign("broker").key_store
    other = authority.sign("other", "DNS:other.example").key_store
    expired = authority.sign("expired", valid=(timedelta(days=-3), timedelta(days=-1))).key_store
    users = ((USER, PASSWORD),)
    listeners = [
        Listener("TLS", "SSL", key_store=own),
        Listener("MUTUAL", "SSL", key_store=own, client_ca=authority.certificate),
        Listener("OTHERNAME", "SSL", key_store=other),
        Listener("EXPIRED", "SSL", key_store=expired),
        Listener("LOGIN", "SASL_SSL", key_store=own, mechanisms=MECHANISMS, plain_users=users),
        Listener("ONEWAY", "SASL_SSL", key_store=own, mechanisms=("SCRAM-SHA-256",)),
        Listener("OPEN", "SASL_PLAINTEXT", mechanisms=("SCRAM-SHA-512",)),
    ]
    with kafka_cluster(folder / "nodes", 1, listeners) as cluster:
        for mechanism in MECHANISMS[1:]:
            asyncio.run(kafka_admin.set_password(cluster.bootstrap, USER, mechanism, PASSWORD))
        yield Broker(cluster, authority, stranger, authority.sign("gw1", ""))


# -- what a gateway is given ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Papers:
    """The files that a gateway's settings name, in its own folder: each may be replaced while it runs."""

    folder: Path

    @property
    def password(self) -> Path:
        return self.folder / "kafka.password"

    def trust(self, authority: Authority) -> None:
        self._put("ca.pem", authority.certificate.read_text(), 0o444)

    def be(self, identity: Identity) -> None:
        """Two files, which no daemon can see replaced at once."""
        self._put("gateway.key", identity.key.read_text(), 0o400)
        self._put("gateway.pem", identity.certificate.read_text(), 0o444)

    def log_in_by(self, password: str, mode: int = 0o400) -> None:
        self._put("kafka.password", password + "\n", mode)

    def tls(self, *, client: bool = False) -> str:
        """`[kafka.tls]`."""
        lines = ["[kafka.tls]", f'ca = "{self.folder}/ca.pem"']
        if client:
            lines += [f'certificate = "{self.folder}/gateway.pem"', f'key = "{self.folder}/gateway.key"']
        return "\n".join(lines) + "\n"

    def sasl(self, mechanism: str) -> str:
        """`[kafka.sasl]`."""
        return f'[kafka.sasl]\nmechanism = "{mechanism}"\nuser = "{USER}"\npassword_file = "{self.password}"\n'

    def _put(self, name: str, text: str, mode: int) -> None:
        beside = self.folder / f"{name}.new"
        beside.write_text(text)
        beside.chmod(mode)
        beside.replace(self.folder / name)


@pytest.fixture
def papers(broker: Broker, tmp_path: Path) -> Papers:
    """All that is right for every listener."""
    made = Papers(tmp_path)
    made.trust(broker.authority)
    made.be(broker.client)
    made.log_in_by(PASSWORD)
    return made


async def everything_told(site: Site) -> str:
    """All that the gateway says of itself, to anybody, in any way: on this box and in Kafka."""
    commands = (
        ("status",),
        ("status", "--json"),
        ("check",),
        ("check", "--json"),
        ("buffer", "export"),
        ("buffer", "export", "--quarantine"),
        ("buffer", "ls"),
    )
    # In this process: seven starts of Python would be most of what a test costs.
    ended = [
        await asyncio.to_thread(CliRunner().invoke, main, [*command, "--config", str(site.config)])
        for command in commands
    ]
    for each in ended:
        assert isinstance(each.exception, SystemExit | None), each.exception
        assert each.output
    records = [await records_of(site.plain, site.topic(stream)) for stream in ("events", "quarantine")]
    return "\n".join([site.log, *(each.output for each in ended), *map(str, records)])


async def assert_nothing_leaks(site: Site, papers: Papers) -> None:
    told = await everything_told(site)
    for secret in (PASSWORD, WRONG_PASSWORD):
        assert secret not in told
        for token in (secret, f"\0{USER}\0{secret}"):
            assert base64.b64encode(token.encode()).decode() not in told
    assert "PRIVATE KEY" not in told
    assert (papers.folder / "gateway.key").read_text().splitlines()[1] not in told


async def arrives(site: Site, sequence: int, patience_s: float = BACK_S_MAX) -> None:
    """All readings up to a sequence are in Kafka, each of them once."""
    records = await records_until(site.plain, site.topic(), sequence + 1, patience_s)
    assert [json.loads(record.value)["seq"] for record in records] == list(range(sequence + 1))


def publish(site: Site, sequence: int) -> None:
    site.publish("device/42/thermo", json.dumps({"celsius": 21.5, "boot": "b", "seq": sequence}))


# -- the broker of these tests is what they take it for -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that is none of ours, and whether it must be let in."""

    listener: str
    let_in: bool
    mechanism: str | None = None
    password: str = PASSWORD
    with_certificate: bool = False


CALLERS = [
    Caller("TLS", let_in=True),
    Caller("MUTUAL", let_in=True, with_certificate=True),
    Caller("MUTUAL", let_in=False),
    Caller("OTHERNAME", let_in=False),
    Caller("EXPIRED", let_in=False),
    *[Caller("LOGIN", let_in=True, mechanism=mechanism) for mechanism in MECHANISMS],
    *[Caller("LOGIN", let_in=False, mechanism=mechanism, password=WRONG_PASSWORD) for mechanism in MECHANISMS],
    Caller("ONEWAY", let_in=True, mechanism="SCRAM-SHA-256"),
    Caller("ONEWAY", let_in=False, mechanism="SCRAM-SHA-512"),
    Caller("OPEN", let_in=True, mechanism="SCRAM-SHA-512"),
]


def client_of(broker: Broker, caller: Caller) -> AIOKafkaAdminClient:
    context = client_context(broker.authority.certificate, None, None)
    if caller.with_certificate:
        context.load_cert_chain(broker.client.certificate, broker.client.key)
    login = {"sasl_plain_username": USER, "sasl_plain_password": caller.password, "sasl_mechanism": caller.mechanism}
    (protocol,) = [each.protocol for each in broker.cluster.listeners if each.name == caller.listener]
    return AIOKafkaAdminClient(
        bootstrap_servers=broker.at(caller.listener),
        security_protocol=protocol,
        ssl_context=context,
        **(login if caller.mechanism else {}),
    )


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: f"{caller.listener}-{caller.mechanism}-{caller.let_in}")
async def test_what_the_listeners_ask_for(broker: Broker, caller: Caller) -> None:
    client = client_of(broker, caller)
    with contextlib.nullcontext() if caller.let_in else pytest.raises(KafkaError):
        await client.start()
        await client.list_topics()
    await client.close()
    # It closes what was refused a moment later.
    await asyncio.sleep(0.05)


# -- let in -------------------------------------------------------------------------------------------

LET_IN: dict[str, tuple[str, Callable[[Papers], str]]] = {
    "own-ca": ("TLS", lambda papers: papers.tls()),
    "client-certificate": ("MUTUAL", lambda papers: papers.tls(client=True)),
    "plain": ("LOGIN", lambda papers: papers.tls() + papers.sasl("PLAIN")),
    "scram-256": ("LOGIN", lambda papers: papers.tls() + papers.sasl("SCRAM-SHA-256")),
    "scram-512": ("LOGIN", lambda papers: papers.tls() + papers.sasl("SCRAM-SHA-512")),
    "scram-without-tls": ("OPEN", lambda papers: papers.sasl("SCRAM-SHA-512")),
}
LET_IN_ALWAYS = ("own-ca", "client-certificate", "scram-512")
"""Cases that `make test` has."""


@pytest.mark.parametrize("way", [*LET_IN_ALWAYS, *left_to_long(LET_IN, LET_IN_ALWAYS, 8)])
async def test_readings_flow(broker: Broker, papers: Papers, tmp_path: Path, way: str) -> None:
    listener, settings = LET_IN[way]
    site = Site(tmp_path, f"let-in-{way}", broker.at(listener), broker.plain, settings(papers))
    with site.daemon():
        publish(site, 0)
        await arrives(site, 0)
        checked = await site.command("check", "--json")
        (kafka,) = [each for each in json.loads(checked.stdout) if each["subject"].startswith("Kafka at")]
        assert kafka["ok"], kafka
        await assert_nothing_leaks(site, papers)


# -- refused ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """One fault, its words, and its correction while the daemon runs (if files correct it)."""

    listener: str
    settings: Callable[[Papers], str]
    words: str
    """A pattern."""
    spoil: Callable[[Broker, Papers], None] = lambda _broker, _papers: None
    mend: Callable[[Broker, Papers], None] | None = None


def _login(mechanism: str) -> Callable[[Papers], str]:
    return lambda papers: papers.tls() + papers.sasl(mechanism)


def _wrong_password(mechanism: str) -> Refusal:
    return Refusal(
        "LOGIN",
        _login(mechanism),
        rf"{USER}.*password is wrong",
        lambda _broker, papers: papers.log_in_by(WRONG_PASSWORD),
        lambda _broker, papers: papers.log_in_by(PASSWORD),
    )


REFUSED = {
    "wrong-ca": Refusal(
        "TLS",
        lambda papers: papers.tls(),
        r"certificate.*signed by nobody whom kafka\.tls\.ca names",
        lambda broker, papers: papers.trust(broker.stranger),
        lambda broker, papers: papers.trust(broker.authority),
    ),
    "wrong-host-name": Refusal("OTHERNAME", lambda papers: papers.tls(), r"other\.example.*not for 127\.0\.0\.1"),
    "expired": Refusal("EXPIRED", lambda papers: papers.tls(), r"certificate.*expired.*clock"),
    "wrong-password-plain": _wrong_password("PLAIN"),
    "wrong-password-scram-256": _wrong_password("SCRAM-SHA-256"),
    "wrong-password-scram-512": _wrong_password("SCRAM-SHA-512"),
    "mechanism-not-offered": Refusal("ONEWAY", _login("SCRAM-SHA-512"), r"SCRAM-SHA-512.*it takes: SCRAM-SHA-256"),
    "client-certificate-missing": Refusal("MUTUAL", lambda papers: papers.tls(), r"want.* certificate of this gateway"),
    "client-certificate-of-a-stranger": Refusal(
        "MUTUAL",
        lambda papers: papers.tls(client=True),
        r"not accept this gateway's certificate",
        lambda broker, papers: papers.be(broker.stranger.sign("gw1", "")),
        lambda broker, papers: papers.be(broker.client),
    ),
    "password-file-for-all": Refusal(
        "LOGIN",
        _login("SCRAM-SHA-512"),
        r"can be read by others",
        lambda _broker, papers: papers.password.chmod(0o644),
        lambda _broker, papers: papers.password.chmod(0o400),
    ),
    "password-file-missing": Refusal(
        "LOGIN",
        _login("SCRAM-SHA-512"),
        r"cannot be read",
        lambda _broker, papers: papers.password.unlink(),
        lambda _broker, papers: papers.log_in_by(PASSWORD),
    ),
    "broker-wants-a-login": Refusal("LOGIN", lambda papers: papers.tls(), r"log-in \(SASL\)"),
    "broker-wants-tls": Refusal("TLS", lambda _papers: "", r"wants TLS"),
}
REFUSED_ALWAYS = ("wrong-ca", "wrong-password-scram-512", "client-certificate-missing", "password-file-missing")
"""Cases that `make test` has."""


async def told_why(site: Site, words: str) -> None:
    """Wait until `sluice status --json` tells what is wrong; then the log has told it too."""
    error = None
    try:
        async with asyncio.timeout(patience(TOLD_S_MAX)):
            while error is None or not re.search(words, error):
                await asyncio.sleep(0.2)
                error = (await site.uplink())["error"]
    except TimeoutError:
        pytest.fail(f"status says {error!r}, and not {words!r}")
    uplink = (await site.status())["daemon"]["uplink"]
    assert re.search(words, uplink["error"]), uplink
    assert not uplink["up"]
    assert uplink["barred"], "it is reached, and refuses"
    assert re.search(words, site.log), site.log


@pytest.mark.parametrize("fault", [*REFUSED_ALWAYS, *left_to_long(REFUSED, REFUSED_ALWAYS, 15)])
async def test_what_is_refused_is_told_and_flows_once_it_is_mended(
    broker: Broker, papers: Papers, tmp_path: Path, fault: str
) -> None:
    refusal = REFUSED[fault]
    refusal.spoil(broker, papers)
    site = Site(tmp_path, f"refused-{fault}", broker.at(refusal.listener), broker.plain, refusal.settings(papers))
    with site.daemon() as process:
        # Promise P1: whatever Kafka says, what is acknowledged is on disk.
        publish(site, 0)
        await told_why(site, refusal.words)
        checked = await site.command("check", "--json")
        assert checked.returncode == 1
        failed = [each["words"] for each in json.loads(checked.stdout) if not each["ok"]]
        assert any(re.search(refusal.words, each) for each in failed), failed
        await assert_nothing_leaks(site, papers)
        # For a state, not for each attempt.
        assert 1 <= sum(bool(re.search(refusal.words, line)) for line in site.log.splitlines()) <= LINES_MAX
        if refusal.mend is not None:
            refusal.mend(broker, papers)
            await arrives(site, 0)
            assert process.poll() is None
            assert (await site.status())["daemon"]["uplink"]["up"]


def test_a_password_is_no_part_of_the_settings(broker: Broker, papers: Papers, tmp_path: Path) -> None:
    """The configuration is world-readable."""
    settings = papers.sasl("SCRAM-SHA-512") + f'password = "{PASSWORD}"\n'
    site = Site(tmp_path, "inline", broker.at("OPEN"), kafka=settings)
    site.write_config()
    ended = asyncio.run(site.command("check"))
    assert ended.returncode == 2
    assert "kafka.sasl.password" in ended.stderr
    assert PASSWORD not in ended.stdout + ended.stderr


# -- what rotates -------------------------------------------------------------------------------------


@pytest.mark.long(seconds=30)
async def test_a_password_changed_at_the_broker_and_in_the_file(broker: Broker, papers: Papers, tmp_path: Path) -> None:
    changed = "changed-" + os.urandom(6).hex()
    site = Site(tmp_path, "rotated", broker.at("LOGIN"), broker.plain, _login("SCRAM-SHA-256")(papers))
    node = broker.cluster.node(1)
    with site.daemon():
        publish(site, 0)
        await arrives(site, 0)
        try:
            await kafka_admin.set_password(broker.plain, USER, "SCRAM-SHA-256", changed)
            # Whoever is logged in stays so: the new one counts from the next connection on.
            node.stop()
            publish(site, 1)
            node.start()
            await told_why(site, rf"{USER}.*password is wrong")
            papers.log_in_by(changed)
            await arrives(site, 1)
        finally:
            await kafka_admin.set_password(broker.plain, USER, "SCRAM-SHA-256", PASSWORD)
        assert changed not in await everything_told(site)


async def let_in_by(broker: Broker, password: str) -> None:
    """Wait until the broker goes by a password that was set a moment ago."""
    caller = Caller("LOGIN", let_in=True, mechanism="SCRAM-SHA-256", password=password)
    async with asyncio.timeout(patience(BACK_S_MAX)):
        while True:
            client = client_of(broker, caller)
            try:
                await client.start()
            except KafkaError:
                await asyncio.sleep(0.1)
            else:
                return
            finally:
                await client.close()


async def test_a_password_that_changes_under_a_session_that_works_begins_another(
    broker: Broker, papers: Papers, tmp_path: Path
) -> None:
    """The broker lets those that are logged in go on; the next outage must not meet the former password."""
    changed = "changed-" + os.urandom(6).hex()
    site = Site(tmp_path, "replaced", broker.at("LOGIN"), broker.plain, _login("SCRAM-SHA-256")(papers))
    with site.daemon():
        publish(site, 0)
        await arrives(site, 0)
        try:
            await kafka_admin.set_password(broker.plain, USER, "SCRAM-SHA-256", changed)
            await let_in_by(broker, changed)
            papers.log_in_by(changed)
            async with asyncio.timeout(patience(BACK_S_MAX)):
                while "has changed: connecting anew" not in site.log:
                    await asyncio.sleep(0.1)
            publish(site, 1)
            await arrives(site, 1)
            assert "uplink is down" not in site.log
        finally:
            await kafka_admin.set_password(broker.plain, USER, "SCRAM-SHA-256", PASSWORD)
        assert changed not in await everything_told(site)


async def test_certificates_renewed_on_both_sides(broker: Broker, papers: Papers, tmp_path: Path) -> None:
    """The broker gets another certificate of the same CA; who signs the gateways' is another one from now on.

    No test comes after it: that broker stays so.
    """
    site = Site(tmp_path, "renewed", broker.at("MUTUAL"), broker.plain, papers.tls(client=True))
    cluster, node = broker.cluster, broker.cluster.node(1)
    renewed = broker.authority.sign("renewed").key_store
    with site.daemon():
        publish(site, 0)
        await arrives(site, 0)
        cluster.configure(Listener("MUTUAL", "SSL", key_store=renewed, client_ca=broker.stranger.certificate))
        node.stop()
        publish(site, 1)
        node.start()
        await told_why(site, r"not accept this gateway's certificate")
        papers.be(broker.stranger.sign("gw1", ""))
        await arrives(site, 1)
        await assert_nothing_leaks(site, papers)
