"""Serves `/metrics` and `/health` of the job, beside its work. Both are read only, and hold no secret."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST

CONNECTIONS_MAX: Final = 16
"""Connections at once, each with a thread. Further ones are closed."""
CONNECTION_S: Final = 10.0
"""Seconds from a connection's beginning until it is cut."""
LOOK_S: Final = 0.5
"""Seconds between two looks at the age of connections, and until the page has ended."""

Health = Callable[[], tuple[bool, dict[str, Any]]]
"""Whether all is well, and the members of the answer."""


class _Page(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, metrics: Callable[[], bytes], health: Health) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.metrics = metrics
        self.health = health
        self._places = BoundedSemaphore(CONNECTIONS_MAX)
        self._begun_s: dict[socket.socket, float] = {}
        super().__init__((host, port), _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._begun_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._begun_s.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """Cut connections that last too long. `serve_forever` calls this every LOOK_S."""
        now_s = time.monotonic()
        for request, begun_s in list(self._begun_s.items()):
            if now_s - begun_s > CONNECTION_S:
                # Its thread then reads the end, and closes it.
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no failure of the job."""


class _Request(BaseHTTPRequestHandler):
    server: _Page
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, self.server.metrics())
        elif path == "/health":
            is_well, members = self.server.health()
            status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, "application/json", json.dumps(members).encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there are /metrics and /health\n")

    def version_string(self) -> str:
        return "sluice"

    def log_message(self, *_: object) -> None:
        """Log no request: Prometheus asks every few seconds."""

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def monitor_page(host: str, port: int, metrics: Callable[[], bytes], health: Health) -> Iterator[int]:
    """Serve the page for the length of a `with`. Yields its port. Raises OSError if the port cannot be had."""
    with _Page(host, port, metrics, health) as page:
        serving = Thread(target=page.serve_forever, args=(LOOK_S,), name="monitor-page", daemon=True)
        serving.start()
        try:
            yield page.server_address[1]
        finally:
            page.shutdown()
