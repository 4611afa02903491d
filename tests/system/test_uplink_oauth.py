"""OAUTHBEARER between the daemon and a real broker, which verifies signed tokens and ends connections with them."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Authority, make_authority
from tests.support.gateways import header
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.sizes import size
from tests.support.token_server import AUDIENCE, CLIENT, ISSUER, TokenServer, token_server
from tests.support.uplink_site import BACK_S_MAX, Site, records_of
from tests.support.waiting import patience, until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto-clients is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"
VALIDATOR = "org.apache.kafka.common.security.oauthbearer.BrokerJwtValidator"
"""Kafka 4.1 has another one by default, which takes a token that anybody signed."""
LIFE_S = 10
"""Life of a token in seconds. The broker ends a connection that outlives its token (KIP-368)."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def one_server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with token_server(tmp_path_factory.mktemp("tokens"), authority.sign("tokens")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(
    authority: Authority, one_server: TokenServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    keys = one_server.keys
    listener = Listener(
        "OAUTH",
        "SASL_SSL",
        key_store=authority.sign("broker").key_store,
        mechanisms=("OAUTHBEARER",),
        more=(
            f"oauthbearer.sasl.server.callback.handler.class={HANDLER}",
            f"sasl.oauthbearer.jwt.validator.class={VALIDATOR}",
            f"sasl.oauthbearer.jwks.endpoint.url=file://{keys}",
            f"sasl.oauthbearer.expected.audience={AUDIENCE}",
            f"sasl.oauthbearer.expected.issuer={ISSUER}",
            "oauthbearer.connections.max.reauth.ms=3600000",
        ),
    )
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls=file://{keys}"
    folder = tmp_path_factory.mktemp("nodes")
    with kafka_cluster(
        folder / "nodes", 1, [listener], command_prefix=("env", f"JAVA_TOOL_OPTIONS={allowed}")
    ) as cluster:
        yield cluster


@pytest.fixture
def server(one_server: TokenServer) -> Iterator[TokenServer]:
    one_server.life_s = LIFE_S
    yield one_server
    one_server.asked.clear()
    one_server.answer, one_server.forges = None, False


@pytest.fixture
def site(cluster: Cluster, server: TokenServer, authority: Authority, tmp_path: Path) -> Site:
    secret = tmp_path / "client.secret"
    secret.write_text(server.secret)
    secret.chmod(0o400)
    kafka = (
        f'[kafka.tls]\nca = "{authority.certificate}"\n'
        f'[kafka.sasl]\nmechanism = "OAUTHBEARER"\nuser = "{CLIENT}"\npassword_file = "{secret}"\n'
        f'token_url = "{server.url}"\ntoken_ca = "{authority.certificate}"\nscope = "kafka"\n'
    )
    return Site(tmp_path, tmp_path.name.replace("_", "-"), cluster.addresses("OAUTH"), cluster.bootstrap, kafka)


def publish(site: Site, sequence: int) -> None:
    site.publish("device/42/thermo", json.dumps({"celsius": 21.5, "boot": "b", "seq": sequence}))


async def sequences(site: Site, count: int) -> list[int]:
    """Sequences of the readings in Kafka, once there are `count`.

    A reading on its way as a session ended may stand there twice, with one identity.
    """
    came: dict[str, int] = {}
    async with asyncio.timeout(patience(BACK_S_MAX)):
        while len(came) < count:
            await asyncio.sleep(0.3)
            came = {
                header(record, "ce_id"): json.loads(record.value)["seq"]
                for record in await records_of(site.plain, site.topic())
            }
    return sorted(came.values())


async def checked(site: Site) -> dict[str, str]:
    """What `sluice check` finds of TLS and of the log-in."""
    ended = await site.command("check", "--json")
    return {
        kind: finding["words"]
        for finding in json.loads(ended.stdout)
        for kind in ("TLS", "log-in at")
        if finding["subject"].startswith(kind)
    }


@pytest.mark.campaign(seconds=490)
async def test_readings_flow_over_many_renewals_of_short_lived_tokens(site: Site, server: TokenServer) -> None:
    renewals = size(3, 60)
    sequence = 0
    with site.daemon() as process:
        while len(server.asked) <= renewals:
            await asyncio.to_thread(publish, site, sequence)
            sequence += 1
            await asyncio.sleep(0.05)
            assert process.poll() is None
        came = await sequences(site, sequence)
        uplink = await site.uplink()
    assert came == list(range(sequence))
    assert uplink["up"]
    assert server.asked[0] == {"grant_type": ["client_credentials"], "scope": ["kafka"]}
    # A session ends before its token does, and no broker had to end it.
    assert site.log.count("the access token for Kafka was renewed") >= renewals - 1
    assert "cannot be reached" not in site.log
    assert server.secret not in site.log


async def test_a_token_that_is_refused_or_not_given_is_told_in_words_until_it_is(
    site: Site, server: TokenServer
) -> None:
    server.answer = 401, b'{"error":"invalid_client"}'
    with site.daemon():
        publish(site, 0)
        await until(lambda: "gives no token: invalid_client" in site.log)
        found = await checked(site)
        assert found["log-in at"].startswith("127.0.0.1 gives no token: invalid_client; mend kafka.sasl.user")
        assert found["TLS"] == "not checked: nothing is sent to a broker without an access token, see below"
        server.forges = True
        server.answer = None
        await until(lambda: f"refuses the token of client {CLIENT}" in site.log)
        assert "have the brokers trust the authorization server" in (await checked(site))["log-in at"]
        server.forges = False
        assert await sequences(site, 1) == [0]
        assert (await checked(site))["log-in at"].startswith(f"logged in as {CLIENT} (OAUTHBEARER)")
        # While no new one can be had, the session goes on until the broker ends it.
        server.answer = 500, b""
        await until(lambda: "the access token for Kafka cannot be renewed yet" in site.log)
        server.answer = None
        publish(site, 1)
        assert await sequences(site, 2) == [0, 1]
    assert server.secret not in site.log
