"""Peers for the tests of connections to Kafka: a certificate authority, servers, and a broker of a few answers."""

import asyncio
import ssl
import struct
from dataclasses import dataclass, field
from pathlib import Path

API_VERSIONS, METADATA, SASL_HANDSHAKE, SASL_AUTHENTICATE, INIT_PRODUCER_ID, FETCH = 18, 3, 17, 36, 22, 1
SASL_AUTHENTICATION_FAILED, UNSUPPORTED_SASL_MECHANISM = 58, 33
_OFFERED = (
    (API_VERSIONS, 0, 0),
    (METADATA, 0, 0),
    (SASL_HANDSHAKE, 1, 1),
    (SASL_AUTHENTICATE, 0, 0),
    (INIT_PRODUCER_ID, 0, 0),
)


def server_context(pair: tuple[Path, Path], version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    context.maximum_version = version
    return context


@dataclass
class FakeBroker:
    """Answers what a client asks first (Kafka's protocol, version 0 of each message), as `speaking` has it."""

    advertised: tuple[str, int] = ("127.0.0.1", 1)
    """Address that it gives as its own."""
    mechanisms: tuple[str | None, ...] = ()
    """Mechanisms that it offers for SASL. If there are any, it closes a connection that asks for more without a
    log-in."""
    takes_mechanism: bool = False
    """Whether the client's mechanism is taken, and its log-in refused then."""
    iterations: int | None = None
    """With how many it asks for SCRAM to go on, instead of refusing the log-in."""
    answers: frozenset[int] = frozenset({API_VERSIONS, METADATA, SASL_HANDSHAKE, SASL_AUTHENTICATE})
    """Requests that it answers; the others it takes, and says nothing."""
    asked: list[int] = field(default_factory=list)
    """The requests that came."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(length := await reader.read(4)) == 4:
            request = await reader.readexactly(int.from_bytes(length))
            kind, _, correlation = struct.unpack_from(">hhi", request)
            self.asked.append(kind)
            if kind == METADATA and self.mechanisms:
                return
            if kind in self.answers:
                answer = struct.pack(">i", correlation) + self._answer(kind, request)
                writer.write(struct.pack(">i", len(answer)) + answer)

    def _answer(self, kind: int, request: bytes) -> bytes:
        if kind == API_VERSIONS:
            return struct.pack(">hi", 0, len(_OFFERED)) + b"".join(struct.pack(">hhh", *each) for each in _OFFERED)
        if kind == METADATA:
            host, port = self.advertised
            return struct.pack(">ii", 1, 1) + _text(host) + struct.pack(">ii", port, 0)
        if kind == SASL_HANDSHAKE:
            code = 0 if self.takes_mechanism else UNSUPPORTED_SASL_MECHANISM
            return struct.pack(">hi", code, len(self.mechanisms)) + b"".join(map(_text, self.mechanisms))
        if self.iterations is not None:
            nonce = request.rpartition(b"r=")[2].decode()
            first = f"r={nonce}x,s=AAAA,i={self.iterations}".encode()
            return struct.pack(">h", 0) + _text(None) + struct.pack(">i", len(first)) + first
        return struct.pack(">h", SASL_AUTHENTICATION_FAILED) + _text("invalid credentials") + struct.pack(">i", 0)


def _text(text: str | None) -> bytes:
    if text is None:
        return struct.pack(">h", -1)
    return struct.pack(">h", len(text)) + text.encode()
