"""The event about an update: once for each result, also across restarts."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gateway.daemon.update_watch import INTERVAL_S, UpdateWatch
from gateway.host import last_update
from gateway.host.last_update import Before, LastUpdate
from tests.support.buffers import entry, opened, store

UPDATE = LastUpdate("1", "1.0", "1.1", "b", Before())
BACK = replace(UPDATE, result="went-back", reason="Kafka is not reached")


async def test_each_result_is_reported_once(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    def event(kind: str, device: str | None, **details: object) -> None:
        assert (kind, device) == ("update", None)
        told.append(details)

    file = tmp_path / "last.json"
    async with opened(tmp_path / "buffer.db") as buffer:
        watch, now_s = UpdateWatch(buffer, event, file), 0.0

        async def look() -> list[dict[str, Any]]:
            nonlocal now_s
            now_s += INTERVAL_S
            await watch.look(now_s)
            # With the next commit the mark is on disk.
            await store(buffer, [entry()])
            return [told.pop() for _ in told[:]]

        assert await look() == [], "a box without our image"
        last_update.write(UPDATE, file)
        assert await look() == [], "on trial"
        last_update.write(BACK, file)
        await watch.look(now_s + 1)
        assert told == [], "not at each look"
        assert await look() == [{"from": "1.0", "to": "1.1", "result": "went-back", "reason": "Kafka is not reached"}]
        assert await look() == []
        watch = UpdateWatch(buffer, event, file)
        assert await look() == [], "told before a restart"
        good = {"from": "1.0", "to": "1.1", "result": "good", "reason": None}
        last_update.write(replace(UPDATE, id="2", result="good"), file)
        assert await look() == [good]


async def test_a_refused_stick_is_reported_once_and_repeats_nothing(tmp_path: Path) -> None:
    told: list[tuple[object, object, object]] = []

    def event(*_: object, **details: object) -> None:
        told.append((details["to"], details["result"], details["reason"]))

    last, refused = tmp_path / "last.json", tmp_path / "refused.json"
    last_update.write(replace(UPDATE, result="good"), last)
    async with opened(tmp_path / "buffer.db") as buffer:
        for number in range(3):
            # The box starts with the stick in it, and once it is pulled out in between.
            watch = UpdateWatch(buffer, event, last, refused)
            last_update.write(replace(UPDATE, id="x", new="", result="refused", reason="torn"), refused)
            await watch.look(INTERVAL_S * number)
            await store(buffer, [entry()])
            refused.unlink()
            await watch.look(INTERVAL_S * (number + 1))
            await store(buffer, [entry()])
    assert told == [("1.1", "good", None), (None, "refused", "torn")]
