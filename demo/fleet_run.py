"""Runs the demo of many gateways: a change that goes well in steps, and one that stops by itself and is taken back."""

import asyncio
import json
import os
import random
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from demo import child_process
from demo.box import FED_S
from demo.box_service import BoxService
from demo.boxes import Box
from demo.children import COMMANDS, INSTALL, Child, Children, DemoError
from demo.cloud_side import STANDSTILL_S_MAX, CloudSide, JsonLines
from demo.demo_settings import DemoSettings
from demo.kafka_broker import free_ports
from demo.kafka_ends import KafkaEnds
from demo.progress import Progress
from demo.run import INGEST_STOP_S_MAX, SENSORS_STOP_S_MAX, Folder, buffer_status, now_us, number, start_kafka
from demo.web_folder import WebFolder, web_folder
from gateway.daemon import control
from gateway.daemon.control import ControlError
from gateway.fleet_file import NAME, Fleet, load
from gateway.host.terminal_text import span
from spark.commands.fleet_commands import WHOLE
from systemd import deb_signing

SENSORS = 2
"""Sensors of each gateway, with a reading a second each."""
FIRST_SHARE = 10


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that the fleet's file wants."""

    section: str
    setting: str
    about: str = ""
    """What is wrong with it."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by their section."""
        return {self.section: tomllib.loads(self.setting)}


GOOD = Change("kafka", "linger_ms = 100")
BAD = {
    "uplink": Change("kafka", 'bootstrap = ["127.0.0.1:1"]', "nobody listens at that address"),
    "sensors": Change("mqtt_listener", "anonymous = false", "the sensors here have no passwords"),
}
START_S_MAX = 120.0
FEWER = "On a slow machine try fewer gateways: FLEET=10."
LOOK_S_MAX = 240.0
"""Seconds that a look at the folder may take beside the trial: many of them begin at once."""
KILLED_SHARE = 0.4
"""Share of looks that meet a kill, where kills are asked for."""
JITTER_S = 0.3
"""Seconds by number of gateways over which their looks are spread. In the field, their timer spreads them."""
HASTE = 0.05
"""Share of the moments before a trial at which a look is killed."""
DAEMONS_SHARE = 0.5
"""Share of the kills on trial that hit the daemon, and not the look."""
WATCH_INTERVAL_S = 1.0
TABLES_LOOK_S = 4.0
ALL = ("--json", "--limit", "1000")
"""Options by which a listing of `sluice-cloud` has all rows for a program."""
ENDED = frozenset({"good", "not-drawn", "went-back", "refused"})
"""Standings of gateways that have nothing more to do."""


@dataclass(frozen=True, slots=True)
class Step:
    """A share of a roll-out, and how the gateways stood to it at its end, as the tables told."""

    share: int
    standings: Mapping[str, int]


@dataclass(slots=True)
class RollOut:
    """A change, and what became of it."""

    change: Change
    steps: list[Step] = field(default_factory=list)
    has_stopped: bool = False
    """Whether `sluice-cloud fleet raise` refused to go on."""
    refusal: str = ""
    """What it said."""

    @property
    def last(self) -> Step:
        return self.steps[-1]


@dataclass(slots=True)
class FleetRun:
    """State that the steps of a run share."""

    settings: DemoSettings
    folder: Folder
    progress: Progress
    children: Children
    cloud: CloudSide
    web: WebFolder
    boxes: list[Box]
    services: dict[Box, BoxService] = field(default_factory=dict)
    buffered: int | None = None
    reached: int = 0
    """Gateways whose uplink is up."""
    roll_outs: list[RollOut] = field(default_factory=list)
    shown: list[tuple[Sequence[str], str]] = field(default_factory=list)
    """Commands that the owner typed at the end, and what they said."""
    killed: Counter[str] = field(default_factory=Counter)
    """Programs that were ended by `kill -9`, by kind."""
    commands: int = 0

    @property
    def fleet_file(self) -> Path:
        """The owner's file."""
        return self.folder.root / NAME

    @property
    def key(self) -> Path:
        """The owner's key."""
        return self.folder.root / "owner" / "release.key"


