"""Attacks on a gateway from its own network: by an outsider, and by a sensor whose secret was stolen.

Each is small, takes no skill, and lasts until its process is ended:
`python -m tests.support.attacks NAME PORT TLS_PORT PAGE_PORT SECRET`.
What is bounded (connections, topics, threads) is so that the attacker does not wear out the machine of a test.
"""

import contextlib
import ctypes
import os
import resource
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

import cbor2

from gateway.mqtt.protocol import publish
from tests.support.mqtt_peers import connect

SOURCE: Final = "127.0.0.66"
"""The attacker's own address: a loopback has sixteen million."""
GOOD: Final = "d000"
STOLEN: Final = "d001"
"""Device whose secret the attacker has."""
CBOR_TOPIC: Final = "packed"
"""The first level of topics whose readings say in CBOR who took them."""
STREAMS: Final = "streams"
"""The first level of topics that have a Kafka topic for each stream."""
SILENT: Final = 5_200
"""More connections than a gateway has places for, as it is installed."""
GUESSERS: Final = 8
VISITORS: Final = 12
"""Connections that one address may have to the status page."""
SILENT_AT_PAGE: Final = 500
PAYLOAD_BYTES: Final = 64_000
UNANSWERED_MAX: Final = 20
"""QoS 1 readings that a connection sends ahead."""
STREAMS_MAX: Final = 1_500
MERSENNE: Final = 2**61 - 1
"""Python's hash of an integer is what is left of it by this: multiples have one hash."""


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway on loopback."""

    port: int
    tls_port: int
    page_port: int
    secret: str
    """Secret of the stolen sensor."""

    def open(self) -> socket.socket:
        return _open(self.port)

    def open_for_tls(self) -> socket.socket:
        return _open(self.tls_port)

    def open_page(self) -> socket.socket:
        return _open(self.page_port)

    def log_in(self) -> socket.socket:
        """Log in as the stolen sensor, under this process's own identifier: another would end the connection."""
        opened = self.open()
        opened.sendall(connect(f"{STOLEN}-{os.getpid()}", login=(STOLEN, self.secret)))
        answer = opened.recv(4)
        if answer[3:] != b"\0":
            raise ConnectionError(f"the stolen sensor was not let in: {answer!r}")
        return opened


def _open(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(SOURCE, 0))


# -- without a secret -------------------------------------------------------------------------------


def silent(target: Target) -> None:
    """All places of the listener: connections that say nothing. Those that are closed are opened again."""
    _hold(target.open, SILENT)


def guesses(target: Target) -> None:
    """Log-ins under the name of a good sensor."""
    _in_threads(GUESSERS, lambda number: _refused(target, GOOD, number))


def made_up_names(target: Target) -> None:
    """Log-ins under names that nobody has: each is another."""
    names = count()
    _in_threads(GUESSERS, lambda number: _refused(target, f"nobody-{next(names)}", number))


def _refused(target: Target, user: str, number: int) -> None:
    with contextlib.suppress(OSError), target.open() as opened:
        opened.sendall(connect(f"guesser-{number}", login=(user, "a wrong secret")))
        opened.recv(4)


def handshakes(target: Target) -> None:
    """TLS handshakes that end where the gateway has computed its part: one ClientHello, made once, for all of them."""
    hello = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    first = hello.read()

    def half(_: int) -> None:
        with contextlib.suppress(OSError), target.open_for_tls() as opened:
            opened.sendall(first)
            opened.recv(4_096)

    _in_threads(GUESSERS, half)


def key_updates(target: Target) -> None:
    """New keys without end on a connection over TLS 1.3 that does not log in: 27 bytes each, and two keys to derive."""
    library = ctypes.CDLL("libssl.so.3")
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
    while True:
        with contextlib.suppress(OSError), target.open_for_tls() as opened:
            opened.settimeout(None)
            connection = ctypes.c_void_p(library.SSL_new(context))
            library.SSL_set_fd(connection, opened.fileno())
            is_open = library.SSL_connect(connection) == 1
            while is_open:
                is_open = library.SSL_key_update(connection, 0) == 1 and library.SSL_do_handshake(connection) == 1
            library.SSL_free(connection)


def page_requests(target: Target) -> None:
    """Requests to the status page, as many at a time as one address may have, without waiting for an answer."""
    requests = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100

    def visit(_: int) -> None:
        with contextlib.suppress(OSError), target.open_page() as opened:
            threading.Thread(target=_read_away, args=(opened,), daemon=True).start()
            while True:
                opened.sendall(requests)

    _in_threads(VISITORS, visit)


