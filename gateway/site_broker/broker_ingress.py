"""The broker ingress: reads from the site's own MQTT broker, makes connections, and says why there is none.

The promise begins when the broker delivers a message; a PUBACK goes out after the commit. `site_broker.connection` runs
one connection, `site_broker.commits` acknowledges, and `site_broker.deliveries` recognises messages that were delivered
before. `site_broker.session` keeps what outlives a connection.

While the buffer can store nothing, the socket is not read, so that TCP slows the broker down. PINGREQs are still sent,
and a broker that is not read from does not count as dead. The connection lasts as long as the broker tolerates a full
socket. A broken connection is made anew when there is room again.

A message with RETAIN is its topic's last message from before the subscription. It is no reading of now, and nobody
knows its time. It is acknowledged and counted, but not stored. Each connection subscribes anew, and so brings it again.
A live message comes without that flag (section 3.3.1.3).
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
"""Seconds after which a connection was no failure, so that the next attempt comes soon."""
SAY_AGAIN_S: Final = 300.0
"""Seconds until the same trouble is logged again, or a lost connection reported again."""

_log = structlog.get_logger("sluice.mqtt_broker")


class BrokerIngress:
    """Reads from one broker. Its troubles do not affect the rest of the gateway.

    `now_us` is CLOCK_BOOTTIME in microseconds, and `random` returns numbers from 0 to 1. The broker's certificate is
    judged by `dates`.
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
        """Whether to report the next connection: none was reported since the last lost one."""
        self._resolver = ThreadPoolExecutor(1, "mqtt-broker-name")
        """One thread that looks up the broker's name, however long the network makes it wait."""

    def state(self) -> dict[str, object]:
        """The state for `sluice status`."""
        subscriptions = self.session.subscriptions
        return {
            "connected": subscriptions.answered.is_set(),
            "refused": sorted(subscriptions.refused),
            **self.session.counts,
        }

    async def run(self) -> None:
        """Connect again and again until cancelled; then acknowledge what is stored, and send DISCONNECT."""
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
        """Connect once, and run the connection until it ends. Raises BrokerError with the reason."""
        session, settings = self.session, self._settings
        await session.load()
        # The last connection's batches must be decided before CONNECT, so that it is known what is stored.
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

    # --- log and events -----------------------------------------------------------------------------------

    def _say_connected(self, session_present: bool) -> None:  # noqa: FBT001 - what CONNACK says
        session = self.session
        _log.info("connected to the broker", broker=self.name, client_id=session.client_id, session=session_present)
        if self._report_connection:
            self._report_connection = False
            self._intake.event("broker-connected", None, broker=self.name, session_present=session_present)

    def _say(self, words: str, now_s: float) -> None:
        """Log and report why there is no connection; repeat it only after SAY_AGAIN_S."""
        said, at_s = self._said
        if words != said or now_s - at_s >= SAY_AGAIN_S:
            self._said = words, now_s
            _log.warning(f"no connection to the broker: {words}", broker=self.name, client_id=self.session.client_id)
        if now_s - self._lost_reported_s >= SAY_AGAIN_S:
            self._lost_reported_s = now_s
            self._report_connection = True
            self._intake.event("broker-lost", None, broker=self.name, cause=words)
