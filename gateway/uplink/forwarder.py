"""The forwarder: keeps a session with Kafka going, whatever the uplink does, and says how it is."""

import asyncio
import ipaddress
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import structlog
from aiokafka.errors import KafkaError

from gateway.buffer.buffer import Buffer
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.host.network_watch import AddressWatch, is_own_address, source_address
from gateway.intake.front_door import FrontDoor
from gateway.kafka.batch import HEADER_BYTES, EncodedBatch
from gateway.kafka.link import KafkaLink
from gateway.kafka.secret_files import KafkaFileError
from gateway.kafka.session import VERDICT_S, KafkaSession, NetworkChangedError, open_session
from gateway.kafka.topics import TopicVerdict
from gateway.reading import BufferFileError, Mark
from gateway.settings import GatewaySettings, KafkaSettings
from gateway.tls.dates import Dates, by_system_clock
from gateway.uplink.heartbeat import Heartbeat
from gateway.uplink.memory import UPLINK_MARKS, Memory, QuotaUsedUpError, UplinkState
from gateway.uplink.redrive import REDRIVE_S, Redrive
from gateway.uplink.refused import REFUSALS
from gateway.uplink.rounds import NewSession, Rounds

BACKOFF_S_MIN = 0.25
LOOK_S = 1.0
"""How often certificates, passwords and connections are looked at."""
QUOTA_JITTER_S = 30.0
REFUSED_TOLD_MAX = 1_000
"""Topics of which a status says what is wrong with them: their names are made up by whoever sends."""
STILL_DOWN_S = 600.0
"""While the uplink is down, another reason is told at once, and further ones no oftener."""
FILES_CHANGED = "a certificate, key or password for Kafka has changed: connecting anew"
DATES_CLOCK_CHANGED = "another clock judges the dates of Kafka's certificates now: connecting anew"

log = structlog.get_logger()


class _BarredError(ConnectionError):
    """Kafka is reached, and one of both sides refuses the other."""


