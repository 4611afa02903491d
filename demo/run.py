"""Runs the demo in the order in which it happens: Kafka, cloud, gateway, sensors, outage, drain."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from demo import kafka_broker
from demo.audit import Ledger, read_ledgers
from demo.children import COMMANDS, INSTALL, Child, Children, DemoError
from demo.chronicle import Chronicle, Sample
from demo.cloud_side import CloudSide, JsonLines
from demo.demo_settings import DemoSettings
from demo.gateway_config import render_gateway_config
from demo.kafka_broker import HOST, OwnBroker, free_ports
from demo.kafka_ends import KafkaEnds
from demo.progress import Progress
from demo.uplink import Uplink
from gateway.buffer.status import BufferStatus, read_status
from gateway.buffer.wear import written_bytes
from gateway.reading import BufferFileError
from sluice_sim import avr
from sluice_sim.avr_board import led_is_on
from sluice_sim.avr_faults import Build

WATCH_INTERVAL_S = 0.5
BOARD_NAMES: Mapping[Build, str] = {"serial": "board-", "mqtt": "wifi-"}
KILLED_FOR_S = 3.0
"""Seconds for which the gateway stays dead after `kill -9`."""
SAMPLE_INTERVAL_MS = 1_000
LEDGER_INTERVAL_S = 1.0
"""Seconds between two looks at the boards' ledgers. A board writes its ledger twice as often."""
BOARDS_SETTLE_LOOKS_MAX = 15
"""Looks at the ledgers before the boards are switched off. What a board still holds stays with it, unacknowledged."""

GATEWAY_START_S_MAX = 30.0
SENSORS_STOP_S_MAX = 40.0
GATEWAY_STOP_S_MAX = 20.0
FEWER = "On a slow machine try fewer sensors: DEMO_SENSORS=50."
INGEST_STOP_S_MAX = 60.0
COMMAND_S_MAX = 120.0
"""Seconds that a command to a board may take, with the start of the program that sends it."""
EXPORT_S_MAX = 180.0


@dataclass(frozen=True, slots=True)
class Folder:
    """Folder of the run's files."""

    root: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def buffer(self) -> Path:
        return self.root / "buffer.db"

    @property
    def config(self) -> Path:
        return self.root / "gateway.toml"

    @property
    def warehouse(self) -> Path:
        return self.root / "warehouse"

    @property
    def boards(self) -> Path:
        return self.root / "avr"

    @property
    def serial_ports(self) -> str:
        """Glob of all serial ports; board names end in a digit.

        The runner makes each link under another name, `tty-….new`, and renames it: that name is nobody's port.
        """
        return f"{self.boards}/tty-*[0-9]"

    @property
    def fleet_ledger(self) -> Path:
        return self.root / "fleet.jsonl"

    @property
    def fleet_samples(self) -> Path:
        return self.root / "fleet.samples"

    @property
    def table(self) -> Path:
        return self.root / "readings.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def audit(self) -> Path:
        return self.root / "audit.txt"

    @property
    def report(self) -> Path:
        return self.root / "report.html"


@dataclass(slots=True)
class Sensors:
    """The programs that measure."""

    boards: list[Child]
    fleet: Child | None


@dataclass(slots=True)
class Run:
    """State that the steps of a run share."""

    settings: DemoSettings
    folder: Folder
    progress: Progress
    children: Children
    uplink: Uplink
    cloud: CloudSide
    mqtt_port: int
    chronicle: Chronicle = field(default_factory=Chronicle)
    buffered: int | None = None
    gateway: Child | None = None


@asynccontextmanager
async def measured_run(settings: DemoSettings, folder: Folder, progress: Progress) -> AsyncIterator[Run]:
    """Run everything up to the point where all that was measured should be in the table.

    Within the `async with` only Kafka still runs, for the audit. Leaving it, or any failure, stops all programs.

    Raises:
        DemoError, BrokerError: a step failed; in an ExceptionGroup if a program ended by itself.
    """
    async with Uplink() as uplink, Children(folder.logs) as children:
        with progress.step("Start Kafka, one real broker, on loopback") as step:
            broker = await start_kafka(folder, children, uplink)
            step.result = f"{broker.bootstrap}; the gateway reaches it through a line that can be cut"
        progress.figures.uplink = "up"
        async with KafkaEnds(broker.bootstrap) as kafka:
            cloud = CloudSide(broker, kafka, folder.warehouse, folder.logs, progress.figures, FEWER)
            run = Run(settings, folder, progress, children, uplink, cloud, mqtt_port=free_ports(1)[0])
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(run), name="watch")
                await _measure(run)
                watch.cancel()
        yield run


