"""`sluice devices`: shows each device and who may log in, and makes, replaces and revokes secrets."""

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from msgspec import Struct

from gateway.clock.kernel_clock import boottime_us, read_wall_clock
from gateway.commands.options import (
    FINDING,
    WrappingGroup,
    as_typed,
    config_option,
    json_option,
    load_as_service,
    load_settings,
    named,
)
from gateway.daemon import control
from gateway.host.terminal import confirm, say, say_json
from gateway.host.terminal_text import aligned, counted, escaped, hanging, span
from gateway.listener import credentials
from gateway.listener.credentials import CredentialsError, Made, Secrets
from gateway.reading import BufferFileError
from gateway.settings import ListenerSettings, Settings

INDENT = 4
NAMED_MAX = 5
T = TypeVar("T")
_UNKNOWN = "-"
_NO_LISTENER = (
    "no sensor can log in here, because gateway.toml has no [mqtt_listener]; write that section (docs/install.md has "
    "an example) or run sluice setup again, then add devices"
)
_ANYBODY = (
    "mqtt_listener.anonymous is true: whoever reaches the port may write as any device, without its secret; once each "
    "device has its secret, take that line out of gateway.toml and restart sluice"
)
_ONLY_THIS_BOX = (
    'mqtt_listener.host is {host}: only programs on this box can connect; write host = "0.0.0.0" for sensors on the '
    "network, and restart sluice"
)
_NO_DATE = "SINCE -: not known, because this box's clock was not synced when that secret was made"
_CERTIFICATES_LISTED = (
    "until now every certificate of mqtt_listener.tls.client_ca let a device in; now there is a list, and devices that "
    "are not on it are refused: add them too"
)


class Outcome(NamedTuple):
    """Time from which a change counts, and what to tell a person of it."""

    counts: str
    """`now`, `soon` or `at start`."""
    words: str
    warnings: tuple[str, ...] = ()


class LogIn(Struct, frozen=True):
    """A device or operator that may log in."""

    name: str
    operator: bool
    in_settings: bool
    """True if its secret's hash is in gateway.toml."""
    secrets: tuple["SecretTimes", ...]
    heard_s: float | None
    """Seconds since something of it was taken in; None if that is not known."""


class SecretTimes(Struct, frozen=True):
    """Times in UTC between which a secret works."""

    made: str | None
    """None if it is not known."""
    until: str | None
    """None if the secret does not end."""


# -- what is known of each device -----------------------------------------------------------------


