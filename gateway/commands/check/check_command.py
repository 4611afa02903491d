"""The command `sluice check`: prints the findings about every link from the settings to Kafka and back."""

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
@click.option("--create-topics", is_flag=True, help="Create missing Kafka topics, with LogAppendTime.")
@json_option
def check(config: Path, create_topics: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Check every link of the chain in order. Say what is wrong, and what to do.

    It checks the settings, what they name on this box, the way to Kafka step by step, and Kafka's topics. It tells of
    quarantined input and of refused log-ins. It changes nothing on this box, apart from a test reading.

    If the gateway runs, the test reading goes in at the front door, is acknowledged, and is read back from Kafka. Its
    record is on kafka.events_topic, and no table takes it for a reading. If the gateway is a service and does not run,
    that fails; without a service it is a warning.

    Run by root, it checks as the user that sluice runs as, since root may do more than that user. Topics that routes
    make from variables (device-{stream}) are checked once they exist.

    Each line begins with ok, warn, FAIL, or - for a part that could not be checked. The exit code is 1 only if a part
    fails. With --json each finding has its link (configuration, disk, clock, serial, listener, broker, sensors, dns,
    tcp, tls, sasl, kafka, topics, end-to-end) and its result (pass, warning, fail, skipped).
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
        # Print each line at once: it may take a while to find that Kafka is missing.
        for finding in check_chain(settings, config, create=create_topics):
            if not as_json:
                if not findings or finding.link != findings[-1].link:
                    say(LINKS[finding.link], bold=len(LINKS[finding.link]))
                say(_line(finding))
            findings.append(finding)
    if as_json:
        say_json([finding_json(finding) for finding in findings])
    else:
        say(_sum(findings))
    sys.exit(0 if all(finding.ok for finding in findings) else FINDING)


def finding_json(finding: "Finding") -> dict[str, object]:
    """Finding as JSON for programs."""
    return {"link": finding.link, "result": finding.result, **msgspec.to_builtins(finding)}


def _line(finding: "Finding") -> str:
    words = f"{escaped(finding.subject)}: {escaped(finding.words)}"
    return hanging(f"  {_JUDGEMENTS[finding.result]}  {as_typed(words)}", INDENT)


def _sum(findings: "list[Finding]") -> str:
    """Sum all findings up in one line."""
    failed = sum(not finding.ok for finding in findings)
    warned = sum(finding.result == "warning" for finding in findings)
    warnings = f", {counted(warned, 'warning')}" if warned else ""
    if failed:
        return f"{counted(failed, 'finding')} {'fails' if failed == 1 else 'fail'} (FAIL){warnings}"
    return f"nothing fails{warnings}" if warned else "all is well"
