"""Measures the card to flash, in an emulated machine."""

import asyncio
import lzma
import random
import time
from pathlib import Path

from tests.bench.context import Bench, say
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.support.forgetful_card import powered
from tests.support.image_story import BUILT, Story, flash

IMAGE_MB_MAX, ROOT_MB_MAX, RSS_MB_MAX = 250, 450, 200
CUTS = 20
IDLE_S = 600
CUT_CPU_S_MAX = 180
"""CPU seconds of the emulator within which the power goes: a start takes less."""


def _flashed(bench: Bench, part: str) -> Story:
    found = sorted(BUILT.glob("*.img"))
    if not found:
        raise NotMeasuredError(f"there is no image in {BUILT}: run `make test-image`")
    folder = bench.directory / part
    folder.mkdir(parents=True)
    return flash(folder, found[-1])


async def size(bench: Bench) -> list[Result]:
    """How large the packed image is, and what lies in a root."""
    return await asyncio.to_thread(_size, bench)


def _size(bench: Bench) -> list[Result]:
    story = _flashed(bench, "size")
    image = max(BUILT.glob("*.img"))
    packed = sum(map(len, _packed(image)))
    root = story.partition(2)
    used_mb = root.stat().st_blocks * 512 / 1e6
    return [
        Result("image_mb", packed / 1e6, "MB", f"<= {IMAGE_MB_MAX}", "compressed"),
        Result("root_mb", used_mb, "MB", f"<= {ROOT_MB_MAX}", "blocks in use"),
    ]


def _packed(image: Path) -> list[bytes]:
    packer = lzma.LZMACompressor(preset=1)
    with image.open("rb") as file:
        return [*(packer.compress(chunk) for chunk in iter(lambda: file.read(1 << 20), b"")), packer.flush()]


async def first(bench: Bench) -> list[Result]:
    """From power on to the first acknowledged reading; memory then, and what an idle box writes."""
    return await asyncio.to_thread(_first, bench)


def _first(bench: Bench) -> list[Result]:
    story = _flashed(bench, "first")
    begun_s = time.monotonic()
    with story.start(story.image) as box:
        box.wait(lambda: story.publish(box), "the first acknowledged reading")
        reading_s, cpu_s = time.monotonic() - begun_s, box.cpu_s
        box.wait(lambda: story.try_call(box, "hostname"), "the user's log-in")
        used_kb, written = (
            _used_kb(story.call(box, "cat", "/proc/meminfo")),
            _written(story.call(box, "cat", "/proc/diskstats")),
        )
        idle_s = bench.pick(IDLE_S, 5)
        time.sleep(idle_s)
        more = _written(story.call(box, "cat", "/proc/diskstats")) - written
        story.switch_off(box)
    return [
        Result("boot_to_first_reading_s", reading_s, "s", None, "by the clock of this machine, in emulation"),
        Result("boot_to_first_reading_cpu_s", cpu_s, "s", None, "CPU of the emulator"),
        Result("rss_mb_guest", used_kb / 1e3, "MB", f"<= {RSS_MB_MAX}", "in use, of 512 MB"),
        Result("bytes_per_hour_idle", more * 3600 / idle_s, "bytes", None, f"in {idle_s} s"),
    ]


def _used_kb(meminfo: str) -> int:
    told = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines()}
    return told["MemTotal"] - told["MemAvailable"]


def _written(diskstats: str) -> int:
    """Bytes that were written to the card (Documentation/admin-guide/iostats.rst)."""
    return next(int(line.split()[9]) * 512 for line in diskstats.splitlines() if line.split()[2] == "vda")


async def cuts(bench: Bench) -> list[Result]:
    """Power cuts at random moments, the first start included: readings that are missing, or twice there."""
    return await asyncio.to_thread(_cuts, bench)


def _cuts(bench: Bench) -> list[Result]:
    story, chance = _flashed(bench, "cuts"), random.Random(1)  # noqa: S311 - the same moments each time
    for number in range(count := bench.pick(CUTS, 1)):
        until_s = chance.uniform(2, CUT_CPU_S_MAX)
        with powered(story.image, number) as power, story.start(power.drive) as box:
            while box.cpu_s < until_s:
                story.publish(box)
                time.sleep(0.2)
            doubtful, kept = power.cut()
            box.kill()
        say(f"cut {number + 1} after {until_s:.0f} s of CPU: {doubtful} sectors in doubt, {kept} of them kept")
    with story.start(story.image) as box:
        box.wait(lambda: story.publish(box), "a reading after all cuts")
        story.switch_off(box)
    there = story.waiting()
    return [
        Result("power_cuts", count, "", None, f"{len(story.acknowledged)} readings were acknowledged"),
        Result("power_cut_missing", len(set(story.acknowledged) - set(there)), "", "= 0"),
        Result("power_cut_duplicates", len(there) - len(set(there)), "", "= 0"),
    ]


async def rollback(bench: Bench) -> list[Result]:
    """From the start of a version that takes no reading to a reading of the version before."""
    return await asyncio.to_thread(_rollback, bench)


def _rollback(bench: Bench) -> list[Result]:
    story = _flashed(bench, "rollback")
    stick = story.bundle("91.0.0", is_deaf=True)
    with story.start(story.image, stick) as box:
        for _ in range(20):
            box.wait(lambda: story.publish(box), "readings before the update")
        story.update(box)
        box.wait_for("sluice: starting b; good a, on trial b with 2 tries left", 1000)
        begun_s = time.monotonic()
        box.wait_for("sluice: starting a; good a, on trial none", 2000)
        box.wait(lambda: story.publish(box), "a reading of the version before")
        back_s = time.monotonic() - begun_s
        story.switch_off(box)
    return [Result("rollback_s", back_s, "s", None, "of it 5 minutes in which the version may become good")]