@click.group(
    cls=WrappingGroup,
    invoke_without_command=True,
    short_help="Each device: where, last heard, its clock; who may log in.",
    epilog="Example: sluice devices --config gateway.toml",
)
@config_option
@json_option
@click.pass_context
def devices(context: click.Context, config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show every device that this gateway knows: where it is, when it was last heard, and how its clock runs.

    DRIFT is how fast the sensor's clock runs, in parts per million above true. BOUND is the largest error of a time
    taken now, against this box's clock. OBSERVED is when the sensor's clock was last compared with this box's clock: by
    an answered PROBE, or by an MQTT reading with a useful time. Works whether the gateway runs or not.

    The exit code is 1 if something must be corrected: a clock that is worse than the settings say, ticks that give no
    time, or dates that cannot be right.

    The commands below are about who may log in over MQTT.
    """
    if context.invoked_subcommand is not None:
        # An option counts for the subcommand whether it stands before or behind the subcommand's name.
        source = click.core.ParameterSource.COMMANDLINE
        given = {name: context.params[name] for name in context.params if context.get_parameter_source(name) == source}
        context.default_map = dict.fromkeys(devices.commands, given)
        return
    from gateway.devices.listing import read_devices  # noqa: PLC0415 - the other commands need none of it
    from gateway.devices.words import devices_lines  # noqa: PLC0415 - the other commands need none of it

    settings = load_as_service(config)
    try:
        listing = read_devices(settings)
    except BufferFileError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        known = {"gateway": settings.gateway.id, "running": listing.running, "devices": listing.devices}
        known["not_heard"] = listing.not_heard
        say_json({**known, "unheard": listing.unheard or None})
    else:
        for line in devices_lines(listing):
            say(as_typed(line))
    sys.exit(FINDING if any(device.finding for device in listing.devices) else 0)


# -- who may log in -------------------------------------------------------------------------------


@devices.command(name="list", short_help="Who may log in over MQTT.", epilog="Example: sluice devices list --json")
@config_option
@json_option
def list_command(config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show who may log in over MQTT: since when, until when, and when they were last heard.

    FROM says where the secret's hash is: "added" by sluice devices add, or in "gateway.toml", where a person wrote it
    at an unknown time. The secrets themselves are not kept. A device whose old secret still works has a line for each
    secret, and HEARD counts both. HEARD begins with the start of sluice. For sensors that send a boot and a sequence,
    the buffer also knows earlier times.
    """
    settings = load_as_service(config)
    listener = _listener(settings)
    found = list(_log_ins(settings, listener))
    if as_json:
        say_json({"gateway": settings.gateway.id, "logins": found})
        return
    for line in _list_lines(found):
        say(as_typed(line))
    if any(times.made is None for log_in in found if not log_in.in_settings for times in log_in.secrets):
        say(hanging(_NO_DATE, INDENT))
    for warning in _warnings(listener):
        say(hanging(f"warn  {escaped(warning)}", 6))


def _log_ins(settings: Settings, listener: ListenerSettings) -> Iterator[LogIn]:
    kept = _done(lambda: credentials.load(credentials.file_of(settings)))
    heard = _heard(settings)
    now_s = datetime.now(UTC).timestamp()
    for operator, written, added in (
        (False, listener.users, kept.devices),
        (True, listener.operators, kept.operators),
    ):
        for name in sorted(written.keys() | added.keys()):
            if name in written:
                yield LogIn(name, operator, True, (SecretTimes(None, None),), heard.get(name))
            if name in added:
                yield LogIn(name, operator, False, _times(added[name], now_s), heard.get(name))


def _times(secrets: Secrets, now_s: float) -> tuple[SecretTimes, ...]:
    return tuple(SecretTimes(secret.made, secret.until) for secret in secrets if secret.is_valid(now_s))


def _heard(settings: Settings) -> dict[str, float | None]:
    from gateway.devices.listing import read_devices  # noqa: PLC0415 - the other commands need none of it

    try:
        return {device.device: device.heard_s for device in read_devices(settings).devices}
    except BufferFileError:
        # A gateway that has never run has no file, and has heard nobody.
        return {}


def _list_lines(found: Sequence[LogIn]) -> Iterator[str]:
    if not found:
        yield "nobody may log in yet; make a secret for each device: sluice devices add NAME..."
        return
    rows = [
        (
            *((escaped(log_in.name) + (" (operator)" if log_in.operator else ""), source) if at == 0 else ("", "")),
            _shown(times.made),
            _shown(times.until),
            "" if at else _UNKNOWN if log_in.heard_s is None else f"{span(log_in.heard_s)} ago",
        )
        for log_in in found
        for source in ("gateway.toml" if log_in.in_settings else "added",)
        for at, times in enumerate(log_in.secrets)
    ]
    yield from aligned(("NAME", "FROM", "SINCE (UTC)", "UNTIL (UTC)", "HEARD"), rows, right=frozenset({4}))


def _shown(moment: str | None) -> str:
    return _UNKNOWN if moment is None else moment[:16].replace("T", " ")


# -- secrets --------------------------------------------------------------------------------------


_no_qr = click.option("--no-qr", is_flag=True, help="Show no QR code.")


@devices.command(
    short_help="Make a secret for each new device.", epilog="Example: sluice devices add stable-1 stable-2"
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@config_option
@click.option("--operator", is_flag=True, help="Add operators: people or programs that send commands to devices.")
@_no_qr
@json_option
def add(
    names: tuple[str, ...],
    config: Path,
    operator: bool,  # noqa: FBT001 - click passes options by name
    no_qr: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """Make a secret for each new device, and show what to type into the device.

    The secret is shown once, since only its hash is kept. A device may write only under its own topics. A running
    gateway lets the device in as soon as this command ends. The QR code holds mqtt://NAME:SECRET@HOST:PORT, or mqtts://
    if the listener has TLS.
    """
    settings = load_settings(config)
    listener = _listener(settings)
    _refuse_written(listener, names)
    path = credentials.file_of(settings)
    warnings = list(_warnings(listener))
    if listener.tls is not None and listener.tls.client_ca is not None and not listener.users and not path.exists():
        warnings.append(_CERTIFICATES_LISTED)
    made = _done(lambda: credentials.add(path, names, _now(settings), operators=operator))
    outcome = _tell(settings, path, f"{_it(made)} may log in")
    _show_secrets(settings, listener, made, outcome, warnings, operator=operator, qr=not no_qr, as_json=as_json)


@devices.command(short_help="Make a new secret for a device.", epilog="Example: sluice devices rotate stable-1")
@click.argument("name")
@config_option
@click.option(
    "--keep-old",
    "keep_old_hours",
    type=named(click.FloatRange(0, credentials.KEEP_HOURS_MAX), "number of hours"),
    default=0,
    show_default=True,
    metavar="HOURS",
    help="Hours for which the old secret works beside the new one.",
)
@_no_qr
@json_option
def rotate(
    name: str,
    config: Path,
    keep_old_hours: float,
    no_qr: bool,  # noqa: FBT001 - click passes options by name
    as_json: bool,  # noqa: FBT001
) -> None:
    """Make a new secret for a device, and show it once.

    The old secret ends at once, and so do connections that use it. With --keep-old both secrets work for a while, so
    that there is time to give the sensor the new one.
    """
    settings = load_settings(config)
    listener = _listener(settings)
    _refuse_written(listener, (name,))
    path = credentials.file_of(settings)
    # Every step that may fail comes before the secret is made: then the secret must be shown.
    operator = name in _done(lambda: credentials.load(path)).operators
    warnings = list(_warnings(listener))
    now = _now(settings)
    made = _done(lambda: credentials.rotate(path, name, now, keep_old_hours))
    outcome = _tell(settings, path, "it has its new secret")
    old = None
    if keep_old_hours and now is not None:
        old = credentials.spelled(now + timedelta(hours=keep_old_hours))
    _show_secrets(
        settings, listener, [made], outcome, warnings, operator=operator, qr=not no_qr, as_json=as_json, old_until=old
    )


@devices.command(short_help="Lock devices out.", epilog="Example: sluice devices revoke stable-2")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@config_option
@click.option("--yes", is_flag=True, help="Do not ask first.")
@json_option
def revoke(names: tuple[str, ...], config: Path, yes: bool, as_json: bool) -> None:  # noqa: FBT001
    """Lock devices out: their secrets and all their connections end at once. Asks first.

    Readings that they have sent stay. sluice devices add makes a new secret for a revoked device.
    """
    settings = load_settings(config)
    listener = _listener(settings)
    _refuse_written(listener, names)
    path = credentials.file_of(settings)
    if not yes:
        known = _done(lambda: credentials.load(path))
        if all(name in known for name in names):
            are = "It is" if len(set(names)) == 1 else "They are"
            confirm(f"Revoke {_named(names)}? {are} disconnected at once.", abort=True, err=True)
    gone = _done(lambda: credentials.revoke(path, names))
    outcome = _tell(settings, path, f"{_it(gone)} {'is' if len(gone) == 1 else 'are'} let in no more")
    if as_json:
        told = {"revoked": gone, "counts": outcome.counts, "said": outcome.words, "warnings": outcome.warnings}
        say_json(told)
        return
    say(hanging(f"revoked: {', '.join(gone)}", INDENT))
    _say(outcome)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"


def _it(those: Sequence[object]) -> str:
    return "it" if len(those) == 1 else "they"


def _listener(settings: Settings) -> ListenerSettings:
    if settings.mqtt_listener is None:
        raise click.ClickException(_NO_LISTENER)
    return settings.mqtt_listener


def _warnings(listener: ListenerSettings) -> Iterator[str]:
    from gateway.commands.handout import is_only_for_this_box  # noqa: PLC0415

    if listener.anonymous:
        yield _ANYBODY
    if is_only_for_this_box(listener.host):
        yield _ONLY_THIS_BOX.format(host=listener.host)


def _refuse_written(listener: ListenerSettings, names: Sequence[str]) -> None:
    """Raise ClickException for a name whose secret a person wrote into gateway.toml."""
    for section in ("users", "operators"):
        for name in names:
            if name in getattr(listener, section):
                raise click.ClickException(
                    f"{name} has its secret in gateway.toml, which this command does not change: take its line out "
                    f"of [mqtt_listener.{section}] and restart sluice (nothing was changed)"
                )


def _done(change: Callable[[], T]) -> T:
    """Make a change and return its result. Raises ClickException instead of CredentialsError."""
    try:
        return change()
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error


def _now(settings: Settings) -> datetime | None:
    """Time in UTC; None if this box's clock is not synced."""
    try:
        clock = read_wall_clock(settings.gateway)
    except OSError:
        return None
    return datetime.fromtimestamp(clock.at(boottime_us()) / 1e6, UTC) if clock.synced else None


def _tell(settings: Settings, path: Path, become: str) -> Outcome:
    """Tell the running gateway that the file has changed. `become` says what the change means for the devices."""
    try:
        told: dict[str, Any] = control.call(control.socket_path(settings.buffer.path), "devices-changed")
    except control.NotRunningError:
        return Outcome("at start", "no gateway runs with these settings: this counts from when sluice starts")
    except control.RequestRefusedError as error:
        words = f"the gateway that runs could not be told ({error}); restart it (sudo systemctl restart sluice)"
        return Outcome("at start", words, (words,))
    except control.ControlError as error:
        return Outcome("soon", f"{error}. A running gateway looks at the file by itself, each second")
    if told["file"] != str(path):
        words = (
            f"the gateway that runs reads {told['file']}, and not {path}: restart it (sudo systemctl restart sluice)"
        )
        return Outcome("at start", words, (words,))
    if told["trouble"]:
        return Outcome("soon", told["trouble"], (told["trouble"],))
    ended = f"; {counted(told['ended'], 'connection')} ended" if told["ended"] else ""
    return Outcome("now", f"the running gateway knows: {become} from now on{ended}")


def _show_secrets(  # noqa: PLR0913 - each is another option
    settings: Settings,
    listener: ListenerSettings,
    made: Sequence[Made],
    outcome: Outcome,
    warnings: Sequence[str],
    *,
    operator: bool,
    qr: bool,
    as_json: bool,
    old_until: str | None = None,
) -> None:
    from gateway.commands.handout import handout, qr_code  # noqa: PLC0415

    handouts = [handout(settings, listener, each, operator=operator) for each in made]
    if as_json:
        told = {"devices": handouts, "counts": outcome.counts, "said": outcome.words, "old_until": old_until}
        say_json({**told, "warnings": [*warnings, *outcome.warnings]})
        return
    for each in handouts:
        if qr:
            # The QR code comes first: it is tall, and a small screen shows the lines that come last.
            say(_encodable(qr_code(each.uri).rstrip("\n")))
        rows = [
            ("host", " or ".join(each.hosts)),
            (
                "port",
                f"{each.port}{' with TLS' if each.tls else ''}"
                + (f", {each.plain_port} without" if each.plain_port else ""),
            ),
            ("user", each.user),
            ("password", each.secret),
            ("topic", " or ".join(each.topics) or "none: no route makes this device's name out of a topic"),
        ]
        for name, value in rows:
            say(hanging(f"{name:<10}{value}", 10))
        say("")
    say(hanging("Write it down now: the password is shown only this once, and only its hash is kept.", INDENT))
    if old_until is not None:
        say(hanging(f"the old password works beside it until {_shown(old_until)} UTC", INDENT))
    _say(outcome)
    for warning in warnings:
        say(hanging(f"warn  {escaped(warning)}", 6))


def _encodable(code: str) -> str:
    """Return the QR code, or words instead if this terminal cannot show it, as some serial consoles cannot."""
    try:
        code.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "(this terminal cannot show a QR code)"
    return code


def _say(outcome: Outcome) -> None:
    say(hanging(f"{'warn  ' if outcome.warnings else ''}{escaped(outcome.words)}", INDENT))
