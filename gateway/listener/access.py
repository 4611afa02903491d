"""Judges who may log in to the MQTT listener, and which topics carry commands to which device."""

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct

from gateway.mqtt.protocol import Connect
from gateway.record_contract import DEVICE_NAME, NAME_RULE

Secrets = Mapping[str, Collection[str]]
"""SHA-256 digests of secrets, in hex, by the name that logs in with them."""
_DEVICE: Final = "{device}"
_PLAIN_LEVEL = re.compile(r"[^{}+#\0]*")


class Identity(Struct, frozen=True):
    """The client that a connection's credentials name."""

    user: str | None
    """User name, or device of the certificate; None if anybody may write as any device."""
    operator: bool = False
    """Whether the client is an operator, which sends commands and nothing else."""
    is_check: bool = False
    """Whether the client is `sluice check` with its test reading, and no device."""
    digest: str | None = None
    """Digest of the secret that the client logged in with; None if it logged in without a listed secret."""


class Refusal(Struct, frozen=True):
    """A refused log-in: a short reason to count by, and a message for the log."""

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

    If CONNECT has no user name, a verified client certificate logs in the device that it names. `certificate_name` is
    the certificate's common name. `listed` tells whether anybody was ever listed as a user; by default, whether there
    are `users`. If so, the certificate must name one of them. A removed device thus stays out although its certificate
    is still valid.

    A refusal's message repeats no unknown user name and no password: either may be a secret in the wrong place.
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
            "certificate-of-no-user",
            f"the client certificate names {certificate_name!r}, which is no {what}",
        )
    if user is None or password is None:
        return Refusal(
            "no-credentials",
            "CONNECT without user name and password, and without a client certificate that names a device",
        )
    digest = hashlib.sha256(password).hexdigest()
    # An unknown user costs the same comparison as a known one, so that response times do not reveal who exists.
    expected = operators.get(user) or users.get(user) or ("-" * len(digest),)
    if any([hmac.compare_digest(digest.encode(), each.encode()) for each in expected]):  # noqa: C419 - the same
        return Identity(user, operator=user in operators, digest=digest)
    return Refusal("bad-credentials", _why_wrong(user, password, users, operators))


def _why_wrong(user: str, password: bytes, users: Secrets, operators: Secrets) -> str:
    """Say for the log why user name and password are wrong; the client is not told."""
    if user in users or user in operators:
        return "the password is wrong; sluice devices rotate makes another one for this device"
    name = password.decode(errors="replace")
    digest = hashlib.sha256(user.encode()).hexdigest()
    if digest in users.get(name, ()) or digest in operators.get(name, ()):
        return f"user name and password are the wrong way round: the user name is {name!r}"
    return "no device has this name; sluice devices list shows all names, sluice devices add makes a new one"


class CommandTopics:
    """The topics of commands to devices, made from templates such as `command/{device}/#`."""

    def __init__(self, templates: Sequence[str]) -> None:
        """Raises ValueError for the first template that cannot work; the message says what to write instead."""
        self._templates = [_levels(template) for template in templates]

    def device_of(self, topic: str) -> str | None:
        """The device that a topic name addresses; None if it is no command topic."""
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

    def topic_of(self, device: str, below: str) -> str | None:
        """The command topic of a device with these levels below it; None if no template ends in levels of any name."""
        for template in self._templates:
            if template[-1] == "#" and "+" not in template:
                return "/".join([*_filled(template[:-1], device), *([below] if below else [])])
        return None

    def may_subscribe(self, topic_filter: str, device: str | None) -> bool:
        """Whether a filter matches only command topics of this device.

        `device` is None for an operator, which sends commands and may not subscribe.
        """
        # An anonymous client's identifier may hold wildcards and slashes. Such an identifier names no device.
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
    """Whether `wide` matches every topic that the filter or topic name `narrow` matches (section 4.7.1)."""
    for at, level in enumerate(wide):
        # Checked first, because 'a/#' matches 'a' too.
        if level == "#":
            return True
        if at == len(narrow) or narrow[at] == "#" or level not in {"+", narrow[at]}:
            return False
    return len(narrow) == len(wide)
