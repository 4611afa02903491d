"""Access tokens for the log-in OAUTHBEARER: client credentials of OAuth 2.0 (RFC 6749, section 4.4) over HTTPS.

A token is got before it is needed, and kept for the process: a session that begins anew costs no new one. A session
ends before its token does, as aiokafka cannot log in again on a connection that lives (KIP-368).
"""

import asyncio
import base64
import json
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, quote_plus, urlencode, urlsplit, urlunsplit

import h11
from aiokafka.abc import AbstractTokenProvider

from gateway.host.latest import Latest
from gateway.host.name_lookup import names
from gateway.kafka.reach import TokenError
from gateway.settings import KafkaSaslSettings
from gateway.tls.client import tls_reason

TOKEN_CHARACTERS_MAX: Final = 16_384
ANSWER_BYTES_MAX: Final = 65_536
LIFE_SHARE: Final = 0.8
"""Share of its life after which a token is replaced."""
LIFE_S_DEFAULT: Final = 300
"""Seconds that a token is taken to live if its server does not say, or says nonsense."""
PAUSE_S: Final = 2.0
"""Seconds after which a first token is asked for again."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""RFC 6750, section 2.1."""
_ERROR: Final = re.compile(r"[a-z_]{1,40}")
_OK: Final = 200
_NOT_FOUND: Final = 404
_HINTS: Final = {
    "invalid_client": "mend kafka.sasl.user (the client's id), or its secret in password_file",
    "invalid_scope": "mend kafka.sasl.scope: who runs the authorization server knows it",
    "unauthorized_client": "have the client allowed to use the client-credentials flow there",
    "unsupported_grant_type": "have the client-credentials flow allowed there, or correct kafka.sasl.token_url",
    "invalid_request": "compare kafka.sasl.token_url and scope with what the authorization server wants",
}
"""By error code of RFC 6749, section 5.2."""


@dataclass(frozen=True, slots=True)
class Token:
    """An access token."""

    value: str = field(repr=False)
    renew_s: float
    """When to replace it (monotonic)."""


_kept: Final = Latest[tuple[str | None, ...], Token](4)
"""Tokens of this process, by what they were asked for with."""


class Tokens(AbstractTokenProvider):  # type: ignore[misc] # aiokafka has no types
    """The token of one session."""

    def __init__(self, sasl: KafkaSaslSettings, secret: str, context: ssl.SSLContext, timeout_s: float) -> None:
        """`context` verifies the authorization server. `timeout_s` bounds each step of a request."""
        self._sasl = sasl
        self._secret = secret
        self._key = sasl.token_url, sasl.user, sasl.scope, secret
        self._context = context
        self._timeout_s = timeout_s
        self._held: Token | None = None
        self._getting = asyncio.Lock()
        self._failure: tuple[TokenError, float] | None = None
        """The last failure, and until when (monotonic) it is the answer."""

    async def get(self) -> None:
        """Have a token at hand. Raises TokenError, without asking again for a while after a failure."""
        async with self._getting:
            if self._held is not None:
                return
            if self._failure is not None and time.monotonic() < self._failure[1]:
                raise self._failure[0]
            kept = _kept.get(self._key)
            try:
                self._held = kept if kept is not None and time.monotonic() < kept.renew_s else await self._fetched()
            except TokenError as error:
                self._failure = error, time.monotonic() + PAUSE_S
                raise

    async def token(self) -> str:
        """See AbstractTokenProvider. Raises TokenError."""
        await self.get()
        return "" if self._held is None else self._held.value

    def extensions(self) -> Mapping[str, str]:
        """See AbstractTokenProvider."""
        return self._sasl.extensions

    def forget(self) -> None:
        """Get a new token next time, as brokers refuse this one."""
        _kept.pop(self._key, None)
        self._held = None

    async def renew(self) -> None:
        """Return once a token is there for the session that follows. Raises TokenError."""
        if self._held is not None:
            await asyncio.sleep(self._held.renew_s - time.monotonic())
        await self._fetched()

    async def _fetched(self) -> Token:
        asked_s = time.monotonic()
        value, life_s = await _fetch(self._sasl, self._secret, self._context, self._timeout_s)
        token = _kept[self._key] = Token(value, asked_s + LIFE_SHARE * life_s)
        return token


async def _fetch(sasl: KafkaSaslSettings, secret: str, context: ssl.SSLContext, timeout_s: float) -> tuple[str, float]:
    """A new token, and its life in seconds. Raises TokenError."""
    url = urlsplit(sasl.token_url or "")
    host = url.hostname or ""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connected(host, url.port or 443, context)
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await _asked(reader, writer, url, sasl, secret)
        finally:
            writer.transport.abort()
    except (OSError, h11.ProtocolError) as error:
        raise _unreached(error, host) from error
    return _read(status, body, host)


