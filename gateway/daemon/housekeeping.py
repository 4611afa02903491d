"""Looks once a second at the gateway's clock and its other parts, and reports what happened to them."""

import asyncio
import time
from collections import Counter
from contextlib import suppress

import structlog

from gateway.buffer.buffer import Buffer
from gateway.clock.floor import ClockFloor
from gateway.clock.kernel_clock import ClockWatch, boottime_us
from gateway.clock.report import ClockReport
from gateway.clock.steps import StepWatch
from gateway.daemon.buffer_watch import BufferWatch
from gateway.daemon.update_watch import UpdateWatch
from gateway.intake.front_door import FrontDoor
from gateway.intake.routes import BAD_NAME, LONG_NAME
from gateway.reading import BufferFileError
from gateway.record_contract import NAME_RULE
from gateway.uplink.forwarder import Forwarder
from gateway.uplink.lane_policy import LanePolicy
from gateway.uplink.state import UplinkState

INTERVAL_S = 1.0
LOSSES_INTERVAL_S = 10.0
"""Least seconds between two reports of losses; each has the losses since the last one."""
QUARANTINED_INTERVAL_S = 60.0
"""Least seconds between two log lines on one reason for the quarantine."""
TOO_OLD_INTERVAL_S = 60.0
"""Least seconds between two log lines on readings that grow too old."""

log = structlog.get_logger()


class LaneTurns:
    """Begins a new lane if the uplink has changed since the present one began."""

    def __init__(self, front_door: FrontDoor, buffer: Buffer, policy: LanePolicy) -> None:
        self._front_door = front_door
        self._buffer = buffer
        self._policy = policy
        self._turning = asyncio.Lock()
        """Lets one change happen at a time: a second one would go by a state that the first is changing."""

    async def compare(self, uplink: UplinkState) -> None:
        """Begin a new lane if the uplink's state now asks for one."""
        async with self._turning:
            now_s, is_up, oldest_us = time.monotonic(), uplink.up, uplink.live_oldest_us
            reason = self._policy.reason(
                now_s,
                is_up=is_up,
                live_age_s=0.0 if oldest_us is None else (boottime_us() - oldest_us) / 1e6,
                backlog_lanes=self._buffer.state.backlog_lanes,
                has_hole=self._buffer.lane_has_hole,
            )
            if reason is not None and await self._begin(reason):
                self._policy.begun(now_s, is_up=is_up)

    async def session_begins(self) -> None:
        """Begin a new lane if a session with Kafka begins after an outage. Nothing may be sent in the session before.

        The readings of the outage have to be backlog. The next look would come too late: within a second all of them
        could be sent as live ones.
        """
        async with self._turning:
            now_s = time.monotonic()
            reason = self._policy.reason_at_session(now_s, backlog_lanes=self._buffer.state.backlog_lanes)
            if reason is not None and await self._begin(reason):
                self._policy.begun_at_session(now_s)

    async def _begin(self, reason: str) -> bool:
        try:
            await self._buffer.begin_lane(reason, self._front_door.events.lane_entry)
        except BufferFileError:
            # The buffer itself reports its trouble, and the next look tries again.
            return False
        return True