async def _measure(run: Run) -> None:
    """Run from the start of the cloud side to the last reading in its table."""
    settings, progress, chronicle = run.settings, run.progress, run.chronicle
    with progress.step("Start the cloud side: PySpark reads Kafka and writes Delta tables") as step:
        ingest = run.cloud.start_ingest(run.children)
        step.result = "its JVM takes a while, the others need not wait for it"
    with progress.step("Start the gateway, `sluice run`") as step:
        await _start_gateway(run)
        step.result = f"MQTT on port {run.mqtt_port}, buffer in {run.folder.buffer}"
    sensors = await _start_sensors(run)

    chronicle.sampling_from_us = now_us()
    with progress.step("Measure with the uplink up", lasts_s=settings.before_s) as step:
        await asyncio.sleep(settings.before_s)
        step.result = "readings go from the sensors through the buffer to Kafka"
    if sensors.boards:
        with progress.step(f"Command {sensors.boards[0].name} from the cloud: switch your LED on") as step:
            await _switch_on(run, sensors.boards[0].name)
            step.result = "acknowledged by the board, and its LED is on: sluice-cloud command --wait"
    with progress.step("OUTAGE: the path to Kafka is cut, the sensors go on", lasts_s=settings.outage_seconds) as step:
        await _outage(run)
        step.result = f"{run.buffered or 0:,} readings wait in the buffer, acknowledged and on disk"
    with progress.step("The path is back, the backlog drains, the sensors go on", lasts_s=settings.before_s) as step:
        await asyncio.sleep(settings.before_s)
        step.result = f"{run.buffered or 0:,} wait now"
    with progress.step("Sensors stop measuring and wait for their last acknowledgements"):
        chronicle.sampling_until_us = now_us()
        await _stop_sensors(run, sensors)
    with progress.step("Wait until the buffer is empty"):
        await run.cloud.until(
            lambda: run.buffered == 0, lambda: run.buffered, "the buffer does not become empty", run.gateway
        )
        chronicle.drained_us = now_us()
    with progress.step("Wait until the tables hold what Kafka holds") as step:
        step.state = run.cloud.in_words
        await run.cloud.until_ingested(ingest)
        step.result = f"{sum(run.cloud.ends.values()):,} records"
    with progress.step("Stop the gateway and the ingest job, which finishes its batch first"):
        await _stop_gateway_and_ingest(run, ingest)


async def start_kafka(folder: Folder, children: Children, uplink: Uplink | None = None) -> OwnBroker:
    """Start Kafka, which gateways reach through `uplink` if that is given. Raises BrokerError."""
    files = await asyncio.to_thread(
        kafka_broker.format_storage,
        folder.root / "kafka",
        gateway_port=None if uplink is None else uplink.port,
        log=folder.logs / "kafka.log",
    )
    broker = kafka_broker.launch_broker(files)
    children.adopt(Child("kafka", broker.process, broker.log, "See what the broker says."))
    await asyncio.to_thread(kafka_broker.wait_until_ready, broker)
    if uplink is not None:
        assert broker.gateway_listener_port is not None  # noqa: S101 - asked for above
        uplink.open(broker.gateway_listener_port)
    return broker


async def _start_gateway(run: Run) -> None:
    run.folder.config.write_text(
        render_gateway_config(
            buffer=run.folder.buffer,
            mqtt_port=run.mqtt_port,
            serial_ports=run.folder.serial_ports,
            bootstrap=f"{HOST}:{run.uplink.port}",
        )
    )
    await _launch_gateway(run)


async def _launch_gateway(run: Run) -> None:
    """Start `sluice run` and wait until its MQTT listener accepts."""
    run.gateway = run.children.start(
        "gateway", (COMMANDS / "sluice", "run", "--config", run.folder.config), "See what the gateway says."
    )
    deadline = time.monotonic() + GATEWAY_START_S_MAX
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, run.mqtt_port)
        except OSError:
            if time.monotonic() > deadline:
                words = f"the gateway did not listen on port {run.mqtt_port} within {GATEWAY_START_S_MAX:.0f} s"
                raise DemoError(words, run.gateway.advice, run.gateway.log) from None
            await asyncio.sleep(0.1)
        else:
            writer.close()
            await writer.wait_closed()
            break
    run.progress.figures.gateway = "up"


