"""Questions side by side: what is kept between them, and what happens to one whose asker has gone."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

from spark.desk import tables
from spark.desk.kept_tables import KeptTables, KeptWarehouse
from spark.page.asking import AT_A_TIME, Asking, GoneError
from tests.spark.page.test_desk_server import forget_losses
from tests.support.desk_scene import BOILER, HALL
from tests.support.waiting import patience

pytestmark = pytest.mark.spark
ENDLESS = "SELECT count(*) FROM range(1000000000) a, range(1000000) b WHERE hash(a.range) = hash(b.range)"


def test_evidence_is_kept_until_a_table_that_it_came_from_changes(scene_warehouse: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(scene_warehouse, tmp_path / "warehouse"))
    kept = KeptWarehouse(tables.open(path))
    with kept.question() as one, kept.question() as other:
        first = one.evidence(BOILER)
        assert other.evidence(BOILER) is first
        assert other.evidence(HALL) is not first
        forget_losses(path / "v1" / "losses")
        # This question goes on with what it saw, and the next one sees the commit.
        assert one.evidence(BOILER) is first
        with kept.question() as later:
            assert len(later.evidence(BOILER).losses) < len(first.losses)


def test_a_warehouse_that_was_made_anew_is_not_taken_for_the_former_one(scene_warehouse: str, tmp_path: Path) -> None:
    path = tmp_path / "warehouse"
    shutil.copytree(scene_warehouse, path)
    forget_losses(path / "v1" / "losses")
    kept = KeptWarehouse(tables.open(path))
    with kept.question() as before:
        assert not before.evidence(HALL).losses
    shutil.rmtree(path)
    shutil.copytree(scene_warehouse, path)
    with kept.question() as after:
        assert len(after.evidence(HALL).losses) == 1


def request_of(*received: Message, then_gone_s: float | None = None) -> Request:
    """A request whose client closes its connection after some seconds, or never."""
    waiting = [*received]

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        await asyncio.sleep(10_000 if then_gone_s is None else then_gone_s)
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}, receive)


async def test_a_query_ends_when_its_asker_goes_and_others_are_answered(scene_warehouse: str) -> None:
    asking = Asking(KeptWarehouse(tables.open(scene_warehouse)))

    def endless(opened: KeptTables) -> object:
        return opened.source.rows(ENDLESS)

    begun = time.monotonic()
    empty = {"type": "http.request", "body": b"", "more_body": False}
    gone = [asyncio.create_task(asking.ask(request_of(empty, then_gone_s=1), endless)) for _ in range(AT_A_TIME)]
    await asyncio.sleep(0.2)
    assert await asking.ask(request_of(), lambda opened: opened.source.rows("SELECT 1")) == [(1,)]
    for each in gone:
        with pytest.raises(GoneError):
            await each
    assert time.monotonic() - begun < patience(20)


async def test_the_end_of_the_server_ends_its_queries(scene_warehouse: str) -> None:
    asking = Asking(KeptWarehouse(tables.open(scene_warehouse)))
    task = asyncio.create_task(asking.ask(request_of(), lambda opened: opened.source.rows(ENDLESS)))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, patience(20))
