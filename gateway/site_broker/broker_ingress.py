"""The broker ingress: reads from an MQTT broker that the site has already; a PUBACK goes out after the commit.

The promise begins when that broker delivers to us. `site_broker.connection` is one connection, `site_broker.commits`
says what is acknowledged when, `site_broker.deliveries` what was delivered before; what outlives a connection is
`site_broker.session`'s. Here connections follow one another, and a person is told why there is none.

While the buffer can store nothing, nothing is read from the socket, so that TCP slows the broker down. PINGREQs are
sent all the while, and a broker that is not read from is not held to be dead: the connection lasts as long as the
broker bears to write into a full socket, and a broken one is made anew when there is room again.

A message with RETAIN is what its topic said last, some time before it was subscribed to: no reading of now, and nobody
knows of when. It is acknowledged, counted and not stored; each connection subscribes anew and so brings it again. A
live one comes without that flag (section 3.3.1.3).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

import structlog

from gateway.reading import Intake
from gateway.settings import BrokerSettings
from gateway.site_broker.connection import HOLD_POLL_S, BrokerConnection
from gateway.site_broker.reach import BrokerError, open_link, password_of
from gateway.site_broker.session import BrokerSession
from gateway.tls.dates import Dates, by_system_clock

STEADY_S: Final = 30.0
"""A connection that lasted so long was no failure: the next attempt comes soon."""
SAY_AGAIN_S: Final = 300.0
"""How long the same trouble is not logged again, nor a lost connection reported."""

_log = structlog.get_logger("sluice.mqtt_broker")


class BrokerIngress:
    """Reads from one broker, for as long as it runs. One broker's troubles cost nobody else anything.

    `now_us` is CLOCK_BOOTTIME in microseconds, `random` gives numbers from 0 to 1, `dates` is what the broker's
    certificate is judged by.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a broker's connection goes by
        self,
        settings: BrokerSettings,
        gateway_id: str,
        intake: Intake,
        now_us: Callable[[], int],
        random: Callable[[], float],
        dates: Dates = by_system_clock,
    ) -> None:
        self.session = BrokerSession(settings, gateway_id, intake, now_us)
        self.name = self.session.broker
        self._settings = settings
        self._intake = intake
        self._random = random
        self._dates = dates
        self._said: tuple[str, float] = ("", float("-inf"))
        self._lost_reported_s = float("-inf")
        self._report_connection = True
        """Whether nobody was told of a connection since the last one that was reported as lost."""
        self._resolver = ThreadPoolExecutor(1, "mqtt-broker-name")
        """Looks the broker's name up: one thread, however long the network lets it wait."""

    def state(self) -> dict[str, object]:
        """What `sluice status` tells of it."""
        subscriptions = self.session.subscriptions
        return {
            "connected": subscriptions.answered.is_set(),
            "refused": sorted(subscriptions.refused),
            **self.session.counts,
        }

    async def run(self) -> None:
        """Connect, and connect again, until cancelled; then acknowledge what is stored, and DISCONNECT."""
        loop = asyncio.get_running_loop()
        failures = 0
        try:
            while True:
                begun_s = loop.time()
                try:
                    await self._serve()
                except BrokerError as error:
                    self._say(str(error), loop.time())
                except Exception:  # noqa: BLE001 - whatever it is, the rest of the gateway goes on
                    _log.exception("reading from the broker failed; it is tried again", broker=self.name)
                failures = 0 if loop.time() - begun_s >= STEADY_S else failures + 1
                await asyncio.sleep(self._random() * self._pause_s_max(failures))
        finally:
            self._resolver.shutdown(wait=False, cancel_futures=True)

    def _pause_s_max(self, failures: int) -> float:
        return min(self._settings.backoff_s_max, self._settings.backoff_s_min * 2.0 ** min(max(failures - 1, 0), 32))

    async def _serve(self) -> NoReturn:
        """Connect once, and take what comes until the connection ends. Raises BrokerError, which says why it did."""
        session, settings = self.session, self._settings
        await session.load()
        # What the last connection brought must be decided before CONNECT, for then it is known what is stored.
        await session.settled.wait()
        while self._intake.cannot_store:  # noqa: ASYNC110 - the intake tells nobody when it ends
            await asyncio.sleep(HOLD_POLL_S)
        password = password_of(settings)
        dates = self._dates if settings.tls is not None and self._dates() is not None else None
        link = await open_link(settings, dates, self._resolver)
        try:
            await session.connecting()
            connection = BrokerConnection(session, link, password, dates, self._say_connected)
        except BaseException:
            link.close()
            raise
        await connection.run()

    # --- what a person is told ----------------------------------------------------------------------------

    def _say_connected(self, session_present: bool) -> None:  # noqa: FBT001 - what CONNACK says
        session = self.session
        _log.info("connected to the broker", broker=self.name, client_id=session.client_id, session=session_present)
        if self._report_connection:
            self._report_connection = False
            self._intake.event("broker-connected", None, broker=self.name, session_present=session_present)

    def _say(self, words: str, now_s: float) -> None:
        """Log why there is no connection; the same words again only after a while."""
        said, at_s = self._said
        if words != said or now_s - at_s >= SAY_AGAIN_S:
            self._said = words, now_s
            _log.warning(f"no connection to the broker: {words}", broker=self.name, client_id=self.session.client_id)
        if now_s - self._lost_reported_s >= SAY_AGAIN_S:
            self._lost_reported_s = now_s
            self._report_connection = True
            self._intake.event("broker-lost", None, broker=self.name, cause=words)
