"""Keeps a session with Kafka going, whatever the uplink does, and reports the uplink's state."""

import asyncio
import ipaddress
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Never

import structlog
from aiokafka.errors import KafkaError

from gateway.buffer.buffer import Buffer
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.host.network_watch import AddressWatch, is_own_address, source_address
from gateway.intake.front_door import FrontDoor
from gateway.kafka.batch import HEADER_BYTES, EncodedBatch
from gateway.kafka.link import KafkaLink
from gateway.kafka.reach import TokenError
from gateway.kafka.secret_files import KafkaFileError
from gateway.kafka.session import VERDICT_S, KafkaSession, NetworkChangedError, open_session
from gateway.kafka.topics import UNKNOWN, TopicVerdict
from gateway.reading import BufferFileError, Mark
from gateway.settings import GatewaySettings, KafkaSettings
from gateway.tls.dates import Dates, by_system_clock
from gateway.uplink.heartbeat import Heartbeat
from gateway.uplink.memory import UPLINK_MARKS, Memory, QuotaUsedUpError
from gateway.uplink.redrive import REDRIVE_S, Redrive
from gateway.uplink.refused import REFUSALS
from gateway.uplink.rounds import NewSession, Rounds
from gateway.uplink.state import UplinkState

BACKOFF_S_MIN = 0.25
LOOK_S = 1.0
"""Seconds between two looks at certificates, passwords and connections."""
QUOTA_JITTER_S = 30.0
REFUSED_TOLD_MAX = 1_000
"""Refused topics that a status names. There may be more, as senders make up the names."""
STILL_DOWN_S = 600.0
"""Seconds between two log lines while the uplink is down. The first reason that differs is logged at once."""
FILES_CHANGED = "a certificate, key or password for Kafka has changed: connecting anew"
RENEWED = "the access token for Kafka was renewed before its end: connecting anew"
TOKEN_RETRY_S = 10.0
"""Seconds between two attempts to renew an access token."""
DATES_CLOCK_CHANGED = "another clock judges the dates of Kafka's certificates now: connecting anew"

Beside = Callable[[KafkaSession], Coroutine[Any, Any, Never]]
"""Does something else with a session with Kafka. Its own troubles are no reason to end the session."""

log = structlog.get_logger()


class _BarredError(ConnectionError):
    """Kafka is reached, and one side refuses the other."""


