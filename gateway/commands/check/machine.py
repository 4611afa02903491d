"""Checks what the settings name on this box: the buffer's place, ports, certificates, passwords, serial lines.

It works without a network and changes nothing. It opens no serial port, because that would reset an Arduino.
"""

import math
import os
import pwd
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from msgspec import structs

from gateway.buffer.schema import MIGRATIONS, read_marks
from gateway.buffer.shares import kept_days
from gateway.buffer.status import is_running, open_to_read
from gateway.clock.gateway_clock import WallClock
from gateway.clock.kernel_clock import boottime_us, read_wall_clock
from gateway.commands.certificate_dates import known_floor
from gateway.commands.check.clock import check_clock
from gateway.commands.check.disk import check_disk
from gateway.commands.check.finding import Finding, remark, remark_on, well, wrong
from gateway.commands.check.kafka import WITHOUT_TLS
from gateway.commands.check.page import check_page
from gateway.commands.check.ports import check_port
from gateway.commands.check.serial_lines import check_serial
from gateway.commands.check.users import check_devices
from gateway.config.config_file import route_table
from gateway.config.running_settings import as_whom, digest, running_settings
from gateway.daemon import control
from gateway.health.conditions import dates_unknown, quota_used_up, settings_changed
from gateway.host import our_image
from gateway.host.processes import this_group, this_user
from gateway.host.safe_files import PasswordFileError, read_password
from gateway.host.terminal_text import size
from gateway.reading import BufferFileError
from gateway.settings import (
    NO_SOURCE,
    BrokerSettings,
    BufferSettings,
    FleetSettings,
    KafkaSettings,
    ListenerSettings,
    Settings,
)
from gateway.tls.certificates import (
    SOON,
    CertificateFileError,
    Validity,
    check_pair,
    date_trouble,
    others_may_read,
    read_certificates,
    read_names,
)
from gateway.uplink.memory import BUDGET_MARK
from gateway.uplink.quota import DAY_S, UplinkBudget

NAMES_TOLD_MAX: Final = 12
HEARTBEAT_BYTES: Final = 1_000
"""Bytes on the wire, both ways, for one heartbeat of an idle gateway."""
HEARTBEATS_SHARE_MAX: Final = 1 / 2
"""Share of a metered link above which heartbeats raise a warning: readings would then get less than heartbeats."""
TYPICAL_BYTES: Final = 100
"""Bytes of a reading, to estimate how long readings are kept."""
_SQLITE_MAGIC = b"SQLite format 3\0"
_PER_S = "kafka.bytes_per_s_max"


def check_machine(settings: Settings, config: Path) -> Iterator[Finding]:
    """Check all that the settings name on this box. `config` is their file. Give each finding as soon as it is made."""
    for link, findings in _by_link(settings, config):
        for finding in findings:
            # A check may have set another link itself.
            yield finding if finding.link else structs.replace(finding, link=link)