@asynccontextmanager
async def rolled_out(settings: DemoSettings, folder: Folder, progress: Progress) -> AsyncIterator[FleetRun]:
    """Run everything up to the point where all that was measured should be in the table.

    Within the `async with` only Kafka still runs, for the audit. Leaving it, or any failure, stops all programs.

    Raises:
        DemoError, BrokerError: a step failed; in an ExceptionGroup if a program ended by itself.
    """
    owner, web_root = folder.root / "owner", folder.root / "web"
    for each in (owner, web_root):
        each.mkdir(parents=True)
    async with Children(folder.logs) as children:
        with progress.step("Start Kafka, one real broker, on loopback") as step:
            broker = await start_kafka(folder, children)
            step.result = broker.bootstrap
        with web_folder(web_root, owner) as web:
            async with KafkaEnds(broker.bootstrap) as kafka:
                cloud = CloudSide(broker, kafka, folder.warehouse, folder.logs, progress.figures, FEWER)
                boxes = _boxes(settings, folder)
                run = FleetRun(settings, folder, progress, children, cloud, web, boxes)
                async with _gateways(run), asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(_watch(run), name="watch")
                    await _measure(run)
                    watch.cancel()
                    with progress.step("Stop the gateways"):
                        await _stop_gateways(run)
        yield run


def _boxes(settings: DemoSettings, folder: Folder) -> list[Box]:
    gateways = folder.root / "gateways"
    digits = len(str(settings.fleet))
    return [
        Box(gateways / f"site-{at:0{digits}}", port, float(settings.trial_s))
        for at, port in enumerate(free_ports(settings.fleet), 1)
    ]


@asynccontextmanager
async def _gateways(run: FleetRun) -> AsyncIterator[None]:
    """Have the services of all boxes for the length of a `with`."""
    try:
        yield
    finally:
        await asyncio.shield(_stop_gateways(run))


async def _stop_gateways(run: FleetRun) -> None:
    for service in run.services.values():
        service.leave()
    for service in run.services.values():
        await asyncio.to_thread(service.join)


async def _measure(run: FleetRun) -> None:
    """Run from the start of the cloud side to the last reading in its table."""
    progress = run.progress
    with progress.step("Start the cloud side: PySpark reads Kafka and writes Delta tables") as step:
        ingest = run.cloud.start_ingest(run.children)
        step.result = "its JVM takes a while, the others need not wait for it"
    with progress.step(f"Start {len(run.boxes)} gateways, each `sluice run` with a box of its own") as step:
        await _start_gateways(run)
        step.result = f"each looks at {run.web.url}, a folder with signed files, and trusts its owner's key"
    with progress.step(f"Switch on {SENSORS} MQTT sensors at each gateway"):
        sensors = _start_sensors(run)
    progress.note(
        f"A change is on trial for {span(run.settings.trial_s)} here at most, and for 5 min in the field. There, a "
        "gateway looks once an hour."
    )
    await _roll_out(run, "A good change", GOOD)
    bad = BAD[run.settings.mistake]
    progress.note(f"The next change has a mistake: {bad.about}.")
    await _roll_out(run, "A bad change", bad)
    with progress.step("Sensors stop measuring and wait for their last acknowledgements"):
        sensors.expected = False
        sensors.process.terminate()
        await run.children.finish_well(sensors, SENSORS_STOP_S_MAX)
    with progress.step("Wait until the buffers are empty"):
        await run.cloud.until(lambda: run.buffered == 0, lambda: run.buffered, "the buffers do not become empty", None)
    with progress.step("Wait until the tables hold what Kafka holds") as step:
        step.state = run.cloud.in_words
        await run.cloud.until_ingested(ingest)
        step.result = f"{sum(run.cloud.ends.values()):,} records"
    with progress.step("Ask the tables what the owner would ask"):
        width = {"COLUMNS": str(progress.console.width)} if progress.console.is_terminal else {}
        for words in (("fleet", "status", short(run.fleet_file)), ("gateways", "--trouble")):
            typed = (*words, "--warehouse", short(run.folder.warehouse))
            _, said = await _owner(run, *typed, env={**os.environ, **width})
            run.shown.append(((short(COMMANDS / "sluice-cloud"), *typed), said))
    with progress.step("Stop the ingest job, which finishes its batch first"):
        await run.children.end(ingest, INGEST_STOP_S_MAX)


async def _start_gateways(run: FleetRun) -> None:
    deb_signing.make_key(run.key)
    public_key = deb_signing.public_key(run.key)
    for box in run.boxes:
        box.set_up(run.cloud.broker.bootstrap, run.web, public_key)
        run.services[box] = service = box.service()
        service.start()
    until_s = time.monotonic() + START_S_MAX
    while starting := [box for box, service in run.services.items() if not service.is_ready]:
        if time.monotonic() > until_s:
            words = f"{len(starting)} of {len(run.boxes)} gateways did not start within {span(START_S_MAX)}"
            raise DemoError(words, FEWER, starting[0].log)
        await asyncio.sleep(0.2)


