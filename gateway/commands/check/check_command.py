"""`sluice check`: every link from the settings to Kafka and back, with what to do."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gateway.commands.options import FINDING, as_typed, config_option, json_option, load_settings
from gateway.host.terminal import say, say_json
from gateway.host.terminal_text import counted, escaped, hanging

if TYPE_CHECKING:
    from gateway.commands.check.finding import Finding

INDENT = 8
_JUDGEMENTS = {"pass": "ok  ", "warning": "warn", "fail": "FAIL", "skipped": "-   "}


@click.command(
    short_help="Is all well, from settings and disk to Kafka and back?",
    epilog="Example: sluice check --config gateway.toml",
)
@config_option
@click.option("--create-topics", is_flag=True, help="Create the topics that are missing, with LogAppendTime.")
@json_option
def check(config: Path, create_topics: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Check every link of the chain, in its order; say what is wrong and what to do.

    The settings and what they name on this box (nothing is changed there), the way to Kafka step by step, its topics,
    and, where the gateway runs, a test reading: in at the front door, acknowledged, and its record read back from
    Kafka (on kafka.events_topic; no table takes it for a reading). Run by root it looks at all as the user that sluice
    runs as, for what root may that one may not. Topics that routes make from variables (device-{stream}) are judged
    once they exist.

    Of what sensors send it tells what went to the quarantine, and log-ins that were refused. A gateway of the service
    that does not run fails; of one without a service that is a warning.

    Each line begins with ok, warn, FAIL, or - for what could not be looked at; only what fails makes the exit code 1.
    With --json each has its link (configuration, disk, clock, serial, listener, broker, sensors, dns, tcp, tls, sasl,
    kafka, topics, end-to-end) and its result (pass, warning, fail, skipped).
    """
    from gateway.commands.check.chain import LINKS, check_chain  # noqa: PLC0415
    from gateway.host import logs  # noqa: PLC0415 - `sluice --help` needs none of it
    from gateway.host.name_lookup import bound_look_ups  # noqa: PLC0415
    from gateway.host.service_user import as_service  # noqa: PLC0415

    settings = load_settings(config)
    logs.quieten_libraries()
    bound_look_ups()
    findings: list[Finding] = []
    with as_service(config, settings.buffer.path):
        # Each line at once: Kafka may take its time to be found missing.
        for finding in check_chain(settings, config, create=create_topics):
            if not as_json:
                if not findings or finding.link != findings[-1].link:
                    say(LINKS[finding.link], bold=len(LINKS[finding.link]))
                say(_line(finding))
            findings.append(finding)
    if as_json:
        say_json([told(finding) for finding in findings])
    else:
        say(_sum(findings))
    sys.exit(0 if all(finding.ok for finding in findings) else FINDING)


def told(finding: "Finding") -> dict[str, object]:
    """A finding for programs."""
    return {"link": finding.link, "result": finding.result, **msgspec.to_builtins(finding)}


def _line(finding: "Finding") -> str:
    words = f"{escaped(finding.subject)}: {escaped(finding.words)}"
    return hanging(f"  {_JUDGEMENTS[finding.result]}  {as_typed(words)}", INDENT)


def _sum(findings: "list[Finding]") -> str:
    """All of it in a line."""
    failed = sum(not finding.ok for finding in findings)
    warned = sum(finding.result == "warning" for finding in findings)
    warnings = f", {counted(warned, 'warning')}" if warned else ""
    if failed:
        return f"{counted(failed, 'finding')} {'fails' if failed == 1 else 'fail'} (FAIL){warnings}"
    return f"nothing fails{warnings}" if warned else "all is well"