def _by_link(settings: Settings, config: Path) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Checks with the link that they belong to, in the order of the chain."""
    yield "configuration", _config_file(settings, config)
    if settings.status_page is not None:
        yield "configuration", check_page(settings.status_page, settings.buffer.path)
    yield "disk", [_buffer(settings.buffer), _fair_share(settings.buffer)]
    yield "disk", check_disk(settings.buffer.path)
    image = our_image.read()
    if image is not None:
        yield "disk", [well("image", image.words)]
    clock = read_wall_clock(settings.gateway)
    yield "clock", check_clock(settings, clock)
    today = _today(clock, settings.buffer.path)
    if not clock.synced and _verifies(settings):
        yield "clock", [remark_on(dates_unknown(today.passed.timestamp()), "certificates")]
    if settings.serial is not None:
        yield "serial", check_serial(settings.serial, settings.buffer.path, route_table(settings))
    if settings.mqtt_listener is not None:
        yield "listener", _listener(settings.mqtt_listener, settings.buffer.path, today)
        yield "listener", check_devices(settings, settings.mqtt_listener)
    for index, broker in enumerate(settings.mqtt_brokers):
        yield "broker", _broker(f"mqtt_brokers[{index}]", broker, today)
    yield "tls", _kafka(settings.kafka, today)
    if settings.fleet is not None:
        yield "tls", _fleet(settings.fleet, today)
    yield "kafka", _quota(settings.kafka, settings.buffer.path, clock)


def _verifies(settings: Settings) -> bool:
    """Tell whether this gateway checks the certificates of others."""
    listener = settings.mqtt_listener
    return (
        settings.kafka.tls is not None
        or any(broker.tls is not None for broker in settings.mqtt_brokers)
        or (listener is not None and listener.tls is not None and listener.tls.client_ca is not None)
    )


# -- the settings and the buffer ------------------------------------------------------------------


def _config_file(settings: Settings, config: Path) -> Iterator[Finding]:
    is_readable = os.access(config, os.R_OK)
    if not is_readable:
        # Root has read the settings, and now checks as the user that the gateway runs as.
        yield wrong("settings-unreadable", "settings", _not_readable(config))
    else:
        yield well("settings", f"{config} can be used; this is {settings.gateway.namespace}/{settings.gateway.id}")
        yield from _changed(settings)
    if not settings.has_source:
        yield remark("no-source", "sources", NO_SOURCE)
    for index, broker in enumerate(settings.mqtt_brokers):
        if broker.password is not None and is_readable and others_may_read(config):
            yield remark(
                "secret-readable",
                f"mqtt_brokers[{index}].password",
                f"everybody on this box may read it; write it into a file of its own (password_file), or take the "
                f"right from others: chmod o-r {config}",
            )


def _changed(settings: Settings) -> Iterator[Finding]:
    """Warn if the running gateway was started with other settings."""
    running = running_settings(control.state_of(settings.buffer.path))
    if running is not None and running.digest != digest(settings):
        yield remark_on(settings_changed(as_whom(running, settings)), "settings")


def _buffer(settings: BufferSettings) -> Finding:
    """Check that the buffer file can be made or written, and has the room that the settings want."""
    path, subject = settings.path, "buffer.path"
    folder = path.parent
    try:
        if not folder.is_dir():
            what = "is no directory" if folder.exists() else "does not exist"
            return wrong(
                "buffer-unusable",
                subject,
                f"the directory {folder} {what}; make it, for the user that sluice runs as, or write another path",
            )
        mistake = _file_mistake(path) if os.access(folder, os.W_OK | os.X_OK) else _not_writable(folder)
        if mistake is not None:
            return wrong("buffer-unusable", subject, mistake)
        if path.exists() and path.stat().st_size and _header(path)[:16] != _SQLITE_MAGIC:
            return remark(
                "buffer-damaged",
                subject,
                f"{path} is no SQLite file, or damaged; sluice run sets it aside, salvages what can be read, and goes "
                "on with a new file. If it belongs to another program, write another path",
            )
        if path.exists() and _schema(_header(path)) > len(MIGRATIONS):
            return remark(
                "buffer-newer",
                subject,
                f"a newer Sluice wrote {path}; sluice run sets it aside, and goes on with a new file. Readings that "
                "wait in it go to Kafka once that version or a later one runs",
            )
        return _room(settings)
    except OSError as error:
        return wrong(
            "buffer-unusable", subject, f"{path} cannot be read: {error.strerror}; correct that, or write another path"
        )


def _file_mistake(path: Path) -> str | None:
    """Reason why the files that are there cannot be the buffer; None if they can."""
    if path.is_dir():
        return f"{path} is a directory; name a file in it, such as {path / 'buffer.db'}"
    for name in ("", "-wal", "-shm", ".lock"):
        beside = path.with_name(path.name + name)
        if beside.exists() and not beside.is_file():
            # Opening a named pipe would wait for its other end, for ever.
            return f"{beside} is no file; remove it, or write another path"
        if beside.exists() and not os.access(beside, os.R_OK | os.W_OK):
            return _not_writable(beside)
    if not path.exists():
        return None
    return _mistake_in_file(path)


def _mistake_in_file(path: Path) -> str | None:
    header = _header(path)
    if header[:16] != _SQLITE_MAGIC:
        return None
    pages = int.from_bytes(header[28:32])
    # With a WAL, which a buffer has, the header may be outdated.
    if not _schema(header) and pages > 1 and not path.with_name(path.name + "-wal").exists():
        return f"{path} is another program's database; write a path of the gateway's own"
    return None


def _header(path: Path) -> bytes:
    """Header of a database: pages from byte 28, `user_version` from byte 60 (SQLite's file format, section 1.3)."""
    with path.open("rb") as file:
        return file.read(100)


def _schema(header: bytes) -> int:
    return int.from_bytes(header[60:64])


def _not_readable(config: Path) -> str:
    return (
        f"the gateway runs as {this_user()}, who may not read {config}: it would not start again; let that user read "
        f"the file and enter its folder (sudo chgrp {this_group()} {config}; sudo chmod 0640 {config})"
    )


def _not_writable(path: Path) -> str:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return (
            f"{path} is on a file system that is mounted read-only: the disk or card may be dying (dmesg tells); save "
            "its files, replace it or mount it again, or write another path"
        )
    return (
        f"{path} is {_owner(path)}'s, and {this_user()} may not write it; give it to the user that sluice runs as "
        "(chown). If that is another user, run this check as that user, or as root"
    )


def _owner(path: Path) -> str:
    owner = path.stat().st_uid
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def _room(settings: BufferSettings) -> Finding:
    path = settings.path
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    files = [path, path.with_name(path.name + "-wal")]
    used = sum(file.stat().st_size for file in files if file.exists())
    if free < settings.free_bytes_min:
        return wrong(
            "disk-too-small",
            "buffer.free_bytes_min",
            f"{size(settings.free_bytes_min)} must stay free on the disk of {path}, and only {size(free)} are: the "
            "buffer would be full from the start; make room on the disk, or lower the setting",
        )
    most = free + used - settings.free_bytes_min
    if most < settings.bytes_max:
        return wrong(
            "disk-too-small",
            "buffer.bytes_max",
            f"{size(settings.bytes_max)}, but the disk of {path} has only {size(most)} for the buffer beyond "
            f"buffer.free_bytes_min ({size(settings.free_bytes_min)}); lower the setting, or make room",
        )
    return well("buffer.path", f"{path} can be written by {this_user()}; {size(free)} are free")


def _fair_share(settings: BufferSettings) -> Finding:
    if settings.fair_from >= 1:
        words = "1: one device may fill the buffer, and then all others are refused; if you have several, write 0.5"
    else:
        words = (
            f"while Kafka is away, readings of a device that sends {TYPICAL_BYTES} bytes each second are kept for "
            f"{kept_days(settings, TYPICAL_BYTES):,.1f} days, whatever one other device sends. "
            "Each further device that sends all it can leaves two thirds of that. A larger buffer.bytes_max keeps more"
        )
    return well("buffer.fair_from", words)


# -- ports ----------------------------------------------------------------------------------------


def _listener(listener: ListenerSettings, buffer: Path, today: "_Today") -> Iterator[Finding]:
    if listener.port:
        yield check_port("mqtt_listener.port", listener.host, listener.port, buffer)
    if listener.tls is not None:
        yield check_port("mqtt_listener.tls.port", listener.host, listener.tls.port, buffer)
        yield from _pair("mqtt_listener.tls", listener.tls.certificate, listener.tls.key, today)
        yield from _names("mqtt_listener.tls", listener.tls.certificate)
        if listener.tls.client_ca is not None:
            yield _authority("mqtt_listener.tls.client_ca", listener.tls.client_ca, today)


# -- certificates and passwords -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Today:
    """Date by this box's clock, and how far it can be trusted."""

    by_clock: datetime
    is_known: bool
    """True if this box's clock is synced."""
    passed: datetime
    """Latest time that has surely passed."""


def _today(clock: WallClock, buffer: Path) -> _Today:
    by_clock = datetime.fromtimestamp(clock.at(boottime_us()) / 1e6, UTC)
    if clock.synced:
        return _Today(by_clock, is_known=True, passed=by_clock)
    return _Today(by_clock, is_known=False, passed=datetime.fromtimestamp(known_floor(buffer).us / 1e6, UTC))


def _pair(section: str, certificate: Path, key: Path, today: _Today) -> Iterator[Finding]:
    """Check a certificate that this box shows, and its key."""
    try:
        validities = read_certificates(certificate)
    except CertificateFileError as error:
        yield wrong("certificate-unusable", f"{section}.certificate", str(error))
        return
    yield _chain_dates(f"{section}.certificate", certificate, validities, today)
    subject = f"{section}.key"
    try:
        check_pair(certificate, key)
    except CertificateFileError as error:
        yield wrong("certificate-unusable", subject, str(error))
        return
    if others_may_read(key):
        yield remark(
            "secret-readable",
            subject,
            f"everybody on this box may read {key}; take the right from others: chmod o-r {key}",
        )
    else:
        yield well(subject, f"{key} is the certificate's")


def _names(subject: str, certificate: Path) -> Iterator[Finding]:
    """List the names in a certificate. Give nothing if the file cannot be used, which `_pair` reports."""
    try:
        read_certificates(certificate)
        names = read_names(certificate)
    except CertificateFileError:
        return
    if names:
        told = ", ".join(names[:NAMES_TOLD_MAX]) + (", ..." if len(names) > NAMES_TOLD_MAX else "")
        yield well(subject, f"clients may connect to {told}: the certificate has no other name (subjectAltName)")
    else:
        yield remark(
            "certificate-without-names",
            subject,
            f"{certificate} names no host (subjectAltName), so clients that check the name refuse it; have a new one "
            "made with the names and addresses that clients connect to, as in subjectAltName=DNS:barn-1.example,"
            "IP:192.168.1.5",
        )


def _chain_dates(subject: str, path: Path, chain: Sequence[Validity], today: _Today) -> Finding:
    """Check the dates of a chain. The first certificate is this box's and must hold; others may not be needed."""
    now = today.by_clock
    leaf, *others = chain
    if date_trouble(leaf, now) is not None or leaf.end <= today.passed:
        return _dates(subject, path, leaf, today)
    for number, dates in enumerate(others, start=2):
        trouble = date_trouble(dates, today.passed if dates.end <= today.passed else now)
        if trouble is not None:
            return remark(
                "certificate-expired",
                subject,
                f"certificate {number} of {len(chain)} in {path} {trouble}, and this box's clock says {now:%Y-%m-%d}; "
                "clients that need that certificate refuse this box: have it renewed, or take it out",
            )
    return _dates(subject, path, min(chain, key=lambda dates: dates.end), today)


def _authority(subject: str, path: Path, today: _Today) -> Finding:
    """Check certificates of authorities: one valid certificate is enough."""
    try:
        validities = read_certificates(path)
    except CertificateFileError as error:
        return wrong("certificate-unusable", subject, str(error))
    now = today.by_clock
    valid = [dates for dates in validities if date_trouble(dates, now) is None]
    if 0 < len(valid) < len(validities):
        return remark(
            "certificate-expired",
            subject,
            f"of {len(validities)} certificates in {path}, only {len(valid)} can be used now: others have expired or "
            f"are not valid yet, and this box's clock says {now:%Y-%m-%d}; certificates that they signed are refused: "
            "take them out, or have them renewed",
        )
    return _dates(subject, path, max(validities, key=lambda dates: dates.end), today)


def _dates(subject: str, path: Path, dates: Validity, today: _Today) -> Finding:
    now, end = today.by_clock, dates.end
    trouble = date_trouble(dates, now)
    if not today.is_known and end <= today.passed:
        return wrong(
            "certificate-expired",
            subject,
            f"{path} has expired on {end:%Y-%m-%d}: {today.passed:%Y-%m-%d} has passed, whatever this box's clock "
            "says; have it renewed",
        )
    if not today.is_known and trouble is not None:
        return remark(
            "certificate-expired",
            subject,
            f"{path} {trouble}, by this box's clock, which says {now:%Y-%m-%d} and is not synced; check again when it "
            "is",
        )
    if trouble is not None:
        return wrong(
            "certificate-expired",
            subject,
            f"{path} {trouble}, and this box's clock says {now:%Y-%m-%d}; have it renewed, or set the clock",
        )
    left = end - max(now, today.passed)
    if left <= SOON:
        return remark(
            "certificate-expires",
            subject,
            f"{path} expires on {end:%Y-%m-%d}, in {_days(left)}; have it renewed before that",
        )
    return well(subject, f"{path} is valid until {end:%Y-%m-%d}")


def _days(span: timedelta) -> str:
    return "less than a day" if span.days < 1 else "1 day" if span.days == 1 else f"{span.days} days"


def _kafka(kafka: KafkaSettings, today: _Today) -> Iterator[Finding]:
    """Check the files that `[kafka.tls]` and `[kafka.sasl]` name."""
    tls, sasl = kafka.tls, kafka.sasl
    if tls is not None:
        if tls.ca is not None:
            yield _authority("kafka.tls.ca", tls.ca, today)
        if tls.certificate is not None and tls.key is not None:
            yield from _pair("kafka.tls", tls.certificate, tls.key, today)
    if sasl is not None:
        yield structs.replace(_password("kafka.sasl.password_file", sasl.password_file), link="sasl")
        if sasl.token_ca is not None:
            yield _authority("kafka.sasl.token_ca", sasl.token_ca, today)
        if tls is None:
            words = f"{sasl.mechanism} hides the password, but {WITHOUT_TLS}"
            yield remark("kafka-without-tls", "kafka.sasl", words)


def _fleet(section: FleetSettings, today: _Today) -> Iterator[Finding]:
    if section.ca is not None:
        yield _authority("fleet.ca", section.ca, today)


def _quota(kafka: KafkaSettings, buffer: Path, clock: WallClock) -> Iterator[Finding]:
    """Warn if a metered link is used up for today, or if heartbeats take most of it."""
    bounds = [(kafka.bytes_per_day_max, "kafka.bytes_per_day_max"), (kafka.bytes_per_s_max * DAY_S, _PER_S)]
    most, setting = min((bound for bound in bounds if bound[0]), default=(0, ""))
    beats = HEARTBEAT_BYTES * DAY_S / kafka.heartbeat_interval_s
    if most and beats > most * HEARTBEATS_SHARE_MAX:
        yield remark(
            "heartbeats-too-many",
            "kafka.heartbeat_interval_s",
            f"a heartbeat every {kafka.heartbeat_interval_s:g} s takes some {size(beats)} a day, and {setting} allows "
            f"{size(most)}: little or nothing is left for readings; write "
            f"{math.ceil(HEARTBEAT_BYTES * DAY_S / (most * HEARTBEATS_SHARE_MAX))} or more, or raise {setting}",
        )
    # If no gateway runs, the buffer is not opened: that would leave SQLite's files beside it.
    if not kafka.bytes_per_day_max or not is_running(buffer):
        return
    with suppress(BufferFileError), open_to_read(buffer) as connection:
        budget = UplinkBudget(0, kafka.bytes_per_day_max, read_marks(connection, BUDGET_MARK).get(BUDGET_MARK))
        now_us = boottime_us()
        now_s, wall_s = now_us / 1e6, clock.at(now_us) / 1e6 if clock.synced else None
        if budget.is_used_up(now_s, wall_s):
            yield remark_on(quota_used_up(budget.used_up_until(now_s, wall_s)), "kafka.bytes_per_day_max")


def _password(subject: str, path: Path) -> Finding:
    try:
        password = read_password(path)
    except PasswordFileError as error:
        return wrong("password-unusable", subject, str(error).removeprefix("password_file").lstrip(": "))
    if password != password.strip():
        where = "ends in" if password[-1:].isspace() else "begins with"
        return remark(
            "password-with-space",
            subject,
            f"the password in {path} {where} a space, which counts as part of it; take the space out, unless you want "
            "it",
        )
    return well(subject, f"{path} holds a password, and only its owner may read it")


def _broker(section: str, broker: BrokerSettings, today: _Today) -> Iterator[Finding]:
    if broker.password_file is not None:
        yield _password(f"{section}.password_file", broker.password_file)
    if broker.tls is not None:
        if broker.tls.ca is not None:
            yield _authority(f"{section}.tls.ca", broker.tls.ca, today)
        if broker.tls.certificate is not None and broker.tls.key is not None:
            yield from _pair(f"{section}.tls", broker.tls.certificate, broker.tls.key, today)
