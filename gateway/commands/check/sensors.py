"""Checks what happened to sensors' input: which input was quarantined, and which log-ins were refused."""

from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from gateway.buffer.status import read_quarantine
from gateway.commands.check.finding import Finding, remark, well
from gateway.daemon import control
from gateway.health.conditions import log_in_refused, quarantined
from gateway.host.terminal_text import counted
from gateway.intake.routes import BAD_NAME, LONG_NAME, NO_ROUTE, taken_words
from gateway.listener.refusals import LOG_IN_REASONS
from gateway.reading import BufferFileError
from gateway.record_contract import NAME_RULE
from gateway.settings import Settings

QUARANTINE = "quarantine"
LOG_INS = "log-ins"


def check_sensors(settings: Settings) -> Iterator[Finding]:
    """Check the quarantine, and ask the gateway about log-ins if it runs."""
    # The check of the buffer reports a file that is damaged or missing.
    with suppress(BufferFileError):
        yield _quarantine(read_quarantine(settings.buffer.path), settings)
    if settings.mqtt_listener is None:
        return
    # The check of the listener reports a gateway that does not answer.
    state = control.state_of(settings.buffer.path)
    if "log_ins_refused" in state:
        tls = settings.mqtt_listener.tls
        yield _log_ins(state, certified=tls is not None and tls.client_ca is not None)


def _quarantine(reasons: dict[str, int], settings: Settings) -> Finding:
    found = next(quarantined(reasons), None)
    if found is None:
        return well(QUARANTINE, "empty: no input is kept there")
    most = max(reasons, key=lambda reason: (reasons[reason], reason))
    rule = f" A name has {NAME_RULE}." if most in {BAD_NAME, LONG_NAME} else ""
    taken = f" For {NO_ROUTE}: {taken_words(settings.routes)}." if most == NO_ROUTE else rule
    return remark(found.code, QUARANTINE, found.line + taken)


def _log_ins(state: dict[str, Any], *, certified: bool) -> Finding:
    """Report refused log-ins of sensors that have not logged in since. `certified`: clients need a certificate."""
    # `sluice check` has no certificate, so its own connection may be among the refused.
    late = [each for each in state["log_ins_refused"] if not (certified and _is_of_this_box(each))]
    if not late:
        return well(LOG_INS, "none was refused, or the sensor has logged in since")
    counts = state.get("mqtt_listener", {})
    count = max(len(late), sum(counts.get(reason, 0) for reason in LOG_IN_REASONS))
    last = log_in_refused(late[0])
    return remark(last.code, LOG_INS, f"{counted(count, 'log-in')} refused since the start. The last: {last.line}")


def _is_of_this_box(refused: dict[str, Any]) -> bool:
    if refused["user"] is not None:
        return False
    with suppress(ValueError):
        return ip_address(refused["address"].strip("[]")).is_loopback
    return False
