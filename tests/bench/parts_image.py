"""Measures the card to flash, in an emulated machine: size, first start, power cuts, a full data partition."""

import lzma
import random
import shlex
import time
from pathlib import Path
from threading import Thread

from tests.bench.context import Bench, say
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.support.forgetful_card import powered
from tests.support.image_guest import CPU_S_MAX, Guest, second_disk
from tests.support.image_story import BUILT, USER, Story, flash

IMAGE_MB_MAX, ROOT_MB_MAX, RSS_MB_MAX = 250, 450, 200
STARTS_CUT, UPDATES_CUT = 14, 6
"""Power cuts at any moment from power on, and from the begin of an update."""
CUT_CPU_S_MAX = 180
"""CPU seconds of the emulator after which the power has gone: a start takes less, and so does the writing of a root."""
IDLE_S = 600
MOUNTED = "/mnt"
FILL = (
    "fallocate --length $(df --output=avail --block-size=1 /data | tail -n 1) /data/filler; "
    "dd if=/dev/zero of=/data/rest bs=4k"
)
"""Takes all blocks of the data partition, root's reserve too."""
TRIED = "This box restarts now to try it"
BACK_CPU_S = 2500.0
"""CPU seconds of the emulator within which a box has gone back: three starts, or five minutes of one."""


def flashed(bench: Bench, part: str) -> Story:
    """A card of a part, just written. Raises NotMeasuredError if there is no image."""
    folder = bench.directory / part
    folder.mkdir(parents=True)
    return flash(folder, image())


def image() -> Path:
    found = sorted(BUILT.glob("*.img"))
    if not found:
        raise NotMeasuredError(f"there is no image in {BUILT}: run `make test-image`")
    return found[-1]


def ledger(name: str, story: Story) -> list[Result]:
    """What became of the readings of a card that has no power now."""
    there = story.waiting()
    note = f"of {len(story.acknowledged)} acknowledged readings"
    return [
        Result(f"{name}_missing", len(set(story.acknowledged) - set(there)), "", "= 0", note),
        Result(f"{name}_duplicates", len(there) - len(set(there)), "", "= 0"),
    ]


def update(story: Story, box: Guest, command: str) -> str:
    """Run a command of a shell that installs a bundle of the second disk, and return what it says.

    If the box restarts to try it, that ends the connection.
    """
    words = shlex.quote(f"mount -o ro /dev/vdb {MOUNTED}; cd {MOUNTED}; {command}")
    ended = box.ssh(story.key, USER, "sudo", "sh", "-c", words)
    return ended.stdout + ended.stderr


def send(story: Story, box: Guest, count: int = 1, cpu_s: float = CPU_S_MAX) -> None:
    """Send readings, and see that somebody can log in."""
    for _ in range(count):
        box.wait(lambda: story.publish(box), "an acknowledged reading", cpu_s)
    box.wait(lambda: story.try_call(box, "hostname"), "the user's log-in", cpu_s)


def size(bench: Bench) -> list[Result]:
    """How large the packed image is, and what lies in a root."""
    story = flashed(bench, "size")
    packer, packed = lzma.LZMACompressor(preset=1), 0
    with image().open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            packed += len(packer.compress(chunk))
    packed += len(packer.flush())
    used_mb = story.partition(2).stat().st_blocks * 512 / 1e6
    return [
        Result("image_mb", packed / 1e6, "MB", f"<= {IMAGE_MB_MAX}", "compressed"),
        Result("root_mb", used_mb, "MB", f"<= {ROOT_MB_MAX}", "blocks in use"),
    ]


def first(bench: Bench) -> list[Result]:
    """From power on to the first acknowledged reading; memory then, and what an idle box writes."""
    story = flashed(bench, "first")
    begun_s = time.monotonic()
    with story.start(story.image) as box:
        box.wait(lambda: story.publish(box), "the first acknowledged reading")
        reading_s, cpu_s = time.monotonic() - begun_s, box.cpu_s
        send(story, box)
        used_kb = _used_kb(story.call(box, "cat", "/proc/meminfo"))
        written, idle_s = _written(story.call(box, "cat", "/proc/diskstats")), bench.pick(IDLE_S, 5)
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


