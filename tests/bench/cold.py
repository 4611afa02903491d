"""Runs look-ups as cold processes, one after the other: seconds, seconds of CPU, memory and bytes read."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.processes import NotMeasuredError
from tests.bench.report import ROOT, Result

SLUICE_CLOUD = Path(sys.executable).with_name("sluice-cloud")
QUESTION = """
import json
def read_bytes():
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))
from spark.desk import tables
before = read_bytes()
rows = len(tables.open({path!r}).{call}.fetchall())
print(json.dumps([rows, read_bytes() - before]))
"""
LAUNCHER = """
import json, os, sys, time
begun = time.monotonic()
_, status, used = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
figures = [os.waitstatus_to_exitcode(status), time.monotonic() - begun]
print(json.dumps([*figures, used.ru_utime + used.ru_stime, used.ru_maxrss * 1_024 / 1e6]))
"""
"""A process that starts another one. The kernel counts the memory of who starts it, and a bench's own is large."""


@dataclass(frozen=True, slots=True)
class Run:
    """One cold process, from its start to its end, with the children that it waited for, such as Java."""

    wall_s: float
    cpu_s: float
    rss_mb: float
    said: list[str]


@dataclass(frozen=True, slots=True)
class Runs:
    """The same command several times. Figures are medians, but for the memory: that is the most."""

    runs: tuple[Run, ...]

    @property
    def wall_s(self) -> float:
        return median(run.wall_s for run in self.runs)

    @property
    def cpu_s(self) -> float:
        return median(run.cpu_s for run in self.runs)

    @property
    def rss_mb(self) -> float:
        return max(run.rss_mb for run in self.runs)

    def result(self, name: str, target: str | None, about: str = "") -> Result:
        """The seconds on the clock. The note has the seconds of CPU, which depend less on the machine's other work."""
        note = f"median of {len(self.runs)}; {self.cpu_s:.2f} s of CPU, {self.rss_mb:.0f} MB{about and f'; {about}'}"
        return Result(name, self.wall_s, "s", target, note)


def ran(command: Sequence[str | Path], cwd: str | Path = "/") -> Run:
    """Run a program to its end. Raises NotMeasuredError if it fails."""
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        cwd=cwd,
    )
    *said, figures = run.stdout.splitlines()
    code, wall_s, cpu_s, rss_mb = json.loads(figures)
    if code:
        raise NotMeasuredError(f"{' '.join(map(str, command))}: {' '.join(said)[-300:]}")
    return Run(wall_s, cpu_s, rss_mb, said)


def repeated(command: Sequence[str | Path], runs: int, cwd: str | Path = "/") -> Runs:
    """Run a program several times."""
    return Runs(tuple(ran(command, cwd) for _ in range(runs)))


def asked(warehouse: str, call: str, runs: int) -> tuple[Runs, int, float]:
    """Ask in Python, in cold processes. Gives the runs, the rows of an answer, and the megabytes read for it."""
    found = repeated([sys.executable, "-c", QUESTION.format(path=warehouse, call=call)], runs, ROOT)
    figures = [json.loads(run.said[-1]) for run in found.runs]
    rows, read_bytes = zip(*figures, strict=True)
    return found, rows[0], median(read_bytes) / 1e6
