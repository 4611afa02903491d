"""Asks the tables on threads, and ends questions whose asker has gone."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request

from spark.desk.kept_tables import KeptTables, KeptWarehouse

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

AT_A_TIME: Final = 4
"""Questions that are answered at a time. Others wait: each takes memory."""
INTERRUPT_S: Final = 0.05
"""Seconds between two interrupts. One that comes between two queries of a question ends none."""
Answer = TypeVar("Answer")


class GoneError(Exception):
    """Nobody waits for the answer any more."""


class Asking:
    """Asks one warehouse. Belongs to the event loop."""

    def __init__(self, warehouse: KeptWarehouse) -> None:
        self._warehouse = warehouse
        self._threads = ThreadPoolExecutor(AT_A_TIME, "question")

    async def ask(self, request: Request, answer: Callable[[KeptTables], Answer]) -> Answer:
        """Run a question of its own on a thread. Raises GoneError and all that `answer` raises."""
        running: list[DuckDBPyConnection] = []
        is_over = False

        def asked() -> Answer:
            if is_over:
                raise GoneError
            with self._warehouse.question() as tables:
                running.append(tables.source.db)
                try:
                    return answer(tables)
                finally:
                    running.clear()

        work = asyncio.get_running_loop().run_in_executor(self._threads, asked)
        gone = asyncio.create_task(_gone(request), name="asker-gone")
        either: list[asyncio.Future[Any]] = [work, gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            is_over = not work.done()
            while not work.done():
                for db in running:
                    db.interrupt()
                await asyncio.wait([work], timeout=INTERRUPT_S)
        if is_over:
            # What it failed with is the interrupt.
            work.exception()
            raise GoneError
        return work.result()


async def _gone(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
