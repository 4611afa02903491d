"""How soon the analyst's page shows its first curve, and how soon it answers each question after that."""

import json
import os
import random
import statistics
import tempfile
import time
from datetime import date, timedelta
from itertools import cycle, islice
from pathlib import Path

from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.support.desk_server import Desk, desk

QUESTIONS, QUESTIONS_QUICK = 100, 5
"""Questions that follow the first curve, one after the other: curves mostly, and what the page asks beside them."""
KINDS = ("/curve.json", "/curve.json", "/curve.json", "/windows.csv", "/gaps.json")


def page(suffix: str, warehouse: Path, questions: int, days: tuple[date, int] | None = None) -> list[Result]:
    """Measure one warehouse. `suffix` is that of the results' names.

    `days` are its first day and their number. Each question is then about one of them.
    """
    rng = random.Random("desk page")  # noqa: S311 - nobody guesses
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, desk(str(warehouse), Path(folder)) as server:
        first = _asked(server, "/curve.json", {})
        first_s = time.monotonic() - begun
        devices = json.loads(server.get("/choices.json").body)["devices"]
        found_ms = []
        before_s = _cpu_s(server)
        for path in islice(cycle(KINDS), questions):
            told = {"device": rng.choice(devices)}
            if days is not None:
                day = days[0] + timedelta(days=rng.randrange(days[1]))
                told |= {"since": day.isoformat(), "until": (day + timedelta(days=1)).isoformat()}
            found_ms.append(_asked(server, path, told) * 1_000)
        p95_ms = statistics.quantiles(found_ms, n=20)[-1]
        cpu_ms = (_cpu_s(server) - before_s) * 1_000 / questions
        note = f"{questions} questions; median {statistics.median(found_ms):.0f} ms, {cpu_ms:.0f} ms of CPU each"
    return [
        Result(
            f"page_first_curve_s{suffix}",
            first_s,
            "s",
            "<= 2",
            f"from the command on; {first * 1_000:.0f} ms of it asked",
        ),
        Result(f"page_query_ms_p95{suffix}", p95_ms, "ms", "<= 300", note),
    ]


def _cpu_s(server: Desk) -> float:
    """Seconds of CPU that the server has used."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _asked(server: Desk, path: str, told: dict[str, str]) -> float:
    """Seconds until an answer is read whole. Raises NotMeasuredError if it is none."""
    begun = time.monotonic()
    answer = server.get(path, told)
    if answer.status != 200:
        raise NotMeasuredError(f"{path} {told}: {answer.status} {answer.text[:200]}")
    return time.monotonic() - begun
