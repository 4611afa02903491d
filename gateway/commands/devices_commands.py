"""`sluice devices`: what is known of each device; who may log in; secrets made, replaced and revoked."""

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from msgspec import Struct

from gateway.clock.kernel_clock import boottime_us, read_wall_clock
from gateway.commands.options import FINDING, WrappingGroup, as_typed, config_option, json_option, load_settings, named
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
    "no sensor logs in here, for gateway.toml has no [mqtt_listener]; write that section (the page for installers, "
    "docs/install.md, has an example) or run sluice setup again, then add devices"
)
_ANYBODY = (
    "mqtt_listener.anonymous is true: whoever reaches the port may write as any device, whatever secrets there are; "
    "take that line out of gateway.toml and restart sluice once each device has its secret"
)
_ONLY_THIS_BOX = (
    'mqtt_listener.host is {host}: only programs on this box can connect; write host = "0.0.0.0" for sensors on the '
    "network, and restart sluice"
)
_NO_DATE = "SINCE -: this box's clock was not synced when that secret was made, so that nobody knows"
_CERTIFICATES_LISTED = (
    "until now every certificate of mqtt_listener.tls.client_ca let a device in; now there is a list, and those that "
    "it does not name are refused: add them too"
)


class Outcome(NamedTuple):
    """When a change counts."""

    counts: str
    """`now`, `soon` or `at start`."""
    words: str
    warnings: tuple[str, ...] = ()


class LogIn(Struct, frozen=True):
    """One who may log in."""

    name: str
    operator: bool
    in_settings: bool
    """Whether its secret's hash stands in gateway.toml."""
    secrets: tuple["SecretTimes", ...]
    heard_s: float | None
    """How long ago something of it was taken in; None where nothing tells."""


class SecretTimes(Struct, frozen=True):
    """Since when, and until when, a secret works, in UTC; None where that is unknown, or never."""

    made: str | None
    until: str | None


# -- what is known of each device -----------------------------------------------------------------


@click.group(
    cls=WrappingGroup,
    invoke_without_command=True,
    short_help="Each device: where, last heard, its clock; and who may log in.",
    epilog="Example: sluice devices --config gateway.toml",
)
@config_option
@json_option
@click.pass_context
def devices(context: click.Context, config: Path, as_json: bool) -> None:  # noqa: FBT001 - click passes options by name
    """Show every device that this gateway knows: where it is, when it was heard last, and what is known of its clock.

    DRIFT is how fast the sensor's clock runs, in parts per million above true. BOUND is that of the error of a reading
    taken now, against this box's clock. OBSERVED is when the sensor's clock was last compared with that: a PROBE that
    was answered, or an MQTT reading that told something. Works on a running gateway and on a stopped one.

    The exit code is 1 where something is to be mended: a clock that is worse than the settings say, ticks that no time
    follows from, dates that cannot be right.

    The commands below are about who may log in over MQTT.
    """
    if context.invoked_subcommand is not None:
        # Given before the command's name they mean the same as behind it.
        source = click.core.ParameterSource.COMMANDLINE
        given = {name: context.params[name] for name in context.params if context.get_parameter_source(name) == source}
        context.default_map = dict.fromkeys(devices.commands, given)
        return
    from gateway.devices.listing import read_devices  # noqa: PLC0415 - the other commands need none of it
    from gateway.devices.words import devices_lines  # noqa: PLC0415 - the other commands need none of it

    settings = load_settings(config)
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
    """Show who may log in over MQTT: since when, until when, and when it was heard last.

    FROM says where the secret's hash stands: "added" by sluice devices add, or in "gateway.toml", where a person wrote
    it, and nothing tells since when. The secrets themselves are kept nowhere. A device whose old secret works for a
    while has a line for each of them, and is heard with either. HEARD is since sluice was started; from before it the
    buffer knows that of sensors that send a boot and a sequence.
    """
    settings = load_settings(config)
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
        # A gateway that has never run has heard nobody.
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


_no_qr = click.option("--no-qr", is_flag=True, help="No QR code.")


