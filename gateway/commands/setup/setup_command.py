"""`sluice setup`: asks for answers, or reads them from a file, checks them, and writes settings and secrets."""

import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import click

from gateway.commands.handout import handout
from gateway.commands.options import FINDING, config_option
from gateway.commands.setup import hardware
from gateway.commands.setup.answers import EXAMPLE, Given, load
from gateway.commands.setup.new_settings import Existing, read_existing
from gateway.commands.setup.plan import Plan, carry_out, plan, store_shown, take_back_shown, without_shown
from gateway.commands.setup.write import SetupWriteError, not_interrupted, writable_trouble
from gateway.host import service
from gateway.host.terminal import say
from gateway.host.terminal_text import escaped, hanging, span
from gateway.listener.credentials import CredentialsError, Made
from gateway.settings import DEFAULT_CONFIG, ListenerSettings
from gateway.toml_files.mistakes import ConfigError, where

USAGE = 2
"""Exit code if nothing was written because the answers will not do."""
_NOTHING = "nothing was written"


@click.command(
    short_help="Ask for the settings, check them, and write them.",
    epilog="Example: sluice setup --answers barn-1.toml",
)
@config_option
@click.option(
    "--answers",
    "answers_path",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Take the answers from this file, and secrets from sluice-secrets.toml beside it. Ask nothing.",
)
@click.option("--example-answers", is_flag=True, help="Print an example of such a file, with comments, and end.")
@click.option("--no-check", is_flag=True, help="With --answers: do not try to reach Kafka.")
def setup(config: Path, answers_path: Path | None, example_answers: bool, no_check: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Set this gateway up with at most eight questions.

    Each answer is checked at once, and you may keep an answer that fails. Nothing is written before the last answer.
    Then the settings are written, with comments, and secrets apart from them. Old settings count until the new ones are
    complete, and are kept under another name. If you run this again, it proposes the present settings. It works without
    a network and without sensors.

    The exit code is 1 if something must be corrected, such as an address of Kafka, and 2 if nothing was written.
    """
    if example_answers:
        say(EXAMPLE, nl=False)
        return
    config = config.absolute()
    # A core dump would hold passwords.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trouble = writable_trouble(config)
    if trouble is not None:
        end(trouble)
    try:
        existing = read_existing(config)
    except ConfigError as error:
        _end_with_mistakes(error, f"{_NOTHING}: correct the settings in place first, or move them away")
    if answers_path is not None:
        sys.exit(_from_file(config, existing, answers_path, check=not no_check))
    if no_check:
        raise click.UsageError("--no-check needs --answers: at a terminal you can keep an answer that fails anyway")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "this asks at a terminal, and there is none; sluice setup --answers FILE takes the answers from a file, "
            "and sluice setup --example-answers prints an example"
        )
    sys.exit(_at_a_terminal(config, existing))


def _at_a_terminal(config: Path, existing: Existing) -> int:
    from gateway.commands.setup.dialogue import QUESTIONS_MAX, Dialogue, tell  # noqa: PLC0415 - a file of answers needs none of it
    from gateway.host import logs  # noqa: PLC0415
    from gateway.host.name_lookup import bound_look_ups  # noqa: PLC0415

    logs.quieten_libraries()
    bound_look_ups()
    tell(
        f"This writes {config}, after at most {QUESTIONS_MAX} questions. Nothing is written before you answer the last "
        "one. Ctrl-C ends it at any time."
        + (" The present settings are proposed as answers." if existing.settings is not None else "")
    )
    can_start = service.is_there(config) and service.may_be_changed()
    try:
        told = Dialogue(config, existing, can_start=can_start).run()
    except (click.Abort, KeyboardInterrupt):
        say()
        end(f"stopped: {_NOTHING}")
    planned = _carried_out(Given(told.answers, Path("the answers"), {}), config, existing, told.ca)
    say()
    return _tell(planned, start=told.answers.service.start, findings=told.accepted)


def _from_file(config: Path, existing: Existing, path: Path, *, check: bool) -> int:
    try:
        given = load(path)
        planned = plan(given, config, existing, is_watched=True)
    except ConfigError as error:
        _end_with_mistakes(error, f"{_NOTHING}: correct this first")
    except CredentialsError as error:
        end(f"{error}; {_NOTHING}")
    findings = _kafka_findings(planned, given) if check else []
    _write(planned)
    return _tell(planned, start=given.answers.service.start, findings=findings)


def _kafka_findings(planned: Plan, given: Given) -> list[str]:
    """Check Kafka with the new settings, and print the result. Return failures; the settings are written anyway."""
    from gateway.commands.setup.answers import ca_text  # noqa: PLC0415
    from gateway.commands.setup.kafka_trial import IN_ANSWERS, try_settings  # noqa: PLC0415
    from gateway.host import logs  # noqa: PLC0415
    from gateway.host.name_lookup import bound_look_ups  # noqa: PLC0415

    logs.quieten_libraries()
    bound_look_ups()
    password = given.answers.secrets.kafka_password
    found = try_settings(planned.made.settings, IN_ANSWERS, password=password, ca=ca_text(given))
    for finding in found:
        if not finding.ok or finding is found[0]:
            judgement = "ok  " if finding.ok else "FAIL"
            say(hanging(f"{judgement}  {escaped(finding.subject)}: {escaped(finding.words)}", 6))
    return [f"{escaped(finding.subject)}: {escaped(finding.words)}" for finding in found if not finding.ok]


def _carried_out(given: Given, config: Path, existing: Existing, ca: bytes | None) -> Plan:
    try:
        planned = plan(given, config, existing, is_watched=True, ca=ca)
    except ConfigError as error:
        _end_with_mistakes(error, _NOTHING)
    except CredentialsError as error:
        end(f"{error}; {_NOTHING}")
    _write(planned)
    return planned


def _write(planned: Plan) -> None:
    try:
        carry_out(planned)
    except SetupWriteError as error:
        end(str(error))


def _tell(planned: Plan, *, start: bool, findings: Sequence[str]) -> int:
    """Say what was written and what to do next, and show new secrets. Return the exit code."""
    findings = [*findings, *_stored_and_shown(planned)]
    if not planned.made.settings.has_source:
        findings.append(
            f"nothing comes in, neither by MQTT nor by serial port: run {typed(planned.config, 'setup')} again, or "
            f"write [[mqtt_brokers]] for a broker of the site into {planned.config}"
        )
    say()
    started, lines = _started(planned.config, start=start)
    lines += (f"to be corrected: {words}" for words in findings)
    for line in (*lines, *_clock_lines(planned), *_next_lines(planned, started=started)):
        say(hanging(line, 4))
    return FINDING if findings or (start and not started and service.is_there(planned.config)) else 0


def _stored_and_shown(planned: Plan) -> Iterator[str]:
    """Store the secrets made here, and show them at once, because nobody can see them later.

    Gives troubles. Raises OSError if nothing can be shown; then the secrets are not stored.
    """
    told, written = "", planned
    with not_interrupted():
        try:
            store_shown(planned)
        except CredentialsError as error:
            names = " ".join(planned.shown)
            command = typed(planned.config, f"devices add {names}")
            told = f"the settings are written, but {names} have no secrets: {error}. Correct that, then: {command}"
            written = without_shown(planned)
        try:
            for line in written_lines(written):
                say(hanging(line, 4))
            secrets = list(_shown_lines(written))
            if secrets:
                say()
                say("Shown only once, because only hashes are kept:")
                for line in secrets:
                    say(f"    {line}")
        except OSError:
            take_back_shown(written)
            raise
    if told:
        yield told


def written_lines(planned: Plan) -> Iterator[str]:
    """List the files that were written, and the devices, without secrets."""
    made = planned.made
    for file in made.files:
        what = " (as it was before)" if file.path == made.kept else ""
        yield f"written: {file.path}{what}"
    if planned.digests:
        yield f"secrets of devices, as hashes: {', '.join(sorted(planned.digests))}"
    for name in planned.kept:
        yield f"{name} keeps its present secret: {typed(planned.config, f'devices rotate {name}')} makes a new one"


def typed(config: Path, command: str) -> str:
    """Spell a `sluice` command for these settings. The service's settings need sudo."""
    if config == DEFAULT_CONFIG:
        return f"sudo sluice {command}"
    return f"sluice {command} --config {shlex.quote(str(config))}"


def _shown_lines(planned: Plan) -> Iterator[str]:
    shown = dict(planned.shown)
    width = max(map(len, [*shown, "status page"]))
    if planned.page_password is not None:
        yield f"{'status page'.ljust(width)}  {planned.page_password}"
    for name, secret in shown.items():
        yield f"{name.ljust(width)}  {secret}"


def _sensor_lines(planned: Plan) -> Iterator[str]:
    """Say what to type into a sensor."""
    settings = planned.made.settings
    listener = settings.mqtt_listener
    if listener is None:
        return
    sensor = handout(settings, listener, Made("NAME", ""), operator=False)
    user = "" if listener.anonymous else ", user NAME, its password"
    told = f"host {' or '.join(sensor.hosts)}, port {sensor.port}{user}, topic {' or '.join(sensor.topics)}"
    yield f"sensors: {told}"
    if not listener.anonymous:
        yield f"for another sensor, with a QR code: {typed(planned.config, 'devices add NAME')}"


def _page_lines(planned: Plan, *, started: bool) -> Iterator[str]:
    settings = planned.made.settings
    page = settings.status_page
    if page is not None:
        # These are the same names and addresses that sensors are told.
        hosts = handout(settings, ListenerSettings(host=page.host), Made("", ""), operator=False).hosts
        told = " or ".join(f"http://{host}:{page.port}" for host in hosts)
        yield f"status page{'' if started else ', once it runs'}: {told}"


def _started(config: Path, *, start: bool) -> tuple[bool, list[str]]:
    if not service.is_there(config):
        return False, [f"start it: sluice run --config {shlex.quote(str(config))}"]
    if not start or not service.may_be_changed():
        if service.is_active(config):
            return True, ["the gateway still runs with its old settings: sudo systemctl restart sluice"]
        return False, ["start it, now and at every boot: sudo systemctl enable --now sluice"]
    try:
        service.start()
    except service.ServiceError as error:
        return False, [f"not started: {error}"]
    return True, ["the gateway was started, and starts at every boot"]


def _next_lines(planned: Plan, *, started: bool) -> Iterator[str]:
    check, status = typed(planned.config, "check"), typed(planned.config, "status")
    yield f"next: {check} checks every link of the chain; {status} shows how the gateway is"
    yield from _sensor_lines(planned)
    yield from _page_lines(planned, started=started)


def _clock_lines(planned: Plan) -> Iterator[str]:
    """Say what to do about a clock that is not synced."""
    gateway = planned.made.settings.gateway
    if gateway.clock != "kernel" or hardware.is_clock_synced(gateway):
        return
    from gateway.commands.check.clock import time_daemons  # noqa: PLC0415 - only where the clock is not synced

    found, inside = time_daemons(), hardware.virtualization()
    if found:
        todo = f"{found} runs (timedatectl shows its state)"
    elif inside.startswith("container"):
        todo = "no time daemon runs here"
    else:
        todo = "no time daemon runs (sudo apt install systemd-timesyncd)"
    wait = gateway.hold_unsynced_s
    means = f"readings wait for it, at most {span(wait)}" if wait else "the times of readings may be wrong"
    yield f"this box's clock is not synced, and {means}: {todo}"
    if inside:
        yield f'this is a {inside}: if its host keeps the clock, write clock = "system" under [gateway]'


def end(words: str) -> NoReturn:
    """Say why the command ends, and end it."""
    say(hanging(words, 4, sys.stderr), err=True)
    sys.exit(USAGE)


def _end_with_mistakes(error: ConfigError, words: str) -> NoReturn:
    for mistake in error.mistakes:
        say(hanging(f"{where(error.path, mistake.line)}: {mistake.message}", 4, sys.stderr), err=True)
    end(words)
