"""Cold look-ups of the demo's tables, without Java and in Spark, and the weight of what they need installed."""

from importlib.metadata import Distribution
from pathlib import Path

from tests.bench.cold import SLUICE_CLOUD, Runs, repeated
from tests.bench.context import Bench
from tests.bench.parts_desk_page import QUESTIONS, QUESTIONS_QUICK, page
from tests.bench.report import ROOT, Result
from tests.support.installed_packages import packages_of

DEMO = ROOT / "build" / "demo" / "warehouse"
RUNS, RUNS_QUICK = 5, 1
LOOK_UPS = {
    "readings": ["readings"],
    "windows": ["windows"],
    "gaps": ["gaps"],
    "quarantine": ["quarantine", "list"],
    "gateways": ["gateways"],
}
IN_SPARK = "SELECT * FROM {} LIMIT 20"


async def lookups(bench: Bench) -> list[Result]:
    """Cold look-ups of the demo's tables, one after the other, and the same views in Spark."""
    results = [_install()]
    if not DEMO.is_dir():
        return [*results, Result("lookups", None, "", None, f"not measured: there is no {DEMO}: run `make demo` first")]
    found = {
        name: repeated([SLUICE_CLOUD, *words, "--warehouse", DEMO], bench.pick(RUNS, RUNS_QUICK))
        for name, words in LOOK_UPS.items()
    }
    results += [runs.result(f"lookup_s_demo_{name}", "<= 1") for name, runs in found.items()]
    results.append(Result("lookup_rss_mb", max(runs.rss_mb for runs in found.values()), "MB", "<= 250"))
    results += [_in_spark(name).result(f"lookup_s_demo_{name}_spark", None) for name in found]
    return [*results, *page("_demo", DEMO, bench.pick(QUESTIONS, QUESTIONS_QUICK))]


def _in_spark(view: str) -> Runs:
    query = IN_SPARK.format(view)
    return repeated([SLUICE_CLOUD, "sql", "--engine", "spark", "--warehouse", DEMO, "--csv", query], 1)


def _install() -> Result:
    """Megabytes of the packages that the extra `desk` adds to the gateway's own."""
    gateway, desk = packages_of("sluice"), packages_of("sluice[desk]")
    gateway_mb, desk_mb = (sum(map(_file_bytes, packages.values())) / 1e6 for packages in (gateway, desk))
    note = f"{len(desk) - len(gateway)} packages, beside {gateway_mb:.0f} MB of {len(gateway)} that the gateway needs"
    return Result("desk_install_mb", desk_mb - gateway_mb, "MB", "<= 250", note)


def _file_bytes(package: Distribution) -> int:
    found = [Path(str(path.locate())) for path in package.files or []]
    return sum(path.stat().st_size for path in found if path.is_file())
