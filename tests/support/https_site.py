"""A web server by https with files in memory, which cuts connections as a test asks for."""

import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.certificates import Identity

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER by which the end of a connection is a reset."""


@dataclass
class HttpsSite:
    """What the server has, how it behaves, and what it was asked for."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    """Files by their paths."""
    cuts: list[int] = field(default_factory=list)
    """Bytes of their bodies after which the next answers are cut off, in turn."""
    resets: bool = False
    """Whether a cut is a reset, and not an end."""
    answers: dict[str, tuple[int, Mapping[str, str]]] = field(default_factory=dict)
    """Answers without a body for some paths: status and headers."""
    knows_ranges: bool = True
    marks_by: str = "ETag"
    """Header by which a client knows a file again; empty for none."""
    knows_sizes: bool = True
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Path and `Range` of each request."""
    sent: int = 0
    """Bytes of bodies that were sent."""

    def address(self, path: str, host: str = "127.0.0.1") -> str:
        return f"https://{host}:{self.port}{path}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        site, path = self.server.site, self.path.partition("?")[0]
        asked = self.headers.get("Range", "")
        site.asked.append((self.path, asked))
        if path in site.answers:
            status, headers = site.answers[path]
            self._begin(status, {"Content-Length": "0", **headers})
        elif path in site.files:
            self._give(site, site.files[path], asked)
        else:
            self._begin(404, {"Content-Length": "0"})

    def _give(self, site: HttpsSite, content: bytes, asked: str) -> None:
        mark = f'"{zlib.crc32(content):x}"' if site.marks_by == "ETag" else f"day {zlib.crc32(content)}"
        headers = {site.marks_by: mark} if site.marks_by else {}
        begin = 0
        if site.knows_ranges and asked and self.headers.get("If-Range", mark) == mark:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        body = content[begin:]
        headers |= {"Content-Length": str(len(body))} if site.knows_sizes else {"Connection": "close"}
        self._begin(206 if "Content-Range" in headers else 200, headers)
        until = site.cuts.pop(0) if site.cuts else len(body)
        self.wfile.write(body[:until])
        site.sent += min(until, len(body))
        if until < len(body):
            self.close_connection = True
            if site.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            else:
                self.connection.shutdown(socket.SHUT_RDWR)

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, site: HttpsSite, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.site = site
        self._context = context

    def get_request(self) -> tuple[socket.socket, Any]:
        channel, address = super().get_request()
        if self._context is not None:
            # The handshake is the thread's of this connection.
            channel = self._context.wrap_socket(channel, server_side=True, do_handshake_on_connect=False)
        return channel, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients refuse certificates here, and leave."""


@contextmanager
def https_site(identity: Identity | None) -> Iterator[HttpsSite]:
    """A server with a certificate for the length of a `with`; without one it speaks no TLS."""
    context = None
    if identity is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.certificate, identity.key)
    site = HttpsSite()
    with _Server(site, context) as server:
        site.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