async def _connected(
    host: str, port: int, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first address that takes one. Raises OSError."""
    failure: OSError = socket.gaierror(socket.EAI_NODATA, "the name has no address")
    for family, _, _, address in await names.addresses(host, port):
        try:
            return await asyncio.open_connection(
                address[0], port, family=family, ssl=context, server_hostname=host, limit=ANSWER_BYTES_MAX
            )
        except OSError as error:
            failure = error
    raise failure


async def _asked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: SplitResult, sasl: KafkaSaslSettings, secret: str
) -> tuple[int, bytes]:
    """The status and the body of the answer to a request for a token. Raises OSError, h11.ProtocolError."""
    form = {"grant_type": "client_credentials"} | ({} if sasl.scope is None else {"scope": sasl.scope})
    body = urlencode(form).encode()
    # RFC 6749, section 2.3.1: both are encoded as in a form first.
    login = base64.b64encode(f"{quote_plus(sasl.user)}:{quote_plus(secret)}".encode()).decode()
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=ANSWER_BYTES_MAX)
    request = h11.Request(
        method="POST",
        target=urlunsplit(("", "", url.path or "/", url.query, "")),
        headers=[
            ("Host", url.netloc),
            ("Authorization", f"Basic {login}"),
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Content-Length", str(len(body))),
            ("Accept", "application/json"),
            ("Connection", "close"),
        ],
    )
    for event in (request, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
    await writer.drain()
    status, answer = 0, b""
    while True:
        got = connection.next_event()
        if got is h11.NEED_DATA:
            connection.receive_data(await reader.read(ANSWER_BYTES_MAX))
        elif isinstance(got, h11.Response):
            status = got.status_code
        elif isinstance(got, h11.Data):
            answer += got.data
            if len(answer) > ANSWER_BYTES_MAX:
                raise h11.RemoteProtocolError("too large")
        elif isinstance(got, h11.EndOfMessage):
            return status, answer


def _read(status: int, body: bytes, host: str) -> tuple[str, float]:
    """The token and its life in an answer (RFC 6749, sections 5.1 and 5.2). Raises TokenError."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    members = answer if isinstance(answer, dict) else {}
    code = members.get("error")
    if isinstance(code, str) and _ERROR.fullmatch(code):
        raise TokenError(f"{host} gives no token: {code}", _HINTS.get(code, _HINTS["invalid_request"]))
    if status != _OK:
        hint = "correct the path in kafka.sasl.token_url" if status == _NOT_FOUND else _HINTS["invalid_request"]
        raise TokenError(f"{host} gives no token: it answers with status {status}", hint)
    value, life_s = members.get("access_token"), members.get("expires_in", LIFE_S_DEFAULT)
    if not isinstance(value, str) or len(value) > TOKEN_CHARACTERS_MAX or _TOKEN.fullmatch(value) is None:
        raise TokenError(f"{host} gives no token: its answer has none that can be sent", "correct kafka.sasl.token_url")
    # Some servers send the number as a text.
    with suppress(TypeError, ValueError, OverflowError):
        if (told_s := float(life_s)) >= 1:
            return value, min(told_s, 86_400.0)
    return value, LIFE_S_DEFAULT


def _unreached(error: Exception, host: str) -> TokenError:
    """Words for an authorization server that cannot be asked. They repeat nothing that it sent."""
    if isinstance(error, socket.gaierror):
        why, hint = "its name does not resolve", "is it written right in kafka.sasl.token_url, and does DNS work here?"
    elif isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not accepted: {error.verify_message}"
        hint = "kafka.sasl.token_ca must name who signed it, and it must be for the name in token_url; check the clock"
    elif isinstance(error, ssl.SSLError):
        why, hint = f"TLS fails: {tls_reason(error)}", "is the port in kafka.sasl.token_url one with HTTPS?"
    elif isinstance(error, h11.ProtocolError):
        why, hint = "what answers there does not speak HTTP as it should", "correct kafka.sasl.token_url"
    elif isinstance(error, ConnectionRefusedError):
        why, hint = "nothing listens there", "is it up, and are host and port in kafka.sasl.token_url right?"
    elif isinstance(error, TimeoutError):
        why, hint = "it does not answer", "let this box's network and firewalls lead there (kafka.sasl.token_url)"
    else:
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        hint = "is it up, and is kafka.sasl.token_url right?"
    return TokenError(f"no token from {host}: {why}", hint)
