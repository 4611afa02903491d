"""Measures what a reading costs on the wire if it is sent by HTTP POST: kept-alive connections or not, TLS or not."""

import asyncio
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.bench.context import Bench, say
from tests.bench.parts_uplink_site import DEVICES, STREAM, Payloads
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.bench.uplink_cable import Carried, carried, have_real_packets
from tests.support.certificates import make_authority
from tests.support.netns import BROKERS_NET, Namespace, Network, new_network

SERVER = f"{BROKERS_NET}.2"
READINGS, READINGS_QUICK = 1_000, 200
RATE = 100.0
"""Readings a second, as in `wire`."""
ANSWER_S_MAX = 30.0
QUIET_S = 1.0
"""Seconds until everything of the last request has been carried."""


class _Taken(BaseHTTPRequestHandler):
    """Takes a reading, and answers in as few bytes as HTTP/1.1 allows."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response_only(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


async def http(bench: Bench) -> list[Result]:
    """Measure a reading's bytes and packets by HTTP POST, one request for each reading, over an Ethernet of its own."""
    directory = bench.directory / "http"
    directory.mkdir(parents=True)
    return await asyncio.to_thread(_measure, directory, bench.pick(READINGS, READINGS_QUICK))


def _measure(directory: Path, readings: int) -> list[Result]:
    authority = make_authority(directory / "ca")
    identity = authority.sign("server", f"IP:{SERVER}")
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(identity.certificate, identity.key)
    client_tls = ssl.create_default_context(cafile=str(authority.certificate))
    results = []
    with new_network(directory) as network:
        have_real_packets(network)
        for is_kept, is_secret in itertools.product((True, False), (False, True)):
            name = "" if is_kept else "_connection_each"
            name += "_tls" if is_secret else ""
            with _server(network, server_tls if is_secret else None) as port:
                of_client = client_tls if is_secret else None
                way = _Way(network.gateway, port, of_client, is_kept=is_kept)
                found = network.gateway.inside(lambda way=way: way.post(readings))  # type: ignore[misc]
            say(f"http{name}: {found.bytes / readings:.0f} bytes and {found.packets / readings:.1f} packets a reading")
            results.append(Result(f"http_post_bytes_per_reading{name}", found.bytes / readings, "bytes"))
            results.append(Result(f"http_post_packets_per_reading{name}", found.packets / readings, "packets"))
    return results


@contextmanager
def _server(network: Network, tls: ssl.SSLContext | None) -> Iterator[int]:
    """A server in the brokers' place. Gives its port."""

    def made() -> ThreadingHTTPServer:
        server = ThreadingHTTPServer((SERVER, 0), _Taken)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        return server

    with network.brokers.inside(made) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Way:
    """A way to post readings, as sparing as HTTP/1.1 is. Its methods are called within the gateway's namespace."""

    def __init__(self, place: Namespace, port: int, tls: ssl.SSLContext | None, *, is_kept: bool) -> None:
        self._place = place
        self._port = port
        self._tls = tls
        self._is_kept = is_kept
        self._connection: socket.socket | None = None
        self._payloads = Payloads(seed=2)

    def post(self, readings: int) -> Carried:
        """Post so many readings at `RATE`. Returns what the cable carried for them."""
        # The first one resolves the neighbour's address, and opens the connection that is kept.
        self._post(0)
        time.sleep(QUIET_S)
        before, begun_s = carried(self._place), time.monotonic()
        for number in range(readings):
            time.sleep(max(0.0, begun_s + number / RATE - time.monotonic()))
            self._post(number)
        time.sleep(QUIET_S)
        after = carried(self._place)
        self._close()
        return after.since(before)

    def _post(self, number: int) -> None:
        device = number % DEVICES
        body = self._payloads.of(device)
        head = (
            f"POST /device/d{device:03d}/{STREAM} HTTP/1.1\r\nHost: {SERVER}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        if self._connection is None:
            self._connection = self._connect()
        # At once: http.client sends the body in a packet of its own.
        self._connection.sendall(head.encode() + body)
        with HTTPResponse(self._connection, method="POST") as response:
            response.begin()
            if response.status != HTTPStatus.NO_CONTENT:
                raise NotMeasuredError(f"the server answered with {response.status}")
        if not self._is_kept:
            self._close()

    def _connect(self) -> socket.socket:
        plain = socket.create_connection((SERVER, self._port), timeout=ANSWER_S_MAX)
        return plain if self._tls is None else self._tls.wrap_socket(plain, server_hostname=SERVER)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