def _start_sensors(run: FleetRun) -> Child:
    ledgers = run.folder.root / "ledgers"
    ledgers.mkdir()
    return run.children.start(
        "sensors",
        (*_python("demo.fleet_sensors"), str(SENSORS), ledgers, *(str(box.port) for box in run.boxes)),
        "See what the sensors say.",
        output=run.folder.logs / "sensors.jsonl",
    )


# -- the owner of the fleet ---------------------------------------------------------------------------


async def _roll_out(run: FleetRun, what: str, change: Change) -> None:
    """Roll a change out as an owner does who raises the share as long as the gateways are well."""
    roll_out = RollOut(change)
    run.roll_outs.append(roll_out)
    serial = load(run.fleet_file).serial + 1 if run.fleet_file.exists() else 1
    run.fleet_file.write_text(
        f"""\
serial = {serial}

[[groups]]
name = "sites"
gateways = ["*/gateway"]
share = {FIRST_SHARE}

[groups.settings.{change.section}]
{change.setting}
"""
    )
    while True:
        fleet = load(run.fleet_file)
        share = fleet.groups[0].share
        with run.progress.step(
            f"{what} ({change.setting}), {share} per cent: each gateway looks at the folder"
        ) as step:
            await _publish(run)
            looks = [asyncio.create_task(_look(run, box)) for box in run.boxes]
            step.state = partial(_looks_in_words, run, looks)
            try:
                await asyncio.gather(*looks)
            finally:
                for look in looks:
                    look.cancel()
            step.state = lambda: "the tables learn what became of it"
            roll_out.steps.append(Step(share, await _told(run)))
            step.result = in_words(roll_out.last.standings)
        if not await _raise_share(run, roll_out, fleet):
            return


async def _raise_share(run: FleetRun, roll_out: RollOut, before: Fleet) -> bool:
    """Raise the share. Returns whether there is a next step: not if all have the change, or if it has stopped.

    Raises:
        DemoError: the command failed, or waits for a gateway for STANDSTILL_S_MAX.
    """
    words = ("fleet", "raise", short(run.fleet_file), "--warehouse", run.folder.warehouse, "--by")
    until_s = time.monotonic() + STANDSTILL_S_MAX
    while True:
        code, said = await _owner(run, *words, str(run.settings.step))
        if code == 1:
            roll_out.has_stopped, roll_out.refusal = True, said
        for line in said.splitlines():
            run.progress.note(f"sluice-cloud fleet raise: {line}")
        if code > 1 or time.monotonic() > until_s:
            raise DemoError(f"sluice-cloud fleet raise failed: {said}", INSTALL)
        if code or before.groups[0].share == WHOLE:
            return False
        if load(run.fleet_file).serial != before.serial:
            return True
        await asyncio.sleep(TABLES_LOOK_S)


async def _publish(run: FleetRun) -> None:
    """Sign the file, and put it into the folder."""
    code, said = await _owner(run, "fleet", "sign", run.fleet_file, run.key)
    if code:
        raise DemoError(f"sluice-cloud fleet sign failed: {said}", INSTALL)
    for name in (NAME, f"{NAME}.sig"):
        shutil.copyfile(run.fleet_file.with_name(name), run.folder.root / "web" / name)


async def _told(run: FleetRun) -> Mapping[str, int]:
    """Count gateways by their standing to the file. Wait until the tables know the end of each.

    Raises:
        DemoError: nothing changed there for STANDSTILL_S_MAX.
    """
    loop = asyncio.get_running_loop()
    standings: Mapping[str, int] = {}
    changed_s = loop.time()
    while standings.keys() - ENDED or sum(standings.values()) < len(run.boxes):
        await asyncio.sleep(TABLES_LOOK_S)
        _, said = await _owner(run, "fleet", "status", run.fleet_file, "--warehouse", run.folder.warehouse, *ALL)
        now = dict(Counter(json.loads(line)["standing"] for line in said.splitlines() if line.startswith("{")))
        if now != standings:
            standings, changed_s = now, loop.time()
        elif loop.time() - changed_s > STANDSTILL_S_MAX:
            raise DemoError(
                f"the tables do not learn how the gateways stand to the file: {in_words(standings)}",
                "See ingest.log, and gateway.log of the gateways.",
            )
    return standings


