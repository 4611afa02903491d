"""An authorization server: gives signed access tokens for client credentials, over HTTPS, or whatever a test wants."""

import base64
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote_plus

from tests.support.certificates import Identity

CLIENT = "gateway-1"
ISSUER = "https://issuer.example"
AUDIENCE = "kafka"


@dataclass(slots=True)
class TokenServer:
    """What it gives, and what it was asked."""

    folder: Path
    port: int = 0
    secret: str = "secret-4b1e:%/ü"  # noqa: S105 - lives for the length of a test
    life_s: int = 3_600
    forges: bool = False
    """Whether it signs with another key than the public one."""
    answer: tuple[int, bytes] | None = None
    """Status and body that it gives instead of a token."""
    silent: bool = False
    """Whether it takes requests and answers none."""
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    """The form of each request with the right secret."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}/token"

    @property
    def keys(self) -> Path:
        """The public key, as a JSON Web Key Set (RFC 7517)."""
        path = self.folder / "keys.json"
        if not path.exists():
            told = _openssl("rsa", "-in", str(self._key("right")), "-noout", "-modulus").decode()
            modulus = bytes.fromhex(told.strip().removeprefix("Modulus="))
            key = {"kty": "RSA", "kid": "k1", "use": "sig", "alg": "RS256", "n": _plain(modulus), "e": "AQAB"}
            path.write_text(json.dumps({"keys": [key]}))
        return path

    def _key(self, name: str) -> Path:
        path = self.folder / f"{name}.key"
        if not path.exists():
            _openssl("genrsa", "-out", str(path), "2048")
        return path

    def token(self) -> str:
        """A signed token (RFC 7519) for the client."""
        now_s = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": CLIENT,
            "scope": "kafka",
            "iat": now_s,
            "exp": now_s + self.life_s,
        }
        parts = [_plain(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "k1"}, claims)]
        signed = ".".join(parts)
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self._key("forged" if self.forges else "right")],
            input=signed.encode(),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        return f"{signed}.{_plain(signature)}"

    def respond(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, bytes]:
        """Status and body for a request."""
        if self.answer is not None:
            return self.answer
        login = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        client, _, secret = login.partition(":")
        if (unquote_plus(client), unquote_plus(secret)) != (CLIENT, self.secret):
            return 401, b'{"error":"invalid_client","error_description":"no such client"}'
        self.asked.append(form)
        given = {"access_token": self.token(), "token_type": "Bearer", "expires_in": self.life_s}
        return 200, json.dumps(given).encode()


@contextmanager
def token_server(folder: Path, identity: Identity) -> Iterator[TokenServer]:
    """A server in a thread for the length of a `with`; `identity` is its certificate."""
    made = TokenServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if made.silent:
                stop.wait()
                return
            status, body = made.respond(self.headers["Authorization"], form)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    stop = threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _plain(data: bytes) -> str:
    """Base64 as tokens have it (RFC 7515, section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _openssl(*command: str) -> bytes:
    return subprocess.run(["openssl", *command], capture_output=True, check=True).stdout
