"""Measures what becomes of updates of the card to flash, in an emulated machine: bad ones, and a wrong clock."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.context import Bench, say
from tests.bench.parts_image import (
    BACK_CPU_S,
    CUT_CPU_S_MAX,
    TRIED,
    begin_update,
    cut_at,
    flashed,
    ledger,
    send,
    update,
)
from tests.bench.report import Result
from tests.support.forgetful_card import powered
from tests.support.image_guest import Guest, second_disk
from tests.support.image_story import Story, debugfs, make_deaf, make_file

BEFORE = 20
"""Readings before an update, so that the new version has to take some too."""
WATCHDOG, ITS_DEVICE = ("-device", "i6300esb"), "/dev/watchdog0"
UNITS = "/usr/lib/systemd/system"
HANG = """\
[Service]
ExecStart=/bin/sh -c 'sleep 20; echo -1 >/proc/sys/kernel/sched_rt_runtime_us; exec chrt -f 99 yes >/dev/null'
"""
"""Lets the box come up, and then nobody else have its only processor: nobody feeds the watchdog."""
YEAR_2000 = ("-rtc", "base=2000-01-01T00:00:00")


def rollback(bench: Bench) -> list[Result]:
    """From the start of a version that takes no reading to a reading of the version before."""
    story = flashed(bench, "rollback")
    deaf = story.stick(story.bundle("91.0.0", make_deaf))
    with story.start(story.image, options=second_disk(deaf)) as box:
        send(story, box, BEFORE)
        told = update(story, box, "sluice update 91.0.0.raucb")
        assert TRIED in told, told
        box.wait_for("sluice: starting b; good a, on trial b with 2 tries left", BACK_CPU_S)
        begun_s = time.monotonic()
        box.wait_for("sluice: starting a; good a, on trial none", BACK_CPU_S)
        box.wait(lambda: story.publish(box), "a reading of the version before")
        back_s = time.monotonic() - begun_s
        story.switch_off(box)
    return [Result("rollback_s", back_s, "s", None, "of it 5 minutes in which the version may become good")]


def _panic(root: Path) -> None:
    """Leave the kernel an empty initramfs: it finds no root."""
    empty = root.with_suffix(".initrd")
    empty.write_bytes(bytes(4096))
    debugfs(root, "rm /boot/initrd.img", f"write {empty} /boot/initrd.img")


def _hang(root: Path) -> None:
    make_file(root, UNITS, "hang.service", HANG)
    debugfs(root, f"cd {UNITS}/multi-user.target.wants", "symlink hang.service ../hang.service")


def _tampered(story: Story, version: str) -> Path:
    """Change one bit of a bundle's root, which its signature vouches for by hashes alone."""
    path = story.bundle(version)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


@dataclass(frozen=True, slots=True)
class Bad:
    """A kind of bad update."""

    name: str
    make: Callable[[Story, str], Path]
    """Makes its bundle, with this version."""
    words: str
    """Said of it by `sluice status` after its trial; or by `sluice update`, if it is not tried."""
    is_tried: bool


KINDS = (
    Bad("panic", lambda story, version: story.bundle(version, _panic), "it was started 3 times", is_tried=True),
    Bad("hang", lambda story, version: story.bundle(version, _hang), "it was started 3 times", is_tried=True),
    Bad("tampered", _tampered, "RAUC did not install it", is_tried=False),
    Bad(
        "another_board",
        lambda story, version: story.bundle(version, compatible="toaster"),
        "RAUC did not install it",
        is_tried=False,
    ),
)


def bad(bench: Bench) -> list[Result]:
    """Bad versions, with a power cut while each is brought, and then without: the box ends as it was, and says why."""
    story, results = flashed(bench, "bad"), list[Result]()
    chance = random.Random(2)  # noqa: S311 - the same moments each time
    for number, kind in enumerate(KINDS):
        name = f"bad_update_{kind.name}_goes_away"
        bundle = kind.make(story, f"{81 + number}.0.0")
        options = [*second_disk(story.stick(bundle)), *WATCHDOG]
        until_s, command = chance.uniform(2, CUT_CPU_S_MAX), f"sluice update {bundle.name}"
        with powered(story.image, number) as power, story.start(power.drive, options=options) as box:
            send(story, box, BEFORE)
            if kind.name == "hang" and not story.try_call(box, "ls", ITS_DEVICE):
                results.append(Result(name, None, "", None, "not measured: no driver for the emulated watchdog"))
                story.switch_off(box)
                continue
            begun = begin_update(story, box, command)
            cut_at(story, box, box.cpu_s + until_s)
            doubtful, kept = power.cut()
            box.kill()
            begun.join()
        say(f"{kind.name}: cut after {until_s:.0f} s of CPU, {doubtful} sectors in doubt, {kept} of them kept")
        with story.start(story.image, options=options) as box:
            send(story, box, BEFORE, BACK_CPU_S)
            _await_verdict(story, box)
            results.append(Result(name, int(_goes_away(story, box, kind, command)), "", "= 1", "cut once before"))
            story.switch_off(box)
    return [*results, *ledger("bad_update", story)]


def _await_verdict(story: Story, box: Guest) -> None:
    """Wait until no version is on trial."""

    def is_over() -> bool:
        told = story.try_call(box, "sluice", "status")
        return bool(told) and "on trial" not in told

    box.wait(is_over, "the end of the trial", BACK_CPU_S)


def _goes_away(story: Story, box: Guest, kind: Bad, command: str) -> bool:
    """Bring a bad version; whether the box runs the former one then, and says why."""
    told = update(story, box, command)
    if kind.is_tried:
        assert TRIED in told, told
        box.wait_for("sluice: starting a; good a, on trial b with 0 tries left", BACK_CPU_S)
        send(story, box)
        _await_verdict(story, box)
        told = story.call(box, "sluice", "status")
    is_back = "rauc.slot=a" in story.call(box, "cat", "/proc/cmdline").split()
    return is_back and kind.words in " ".join(told.split())


def clock(bench: Bench) -> list[Result]:
    """A box whose clock starts in the year 2000: readings are taken, and a good version is found good."""
    story = flashed(bench, "clock")
    options = [*second_disk(story.stick(story.bundle("93.0.0"))), *YEAR_2000]
    with story.start(story.image, options=options) as box:
        send(story, box, BEFORE)
        year = story.call(box, "date", "+%Y").strip()
        told = update(story, box, "sluice update 93.0.0.raucb")
        assert TRIED in told, told
        box.wait_for("sluice: starting b; good a, on trial b with 2 tries left", BACK_CPU_S)
        send(story, box, cpu_s=BACK_CPU_S)
        _await_verdict(story, box)
        is_good = "93.0.0 was found good" in " ".join(story.call(box, "sluice", "status").split())
        story.switch_off(box)
    good = Result("clock_2000_update_good", int(is_good), "", "= 1", f"the box believed that it was {year}")
    return [good, *ledger("clock_2000", story)]