async def _owner(run: FleetRun, *words: str | Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run `sluice-cloud` to its end, and return its exit code and what it said."""
    run.commands += 1
    child = run.children.start(f"owner-{run.commands}", (COMMANDS / "sluice-cloud", *words), INSTALL, env=env)
    code = await run.children.finish(child, LOOK_S_MAX)
    if code is None:
        raise DemoError(f"sluice-cloud {words[0]} did not end within {LOOK_S_MAX:.0f} s", INSTALL, child.log)
    said = child.log.read_text()
    child.log.unlink()
    return code, said.rstrip()


def short(path: Path) -> str:
    """A path as a person types it who is here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _looks_in_words(run: FleetRun, looks: Sequence[asyncio.Task[None]]) -> str:
    on_trial = sum(box.report.trial is not None for box in run.boxes)
    return f"{sum(look.done() for look in looks)} of {len(looks)} are through, {on_trial} have the change on trial"


def in_words(standings: Mapping[str, int]) -> str:
    """Say how many gateways stand how to the file."""
    return ", ".join(f"{count} {standing}" for standing, count in sorted(standings.items())) or "nothing is known yet"


# -- the boxes ----------------------------------------------------------------------------------------


async def _look(run: FleetRun, box: Box) -> None:
    """Have a box look at the folder, as its timer does. With `kill`, some looks and some daemons are killed."""
    is_killed = run.settings.kill and random.random() < KILLED_SHARE  # noqa: S311
    await asyncio.sleep(random.uniform(0, JITTER_S * len(run.boxes)))  # noqa: S311
    while True:
        child = run.children.start(f"look-{box.folder.name}", box.command("fleet", "pull"), "See what it says.")
        child.expected = False
        if is_killed and await _killed(run, box, child):
            is_killed = False
            continue
        if await run.children.finish(child, LOOK_S_MAX + 2 * run.settings.trial_s) is None:
            raise DemoError(f"{box.name} does not come to an end with its look", child.advice, child.log)
        if box.report.trouble:
            raise DemoError(f"{box.name} cannot look at the folder: {box.report.trouble}", child.advice, child.log)
        return


async def _killed(run: FleetRun, box: Box, look: Child) -> bool:
    """End a look, or the daemon of a change on trial, by `kill -9` at some moment. Returns whether the look is dead."""
    while box.report.trial is None and look.process.poll() is None and random.random() > HASTE:  # noqa: S311, ASYNC110
        await asyncio.sleep(0.05)
    on_trial = box.report.trial is not None
    if on_trial:
        await asyncio.sleep(random.uniform(0, FED_S))  # noqa: S311
        service = run.services[box]
        # A service whose start fails is put back at once, and killing it then would look like that.
        if service.is_ready and random.random() < DAEMONS_SHARE:  # noqa: S311
            run.killed["daemons on trial"] += 1
            service.kill()
            return False
    if look.process.poll() is not None:
        return False
    run.killed["looks on trial" if on_trial else "looks before a trial"] += 1
    # As a power cut, it ends the child too that the look may have.
    child_process.kill_session(look.process)
    return True


async def _watch(run: FleetRun) -> None:
    """Look once a second whether all programs are there, and renew the figures."""
    sensors = JsonLines(run.folder.logs / "sensors.jsonl")
    figures = run.progress.figures
    while True:
        run.children.check()
        for box, service in run.services.items():
            if service.is_over:
                raise DemoError(f"the service of {box.name} has ended", "See what the gateway says.", box.log)
        answered = await run.cloud.look()
        for line in sensors.new():
            figures.sensors, figures.acknowledged = number(line["sensors"]), number(line["acknowledged"])
        await asyncio.to_thread(_look_at_boxes, run)
        figures.gateway = f"{sum(service.is_ready for service in run.services.values())} of {len(run.boxes)} are up"
        figures.uplink = f"{run.reached} of {len(run.boxes)} are up"
        run.cloud.looks += answered
        await asyncio.sleep(WATCH_INTERVAL_S)


def _look_at_boxes(run: FleetRun) -> None:
    """Renew what waits in the buffers, and how many gateways reach Kafka."""
    statuses = [status for box in run.boxes if (status := buffer_status(box.buffer)) is not None]
    run.buffered = run.progress.figures.buffered = sum(status.rows for status in statuses)
    oldest_us = [status.oldest_wall_us for status in statuses if status.oldest_wall_us is not None]
    run.progress.figures.oldest_s = (now_us() - min(oldest_us)) / 1e6 if oldest_us else None
    run.reached = sum(_is_up(box) for box in run.boxes)


def _is_up(box: Box) -> bool:
    try:
        return bool(control.call(control.socket_path(box.buffer), "state")["uplink"]["up"])
    except ControlError:
        return False


def _python(module: str) -> tuple[str, ...]:
    return (str(COMMANDS / "python"), "-m", module)
