"""Test readings of `sluice check` in the daemon: who may send one, and how far it has come.

Each test reading has a credential for one connection, and a payload that nobody else knows. It enters at the front door
as a sensor's reading does. It goes to Kafka as an event of the gateway's own (`sluice.gateway.check`), which no table
takes for a reading.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from gateway.buffer.rows import Lane, Row
from gateway.reading import Datum, Reading

UNDER_WAY_MAX = 8
"""Test readings under way; beyond it, the oldest is forgotten."""
LIFE_US = 120_000_000
"""Microseconds for which a credential is good, and a test reading is looked out for."""
USER_PREFIX = "$check-"
"""Prefix of the users; no device's name begins so."""
CHECK_TOPIC_PREFIX = "$sluice/check/"
CHECK_KIND = "check"
"""The kind of event, behind `sluice.gateway.` in `ce_type`."""


class CheckOpened(Struct, frozen=True):
    """The credential, topic and payload of a test reading."""

    user: str
    secret: str
    topic: str
    payload: str


class CheckPlace(Struct, frozen=True):
    """The place of a test reading in Kafka."""

    topic: str
    partition: int
    offset: int | None
    """None if the broker had it already, and did not say where."""
    ce_id: str
    acknowledged_us: int
    """CLOCK_BOOTTIME of Kafka's acknowledgement."""


class _Test:
    """A test reading under way."""

    __slots__ = ("arrived", "digest", "opened", "place", "taken", "until_us")

    def __init__(self, opened: CheckOpened, until_us: int) -> None:
        self.opened = opened
        self.digest = hashlib.sha256(opened.secret.encode()).digest()
        self.until_us = until_us
        self.taken = False
        """Whether its reading came in."""
        self.arrived = asyncio.Event()
        self.place: CheckPlace | None = None


class CheckReadings:
    """Test readings under way. Belongs to the event loop; `now_us` is CLOCK_BOOTTIME."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._by_user: dict[str, _Test] = {}
        self.waiting: dict[bytes, _Test] = {}
        """Test readings that came in and wait for Kafka's acknowledgement, by their payload: mostly none."""

    def open(self) -> CheckOpened:
        """Begin a test reading."""
        self._forget()
        while len(self._by_user) >= UNDER_WAY_MAX:
            self._drop(next(iter(self._by_user)))
        name = secrets.token_hex(8)
        payload = msgspec.json.encode({"check": secrets.token_hex(16)}).decode()
        opened = CheckOpened(USER_PREFIX + name, secrets.token_urlsafe(16), CHECK_TOPIC_PREFIX + name, payload)
        self._by_user[opened.user] = _Test(opened, self._now_us() + LIFE_US)
        return opened

    def lets_in(self, user: str | None, password: bytes | None) -> bool:
        """Whether this is the credential of a test reading. If so, it is used up."""
        if user is None or password is None or not user.startswith(USER_PREFIX):
            return False
        self._forget()
        test = self._by_user.get(user)
        if test is None or not hmac.compare_digest(hashlib.sha256(password).digest(), test.digest):
            return False
        # No digest is empty: nothing matches any more.
        test.digest = b""
        return True

    def takes(self, reading: Reading) -> bool:
        """Whether this is the sender's own test reading: the first, and as it was handed out."""
        test = None if reading.writer is None else self._by_user.get(reading.writer)
        if test is None or test.taken:
            return False
        payload = test.opened.payload.encode()
        if reading.topic != test.opened.topic or reading.datum.payload != payload:
            return False
        test.taken = True
        self.waiting[payload] = test
        return True

    def reading_of(self, user: str) -> Reading | None:
        """The test reading as an ingress would hand it over; None if there is none for this user."""
        test = self._by_user.get(user)
        if test is None:
            return None
        opened = test.opened
        datum = Datum(received_us=self._now_us(), payload=opened.payload.encode())
        return Reading(opened.topic, opened.topic, datum, user)

    def acknowledged(self, partition: tuple[str, int], offset: int, rows: Sequence[Row], lanes: Sequence[Lane]) -> None:
        """Record that Kafka has these rows, of these lanes, from `offset` on; -1 if it does not say where."""
        topic, number = partition
        for place, (row, lane) in enumerate(zip(rows, lanes, strict=True)):
            test = self.waiting.pop(row.datum.payload, None)
            if test is not None:
                ce_id = f"{lane.buffer_id}-{lane.name}-{row.sequence}"
                at = None if offset < 0 else offset + place
                test.place = CheckPlace(topic, number, at, ce_id, self._now_us())
                test.arrived.set()
        self._forget()

    async def place_of(self, user: str, patience_s: float) -> CheckPlace | None:
        """Wait for a test reading's place in Kafka; None if it has not come that far, or is forgotten."""
        test = self._by_user.get(user)
        if test is None:
            return None
        try:
            async with asyncio.timeout(patience_s):
                await test.arrived.wait()
        except TimeoutError:
            return None
        return test.place

    def _forget(self) -> None:
        now_us = self._now_us()
        for user in [user for user, test in self._by_user.items() if test.until_us <= now_us]:
            self._drop(user)

    def _drop(self, user: str) -> None:
        test = self._by_user.pop(user)
        self.waiting.pop(test.opened.payload.encode(), None)
