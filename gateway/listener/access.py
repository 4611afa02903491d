"""Who may connect to the MQTT listener, and who may say and hear what: devices, operators, command topics."""

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct

from gateway.mqtt.protocol import Connect, ConnectReturnCode
from gateway.record_contract import DEVICE_NAME, NAME_RULE

Secrets = Mapping[str, Collection[str]]
"""The SHA-256 of each secret, in hex, by the name that it belongs to."""
_DEVICE: Final = "{device}"
_PLAIN_LEVEL = re.compile(r"[^{}+#\0]*")


class Identity(Struct, frozen=True):
    """Whom a connection's credential names."""

    user: str | None
    """None where anybody may write as any device."""
    operator: bool = False
    """Sends commands, and nothing else."""
    is_check: bool = False
    """Sends the test reading of `sluice check`, and is no device."""
    digest: str | None = None
    """Of the secret that it logged in with; None for a certificate, and where anybody may write."""


class Refusal(Struct, frozen=True):
    """Why a CONNECT's credentials will not do, and what to answer."""

    code: ConnectReturnCode
    reason: str
    message: str


def identify(  # noqa: PLR0913 - each is another source
    connect: Connect,
    certificate_name: str | None,
    users: Secrets,
    operators: Secrets,
    *,
    anonymous: bool,
    listed: bool | None = None,
) -> Identity | Refusal:
    """Judge a CONNECT's credentials.

    A verified client certificate (`certificate_name` is its common name) stands for the user name and password of the
    device that it names, where no user name is given. Where anybody was ever listed as a user (`listed`; without it:
    where there are users) it must be one of them, so that a device that was removed stays out although its certificate
    lives on.

    What a refusal says holds nothing that the client gave, which may be a secret in the wrong place.
    """
    user, password = connect.user_name, connect.password
    if anonymous and user not in operators:
        return Identity(None)
    if user is None and certificate_name is not None:
        is_name = DEVICE_NAME.fullmatch(certificate_name) is not None
        if is_name and (certificate_name in users or not (bool(users) if listed is None else listed)):
            return Identity(certificate_name)
        unlisted = "device that is listed (sluice devices list; mqtt_listener.users)"
        what = unlisted if is_name else f"device name: a name has {NAME_RULE}"
        return Refusal(
            ConnectReturnCode.NOT_AUTHORIZED,
            "certificate-of-no-user",
            f"the client certificate names {certificate_name!r}, which is no {what}",
        )
    if user is None or password is None:
        return Refusal(
            ConnectReturnCode.NOT_AUTHORIZED,
            "no-credentials",
            "CONNECT without user name and password, and without a client certificate that names a device",
        )
    digest = hashlib.sha256(password).hexdigest()
    # An unknown user costs the same comparison as a known one, so that time tells nobody who exists.
    expected = operators.get(user) or users.get(user) or ("-" * len(digest),)
    if any([hmac.compare_digest(digest.encode(), each.encode()) for each in expected]):  # noqa: C419 - the same
        return Identity(user, operator=user in operators, digest=digest)
    return Refusal(
        ConnectReturnCode.BAD_USER_NAME_OR_PASSWORD, "bad-credentials", _why_wrong(user, password, users, operators)
    )


def _why_wrong(user: str, password: bytes, users: Secrets, operators: Secrets) -> str:
    """Why user name and password will not do, for the log alone."""
    if user in users or user in operators:
        return "the password is wrong; sluice devices rotate makes another one for this device"
    name = password.decode(errors="replace")
    digest = hashlib.sha256(user.encode()).hexdigest()
    if digest in users.get(name, ()) or digest in operators.get(name, ()):
        return f"user name and password are the wrong way round: the user name is {name!r}"
    return "no device is called so; sluice devices list has those that are, sluice devices add makes one"


class CommandTopics:
    """The topics on which devices are told something, made from templates such as `command/{device}/#`."""

    def __init__(self, templates: Sequence[str]) -> None:
        """Raises ValueError for the first template that cannot work; the message says what to write instead."""
        self._templates = [_levels(template) for template in templates]

    def device_of(self, topic: str) -> str | None:
        """The one device that a topic name speaks to; None where it is no command topic."""
        levels = topic.split("/")
        for template in self._templates:
            at = template.index(_DEVICE)
            if (
                len(levels) > at
                and DEVICE_NAME.fullmatch(levels[at])
                and _covers(_filled(template, levels[at]), levels)
            ):
                return levels[at]
        return None

    def may_subscribe(self, topic_filter: str, device: str | None) -> bool:
        """Whether all that a filter matches are command topics of this device.

        An operator is no device, so that its SUBSCRIBE is refused: it sends commands and hears none.
        """
        # An anonymous client's identifier may hold wildcards and slashes: then it names no device.
        if device is None or DEVICE_NAME.fullmatch(device) is None:
            return False
        levels = topic_filter.split("/")
        return any(_covers(_filled(template, device), levels) for template in self._templates)


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a topic filter matches a topic name (section 4.7)."""
    return _covers(topic_filter.split("/"), topic.split("/"))


def _levels(template: str) -> list[str]:
    levels = template.split("/")
    if levels.count(_DEVICE) != 1:
        raise ValueError(f"{template!r} must hold {_DEVICE} once, as a level of its own, as in 'command/{_DEVICE}/#'")
    for at, level in enumerate(levels):
        wildcard = level == "+" or (level == "#" and at == len(levels) - 1)
        if level != _DEVICE and not wildcard and not _PLAIN_LEVEL.fullmatch(level):
            raise ValueError(
                f"{template!r}: level {level!r} will not do; a level is plain text, {_DEVICE}, '+', or '#' at the end"
            )
    if levels[0] in {"+", "#", ""} or levels[0].startswith("$"):
        raise ValueError(f"{template!r} must begin with plain text or {_DEVICE}, as in 'command/{_DEVICE}/#'")
    return levels


def _filled(template: Sequence[str], device: str) -> list[str]:
    return [device if level == _DEVICE else level for level in template]


def _covers(wide: Sequence[str], narrow: Sequence[str]) -> bool:
    """Whether every topic that the filter (or name) `narrow` matches is matched by `wide` too (section 4.7.1)."""
    for at, level in enumerate(wide):
        if level == "#":
            return True
        if at == len(narrow) or narrow[at] == "#" or level not in {"+", narrow[at]}:
            # 'a/#' matches 'a' too.
            return False
    return len(narrow) == len(wide)
