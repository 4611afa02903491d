"""How this box is now, asked as the gateway's own user: root trusts neither that user's socket nor its database."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from msgspec.structs import astuple

from gateway.commands.update import trial
from gateway.commands.update.image_update import how_it_is
from gateway.commands.update.trial import LOOK_S, Seen, missing, own_settings
from gateway.host import service
from gateway.host.last_update import Before
from gateway.host.service_user import as_service
from gateway.settings import DEFAULT_CONFIG

SETTLED_S: Final = 300.0
"""Seconds within which a box should be as it mostly is: sensors are heard, and Kafka is reached."""


def as_it_mostly_is() -> Before:
    """What a change has to reach: the best of some minutes, unless all is there at once.

    At one moment, Kafka may just be away, or the box may have started a minute ago.
    """
    until_s = time.monotonic() + SETTLED_S
    best = Before()
    while True:
        with _as_service():
            now = how_it_is()
        best = Before(*(one or other for one, other in zip(astuple(best), astuple(now), strict=True)))
        if all(astuple(best)) or time.monotonic() > until_s:
            return best
        time.sleep(LOOK_S)


def lacking(before: Before, since_s: float) -> Iterator[str]:
    """Say what this box lacks to be as before, with a service started since a moment of the monotonic clock."""
    if before.service and service.started_s() < since_s:
        yield "its service was not restarted, and runs as before"
    yield from missing(before, seen_now())


def seen_now() -> Seen:
    """Look at the service and ask the daemon."""
    with _as_service():
        return trial.seen_now()


@contextmanager
def _as_service() -> Iterator[None]:
    settings = own_settings()
    if settings is None:
        yield
    else:
        with as_service(DEFAULT_CONFIG, settings.buffer.path):
            yield
