"""Checks the way to Kafka: name, connection, TLS and log-in of each address of `kafka.bootstrap`."""

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiokafka.errors import KafkaError
from msgspec import structs

from gateway.commands.certificate_dates import certificate_dates
from gateway.commands.check.finding import Finding, remark, skipped, well, wrong
from gateway.commands.check.kafka import WITHOUT_TLS, connected
from gateway.host.name_lookup import Address, names
from gateway.host.terminal_text import milliseconds
from gateway.kafka.link import ADDRESSES_MAX, KafkaLink
from gateway.kafka.reach import Fault, reach_words
from gateway.kafka.secret_files import KafkaFileError
from gateway.settings import KafkaSettings, Settings
from gateway.tls.certificates import SOON, validity

ADDRESSES_TOLD_MAX = 6
_LINKS = ("dns", "tcp", "tls", "sasl")
_LINK_OF = {"token": "sasl", "name": "dns", "connect": "tcp", "tls": "tls", "login": "sasl"}
"""Link of each stage of a connection. A later stage is of the link `kafka`."""
_SUBJECTS = {"dns": "name", "tcp": "connection to", "tls": "TLS with", "sasl": "log-in at"}
_CODES = {"dns": "kafka-name", "tcp": "kafka-connection", "tls": "kafka-tls", "sasl": "kafka-log-in"}
_NAMES = {"dns": "names", "tcp": "connections", "tls": "TLS", "sasl": "log-in"}


@dataclass(slots=True)
class Way:
    """Findings about the ways to Kafka, and the addresses that work."""

    findings: list[Finding]
    answering: tuple[str, ...] = ()
    """Addresses of `kafka.bootstrap` that lead to a broker that lets this gateway in."""
    why_not: str = ""
    """Reason why no address works; empty if one does."""


@dataclass(slots=True)
class _Tried:
    """One address of `kafka.bootstrap`."""

    address: str
    host: str
    findings: dict[str, Finding] = field(default_factory=dict)
    """Findings by link, for the links that were tried."""
    fault: Fault | None = None
    because: str = ""
    """Reason why the address was not tried further, if the way has no fault."""
    is_let_in: bool = False


async def check_way(settings: Settings) -> Way:
    """Try all addresses of `kafka.bootstrap` at the same time, each as far as it leads."""
    kafka = settings.kafka
    tried = await asyncio.gather(*(_try(settings, address) for address in kafka.bootstrap))
    findings = [finding for link in _LINKS for finding in _of_link(link, tried, kafka)]
    way = Way(findings, tuple(each.address for each in tried if each.is_let_in))
    if not way.answering:
        which = tried[0].address if len(tried) == 1 else "no address of kafka.bootstrap"
        way.why_not = f"{which} leads to {'no' if len(tried) == 1 else 'a'} broker that lets this gateway in, see above"
        findings += [
            structs.replace(wrong("kafka-unusable", f"Kafka at {each.address}", _told(each.fault)), link="kafka")
            for each in tried
            if each.fault is not None and each.fault.stage not in _LINK_OF
        ]
    return way


def _of_link(link: str, tried: Sequence[_Tried], kafka: KafkaSettings) -> list[Finding]:
    """Findings about one link. An address that fails is only a warning if another address leads on."""
    if link == "tls" and kafka.tls is None:
        return [structs.replace(_without_tls(kafka), link=link)]
    if link == "sasl" and kafka.sasl is None:
        return []
    findings: list[Finding] = []
    leads_on = any(each.is_let_in for each in tried)
    for each in tried:
        finding = each.findings.get(link)
        if finding is None:
            continue
        if not finding.ok and leads_on:
            finding = remark(
                "bootstrap-unreached",
                finding.subject,
                f"only other addresses of kafka.bootstrap lead to Kafka; {finding.words}",
            )
        findings.append(finding)
    if not findings:
        before = max((each for each in tried if each.fault is not None), key=lambda each: len(each.findings))
        findings.append(skipped(_NAMES[link], before.because or _before(before)))
    # A name with several ports gets one finding.
    return [structs.replace(finding, link=link) for finding in dict.fromkeys(findings)]