class Forwarder:
    """Drains the buffer into Kafka, for ever, and comes back by itself."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the uplink
        self,
        buffer: Buffer,
        front_door: FrontDoor,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        clock: Callable[[], BootClock],
        on_session: Callable[[], Awaitable[None]],
        dates: Dates = by_system_clock,
    ) -> None:
        """`on_session` is awaited in each session that could be opened, before anything is sent in it.

        `dates` is what brokers' certificates are judged by.
        """
        self._buffer = buffer
        self._front_door = front_door
        self._gateway = gateway
        self._kafka = kafka
        self._clock = clock
        self._on_session = on_session
        self._dates = dates
        self._memory = Memory(kafka, clock)
        self._redrive = Redrive(buffer, front_door, self._memory)
        self._since_us = boottime_us()
        self._failed_with = ""
        self._told = ("", 0.0)
        """What was last said of an uplink that is down, and when more may be said."""
        self._remembers = False
        """Whether what the buffer kept of former starts was read: a disk that fails is waited for."""
        self._heartbeat = Heartbeat(buffer, front_door, gateway, kafka, clock)
        self._heartbeat_from_s = 0.0
        self._clock_wait_from_s = time.monotonic()
        self._told_unsynced = False
        """Whether it was said that readings go although the clock is not known."""
        self._link: KafkaLink | None = None
        self._addresses = AddressWatch()
        self._peers: frozenset[tuple[str, int]] = frozenset()
        """The brokers that were connected last, and this box's own addresses towards them."""
        self._own: frozenset[str | None] = frozenset()
        self._changed = asyncio.Event()
        """The network is another one: what waits for better times need not wait on."""

    @property
    def state(self) -> UplinkState:
        """How the uplink is, as the forwarder itself goes by it."""
        return self._memory.state

    def report(self) -> UplinkState:
        """The same, with what only others want to know."""
        state = self._memory.state
        known = self._dates() if self._kafka.tls is not None else None
        return replace(
            state,
            throttled_s=self._memory.throttled_s,
            dates_passed=None if known is None else known.earliest_us / 1e6,
            # While the first attempt is under way, what has failed so far is what is to be mended.
            error=state.error or (None if state.up or self._link is None else self._link.fault),
            barred=state.barred if state.error or self._link is None else self._link.is_barred,
            refused_topics={
                topic: verdict.hint or verdict.reason
                for topic, verdict in islice(self._memory.verdicts.refused.items(), REFUSED_TOLD_MAX)
                if not verdict.waits
            },
            beyond_topics=self._memory.new_topics.beyond,
            # By the clock as it is now: it may have been set since.
            since=time.time() - (boottime_us() - self._since_us) / 1e6,
        )

    async def run(self) -> None:
        """Forward until cancelled."""
        try:
            await self._run()
        finally:
            self._memory.lines.finish()
            self._keep(self._memory.take_budget_mark(now=True))

    async def _run(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            sent = self._memory.state.sent
            self._changed.clear()
            if await self._until_trouble():
                continue
            if self._memory.state.sent > sent:
                backoff_s = BACKOFF_S_MIN
            # Jitter: gateways whose broker comes back must not knock at once.
            await asyncio.sleep(random.uniform(BACKOFF_S_MIN / 2, BACKOFF_S_MIN))  # noqa: S311
            try:
                async with asyncio.timeout(random.uniform(backoff_s / 2, backoff_s)):  # noqa: S311
                    await self._changed.wait()
                backoff_s = BACKOFF_S_MIN
            except TimeoutError:
                backoff_s = min(backoff_s * 2, self._kafka.backoff_s_max)

    async def _until_trouble(self) -> bool:
        """Have one session, for as long as it lasts; whether the next may begin at once."""
        try:
            new_session = await self._one_session()
        except NetworkChangedError as error:
            log.debug("a new session", reason=str(error))
            return True
        except QuotaUsedUpError:
            await self._wait_for_quota()
            return True
        except BufferFileError as error:
            log.info("forwarding waits for the buffer", error=str(error))
        except (KafkaError, OSError, TimeoutError) as error:
            self._note_down(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not by us: ending quietly would end the forwarder for good.
            self._note_down(TimeoutError("the Kafka client gave up a request"))
        except Exception as error:
            # A fault of ours or of the client's must not cost the sensors their front door.
            if repr(error) != self._failed_with:
                self._failed_with = repr(error)
                log.exception("forwarding failed, and is begun anew")
            self._note_down(error)
        else:
            log.debug("a new session", reason=new_session.reason)
            return True
        return False

    def network_changed(self) -> None:
        """A link, an address or a route has changed: connections from an address that is gone are dead."""
        link = self._link
        if link is not None:
            link.abort_stale(is_own_address)
        self._peers = (link.peers() if link is not None else None) or self._peers
        own = frozenset(source_address(peer) for peer in self._peers) - {None}
        if not own or own == self._own:
            # Of no concern here: a Wi-Fi scan, another network; or there is no way at all, which may change again.
            self._own = own
            return
        self._own = own
        self._tell_changes()
        if link is not None:
            link.abort_stale(lambda address: any(_is_as_good(address, new) for new in own))
        self._changed.set()

    async def _one_session(self) -> NewSession:
        if not self._remembers:
            self._memory.recall(await self._buffer.run(lambda file: file.marks(UPLINK_MARKS)))
            self._remembers = True
        link = self._link = KafkaLink(self._kafka, self._dates)
        try:
            # Connecting costs as well: no longer than there is something left to spend, whether it succeeds or not.
            await self._memory.wait_for_allowance(link)
            async with open_session(self._gateway.id, self._kafka, link) as session:
                if not self._memory.state.was_reached:
                    # NTP comes with the network: what waits for a clock waits from here. Once: it may never come.
                    self._memory.state.was_reached = True
                    self._clock_wait_from_s = time.monotonic()
                self._memory.verdicts.begin_session()
                self._keep(self._memory.enter(session.cluster_id))
                await self._on_session()
                rounds = Rounds(
                    session,
                    self._buffer,
                    self._front_door,
                    self._gateway,
                    self._kafka,
                    self._memory,
                    self._waits_for_clock,
                    self._note_up,
                )
                self._remember_addresses(link)
                return await _first_to_end(
                    rounds=rounds.run(),
                    heartbeat=self._beat(session),
                    look=self._look(session),
                    topics=self._memory.new_topics.run(session, self._buffer),
                )
        except (KafkaError, OSError, TimeoutError) as error:
            if link.fault is not None:
                raise _down(link) from error
            raise
        finally:
            self._link = None
            self._memory.count(link)

    def _remember_addresses(self, link: KafkaLink) -> None:
        """What the next change of the network is compared with."""
        self._peers = link.peers()
        self._own = frozenset(source_address(peer) for peer in self._peers) - {None}
        self._tell_changes()

    def _tell_changes(self) -> None:
        for change in self._addresses.changes(self._peers):
            log.info("this box's address has changed", old=change.old, new=change.new)
            self._front_door.event("address-changed", None, old=change.old, new=change.new)

    def _keep(self, marks: list[Mark]) -> None:
        if marks:
            self._buffer.confirm(self._buffer.id, (), marks)

    # -- beside the rounds ----------------------------------------------------------------------

    async def _look(self, session: KafkaSession) -> NewSession:
        """See whether a topic was mended, until files have changed, or what judges certificates."""
        redrive_due_s = 0.0
        is_cut_off = False
        while True:
            await asyncio.sleep(LOOK_S)
            link = session.link
            self._memory.count(link)
            self._keep(self._memory.take_budget_mark())
            changed = FILES_CHANGED if link.files_changed() else DATES_CLOCK_CHANGED if link.clock_changed() else None
            if changed is not None:
                log.info(changed)
                return NewSession(changed)
            was_cut_off, is_cut_off = is_cut_off, link.fault is not None and not link.peers()
            if was_cut_off and is_cut_off:
                # The client would try on; with pauses of our own it is a state, and told.
                raise _down(link)
            if time.monotonic() >= redrive_due_s:
                await self._redrive.take_in_again(session.admin)
                redrive_due_s = time.monotonic() + REDRIVE_S

    async def _beat(self, session: KafkaSession) -> NewSession:
        """Say every `heartbeat_interval_s` how far this gateway has come; a missed one is never made up for."""
        topic = self._heartbeat.topic
        while True:
            due = time.monotonic() >= self._heartbeat_from_s and (self._clock().synced or not self._waits_for_clock())
            if due and (verdict := await self._own_topic(session, topic)).usable:
                partition = await session.partition(topic, self._heartbeat.key.encode())
                rests = time.monotonic() < self._memory.rests_until_s((topic, partition))
                if session.has_leader(topic, partition) and not rests and self._memory.may_send():
                    record = await self._heartbeat.record(boottime_us(), self._memory.offsets)
                    bytes_max = min(self._kafka.record_bytes_max, verdict.batch_bytes_max - HEADER_BYTES)
                    if len(record) <= bytes_max:
                        new_session = await self._send_beat(session, partition, record)
                        if new_session is not None:
                            return new_session
                    else:
                        log.error(
                            "a heartbeat is larger than its topic or kafka.record_bytes_max takes, and not sent",
                            bytes=len(record),
                            bytes_max=bytes_max,
                        )
            await asyncio.sleep(self._kafka.heartbeat_interval_s)

    async def _own_topic(self, session: KafkaSession, topic: str) -> TopicVerdict:
        """Whether a topic of the gateway's own may be written to, once it is made."""
        verdict = await self._memory.verdicts.of(session.admin, topic)
        if not self._memory.new_topics.asked(verdict, "").waits:
            return verdict
        await self._memory.new_topics.settled(topic)
        return await self._memory.verdicts.of(session.admin, topic)

    async def _send_beat(self, session: KafkaSession, partition: int, record: bytes) -> NewSession | None:
        """Send one, and wait however long that takes: those that fall due meanwhile are left out."""
        topic = self._heartbeat.topic
        batch = EncodedBatch(self._kafka.compression)
        batch.add(record)
        try:
            await session.send(topic, partition, batch)
        except REFUSALS as error:
            # Readings must not wait for it: the producer is rebuilt once, without heartbeats for a while.
            self._heartbeat_from_s = time.monotonic() + VERDICT_S
            log.error("heartbeats are refused", topic=topic, error=str(error))  # noqa: TRY400 - no fault of ours
            return NewSession(str(error))
        except KafkaError as error:
            self._heartbeat_from_s = time.monotonic() + VERDICT_S
            self._memory.trouble((topic, partition), pauses=True)
            return NewSession(str(error) or type(error).__name__)
        return None

    # -- how it is ------------------------------------------------------------------------------

    def _waits_for_clock(self) -> bool:
        """Whether this boot's readings wait because a time for them may still be learnt (`gateway.hold_unsynced_s`)."""
        left_s = self._gateway.hold_unsynced_s - (time.monotonic() - self._clock_wait_from_s)
        waits = not self._clock().synced and left_s > 0
        state = self._memory.state
        if left_s <= 0 and not self._told_unsynced and not self._clock().synced:
            self._told_unsynced = True
            log.warning(
                "the clock is still not synced, and readings wait for it no longer: they go to Kafka with times that "
                "nothing vouches for, and are put right by a correction on gateway-events once it is; sluice check "
                "says what to do",
                waited_s=self._gateway.hold_unsynced_s,
                setting="gateway.hold_unsynced_s",
            )
        if waits and not state.waits_for_clock:
            log.info(
                "readings wait on disk until the kernel says that the clock is synced: see to NTP, or, where this box "
                'cannot know, set clock = "system" under [gateway]',
                seconds_at_most=round(left_s),
                setting="gateway.hold_unsynced_s",
            )
        state.waits_for_clock = waits
        state.clock_until_us = boottime_us() + round(left_s * 1e6) if waits else None
        return waits

    async def _wait_for_quota(self) -> None:
        """Nothing may be sent today: leave Kafka alone until tomorrow."""
        log.warning(
            "the uplink's quota of the day is used up: readings are kept on disk until tomorrow (UTC)",
            setting="kafka.bytes_per_day_max",
        )
        self._keep(self._memory.take_budget_mark(now=True))
        self._set_up(is_up=False, error="the quota of the day is used up (kafka.bytes_per_day_max)")
        await self._memory.wait_for_tomorrow()
        # A fleet's quotas end at one moment.
        await asyncio.sleep(random.uniform(0, QUOTA_JITTER_S))  # noqa: S311
        self._set_up(is_up=False, error=None)
        log.info("the uplink's quota begins anew")

    def _note_up(self) -> None:
        state = self._memory.state
        if not state.up:
            self._set_up(is_up=True, error=None)
            log.info("uplink is up", bootstrap=",".join(self._kafka.bootstrap), rows_waiting=self._buffer.state.rows)

    def _note_down(self, error: BaseException) -> None:
        words = str(error) or type(error).__name__
        is_barred = isinstance(error, (_BarredError, KafkaFileError))
        state, now_s = self._memory.state, time.monotonic()
        if state.up or state.error is None:
            log.warning(
                "uplink is down: readings are kept on disk",
                error=words,
                bootstrap=",".join(self._kafka.bootstrap),
                since=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            self._set_up(is_up=False, error=words)
            self._told = words, now_s
        elif words != self._told[0] and now_s >= self._told[1]:
            log.warning("uplink is still down, for another reason", error=words)
            self._told = words, now_s + STILL_DOWN_S
        state.error, state.barred = words, is_barred

    def _set_up(self, *, is_up: bool, error: str | None) -> None:
        state = self._memory.state
        state.up, state.error = is_up, error
        self._since_us = boottime_us()


def _down(link: KafkaLink) -> ConnectionError:
    return (_BarredError if link.is_barred else ConnectionError)(link.fault)


def _is_as_good(address: str, preferred: str | None) -> bool:
    """Whether what goes out from an address comes back: it is the one that is used now, or its IPv6 network is.

    Privacy addresses change every day, and connections from the former one go on (RFC 8981).
    """
    if preferred is None:
        return False
    old, new = ipaddress.ip_address(address), ipaddress.ip_address(preferred)
    return old == new or (old.version == new.version == 6 and old.packed[:8] == new.packed[:8])


async def _first_to_end(**parts: Coroutine[Any, Any, NewSession]) -> NewSession:
    """Run all until one ends, and end the others. Gives, or raises, what that one did."""
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        if ended.cancelled():
            # Not by us: ending quietly would end the forwarder for good.
            raise TimeoutError("the Kafka client gave up a request")
        return ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