def cuts(bench: Bench) -> list[Result]:
    """Power cuts at random moments of starts, the first one included, and of updates."""
    story, chance = flashed(bench, "cuts"), random.Random(1)  # noqa: S311 - the same moments each time
    count = bench.pick(STARTS_CUT, 1)
    for number in range(count):
        until_s = chance.uniform(2, CUT_CPU_S_MAX)
        with powered(story.image, number) as power, story.start(power.drive) as box:
            cut_at(story, box, until_s)
            say(f"cut {number + 1}, of a start, after {until_s:.0f} s of CPU: {_kept(power.cut())}")
            box.kill()
    # By turns, for the one that runs is not installed again.
    newer = story.stick(story.bundle("93.0.0"), story.bundle("94.0.0"))
    one, other = (f"sluice update --allow-downgrade {version}.raucb" for version in ("93.0.0", "94.0.0"))
    by_turns = f"{one} | grep 'nothing was done' && {other}"
    updates = bench.pick(UPDATES_CUT, 1)
    for number in range(count, count + updates):
        until_s = chance.uniform(2, CUT_CPU_S_MAX)
        with powered(story.image, number) as power, story.start(power.drive, options=second_disk(newer)) as box:
            send(story, box)
            begun = begin_update(story, box, by_turns)
            cut_at(story, box, box.cpu_s + until_s)
            say(f"cut {number + 1}, of an update, after {until_s:.0f} s of CPU: {_kept(power.cut())}")
            box.kill()
            begun.join()
    with story.start(story.image) as box:
        send(story, box, cpu_s=BACK_CPU_S)
        story.switch_off(box)
    return [
        Result("power_cuts", count + updates, "", None, f"{updates} of them of updates"),
        *ledger("power_cut", story),
    ]


def begin_update(story: Story, box: Guest, command: str) -> Thread:
    """Begin an update, as a person does who does not wait for its end."""
    begun = Thread(target=update, args=(story, box, command))
    begun.start()
    return begun


def cut_at(story: Story, box: Guest, until_s: float) -> None:
    """Send readings until the emulator has used so much CPU."""
    while box.cpu_s < until_s:
        story.publish(box)
        time.sleep(0.2)


def _kept(counts: tuple[int, int]) -> str:
    doubtful, kept = counts
    return f"{doubtful} sectors in doubt, {kept} of them kept"


def full(bench: Bench) -> list[Result]:
    """A data partition that is filled to the brim: the box starts, says what it cannot do, and goes on with room."""
    story = flashed(bench, "full")
    newer = second_disk(story.stick(story.bundle("93.0.0")))
    with story.start(story.image, options=newer) as box:
        send(story, box)
        box.ssh(story.key, USER, "sudo", "sh", "-c", shlex.quote(FILL))
        story.switch_off(box)
    with story.start(story.image, options=newer) as box:
        box.wait(lambda: story.try_call(box, "hostname"), "the log-in of a box whose disk is full")
        room = story.call(box, "df", "--output=avail", "--block-size=1", "/data").split()[-1]
        told = update(story, box, "sluice update 93.0.0.raucb")
        # The few bytes that it needs may be there all the same.
        is_tried, is_refused = TRIED in told, "cannot be written" in told
        if is_tried:
            box.wait_for("sluice: starting b; good a, on trial b with 2 tries left", BACK_CPU_S)
        box.wait(lambda: story.try_call(box, "hostname"), "the log-in afterwards", BACK_CPU_S)
        story.call(box, "rm", "-f", "/data/filler", "/data/rest")
        send(story, box, cpu_s=BACK_CPU_S)
        story.switch_off(box)
    how = "the version is tried" if is_tried else "refused in words" if is_refused else told[-100:]
    return [
        Result("full_disk_bytes_free", int(room), "bytes", "<= 1000000", "with which the box started"),
        Result("full_disk_update_told", int(is_tried or is_refused), "", "= 1", how),
        *ledger("full_disk", story),
    ]
