"""Access tokens are got from an authorization server, kept, renewed, and what goes wrong is told without a secret."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.kafka import tokens
from gateway.kafka.reach import TokenError
from gateway.kafka.tokens import Tokens
from gateway.settings import KafkaSaslSettings
from gateway.tls.client import client_context
from tests.support.certificates import Authority, make_authority
from tests.support.gateways import free_port
from tests.support.token_server import CLIENT, TokenServer, token_server

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def one_server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with token_server(tmp_path_factory.mktemp("tokens"), authority.sign("tokens")) as server:
        yield server


@pytest.fixture
def server(one_server: TokenServer) -> Iterator[TokenServer]:
    tokens._kept.clear()
    yield one_server
    one_server.asked.clear()
    one_server.answer, one_server.silent, one_server.life_s = None, False, 3_600


def source(server: TokenServer, ca: Path, timeout_s: float = 20.0, **settings: Any) -> Tokens:
    settings = {"token_url": server.url, "scope": "kafka events"} | settings
    sasl = KafkaSaslSettings("OAUTHBEARER", CLIENT, Path("secret"), **settings)
    return Tokens(sasl, server.secret, client_context(ca, None, None), timeout_s)


async def failure(made: Tokens) -> TokenError:
    with pytest.raises(TokenError) as failed:
        await made.token()
    assert made._secret not in failed.value.words + failed.value.hint + repr(failed.value)
    return failed.value


async def test_a_token_is_asked_for_once_and_serves_the_sessions_that_follow(
    server: TokenServer, authority: Authority
) -> None:
    made = source(server, authority.certificate, extensions={"logicalCluster": "lkc-1"})
    first, again = await asyncio.gather(made.token(), made.token())
    assert first == again
    assert server.asked == [{"grant_type": ["client_credentials"], "scope": ["kafka events"]}]
    assert await source(server, authority.certificate).token() == first
    assert made.extensions() == {"logicalCluster": "lkc-1"}
    assert len(server.asked) == 1
    # Brokers refuse it.
    made.forget()
    await made.token()
    assert len(server.asked) == 2


async def test_a_token_is_renewed_before_it_ends_and_the_next_session_takes_the_new_one(
    server: TokenServer, authority: Authority
) -> None:
    server.life_s = 1
    made = source(server, authority.certificate)
    first = await made.token()
    server.life_s = 3_600
    await made.renew()
    # The session that goes on has its own.
    assert await made.token() == first
    assert await source(server, authority.certificate).token() != first
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("status", "body", "words", "hint"),
    [
        (401, b'{"error":"invalid_client"}', "gives no token: invalid_client", "mend kafka.sasl.user"),
        (400, b'{"error":"invalid_scope","access_token":"a"}', "no token: invalid_scope", "mend kafka.sasl.scope"),
        (400, b'{"error":"<b>no</b>"}', "gives no token: it answers with status 400", "compare kafka.sasl.token_url"),
        (404, b"not here", "gives no token: it answers with status 404", "correct the path"),
        (302, b"", "gives no token: it answers with status 302", "compare kafka.sasl.token_url"),
        (200, b"<html>", "its answer has none that can be sent", "correct kafka.sasl.token_url"),
        (200, b'{"access_token":"a\\u0001b"}', "its answer has none that can be sent", "correct kafka.sasl.token_url"),
        (200, b"[" * 70_000, "what answers there does not speak HTTP as it should", "correct kafka.sasl.token_url"),
    ],
)  # fmt: skip
async def test_an_answer_without_a_token_is_told_in_words(  # noqa: PLR0913, PLR0917 - parameters of the test
    server: TokenServer, authority: Authority, status: int, body: bytes, words: str, hint: str
) -> None:
    server.answer = status, body
    made = source(server, authority.certificate)
    told = await failure(made)
    assert words in told.words
    assert told.words.startswith(("127.0.0.1 gives no token", "no token from 127.0.0.1: "))
    assert told.hint.startswith(hint)
    # For a while it is not asked again.
    server.answer = None
    assert await failure(made) is told
    assert server.asked == []


async def test_a_server_that_cannot_be_reached_is_told_in_words(
    server: TokenServer, authority: Authority, tmp_path: Path
) -> None:
    ca = authority.certificate
    nowhere = f"https://127.0.0.1:{free_port()}/token"
    assert (
        await failure(source(server, ca, token_url=nowhere))
    ).words == "no token from 127.0.0.1: nothing listens there"
    unknown = await failure(source(server, ca, token_url="https://nobody.invalid/token"))  # noqa: S106
    assert unknown.words == "no token from nobody.invalid: its name does not resolve"
    stranger = make_authority(tmp_path / "stranger").certificate
    refused = await failure(source(server, stranger))
    assert refused.words.startswith("no token from 127.0.0.1: its certificate is not accepted: ")
    assert refused.hint.startswith("kafka.sasl.token_ca must name who signed it")
    other = await failure(source(server, ca, token_url=server.url.replace("127.0.0.1", "localhost")))
    assert other.words.startswith("no token from localhost: its certificate is not accepted: ")
    server.silent = True
    assert (await failure(source(server, ca, 1.0))).words == "no token from 127.0.0.1: it does not answer"


async def test_the_wrong_secret_is_told_as_such(server: TokenServer, authority: Authority) -> None:
    made = source(server, authority.certificate)
    made._secret = "wrong"  # noqa: S105 - no secret
    assert (await failure(made)).words == "127.0.0.1 gives no token: invalid_client"


@given(
    st.sampled_from([200, 400, 500]),
    st.binary(max_size=60)
    | st.dictionaries(
        st.sampled_from(["access_token", "expires_in", "error"]),
        st.none() | st.text() | st.floats() | st.integers() | st.lists(st.integers()),
    ).map(lambda members: json.dumps(members).encode())
    | (st.floats() | st.integers()).map(
        lambda life: b'{"access_token":"t","expires_in":%b}' % json.dumps(life).encode()
    ),
)
@example(200, b"[" * 60_000)
def test_any_answer_gives_a_token_that_can_be_sent_or_words(status: int, body: bytes) -> None:
    value, words, life_s = "t", "no token", 1.0
    try:
        value, life_s = tokens._read(status, body, "tokens.example")
    except TokenError as error:
        words = error.words
    assert (value + words).isprintable()
    assert value.isascii()
    assert 1 <= life_s <= 86_400
