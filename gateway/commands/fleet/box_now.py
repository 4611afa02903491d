"""How this box is now, asked by a child that is the gateway's user.

Root trusts neither that user's socket nor its database: either can go on without end.
"""

import math
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final, TypeVar

import msgspec
from msgspec.structs import astuple

from gateway.clock.floor import RELEASED_US
from gateway.commands.certificate_dates import known_floor
from gateway.commands.update.image_update import how_it_is
from gateway.commands.update.stick_update import SETTLED_S
from gateway.commands.update.trial import LOOK_S, Seen, missing, own_settings, seen_now
from gateway.host import service
from gateway.host.last_update import Before
from gateway.host.service_user import as_service
from gateway.settings import DEFAULT_CONFIG, Settings

AWAY_S: Final = 120.0
"""Seconds for which Kafka or the service may be away for no reason that matters, such as a restart."""
ASKED_S: Final = 90.0
"""Seconds that a child may take."""
ASKED_BYTES_MAX: Final = 256_000_000
"""Memory that a child may take."""
_ANSWER_BYTES_MAX: Final = 1_000
T = TypeVar("T", Before, Seen, int)


def clock_floor_us(settings: Settings) -> int:
    """Time that has surely passed, in microseconds since 1970, as the gateway has kept it in its buffer."""
    return asked(lambda: known_floor(settings.buffer.path).us, int) or RELEASED_US


def as_it_mostly_is() -> Before:
    """What a change has to reach: the best of some minutes, unless all is there at once.

    At one moment, Kafka may just be away, or the box may have started a minute ago.
    """
    # The monotonic clock counts from the box's start.
    until_s = max(time.monotonic() + AWAY_S, SETTLED_S)
    best = Before()
    while True:
        # Of the service, systemd tells whatever that user does.
        now = asked(how_it_is, Before) or Before(service=service.fed_s()[0])
        best = Before(*(one or other for one, other in zip(astuple(best), astuple(now), strict=True)))
        if all(astuple(best)) or time.monotonic() > until_s:
            return best
        time.sleep(LOOK_S)


def lacking(before: Before, since_s: float) -> Iterator[str]:
    """Say what this box lacks to be as before, with a service started since a moment of the monotonic clock."""
    if before.service and service.started_s() < since_s:
        yield "its service was not restarted"
    yield from missing(before, asked(seen_now, Seen) or Seen(*service.fed_s()))


def asked(look: Callable[[], T], kind: type[T]) -> T | None:
    """What a look finds as the gateway's user; None if it does not come to its end."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=_tell, args=(look, there))
    child.start()
    there.close()
    with here, suppress(EOFError, OSError, msgspec.DecodeError):
        try:
            if here.poll(ASKED_S):
                return msgspec.json.decode(here.recv_bytes(_ANSWER_BYTES_MAX), type=kind)
        finally:
            child.kill()
            child.join()
    return None


def _tell(look: Callable[[], object], there: Connection) -> None:
    # If the parent is killed, nobody else ends this child, and it has the lock that keeps a second look out.
    signal.alarm(math.ceil(ASKED_S))
    resource.setrlimit(resource.RLIMIT_DATA, (ASKED_BYTES_MAX, ASKED_BYTES_MAX))
    settings = own_settings()
    if settings is None:
        found = look()
    else:
        with as_service(DEFAULT_CONFIG, settings.buffer.path):
            found = look()
    there.send_bytes(msgspec.json.encode(found))