def page_silent(target: Target) -> None:
    """Connections to the status page that say nothing. Those that are closed are opened again."""
    _hold(target.open_page, SILENT_AT_PAGE)


def _hold(opened: Callable[[], socket.socket], most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held: list[socket.socket] = []
    while True:
        for _ in range(most - len(held)):
            with contextlib.suppress(OSError):
                held.append(opened())
        still = []
        for each in held:
            each.setblocking(False)
            try:
                ended = each.recv(1) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
            if ended:
                each.close()
            else:
                still.append(each)
        held = still
        time.sleep(0.01)


# -- with a stolen secret ---------------------------------------------------------------------------


def fill(target: Target) -> None:
    """Large readings at full speed, while Kafka is away: the buffer."""
    payload = os.urandom(PAYLOAD_BYTES // 2).hex().encode()
    _publish(target, (b"%s" % payload for _ in count()), f"device/{STOLEN}/thermo")


def topics(target: Target) -> None:
    """Another stream with each reading: Kafka's topics."""
    packets = (
        publish(f"{STREAMS}/{STOLEN}/stream-{number % STREAMS_MAX}", b'{"t": 1}', 1, 1 + number % 65_535, dup=False)
        for number in count()
    )
    _send_acknowledged(target, packets)


def equal_hashes(target: Target) -> None:
    """CBOR maps whose keys are lists of equal hashes: a dictionary compares each with all."""
    entries = b"".join(b"\x81" + cbor2.dumps((2**64 + number) * MERSENNE) + b"\x00" for number in range(4_000))
    _publish(target, (b"\xb9\x0f\xa0" + entries for _ in count()), f"{CBOR_TOPIC}/{STOLEN}/thermo")


def empty_lists(target: Target) -> None:
    """CBOR lists of 65,000 empty lists: each byte is an object."""
    _publish(target, (b"\x99\xfd\xe8" + b"\x80" * 65_000 for _ in count()), f"{CBOR_TOPIC}/{STOLEN}/thermo")


def pings(target: Target) -> None:
    """PINGREQ at full speed, answers read away."""
    with target.log_in() as opened:
        threading.Thread(target=_read_away, args=(opened,), daemon=True).start()
        while True:
            opened.sendall(b"\xc0\x00" * 4_096)


def qos_0(target: Target) -> None:
    """Small readings at full speed that nobody acknowledges."""
    packet = publish(f"device/{STOLEN}/thermo", b'{"t": 1}', 0, 0, dup=False) * 500
    with target.log_in() as opened:
        while True:
            opened.sendall(packet)


def _publish(target: Target, payloads: Iterator[bytes], topic: str) -> None:
    packets = (publish(topic, payload, 1, 1 + number % 65_535, dup=False) for number, payload in enumerate(payloads))
    _send_acknowledged(target, packets)


def _send_acknowledged(target: Target, packets: Iterator[bytes]) -> None:
    """With few ahead of their answers; anew where the gateway ends the connection."""
    while True:
        with contextlib.suppress(OSError), target.log_in() as opened:
            ahead = threading.Semaphore(UNANSWERED_MAX)
            threading.Thread(target=_read_away, args=(opened, ahead), daemon=True).start()
            while ahead.acquire(timeout=20):
                opened.sendall(next(packets))
        time.sleep(0.05)


def _read_away(opened: socket.socket, ahead: threading.Semaphore | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := opened.recv(65_536):
            if ahead is not None:
                ahead.release(max(1, len(data) // 4))


def _in_threads(many: int, attempt: Callable[[int], None]) -> None:
    def again_and_again(number: int) -> None:
        while True:
            attempt(number)

    threads = [threading.Thread(target=again_and_again, args=(number,)) for number in range(many)]
    for thread in threads:
        thread.start()


ATTACKS: Mapping[str, Callable[[Target], None]] = {
    "silent": silent,
    "guesses": guesses,
    "made-up-names": made_up_names,
    "handshakes": handshakes,
    "key-updates": key_updates,
    "page-requests": page_requests,
    "page-silent": page_silent,
    "fill": fill,
    "topics": topics,
    "equal-hashes": equal_hashes,
    "empty-lists": empty_lists,
    "pings": pings,
    "qos-0": qos_0,
}
NEEDS_NO_KAFKA: Final = frozenset({"fill"})
"""Attacks that do harm while Kafka is away."""
OVER_TLS: Final = frozenset({"handshakes", "key-updates"})
"""Attacks on the port for TLS."""

if __name__ == "__main__":
    name, port, tls_port, page_port, secret = sys.argv[1:]
    ATTACKS[name](Target(int(port), int(tls_port), int(page_port), secret))