async def _start_sensors(run: Run) -> Sensors:
    settings = run.settings
    sensors = Sensors([], None)
    run.folder.boards.mkdir()
    if settings.serial_sensors:
        with run.progress.step(f"Switch on {settings.serial_sensors} AVR boards on serial lines") as step:
            size = await asyncio.to_thread(build_firmware, "serial")
            sensors.boards += [_start_board(run, "serial", number + 1) for number in range(settings.serial_sensors)]
            step.result = f"real firmware, executed; {size}"
    if settings.wifi_sensors:
        with run.progress.step(f"Switch on {settings.wifi_sensors} AVR boards that speak MQTT by modem") as step:
            size = await asyncio.to_thread(build_firmware, "mqtt")
            sensors.boards += [_start_board(run, "mqtt", number + 1) for number in range(settings.wifi_sensors)]
            step.result = f"real firmware, executed; {size}"
    if settings.sensors:
        with run.progress.step(f"Switch on a fleet of {settings.sensors} MQTT sensors"):
            sensors.fleet = _start_fleet(run)
    return sensors


def build_firmware(build: Build) -> str:
    """Build a firmware and its runner if they are out of date. Returns the use of flash and RAM, in words.

    Raises:
        DemoError: it cannot be built.
    """
    try:
        avr.build_firmware(build)
    except avr.SimulationError as error:
        raise DemoError(
            str(error),
            "Run `make demo`, which installs the compiler and simavr, or leave the boards out: DEMO_SERIAL_SENSORS=0 "
            "DEMO_WIFI_SENSORS=0.",
        ) from error
    return (avr.BUILD / f"sensor-{build}.size").read_text().strip()


def _start_board(run: Run, build: Build, number: int) -> Child:
    """Switch on one board. Its EEPROM, ledger and serial port are files in `folder.boards`."""
    device, folder = f"{BOARD_NAMES[build]}{number}", run.folder.boards
    network = avr.Network(port=run.mqtt_port) if build == "mqtt" else None
    avr.provision(folder / f"{device}.eeprom", device, SAMPLE_INTERVAL_MS, network=network)
    wiring = avr.Wiring(modem=build == "mqtt")
    # Each board has its own, which chooses the temperatures.
    seed = number + (100 if wiring.modem else 0)
    command = avr.board_command(folder, device, seed, avr.FIRMWARES[build], wiring)
    return run.children.start(device, command, INSTALL)


async def _switch_on(run: Run, device: str) -> None:
    """Switch on the LED of a board by a command through Kafka.

    Raises:
        DemoError: the command was not delivered, or the LED stays off.
    """
    words = ("command", device, "led=1", "--gateway", "demo-gateway", "--namespace", "demo", "--wait")
    sender = run.children.start(
        "command",
        (COMMANDS / "sluice-cloud", *words, "--bootstrap", run.cloud.broker.bootstrap),
        "See what the command says, and gateway.log.",
    )
    await run.children.finish_well(sender, COMMAND_S_MAX)
    await run.cloud.until(
        lambda: led_is_on(run.folder.boards / f"{device}.faults"),
        lambda: None,
        f"{device} has acknowledged a command, and its LED stays off",
        run.gateway,
    )


def board_kind(device: str) -> str:
    """Describe a board in words."""
    by_modem = device.startswith(BOARD_NAMES["mqtt"])
    return "MQTT by modem, ATmega328P" if by_modem else "serial line, ATmega328P"


def _start_fleet(run: Run) -> Child:
    settings = run.settings
    command = (sys.executable, "-m", "sluice_sim", "fleet", "--port", str(run.mqtt_port))
    size = ("--sensors", str(settings.sensors), "--interval-ms", str(SAMPLE_INTERVAL_MS))
    return run.children.start(
        "fleet",
        (*command, *size, "--ledger", run.folder.fleet_ledger, "--samples", run.folder.fleet_samples, "--json"),
        "See what the fleet says.",
        output=run.folder.logs / "fleet.jsonl",
    )


async def _outage(run: Run) -> None:
    """Cut the uplink for the time that was set; with `kill`, end the daemon meanwhile and start it again."""
    settings, chronicle, figures = run.settings, run.chronicle, run.progress.figures
    ends_s = time.monotonic() + settings.outage_seconds
    await run.uplink.cut()
    chronicle.cut_us = now_us()
    figures.uplink = "cut"
    if settings.kill:
        # Early enough that the restarted daemon takes readings in with the uplink still cut.
        await asyncio.sleep(settings.outage_seconds / 3)
        await _kill_gateway(run)
        await asyncio.sleep(KILLED_FOR_S)
        await _launch_gateway(run)
        chronicle.restarted_us = now_us()
        run.progress.note("the gateway runs again and has what it had acknowledged")
    await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
    await run.uplink.restore()
    chronicle.restored_us = now_us()
    figures.uplink = "up"


