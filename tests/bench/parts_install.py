"""Measures an installation from a bare Debian on: first reading, service, status page, questions."""

import asyncio
import statistics
import time
from pathlib import Path

from systemd.deb_python import TARGETS
from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.support.box import build, new_box
from tests.support.netns import new_network
from tests.support.package_site import Site, install, measure, set_up, wait_for_first_reading
from tests.support.page_weight import browser, page_weight
from tests.support.setup_dialogue import ENTER, questions_asked
from tests.support.setup_dialogue import set_up as ask
from tests.support.status_page_site import PASSWORD, add_sensors, site
from tests.support.uplink_scene import scene_in

DEB_MB_MAX = 25
EXPOSURE_MAX = 2.0
QUESTIONS_MAX = 8
TARGET = "amd64_deb12"
RESTARTS = 5
ANSWERS = ["farm/barn-1", "127.0.0.1:1", "y", "barn-1", "a password of kafka's", ENTER, "42, 43", ENTER, "n"]
"""Without a Kafka in reach, where nothing can be found out: everything is asked."""
SETTLE_S = 30
"""Seconds that the service runs before its memory counts. By then it may have given back the memory of its start."""


async def package(bench: Bench) -> list[Result]:
    """Build the packages of all targets: the largest one's size."""
    directory = bench.directory / "package"
    built = await asyncio.to_thread(build, directory, *map(str, TARGETS))
    sizes = {path.name: path.stat().st_size / 1e6 for path in built}
    for name, size in sizes.items():
        say(f"package: {name}: {size:.1f} MB")
    largest = max(sizes, key=sizes.__getitem__)
    return [Result("deb_mb", sizes[largest], "MB", f"<= {DEB_MB_MAX}", f"the largest of {len(sizes)}: {largest}")]


async def box(bench: Bench) -> list[Result]:
    """A bare Debian 12 that boots: from `apt install` of the file to the first reading in a Kafka outside."""
    return await asyncio.to_thread(_box, bench)


def _box(bench: Bench) -> list[Result]:
    directory = bench.directory / "box"
    (built,) = build(directory, TARGET)
    (directory / "scene").mkdir()
    with (
        new_box(directory) as made,
        new_network(directory / "scene") as network,
        scene_in(network, directory / "scene") as scene,
    ):
        made.boot(network.gateway)
        begin = time.monotonic()
        install(made, built)
        installed_s = time.monotonic() - begin
        set_up(made, scene.bootstrap)
        wait_for_first_reading(Site(made, scene))
        first_reading_s = time.monotonic() - begin
        starts_s = []
        for _ in range(bench.pick(RESTARTS, 1)):
            made.run("systemctl", "restart", "sluice.service")
            starts_s.append(measure(made).start_s)
        time.sleep(bench.pick(SETTLE_S, 2))
        found = measure(made)
    note = f"of it {installed_s:.1f} s for apt; the rest is setup from a file of answers, a restart, and the reading"
    return [
        Result("install_to_first_reading_s", first_reading_s, "s", None, note),
        Result("start_s", statistics.median(starts_s), "s", None, f"median of {len(starts_s)}: process to READY=1"),
        Result("rss_mb_idle", found.rss_mb, "MB", None, "with the status page, MQTT and serial lines"),
        Result("exposure", found.exposure, "of 10", f"<= {EXPOSURE_MAX}", "systemd-analyze security"),
    ]


async def page(bench: Bench) -> list[Result]:
    """The status page in Chromium, before a real daemon with sensors: bytes on the wire, first paint."""
    return await asyncio.to_thread(_page, bench)


def _page(bench: Bench) -> list[Result]:
    directory = bench.directory / "page"
    directory.mkdir(parents=True)
    paints_ms = []
    with site(directory) as gateway, browser() as chromium:
        add_sensors(gateway)
        for _ in range(bench.pick(5, 1)):
            context = chromium.new_context(viewport={"width": 390, "height": 844})
            weight = page_weight(context.new_page(), gateway.url, PASSWORD)
            paints_ms.append(weight.first_paint_ms)
            context.close()
    return [
        Result(
            "page_kb", weight.kilobytes, "kB", None, f"{weight.requests} requests, first figures and curves included"
        ),
        Result("page_first_paint_ms", statistics.median(paints_ms), "ms", None, f"median of {len(paints_ms)}"),
    ]


async def questions(bench: Bench) -> list[Result]:
    """A whole `sluice setup` at a terminal of the box, where most is asked: how many questions that is."""
    asked = await asyncio.to_thread(_ask, bench.directory / "questions")
    return [Result("setup_questions", len(asked), "questions", f"<= {QUESTIONS_MAX}", "; ".join(asked))]


def _ask(directory: Path) -> list[str]:
    (built,) = build(directory, TARGET)
    with new_box(directory) as made:
        made.boot()
        install(made, built)
        program = made.inside("env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "TERM=xterm", "sluice")
        shown, _ = ask(Path("/etc/sluice/gateway.toml"), ANSWERS, program)
    return questions_asked(shown)
