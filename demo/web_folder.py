"""Gives a folder by https on loopback: files alone, and nothing that decides."""

import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from demo.kafka_broker import HOST


class WebFolder:
    """A web server."""

    def __init__(self, certificate: Path, port: int) -> None:
        self.certificate = certificate
        """What clients have to trust."""
        self.url = f"https://{HOST}:{port}"


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, context: ssl.SSLContext) -> None:
        super().__init__((HOST, 0), partial(_Handler, directory=str(folder)))
        self._context = context

    def get_request(self) -> tuple[Any, Any]:
        channel, address = super().get_request()
        # The handshake is that thread's which has the connection.
        return self._context.wrap_socket(channel, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that is killed leaves its connection behind."""


@contextmanager
def web_folder(folder: Path, secrets: Path) -> Iterator[WebFolder]:
    """Give a folder for the length of a `with`, with a new certificate that has its key in another folder."""
    certificate, key = _certificate(secrets)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with _Server(folder, context) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="web folder")
        thread.start()
        try:
            yield WebFolder(certificate, server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def _certificate(secrets: Path) -> tuple[Path, Path]:
    """Make a key, and a certificate of this machine's loopback by that key itself."""
    certificate, key = secrets / "web.pem", secrets / "web.key"
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    name = ("-subj", "/CN=the demo's web server", "-addext", f"subjectAltName=IP:{HOST}")
    command = ["openssl", "req", *kind, *name, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
