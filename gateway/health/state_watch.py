"""Reports the gateway's state as the event `state`: at each start, on each change, and once an hour."""

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

import structlog

from gateway.health.conditions import START_S
from gateway.health.state_event import lasting, state_body
from gateway.health.survey import Survey
from gateway.host.box import read_box
from gateway.record_contract import STATE

LOOK_S: Final = 60.0
"""Seconds between two looks, and so between two events at the least."""
EFFORT_SHARE: Final = 50
"""Least rest after a look, as a multiple of its effort."""
SETTLED_S: Final = 600.0
"""Seconds until a state follows the first one of a start: sensors have been heard by then."""
HOUR_S: Final = 3_600.0
CHANGES_AT_ONCE: Final = 10
"""Changes that are reported one a minute."""
CHANGE_S: Final = 360.0
"""Seconds from one report to the next of changes that go on and on: a link or a sensor may come and go all day."""

log = structlog.get_logger()


class StateWatch:
    """Looks once a minute whether there is a state to report."""

    def __init__(self, survey: Survey, now_s: Callable[[], float] = time.monotonic) -> None:
        self._survey = survey
        self._now_s = now_s
        self._version = version("sluice")
        self._reported: dict[str, Any] | None = None
        """What lasts of the last state that was stored."""
        self._due_s = 0.0
        """When the next state is due, whether something has changed or not."""
        self._settled_s = 0.0
        """When sensors have had the time to be heard since the first state."""
        self._calm_s = 0.0
        """When reported changes no longer hold back others."""
        self._is_on_its_way = False

    async def run(self) -> None:
        """Look until cancelled. Whatever goes wrong here, readings are taken and forwarded."""
        # The first look waits until Kafka is reached, or for as long as that may take.
        first_s = self._now_s() + START_S
        while not self._survey.parts.uplink().up and self._now_s() < first_s:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(1)
        while True:
            began_s = self._now_s()
            try:
                await self.look()
            except Exception:
                log.exception("the gateway's state could not be gathered for the event; it is tried again")
            await asyncio.sleep(max(LOOK_S, EFFORT_SHARE * (self._now_s() - began_s)))

    async def look(self) -> None:
        """Report the state if it has changed, or if it is time. A state that is not stored is reported again."""
        survey = self._survey
        await survey.look()
        box = await asyncio.to_thread(read_box)
        body = state_body(survey.facts(), box, self._version, survey.buffer.lane.number)
        now_s, lasts = self._now_s(), lasting(body)
        is_due, is_news = now_s >= self._due_s, lasts != self._reported
        is_held_back = self._calm_s - now_s > CHANGE_S * (CHANGES_AT_ONCE - 1)
        if self._is_on_its_way or not (is_due or (is_news and not is_held_back)):
            return

        def done(stored: bool) -> None:  # noqa: FBT001 - see `Buffer.append_own`
            self._is_on_its_way = False
            if not stored:
                return
            if self._reported is None:
                self._settled_s = now_s + SETTLED_S
            # A change before that is no reason to leave out the state that tells which sensors were heard.
            self._due_s = self._settled_s if now_s < self._settled_s else now_s + HOUR_S
            if is_news:
                self._calm_s = max(self._calm_s, now_s) + CHANGE_S
            self._reported = lasts

        entry = survey.front_door.events.event_entry(STATE, body)
        self._is_on_its_way = True
        survey.buffer.append_own(entry, done)