async def _kill_gateway(run: Run) -> None:
    assert run.gateway is not None  # noqa: S101 - it was started before the outage
    run.gateway.expected = False
    run.gateway.process.send_signal(signal.SIGKILL)
    run.gateway.process.wait()
    run.chronicle.killed_us = now_us()
    run.progress.figures.gateway = "killed"
    run.progress.note(
        f"kill -9 {run.gateway.process.pid}: the gateway is dead, the sensors keep unacknowledged readings"
    )


async def _stop_sensors(run: Run, sensors: Sensors) -> None:
    """Stop sampling, let outstanding readings be acknowledged, then switch off."""
    for board in sensors.boards:
        # This is the jumper on the board that inhibits sampling.
        board.process.send_signal(signal.SIGUSR1)
    stopping = []
    if sensors.fleet is not None:
        stopping.append(sensors.fleet)
        sensors.fleet.expected = False
        sensors.fleet.process.terminate()
    for _ in range(BOARDS_SETTLE_LOOKS_MAX):
        await asyncio.sleep(LEDGER_INTERVAL_S)
        # Of each board only the last boot counts: what an earlier one held in RAM went with its reset.
        last = {ledger.device: ledger for ledger in board_ledgers(run.folder)}
        if not any(ledger.waiting for ledger in last.values()):
            break
    for board in sensors.boards:
        board.expected = False
        board.process.terminate()
        stopping.append(board)
    for child in stopping:
        await run.children.finish_well(child, SENSORS_STOP_S_MAX)


async def _stop_gateway_and_ingest(run: Run, ingest: Child) -> None:
    """Stop both. If one crashes while it stops, the demo fails, although its work is done."""
    assert run.gateway is not None  # noqa: S101 - it was started before the sensors
    await run.children.end(run.gateway, GATEWAY_STOP_S_MAX)
    run.progress.figures.gateway = "stopped"
    await run.children.end(ingest, INGEST_STOP_S_MAX)


def board_ledgers(folder: Folder) -> list[Ledger]:
    """Read the ledgers of the boards' firmware, one for each board and boot; half a second old at most."""
    return [ledger for path in sorted(folder.boards.glob("*.ledger")) for ledger in read_ledgers(path)]


async def _watch(run: Run) -> None:
    """Look twice a second whether all programs are there, and renew the figures."""
    fleet = JsonLines(run.folder.logs / "fleet.jsonl")
    figures = run.progress.figures
    fleet_size = acknowledged = 0
    while True:
        run.children.check()
        answered = await run.cloud.look()
        for line in fleet.new():
            fleet_size, acknowledged = number(line["sensors"]), number(line["acknowledged"])
        boards = board_ledgers(run.folder)
        figures.sensors = fleet_size + len({ledger.device for ledger in boards})
        figures.acknowledged = acknowledged + sum(ledger.acknowledged_count for ledger in boards)
        status = await asyncio.to_thread(buffer_status, run.folder.buffer)
        run.buffered = None if status is None else status.rows
        oldest_us = None if status is None else status.oldest_wall_us
        figures.buffered = run.buffered
        figures.oldest_s = None if oldest_us is None else (now_us() - oldest_us) / 1e6
        if run.gateway is not None and (written := written_bytes(run.gateway.process.pid)):
            run.chronicle.written[run.gateway.process.pid] = written
        run.chronicle.samples.append(Sample(now_us(), run.buffered, figures.in_kafka, figures.in_table))
        run.cloud.looks += answered
        await asyncio.sleep(WATCH_INTERVAL_S)


def buffer_status(path: Path) -> BufferStatus | None:
    """Read the buffer's status; None while there is no file, or while it is being made."""
    try:
        return read_status(path)
    except BufferFileError:
        return None


def number(value: object) -> int:
    """Take a number of a program's JSON."""
    if not isinstance(value, int):
        raise TypeError(f"a number was expected, not {value!r}")
    return value


def now_us() -> int:
    """Microseconds since 1970 by the wall clock, which the gateway trusts in the demo."""
    return time.time_ns() // 1_000
