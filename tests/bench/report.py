"""Writes the results of a bench: a JSON file that is compared over time, and a table for people."""

import hashlib
import os
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "bench"
CALIBRATIONS = 3


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `value` is None where it could not be measured: `note` says why."""

    name: str
    value: float | None
    unit: str
    target: str | None = None
    """`>= 50000`, `<= 120`, `= 0`; None where the figure is only compared over time."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or a value."""
        if self.target is None or self.value is None:
            return None
        sign, limit = self.target.split()
        return {">=": self.value >= float(limit), "<=": self.value <= float(limit), "=": self.value == float(limit)}[
            sign
        ]


@dataclass(frozen=True, slots=True)
class Report:
    """The content of `build/bench/NAME.json`."""

    commit: str
    machine: dict[str, str]
    load: dict[str, list[float]]
    """Load averages of the machine over 1, 5 and 15 minutes, `before` and `after`: others may have been at work."""
    results: list[Result]


def commit() -> str:
    """The commit that is measured; with a digest of the sources that a bench runs where these were changed since."""
    head = _git("rev-parse", "--short=12", "HEAD").strip()
    if not _git("status", "--porcelain", "--", "gateway", "firmware-sim", "spark"):
        return head
    digest = hashlib.sha256()
    for path in sorted(
        [
            *(ROOT / "gateway").rglob("*.py"),
            *(ROOT / "firmware-sim").rglob("*.[ch]"),
            *(ROOT / "firmware-sim").rglob("*.py"),
            *(ROOT / "spark").rglob("*.py"),
        ]
    ):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return f"{head}+{digest.hexdigest()[:12]}"


def machine(directory: Path) -> dict[str, str]:
    """Facts that the figures depend on. `directory` is where the buffer and Kafka keep their files."""
    memory_kib = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_mb": str(int(memory_kib) // 1024),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system(directory),
    }


def calibration(directory: Path) -> dict[str, str]:
    """How fast the machine is now, by fixed small works: so two runs can be compared."""
    return {"sha256_of_200mb_cpu_s": f"{_cpu_s():.3f}", "fsync_ms": f"{_fsync_ms(directory):.2f}"}


def _cpu_s() -> float:
    """CPU seconds of a fixed work, in this process: the least of several."""
    block, took_s = bytes(1_000_000), []
    for _ in range(CALIBRATIONS):
        begun_s = time.process_time()
        digest = hashlib.sha256()
        for _ in range(200):
            digest.update(block)
        took_s.append(time.process_time() - begun_s)
    return min(took_s)


def _fsync_ms(directory: Path) -> float:
    """Milliseconds of a write of 4 kB and its fsync: the median of 50."""
    directory.mkdir(parents=True, exist_ok=True)
    took_s = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(50):
            begun_s = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            took_s.append(time.perf_counter() - begun_s)
    return statistics.median(took_s) * 1e3


def file_system(directory: Path) -> str:
    """The type of file system that a directory is on: `ext4`, `tmpfs`, ..."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return str(
        max((each for each in mounts if directory.resolve().is_relative_to(each[0])), key=lambda m: len(m[0]))[1]
    )


def save(path: Path, report: Report) -> Report:
    """Write the file, with earlier results of the same commit where this run has none of their name; give the whole."""
    results = {each.name: each for each in report.results}
    if path.exists():
        earlier = msgspec.json.decode(path.read_bytes(), type=Report)
        if earlier.commit == report.commit:
            results = {each.name: each for each in earlier.results} | results
    whole = Report(report.commit, report.machine, report.load, list(results.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(whole)), indent=1) + b"\n")
    return whole


def table(report: Report) -> str:
    """The results in lines, each target beside its measured figure."""
    rows = [("result", "value", "unit", "target", "")]
    for each in report.results:
        value = "—" if each.value is None else f"{each.value:,.3f}".rstrip("0").rstrip(".")
        verdict = {True: "met", False: "MISSED", None: ""}[each.met]
        rows.append((each.name, value, each.unit, each.target or "", " ".join(filter(None, (verdict, each.note)))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {value:>{widths[1]}}  {unit:<{widths[2]}}  {target:<{widths[3]}}  {rest}".rstrip()
        for name, value, unit, target, rest in rows
    ]
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    return "\n".join([f"commit {report.commit}; {about}", *lines])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True, text=True).stdout