class Forwarder:
    """Drains the buffer into Kafka until it is cancelled, and recovers from any trouble by itself."""

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
        """`on_session` is awaited in each new session before anything is sent. `dates` judges brokers' certificates."""
        self._buffer = buffer
        self._front_door = front_door
        self._gateway = gateway
        self._kafka = kafka
        self._clock = clock
        self._on_session = on_session
        self._dates = dates
        self.beside: Beside | None = None
        """Runs in each session until it is cancelled. To be set before `run`."""
        self._memory = Memory(kafka, clock)
        self._redrive = Redrive(buffer, front_door, self._memory)
        self._since_us = boottime_us()
        self._failed_with = ""
        self._told = ("", 0.0)
        """The last reason that was logged for an uplink that is down, and when the next may be logged (monotonic)."""
        self._remembers = False
        """Whether the marks of earlier starts were read. If the disk fails, they are read later."""
        self._heartbeat = Heartbeat(buffer, front_door, gateway, kafka, clock)
        self._heartbeat_from_s = 0.0
        self._clock_wait_from_s = time.monotonic()
        self._told_unsynced = False
        """Whether it was logged that readings go out although the clock is not known."""
        self._link: KafkaLink | None = None
        self._addresses = AddressWatch()
        self._peers: frozenset[tuple[str, int]] = frozenset()
        """Brokers that were connected last. `_own` has this box's addresses towards them."""
        self._own: frozenset[str | None] = frozenset()
        self._changed = asyncio.Event()
        """Set if the network has changed, so that a pause before the next attempt ends."""

    @property
    def state(self) -> UplinkState:
        """The uplink's state as the forwarder works with it."""
        return self._memory.state

    def report(self) -> UplinkState:
        """The uplink's state, with the fields that only others need."""
        # Midnight may have passed since the last row.
        self._memory.count_spared(self._buffer.counts["spared"])
        state = self._memory.state
        known = self._dates() if self._kafka.tls is not None else None
        return replace(
            state,
            throttled_s=self._memory.throttled_s,
            dates_passed=None if known is None else known.earliest_us / 1e6,
            # During the first attempt, the latest failure is the one to mend.
            error=state.error or (None if state.up or self._link is None else self._link.fault),
            barred=state.barred if state.error or self._link is None else self._link.is_barred,
            refused_topics={
                topic: verdict.hint or verdict.reason
                for topic, verdict in islice(self._memory.verdicts.refused.items(), REFUSED_TOLD_MAX)
                if not verdict.waits
            },
            beyond_topics=self._memory.new_topics.beyond,
            # By the clock as it is now: the clock may have been set since.
            since=time.time() - (boottime_us() - self._since_us) / 1e6,
        )

    async def run(self) -> None:
        """Forward until the task is cancelled."""
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
            # Jitter, so that gateways do not connect all at once when their broker comes back.
            await asyncio.sleep(random.uniform(BACKOFF_S_MIN / 2, BACKOFF_S_MIN))  # noqa: S311
            try:
                async with asyncio.timeout(random.uniform(backoff_s / 2, backoff_s)):  # noqa: S311
                    await self._changed.wait()
                backoff_s = BACKOFF_S_MIN
            except TimeoutError:
                backoff_s = min(backoff_s * 2, self._kafka.backoff_s_max)

    async def _until_trouble(self) -> bool:
        """Run one session to its end. Returns whether the next may begin at once."""
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
            # Nobody cancelled this task. If it ended quietly, nothing would be forwarded any more.
            self._note_down(TimeoutError("the Kafka client gave up a request"))
        except Exception as error:
            # A defect here or in the client must not close the front door to sensors.
            if repr(error) != self._failed_with:
                self._failed_with = repr(error)
                log.exception("forwarding failed, and is begun anew")
            self._note_down(error)
        else:
            log.debug("a new session", reason=new_session.reason)
            return True
        return False

    def network_changed(self) -> None:
        """End connections from addresses that are gone, after a link, an address or a route has changed."""
        link = self._link
        if link is not None:
            link.abort_stale(is_own_address)
        self._peers = (link.peers() if link is not None else None) or self._peers
        own = frozenset(source_address(peer) for peer in self._peers) - {None}
        if not own or own == self._own:
            # Nothing has changed towards the brokers (a Wi-Fi scan, another network), or no way leads to them just now.
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
            # Connecting takes from the quota even if it fails, so wait until some of it is left.
            await self._memory.wait_for_allowance(link)
            async with open_session(self._gateway.id, self._kafka, link) as session:
                if not self._memory.state.was_reached:
                    # NTP comes with the network, so the wait for the clock counts from here. Only once, as NTP may
                    # never come.
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
                beside: dict[str, Coroutine[Any, Any, NewSession]] = {}
                if self.beside is not None:
                    beside["commands"] = self.beside(session)
                if link.has_token:
                    beside["token"] = _renew_token(link)
                return await _first_to_end(
                    rounds=rounds.run(),
                    heartbeat=self._beat(session),
                    look=self._look(session),
                    topics=self._memory.new_topics.run(session, self._buffer),
                    **beside,
                )
        except (KafkaError, OSError, TimeoutError) as error:
            if link.fault is not None:
                raise _down(link) from error
            raise
        finally:
            self._link = None
            self._memory.count(link)

    def _remember_addresses(self, link: KafkaLink) -> None:
        """Remember brokers and own addresses, to compare them when the network changes."""
        self._peers = link.peers()
        self._own = frozenset(source_address(peer) for peer in self._peers) - {None}
        self._tell_changes()

    def _tell_changes(self) -> None:
        for change in self._addresses.changes(self._peers):
            log.info("this box's address has changed", old=change.old, new=change.new)
            self._front_door.event("address-changed", None, old=change.old, new=change.new)

    def _keep(self, marks: list[Mark]) -> None:
        if marks:
            self._buffer.keep(marks, soon=True)

    # -- beside the rounds ----------------------------------------------------------------------

    async def _look(self, session: KafkaSession) -> NewSession:
        """Redrive the quarantine regularly. Returns if files have changed, or the clock that judges certificates."""
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
                # The client would go on trying in silence. Instead, the session ends, so that the uplink is seen to be
                # down.
                raise _down(link)
            if time.monotonic() >= redrive_due_s:
                with suppress(BufferFileError):  # a failing disk must not end a session that needs no disk
                    await self._redrive.take_in_again(session.admin)
                redrive_due_s = time.monotonic() + REDRIVE_S

    async def _beat(self, session: KafkaSession) -> NewSession:
        """Send a heartbeat every `heartbeat_interval_s`. A missed heartbeat is never made up for."""
        topic = self._heartbeat.topic
        while True:
            due = time.monotonic() >= self._heartbeat_from_s and (self._clock().synced or not self._waits_for_clock())
            if due and (verdict := await self._own_topic(session, topic)).usable:
                partition = await session.partition(topic, self._heartbeat.key.encode())
                rests = time.monotonic() < self._memory.rests_until_s((topic, partition))
                if session.has_leader(topic, partition) and not rests and self._memory.may_send():
                    await self._find_ends(session)
                    record = await self._next_beat(verdict)
                    if record is not None and (end := await self._send_beat(session, partition, record)) is not None:
                        return end
            await asyncio.sleep(self._kafka.heartbeat_interval_s)

    async def _next_beat(self, verdict: TopicVerdict) -> bytes | None:
        """The next heartbeat; None if there can be none."""
        try:
            record = await self._heartbeat.record(boottime_us(), self._memory.offsets, is_behind=self._memory.is_behind)
        except BufferFileError as error:
            # What waits on the disk is not known, and readings that need no disk go on.
            log.info("a heartbeat is left out", error=str(error))
            return None
        bytes_max = min(self._kafka.record_bytes_max, verdict.batch_bytes_max - HEADER_BYTES)
        if len(record) <= bytes_max:
            return record
        log.error(
            "a heartbeat is larger than its topic or kafka.record_bytes_max takes, and not sent",
            bytes=len(record),
            bytes_max=bytes_max,
        )
        return None

    async def _find_ends(self, session: KafkaSession) -> None:
        """After a start that lost sight of Kafka's offsets, ask for them. Until all are known, nothing is complete."""
        if not self._memory.is_behind:
            return
        try:
            verdicts = await self._memory.verdicts.of_all(session.admin, {topic for topic, _ in self._memory.offsets})
            there = [each for each in self._memory.offsets if verdicts[each[0]].reason != UNKNOWN]
            async with asyncio.timeout(self._kafka.request_timeout_s):
                self._keep(self._memory.caught_up(await session.ends(there)))
        except (KafkaError, TimeoutError) as error:
            log.info("offsets after the last start are not known yet", error=str(error) or type(error).__name__)

    async def _own_topic(self, session: KafkaSession, topic: str) -> TopicVerdict:
        """The verdict on one of the gateway's own topics. A missing topic is made first."""
        verdict = await self._memory.verdicts.of(session.admin, topic)
        if not self._memory.new_topics.asked(verdict, "").waits:
            return verdict
        await self._memory.new_topics.settled(topic)
        return await self._memory.verdicts.of(session.admin, topic)

    async def _send_beat(self, session: KafkaSession, partition: int, record: bytes) -> NewSession | None:
        """Send one heartbeat, and wait as long as it takes. Heartbeats that fall due meanwhile are left out."""
        topic = self._heartbeat.topic
        batch = EncodedBatch(self._kafka.compression)
        batch.add(record)
        try:
            await session.send(topic, partition, batch)
        except REFUSALS as error:
            # Readings must not wait for heartbeats: a new session begins, without heartbeats for a while.
            self._heartbeat_from_s = time.monotonic() + VERDICT_S
            log.error("heartbeats are refused", topic=topic, error=str(error))  # noqa: TRY400 - no fault of ours
            return NewSession(str(error))
        except KafkaError as error:
            self._heartbeat_from_s = time.monotonic() + VERDICT_S
            self._memory.trouble((topic, partition), pauses=True)
            return NewSession(str(error) or type(error).__name__)
        return None

    # -- state ------------------------------------------------------------------------------------

    def _waits_for_clock(self) -> bool:
        """Whether this boot's readings wait because a time for them may still be learnt (`gateway.hold_unsynced_s`)."""
        left_s = self._gateway.hold_unsynced_s - (time.monotonic() - self._clock_wait_from_s)
        waits = not self._clock().synced and left_s > 0
        state = self._memory.state
        if left_s <= 0 and not self._told_unsynced and not self._clock().synced:
            self._told_unsynced = True
            log.warning(
                "the clock is still not synced, and readings wait for it no longer: they go to Kafka with times that "
                "may be wrong, and are corrected on gateway-events once it is; sluice check says what to do",
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
        """Leave Kafka alone until tomorrow (UTC), as the quota of the day is used up."""
        log.warning(
            "the uplink's quota of the day is used up: readings are kept on disk until tomorrow (UTC)",
            setting="kafka.bytes_per_day_max",
        )
        self._keep(self._memory.take_budget_mark(now=True))
        self._set_up(is_up=False, error="the quota of the day is used up (kafka.bytes_per_day_max)")
        await self._memory.wait_for_tomorrow()
        # The quotas of all gateways begin anew at one moment.
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
    """Whether answers to `address` still arrive: it is the preferred address, or of the same IPv6 network.

    Privacy addresses change every day, and connections from the former address go on (RFC 8981).
    """
    if preferred is None:
        return False
    old, new = ipaddress.ip_address(address), ipaddress.ip_address(preferred)
    return old == new or (old.version == new.version == 6 and old.packed[:8] == new.packed[:8])


async def _renew_token(link: KafkaLink) -> NewSession:
    """Return once there is an access token for a session that follows. Until then, the present session goes on."""
    told = ""
    while True:
        try:
            await link.renew_token()
        except TokenError as error:
            if error.words != told:
                told = error.words
                log.warning("the access token for Kafka cannot be renewed yet", reason=told, hint=error.hint)
            await asyncio.sleep(TOKEN_RETRY_S)
        else:
            log.info(RENEWED)
            return NewSession(RENEWED)


async def _first_to_end(**parts: Coroutine[Any, Any, NewSession]) -> NewSession:
    """Run all parts until one ends, and cancel the others. Returns what that part returned, or raises its error."""
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        if ended.cancelled():
            # Nobody cancelled this task. If it ended quietly, nothing would be forwarded any more.
            raise TimeoutError("the Kafka client gave up a request")
        return ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
