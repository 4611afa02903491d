"""When the event `state` is told: at a start, on a change, once an hour, and never in a storm."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.buffer.commit_queue import Done
from gateway.buffer.rows import Entry
from gateway.health import state_watch
from gateway.health.state_watch import CHANGE_S, CHANGES_AT_ONCE, HOUR_S, LOOK_S, SETTLED_S, StateWatch
from gateway.host.box import Box
from gateway.uplink.state import UplinkState
from tests.support.buffers import rows
from tests.support.quiet_gateway import QuietGateway
from tests.support.waiting import patience

DAY_LOOKS = int(86_400 / LOOK_S)


class Watched(QuietGateway):
    """A gateway whose state is watched, by a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now_s = 0.0
        self.watch = StateWatch(self.survey, lambda: self.now_s)

    async def told(self) -> list[dict[str, Any]]:
        """All states that are in the buffer."""
        found = await rows(self.buffer)
        bodies = [json.loads(row.datum.payload) for row in found]
        return [body for body in bodies if "lane_number" in body]

    async def look(self) -> None:
        """A look, and the commit that it leads to."""
        await self.watch.look()
        async with asyncio.timeout(patience(20)):
            while self.watch._is_on_its_way:
                await asyncio.sleep(0)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Watched]:
    found = Watched(tmp_path)
    yield found
    await found.buffer.close()


async def test_a_state_comes_at_the_start_once_it_has_settled_and_every_hour(gateway: Watched) -> None:
    counts = []
    for now_s in (0.0, LOOK_S, SETTLED_S - 1, SETTLED_S, SETTLED_S + HOUR_S - 1, SETTLED_S + HOUR_S):
        gateway.now_s = now_s
        await gateway.look()
        counts.append(len(await gateway.told()))
    assert counts == [1, 1, 1, 2, 2, 3]
    first, *_ = await gateway.told()
    assert first["conditions"] == {"bad": [], "warn": [], "note": []}
    assert first["lane_number"] == gateway.buffer.lane.number


async def test_a_change_is_told_at_the_next_look_and_once(gateway: Watched) -> None:
    await gateway.look()
    gateway.uplink = UplinkState(error="nothing listens")
    for now_s in (LOOK_S, 2 * LOOK_S):
        gateway.now_s = now_s
        await gateway.look()
    assert [state["conditions"]["warn"] for state in await gateway.told()] == [[], ["kafka-unreached"]]


async def test_a_change_after_a_start_does_not_put_off_the_state_that_has_settled(gateway: Watched) -> None:
    counts = []
    for now_s, error in ((0.0, None), (LOOK_S, "nothing listens"), (SETTLED_S - 1, "nothing listens")):
        gateway.now_s, gateway.uplink = now_s, UplinkState(up=error is None, error=error)
        await gateway.look()
        counts.append(len(await gateway.told()))
    gateway.now_s = SETTLED_S
    await gateway.look()
    assert [*counts, len(await gateway.told())] == [1, 2, 2, 3]


async def test_changes_that_go_on_all_day_are_told_now_and_then(
    gateway: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same facts again and again, but for the uplink.
    await gateway.survey.look()

    async def nothing() -> None:
        pass

    monkeypatch.setattr(gateway.survey, "look", nothing)
    monkeypatch.setattr(state_watch, "read_box", Box)
    stored: list[tuple[float, list[str]]] = []

    def append_own(entry: Entry, done: Done) -> None:
        stored.append((gateway.now_s, json.loads(entry.datum.payload)["conditions"]["warn"]))
        done(True)

    monkeypatch.setattr(gateway.buffer, "append_own", append_own)
    for number in range(DAY_LOOKS):
        gateway.now_s = number * LOOK_S
        gateway.uplink = UplinkState(up=number % 2 == 0, error=None if number % 2 == 0 else "nothing listens")
        await gateway.watch.look()
    assert [at_s for at_s, _ in stored[:CHANGES_AT_ONCE]] == [number * LOOK_S for number in range(CHANGES_AT_ONCE)]
    assert len(stored) <= CHANGES_AT_ONCE + 86_400 / CHANGE_S
    # Whatever was held back, the state in which it ends is told before long.
    for up in (False, True):
        gateway.uplink = UplinkState(up=up, error=None if up else "nothing listens")
        gateway.now_s += CHANGE_S
        await gateway.watch.look()
        assert stored[-1][1] == ([] if up else ["kafka-unreached"])


async def test_a_state_that_was_not_stored_is_told_again(gateway: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    append_own = gateway.buffer.append_own
    monkeypatch.setattr(gateway.buffer, "append_own", lambda _, done: done(False))
    await gateway.look()
    monkeypatch.setattr(gateway.buffer, "append_own", append_own)
    assert await gateway.told() == []
    gateway.now_s = LOOK_S
    await gateway.look()
    assert len(await gateway.told()) == 1


async def test_a_mistake_while_gathering_ends_nothing(gateway: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_watch, "LOOK_S", 0.01)
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.survey, "look", look)
    task = asyncio.create_task(gateway.watch.run())
    async with asyncio.timeout(patience(20)):
        while looks < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await gateway.told() == []


async def test_an_uplink_that_is_not_known_yet_is_waited_for(gateway: Watched) -> None:
    gateway.uplink = UplinkState()
    task = asyncio.create_task(gateway.watch.run())
    await asyncio.sleep(0.1)
    assert await gateway.told() == []
    gateway.uplink = replace(gateway.uplink, up=True)
    async with asyncio.timeout(patience(20)):
        while not await gateway.told():
            await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
