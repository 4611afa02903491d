"""Sends only what moved: members of readings that are left out while they stay as they were sent last."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Final

import msgspec

_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Changes:
    """The named members of one stream, and their values as they were sent last.

    `deadbands` has a deadband for each named member. A number has moved if it differs by more than that from the number
    sent last, and any other value if it differs. After `silence_s_max` seconds a member is sent as it is.
    """

    __slots__ = ("_deadbands", "_sent", "_silence_us_max")

    def __init__(self, deadbands: Mapping[str, float], silence_s_max: float) -> None:
        # As it is written: 0.1 is a tenth.
        self._deadbands = {name: Decimal(repr(deadband)) for name, deadband in deadbands.items()}
        self._silence_us_max = round(silence_s_max * 1e6)
        self._sent: dict[str, tuple[bytes, int]] = {}

    def moved(self, payload: bytes, now_us: int) -> bytes | None:
        """The payload without named members that have not moved; None if no named member has.

        A payload without named members, or that is no JSON object, stays as it is.
        """
        if not self._deadbands:
            return payload
        try:
            members = _MEMBERS.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return payload
        named = members.keys() & self._deadbands.keys()
        due = {name for name in named if self._is_due(name, bytes(members[name]), now_us)}
        self._sent.update({name: (bytes(members[name]), now_us) for name in due})
        if due == named:
            return payload
        if not due:
            return None
        rest = (
            b"%b:%b" % (msgspec.json.encode(name), bytes(value))
            for name, value in members.items()
            if name in due or name not in named
        )
        return b"{" + b",".join(rest) + b"}"

    def forget(self) -> None:
        """Send every member with the next reading: one that was sent is lost."""
        self._sent.clear()

    def _is_due(self, name: str, value: bytes, now_us: int) -> bool:
        sent = self._sent.get(name)
        if sent is None or now_us - sent[1] >= self._silence_us_max:
            return True
        if value == sent[0]:
            return False
        try:
            return abs(Decimal(value.decode()) - Decimal(sent[0].decode())) > self._deadbands[name]
        except (ArithmeticError, UnicodeDecodeError):
            # Not two numbers. A format's texts may be no UTF-8.
            return True
