"""Measures the firmware's use of the chip (flash, RAM, stack), and a simulated board's use of this machine."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice_sim.avr import Board, Network
from sluice_sim.avr_faults import Build
from tests.bench.context import Bench, say
from tests.bench.parts_serial_site import Site, serial_site
from tests.bench.processes import NotMeasuredError
from tests.bench.report import Result
from tests.bench.serial_boards import BUILDS, Run, Told, boards, built, cpu_s, finish, read_ledger

FLASH_BYTES_MAX = 8192
RAM_BYTES_MAX = 1400
FLASH_SECTIONS = (".text", ".data")
"""Flash holds .data's initial values beside the program."""
RAM_SECTIONS = (".data", ".bss", ".noinit")

STACK_FAULTS: dict[Build, tuple[str, ...]] = {
    "serial": ("noise 0.01", "overrun 200", "unplug in-frame", "plug same", "reset", "noise 0", "power-cycle"),
    "mqtt": ("wifi off", "wifi on", "modem-reset", "noise 0.001", "reset", "overrun 200", "noise 0", "power-cycle"),
}
"""Faults of a board while its stack is measured: resends, dialling again, HELLO, bytes that are no frames."""
STACK_INTERVAL_MS = 20
"""A full ring as well: more samples than a link in trouble can pass."""

REALTIME_INTERVAL_MS = 100
REALTIME_WARM_UP_S = 5.0
LAG_S_MAX = 0.5
"""The account is as coarse as a sample's interval; a board that cannot keep up falls behind by seconds."""


async def size(bench: Bench) -> list[Result]:  # noqa: ARG001 - a part's form
    """Flash and static RAM of both builds, from their ELF files."""
    results = []
    for build in BUILDS:
        sections = await asyncio.to_thread(section_bytes, await built(build))
        flash = sum(sections.get(name, 0) for name in FLASH_SECTIONS)
        ram = sum(sections.get(name, 0) for name in RAM_SECTIONS)
        results += [
            Result(f"flash_bytes_{build}", flash, "bytes", f"<= {FLASH_BYTES_MAX}"),
            Result(f"ram_bytes_{build}", ram, "bytes", f"<= {RAM_BYTES_MAX}", "static; the stack has the rest"),
        ]
    return results


def section_bytes(elf: Path) -> dict[str, int]:
    """Sizes of an AVR program's sections. Raises NotMeasuredError."""
    try:
        listed = subprocess.run(["avr-size", "-A", elf], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise NotMeasuredError(f"avr-size (of Debian's binutils-avr) does not read {elf.name}: {error}") from error
    rows = [line.split() for line in listed.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) == 3 and row[1].isdigit()}


async def stack(bench: Bench) -> list[Result]:
    """Measure the deepest stack of both builds, on a line with noise, losses, resets and connections that break."""
    results = []
    for build in BUILDS:
        name = f"stack_bytes_peak_{build}"
        try:
            last = await _suffered(bench, build)
        except NotMeasuredError as reason:
            results.append(Result(name, None, "bytes", None, f"not measured: {reason}"))
            continue
        free = last.stack_room - last.stack
        results += [
            Result(name, last.stack, "bytes", None, f"through {len(STACK_FAULTS[build])} faults"),
            Result(f"stack_bytes_free_{build}", free, "bytes", ">= 1", "never used, between static RAM and the stack"),
        ]
    return results


async def _suffered(bench: Bench, build: Build) -> Run:
    """Run a board through all its faults, and return its own figures."""
    await built(build)
    async with serial_site(bench, f"stack-{build}") as site:
        with boards(site.ports, ("d000",), STACK_INTERVAL_MS, 0.0, _network(site, build)) as (board,):
            for fault in STACK_FAULTS[build]:
                await asyncio.sleep(bench.pick(8, 3))
                say(f"stack, {build}: {fault}")
                await asyncio.to_thread(board.do, fault)
            await asyncio.sleep(bench.pick(8, 3))
            await finish([board])
        told = read_ledger(board)
    _need_links([told])
    say(f"stack, {build}: {told.acknowledged} acknowledged in {len(told.runs)} boots")
    return told.last


@dataclass(frozen=True, slots=True)
class _RealTime:
    """Resources of this machine that boards of one build took."""

    cpu_share: float
    """Share of a core that one board takes."""
    lag_s_max: float


async def avr(bench: Bench) -> list[Result]:
    """Estimate the boards of each build that run in real time on a core, by the CPU time of a few that keep up."""
    count = int(os.environ.get("BENCH_BOARDS", bench.pick(16, 4)))
    seconds = bench.pick(30, 5)
    results = []
    for build in BUILDS:
        await built(build)
        devices = [f"d{number:03d}" for number in range(count)]
        async with serial_site(bench, f"avr-{build}") as site:
            with boards(site.ports, devices, REALTIME_INTERVAL_MS, 0.0, _network(site, build)) as started:
                seen = await _run(started, seconds)
        say(f"avr, {build}: {seen.cpu_share:.4f} of a core each, {seen.lag_s_max * 1000:.0f} ms behind at the most")
        method = f"elapsed time of {count} boards over their CPU time in {seconds} s, 10 samples/s each"
        in_time = seen.lag_s_max <= LAG_S_MAX
        results += [
            Result(
                f"avr_realtime_per_core_{build}",
                1 / seen.cpu_share if in_time else None,
                "boards",
                None,
                method if in_time else f"not measured: with {count} boards they fell behind: the machine is too busy",
            ),
            Result(f"avr_lag_ms_{build}", max(0, seen.lag_s_max * 1000), "ms", None, "the most, known to 100 ms"),
        ]
    return results


async def _run(started: list[Board], seconds: float) -> _RealTime:
    await asyncio.sleep(REALTIME_WARM_UP_S)
    loop = asyncio.get_running_loop()
    before, began, used = [read_ledger(board) for board in started], loop.time(), cpu_s(started)
    await asyncio.sleep(seconds)
    elapsed, used = loop.time() - began, cpu_s(started) - used
    after = [read_ledger(board) for board in started]
    _need_links(after)
    return _RealTime(
        cpu_share=used / elapsed / len(started),
        lag_s_max=max(lag_s(first, last) for first, last in zip(before, after, strict=True)),
    )


def lag_s(first: Told, last: Told) -> float:
    """Seconds by which a chip's own time fell behind, from the samples that it took between two moments of one boot."""
    return last.at_s - first.at_s - (last.last.taken - first.last.taken) * REALTIME_INTERVAL_MS / 1000


def _need_links(told: list[Told]) -> None:
    """Raise NotMeasuredError if a board had no gateway: its figures would then be of something else."""
    cut_off = sum(not each.acknowledged for each in told)
    if cut_off:
        raise NotMeasuredError(f"{cut_off} of {len(told)} boards got nothing acknowledged: their link does not work")


def _network(site: Site, build: Build) -> Callable[[str], Network] | None:
    return site.network if build == "mqtt" else None