@devices.command(
    short_help="Make a secret for each of new devices.", epilog="Example: sluice devices add stable-1 stable-2"
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@config_option
@click.option("--operator", is_flag=True, help="For people or programs that send commands to devices.")
@_no_qr
@json_option
def add(
    names: tuple[str, ...],
    config: Path,
    operator: bool,  # noqa: FBT001 - click passes options by name
    no_qr: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """Make a secret for each new device, and show what to type into it: once, for only a hash of it is kept.

    A device may write under its own topics only. The running gateway lets it in from the moment that this returns. The
    QR code holds the same as mqtt://NAME:SECRET@HOST:PORT, or mqtts:// where the listener has TLS.
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


@devices.command(short_help="Make another secret for a device.", epilog="Example: sluice devices rotate stable-1")
@click.argument("name")
@config_option
@click.option(
    "--keep-old",
    "keep_old_hours",
    type=named(click.FloatRange(0, credentials.KEEP_HOURS_MAX), "number of hours"),
    default=0,
    show_default=True,
    metavar="HOURS",
    help="How long the old secret works beside the new one.",
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
    """Make another secret for a device, and show it once. The old one ends at once, with connections that have it.

    With --keep-old both work until then, so that the sensor can be given the new one meanwhile.
    """
    settings = load_settings(config)
    listener = _listener(settings)
    _refuse_written(listener, (name,))
    path = credentials.file_of(settings)
    # All that may fail comes before the secret is made: once it is, it must be shown.
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


@devices.command(short_help="Let devices in no more.", epilog="Example: sluice devices revoke stable-2")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@config_option
@click.option("--yes", is_flag=True, help="Do not ask first.")
@json_option
def revoke(names: tuple[str, ...], config: Path, yes: bool, as_json: bool) -> None:  # noqa: FBT001
    """Let devices in no more: their secrets end at once, with all connections that they have. Asks first.

    What they have sent stays. sluice devices add makes a revoked device a new secret.
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
    """Refuse names whose secret a person wrote: it is theirs to change. Raises ClickException."""
    for section in ("users", "operators"):
        for name in names:
            if name in getattr(listener, section):
                raise click.ClickException(
                    f"{name} has its secret in gateway.toml, which this command does not change: take its line out "
                    f"of [mqtt_listener.{section}], restart sluice, and add it here (nothing was changed)"
                )


def _done(change: Callable[[], T]) -> T:
    """What a change gives. Raises ClickException."""
    try:
        return change()
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error


def _now(settings: Settings) -> datetime | None:
    """The time, if this box knows it."""
    try:
        clock = read_wall_clock(settings.gateway)
    except OSError:
        return None
    return datetime.fromtimestamp(clock.at(boottime_us()) / 1e6, UTC) if clock.synced else None


def _tell(settings: Settings, path: Path, become: str) -> Outcome:
    """Have the running gateway take the file as it is now; `become` says what then holds of whom."""
    try:
        told: dict[str, Any] = control.call(control.socket_path(settings.buffer.path), "devices-changed")
    except control.NotRunningError:
        return Outcome("at start", "no gateway runs with these settings: this counts from when sluice starts")
    except control.RequestRefusedError as error:
        words = f"the gateway that runs could not be told ({error}); restart it (sudo systemctl restart sluice)"
        return Outcome("at start", words, (words,))
    except control.ControlError as error:
        return Outcome("soon", f"{error}. A gateway that runs looks at the file by itself, each second")
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
            # First: it is the taller, and a small screen keeps what comes last.
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
            ("topic", " or ".join(each.topics) or "none: no route makes this device of its topics"),
        ]
        for name, value in rows:
            say(hanging(f"{name:<10}{value}", 10))
        say("")
    say(hanging("Write it down now: the password is shown this once, and only a hash of it is kept.", INDENT))
    if old_until is not None:
        say(hanging(f"the old password works beside it until {_shown(old_until)} UTC", INDENT))
    _say(outcome)
    for warning in warnings:
        say(hanging(f"warn  {escaped(warning)}", 6))


def _encodable(code: str) -> str:
    """A QR code, or why there is none: not every serial console can show one."""
    try:
        code.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "(this terminal cannot show a QR code)"
    return code


def _say(outcome: Outcome) -> None:
    say(hanging(f"{'warn  ' if outcome.warnings else ''}{escaped(outcome.words)}", INDENT))