class Housekeeping:
    """Looks at the parts of the gateway, and reports what changed since the last look."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it looks at
        self,
        front_door: FrontDoor,
        buffer: Buffer,
        forwarder: Forwarder,
        clock: ClockWatch,
        lanes: LaneTurns,
        floor: ClockFloor,
    ) -> None:
        self._front_door = front_door
        self._buffer = buffer
        self._forwarder = forwarder
        self._clock = clock
        self.clock_report = ClockReport(clock.now(), boottime_us())
        self._floor = floor
        self._lanes = lanes
        self._quarantined: Counter[str] = Counter()
        self._tell_quarantined_s: dict[str, float] = {}
        """Time from which the log may tell more, by reason; `_quarantined` counts the input that it has told."""
        self._too_old = 0
        """Readings dropped for their age that the log has told; then the time from which it may tell more."""
        self._tell_too_old_s = 0.0
        self._lanes_told_of = ""
        """Buffer whose lanes were reported."""
        self._report_losses_s = 0.0

    async def run(self) -> None:
        """Look once a second until cancelled, and at the clock also in the moment in which somebody sets it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_at_the_buffer())
            tasks.create_task(self._look_at_the_rest())

    async def _look_at_the_buffer(self) -> None:
        """Apart from all that waits for the buffer, as that may take as long as the trouble lasts."""
        watch = BufferWatch(self._buffer, self._front_door.events)
        while True:
            await asyncio.sleep(INTERVAL_S)
            watch.look(time.monotonic())

    async def _look_at_the_rest(self) -> None:
        steps = StepWatch(self._look_at_the_clock)
        updates = UpdateWatch(self._buffer, self._front_door.event)
        steps.start()
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                self._look_at_the_clock()
                await self._correct_times()
                self._tell_what_was_quarantined(time.monotonic())
                self._tell_what_was_too_old(time.monotonic())
                await self._tell_what_became_of_files()
                await self._lanes.compare(self._forwarder.state)
                await self._report_losses()
                await updates.look(time.monotonic())
        finally:
            steps.stop()

    def _look_at_the_clock(self) -> None:
        before, now = self._clock.read_again()
        now_us = boottime_us()
        offset_us, error_us = now.offset_us(now_us), now.error_us(now_us)
        self.clock_report.looked(before, now, now_us)
        if now.last is not None and now.last is not before.last and now.last.adjusted_us is not None:
            self._front_door.clocks.slews.looked(now.last.at_us, now.last.adjusted_us)
        if (now.synced and not before.synced) or now.revision != before.revision:
            # A commit stores the clock, and finds corrections that are owed.
            self._buffer.commit_soon()
        if now.synced and not before.synced:
            log.info("the wall clock is synced", error_us=error_us)
            self._front_door.event("clock-learnt", None, offset_us=offset_us, error_us=error_us)
        elif now.revision != before.revision:
            log.warning(
                "the wall clock was wrong although it was said to be synced: forwarded records are corrected",
                by_s=round((offset_us - before.offset_us(now_us)) / 1e6, 3),
                error_us=error_us,
            )
        elif now.leaps != before.leaps:
            log.info("a leap second", seconds=now.leaps[-1][1] // 1_000_000)
        if now.synced and error_us is not None:
            mark = self._floor.learn(now.at(now_us), error_us)
            if mark is not None:
                self._buffer.keep([mark])

    async def _correct_times(self) -> None:
        """Correct times that went out before they were known, in this boot or in one that was never synced."""
        if not self._buffer.owes_correction:
            return
        with suppress(BufferFileError):  # the buffer still owes the correction
            for made in await self._front_door.events.report_corrections():
                log.info(
                    "times that were told before they were known are corrected on gateway-events",
                    boot=made.boot_id,
                    version=made.version,
                    error_us=made.line.error_us,
                )

    def _tell_what_was_quarantined(self, now_s: float) -> None:
        for reason, count in (self._front_door.quarantine.by_reason - self._quarantined).items():
            if now_s < self._tell_quarantined_s.get(reason, now_s):
                continue
            self._tell_quarantined_s[reason] = now_s + QUARANTINED_INTERVAL_S
            self._quarantined[reason] += count
            device, come_from = self._front_door.quarantine.last[reason]
            log.warning(
                "input quarantined: sluice buffer quarantine ls says what to do",
                reason=reason,
                count=count,
                last_device=device or None,
                last_subject=come_from,
                **({"rule": f"a name has {NAME_RULE}"} if reason in {BAD_NAME, LONG_NAME} else {}),
            )

    def _tell_what_was_too_old(self, now_s: float) -> None:
        count = self._buffer.counts["too-old"] - self._too_old
        if count and now_s >= self._tell_too_old_s:
            self._tell_too_old_s = now_s + TOO_OLD_INTERVAL_S
            self._too_old += count
            log.warning(
                "what had waited for too long is dropped, and counted as lost: sluice status says why it waits",
                count=count,
                setting="buffer.age_max_s",
            )

    async def _tell_what_became_of_files(self) -> None:
        buffer, event = self._buffer, self._front_door.event
        while buffer.attachment.set_aside:
            aside = buffer.attachment.set_aside.popleft()
            event("buffer-set-aside", None, file=aside.name, buffer=aside.buffer_id, rows=aside.rows)
        if buffer.id != self._lanes_told_of:
            with suppress(BufferFileError):  # the next look tries again
                reason = "buffer-replaced" if self._lanes_told_of else "start"
                await buffer.transact(lambda file: file.report_lanes(reason, self._front_door.events.lane_entry))
                self._lanes_told_of = buffer.id
        while buffer.attachment.salvaged:
            done = buffer.attachment.salvaged.popleft()
            event("buffer-salvaged", None, file=done.aside.name, rows=done.progress.taken, missing=done.missing)

    async def _report_losses(self) -> None:
        # While the uplink is down, losses are counted and not reported one by one: they must not fill the buffer.
        if not self._forwarder.state.up or time.monotonic() < self._report_losses_s:
            return
        with suppress(BufferFileError):  # the counters stay, and the buffer itself reports its trouble
            if await self._front_door.events.report_losses():
                self._report_losses_s = time.monotonic() + LOSSES_INTERVAL_S