def _before(tried: _Tried) -> str:
    """Say what fails of an address. A failure of Kafka itself is shown further below."""
    failed = next((finding.subject for finding in tried.findings.values() if not finding.ok), None)
    return f"Kafka at {tried.address} fails, see below" if failed is None else f"{failed} fails, see above"


def _without_tls(kafka: KafkaSettings) -> Finding:
    if all(_is_on_this_box(address) for address in kafka.bootstrap):
        return well(
            "TLS", "none ([kafka.tls] is not set), and none is needed: the way to Kafka does not leave this box"
        )
    return remark("kafka-without-tls", "TLS", f"none: {WITHOUT_TLS}")


def _is_on_this_box(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in {"localhost", "::1"} or host.startswith("127.")


async def _try(settings: Settings, address: str) -> _Tried:
    kafka = settings.kafka
    host, _, told_port = address.rpartition(":")
    host, port = host.strip("[]"), int(told_port)
    tried = _Tried(address, host)
    found = await _look_up(tried, port, kafka)
    if found and await _connect(tried, port, found, kafka):
        await _open(tried, settings)
    return tried


async def _look_up(tried: _Tried, port: int, kafka: KafkaSettings) -> list[Address]:
    subject = f"{_SUBJECTS['dns']} {tried.host}"
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(kafka.connect_timeout_s):
            found = await names.addresses(tried.host, port)
    except (OSError, TimeoutError, UnicodeError) as error:
        tried.fault = reach_words(error, tried.host, port, kafka, stage="name")
        tried.findings["dns"] = wrong(_CODES["dns"], subject, _told(tried.fault))
        return []
    told = list(dict.fromkeys(str(address[3][0]) for address in found))
    if told == [tried.host]:
        tried.findings["dns"] = well(subject, "is an address: there is no name to look up")
    else:
        more = f" and {len(told) - ADDRESSES_TOLD_MAX} more" if len(told) > ADDRESSES_TOLD_MAX else ""
        addresses = f"{', '.join(told[:ADDRESSES_TOLD_MAX])}{more}"
        tried.findings["dns"] = well(subject, f"is {addresses} (looked up in {_ms(begun_s)})")
    return found


async def _connect(tried: _Tried, port: int, found: Sequence[Address], kafka: KafkaSettings) -> bool:
    """Try to connect to each address. Tell whether one takes the connection."""
    subject = f"{_SUBJECTS['tcp']} {tried.address}"
    some = found[:ADDRESSES_MAX]
    outcomes = await asyncio.gather(*(_dial(address, kafka.connect_timeout_s) for address in some))
    good, bad = [], []
    for address, outcome in zip(some, outcomes, strict=True):
        if isinstance(outcome, str):
            good.append(f"{address[3][0]} in {outcome}")
        else:
            bad.append((address, outcome))
    if not good:
        tried.fault = reach_words(bad[0][1], tried.host, port, kafka, stage="connect")
        tried.findings["tcp"] = wrong(_CODES["tcp"], subject, f"cannot be made: {_told(tried.fault)}")
        return False
    words = f"made: {', '.join(good)}"
    if bad:
        dead = ", ".join(str(address[3][0]) for address, _ in bad)
        fault = reach_words(bad[0][1], tried.host, port, kafka, stage="connect")
        tried.findings["tcp"] = remark(
            _CODES["tcp"],
            subject,
            f"{words}; but {tried.host} also leads to {dead}, which takes no connection: {_told(fault)}",
        )
    else:
        tried.findings["tcp"] = well(subject, words)
    return True


async def _dial(address: Address, timeout_s: float) -> str | Exception:
    """Connect, and return how long that took, or the error."""
    family, kind, protocol, where = address
    begun_s = time.monotonic()
    try:
        with socket.socket(family, kind, protocol) as link:
            link.setblocking(False)
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(link, where)
            return _ms(begun_s)
    except (OSError, TimeoutError) as error:
        return error


async def _open(tried: _Tried, settings: Settings) -> None:
    """Do TLS, log-in and a first request as the gateway does."""
    kafka = structs.replace(settings.kafka, bootstrap=(tried.address,))
    try:
        link = KafkaLink(kafka, certificate_dates(settings))
    except KafkaFileError as error:
        # `check_machine` has reported what is wrong with the file.
        setting = str(error).partition(" ")[0].rstrip(":")
        tried.because = f"{setting} cannot be used, see there"
        tried.fault = Fault(tried.because, "", stage="login" if "sasl" in setting else "tls")
        return
    begun_s = time.monotonic()
    try:
        async with connected(link, structs.replace(settings, kafka=kafka)):
            tried.is_let_in = True
            _note_opened(tried, kafka, link.tls, _ms(begun_s))
    except (KafkaError, OSError, TimeoutError) as error:
        fault = link.faults.get(tried.address) or link.token_fault
        if fault is None:
            fault = Fault(
                str(error) or type(error).__name__, "is it the brokers' port, and are they well?", stage="request"
            )
        tried.fault = fault
        _note_fault(tried, kafka, fault)


def _note_opened(tried: _Tried, kafka: KafkaSettings, tls: ssl.SSLObject | None, took: str) -> None:
    if kafka.tls is not None:
        subject = f"{_SUBJECTS['tls']} {tried.address}"
        tried.findings["tls"] = well(subject, "agreed on") if tls is None else _tls_finding(subject, tls)
    if kafka.sasl is not None:
        words = f"logged in as {kafka.sasl.user} ({kafka.sasl.mechanism}), all in {took}"
        tried.findings["sasl"] = well(f"{_SUBJECTS['sasl']} {tried.address}", words)


def _note_fault(tried: _Tried, kafka: KafkaSettings, fault: Fault) -> None:
    """Record the stage that failed, and that TLS before it succeeded."""
    link = _LINK_OF.get(fault.stage)
    if fault.stage == "token":
        tried.because = "nothing is sent to a broker without an access token, see below"
    elif link in {None, "sasl"} and kafka.tls is not None:
        tried.findings["tls"] = well(f"{_SUBJECTS['tls']} {tried.address}", "agreed on, and the certificate accepted")
    if link in {"tls", "sasl", "tcp"}:
        tried.findings[link] = wrong(_CODES[link], f"{_SUBJECTS[link]} {tried.address}", _told(fault))


def _tls_finding(subject: str, tls: ssl.SSLObject) -> Finding:
    version = (tls.version() or "TLS").replace("TLSv", "TLS ")
    told = tls.getpeercert() or {}
    signed = f", signed by {issuer}," if (issuer := _common_name(told.get("issuer"))) else ""
    try:
        end = validity(tls.getpeercert(binary_form=True) or b"").end
    except ValueError:
        return well(subject, f"{version}{signed.rstrip(',')}")
    words = f"{version}; the certificate{signed} is valid until {end:%Y-%m-%d}"
    if end - datetime.now(UTC) <= SOON:
        return remark("certificate-expires", subject, f"{words}: renew it at the broker before then")
    return well(subject, words)


def _common_name(name: object) -> str:
    """Common name, or else the organisation, in a name as `getpeercert` gives it."""
    parts = {str(key): str(value) for part in name or () for key, value in part}  # type: ignore[attr-defined]
    return parts.get("commonName") or parts.get("organizationName", "")


def _told(fault: Fault) -> str:
    return f"{fault.words}; {fault.hint}"


def _ms(begun_s: float) -> str:
    return milliseconds((time.monotonic() - begun_s) * 1000)
