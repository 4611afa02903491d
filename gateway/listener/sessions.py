"""Keeps the MQTT sessions that outlive their connections, until they expire or make room; no I/O."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from gateway.listener.released import Released
from gateway.listener.session import RELEASED, SESSION_MARKS, Command, KeptSession, Room, Session, SessionKey
from gateway.reading import Mark


class Opening(NamedTuple):
    """The session of a CONNECT, and the marks to commit before its CONNACK."""

    session: Session
    replaced: tuple[Session, ...]
    """Sessions of the same key that are over, and that no commit has forgotten yet. The commit of `marks` does."""
    marks: dict[str, bytes | None]


class SessionsFullError(Exception):
    """`sessions_max` sessions are kept, or `sessions_per_user_max` of one user, and all are connected."""


class Sessions:
    """The sessions that outlive their connections. A session expires `expiry_s` after its last connection.

    Times are seconds of any steady clock. A box without a clock cannot know how long it was off, so after a start every
    session's time begins again.
    """

    def __init__(
        self, sessions_max: int, per_user_max: int, expiry_s: float, room: Room, new_name: Callable[[], str]
    ) -> None:
        self._sessions_max = sessions_max
        self._per_user_max = per_user_max
        self._expiry_s = expiry_s
        self._new_name = new_name
        self.room = room
        self._number = 0
        self.kept: dict[SessionKey, Session] = {}
        self._leaving: dict[SessionKey, list[Session]] = {}
        """Sessions that are over, until a commit has forgotten them. If commits fail, a key may have several."""
        self.subscribed: dict[str, list[Session]] = {}
        """Sessions with subscriptions, kept or not, by device."""

    def load(self, marks: Mapping[str, bytes], now_s: float) -> list[Mark]:
        """Load the marks that were kept before a restart; return marks that forget all stray ones."""
        by_name: dict[str, Session] = {}
        strays: list[str] = []
        for key, value in sorted(marks.items(), key=lambda item: not item[0].startswith(f"{SESSION_MARKS}session/")):
            if not self._load(by_name, key, value):
                strays.append(key)
        forget = dict.fromkeys(strays)
        for session in sorted(by_name.values(), key=lambda session: session.number):
            session.idle_since_s = now_s
            self._number = session.number
            older = self.kept.get(session.key)
            if older is not None:
                # A later session replaced it, but the commit that was to forget it failed.
                forget |= older.forgetting()
                self.close(older)
            self.kept[session.key] = session
        return [Mark(key, value) for key, value in forget.items()]

    def make_room(self, user: str | None, connected: Callable[[SessionKey], bool]) -> list[Session]:
        """Take out sessions so that this user may have one more; return them.

        Sessions that hold nothing go first, then the longest idle. The caller must forget their marks (`forget`).
        Anonymous clients have no user to count by, so only the bound of all sessions holds for them. Raises
        SessionsFullError if too many are connected; then nothing is taken out.
        """
        own = [] if user is None else [session for session in self.kept.values() if session.key[0] == user]
        gone = _longest_idle(own, len(own) - self._per_user_max + 1, connected)
        beyond = len(self.kept) - len(gone) - self._sessions_max + 1
        if beyond > 0:
            gone += _longest_idle(set(self.kept.values()) - set(gone), beyond, connected)
        for session in gone:
            self._take_out(session)
        return gone

    def open(self, key: SessionKey, *, clean: bool, expiry_s: int | None = None, is_over: bool = False) -> Opening:
        """Return the session of a CONNECT, and the marks to commit before its CONNACK (section 3.1.2.4).

        With `clean`, or if the former one `is_over`, it begins anew. `expiry_s` is for how long an MQTT 5 client wants
        it kept. If `key` is new and the session is kept, call `make_room` first. After the commit, call `opened` or
        `not_opened`.
        """
        is_kept = not clean if expiry_s is None else expiry_s > 0
        if expiry_s is not None:
            expiry_s = min(expiry_s, math.ceil(self._expiry_s))
        if (clean or is_over) and key in self.kept:
            self._take_out(self.kept[key])
        is_changed = False
        if key in self.kept:
            # With an expiry of 0 it is resumed, and ends with this connection.
            session = self.kept[key]
            is_changed = session.expiry_s != expiry_s
        elif is_kept:
            self._number += 1
            session = self.kept[key] = Session(key, self._new_name(), True, self.room, self._number)
        else:
            session = Session(key, "", False, self.room)
        session.expiry_s = expiry_s
        replaced = tuple(self._leaving.get(key, ()))
        marks = self.forget(replaced)
        if session.kept and (is_changed or not session.on_disk):
            session.opening += 1
            marks |= (session.mark(),)
        return Opening(session, replaced, marks)

    def opened(self, opening: Opening) -> None:
        """Record that the commit of `open` is done. From now on CONNACK may promise the session."""
        session = opening.session
        if session.kept:
            session.opening = max(session.opening - 1, 0)
            session.on_disk = True
        self.forgotten(opening.replaced, True)

    def not_opened(self, opening: Opening) -> None:
        """Record that the commit of `open` failed, and restore the state before it."""
        session = opening.session
        if session.kept:
            session.opening = max(session.opening - 1, 0)
            if not (session.opening or session.on_disk) and self.kept.get(session.key) is session:
                del self.kept[session.key]
                self.close(session)
        self.forgotten(opening.replaced, False)

    def forget(self, sessions: Collection[Session]) -> dict[str, bytes | None]:
        """Return the marks that forget sessions which were taken out. After their commit, call `forgotten`."""
        marks: dict[str, bytes | None] = {}
        for session in sessions:
            session.leaving += 1
            marks |= session.forgetting()
        return marks

    def forgotten(self, sessions: Collection[Session], stored: bool) -> None:  # noqa: FBT001 - as Intake has it
        """Give up sessions that a commit has forgotten. If it failed and no other is under way, take them back."""
        for session in sessions:
            leaving = self._leaving.get(session.key, [])
            if session not in leaving:
                continue  # another commit was first
            session.leaving -= 1
            if session.leaving and not stored:
                continue
            leaving.remove(session)
            if not leaving:
                del self._leaving[session.key]
            if not stored and (session.on_disk or session.opening):
                self.kept[session.key] = session
            else:
                self.close(session)

    def _take_out(self, session: Session) -> None:
        del self.kept[session.key]
        self._leaving.setdefault(session.key, []).append(session)

    def subscribe(self, session: Session, topic_filter: str, qos: int) -> None:
        """Add a subscription, or replace the one with the same filter [MQTT-3.8.4-3]."""
        if not session.subscriptions:
            self.subscribed.setdefault(session.device, []).append(session)
        session.subscriptions[topic_filter] = qos

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove the subscription with exactly this filter [MQTT-3.10.4-1]; return whether there was one."""
        if session.subscriptions.pop(topic_filter, None) is None:
            return False
        if not session.subscriptions:
            self._unlist(session)
        return True

    def close(self, session: Session) -> None:
        """Give up a session that is over."""
        session.clear()
        if session.subscriptions:
            session.subscriptions = {}
            self._unlist(session)

    def _unlist(self, session: Session) -> None:
        listed = self.subscribed[session.device]
        listed.remove(session)
        if not listed:
            del self.subscribed[session.device]

    def expiry_of(self, session: Session) -> float:
        """Seconds that a kept session is kept after its connection."""
        return self._expiry_s if session.expiry_s is None else min(session.expiry_s, self._expiry_s)

    def expire_after(self, session: Session, expiry_s: int) -> None:
        """Keep a session for so long after its connection, as its client wishes now."""
        session.expiry_s = min(expiry_s, math.ceil(self._expiry_s))

    def is_over(self, key: SessionKey, now_s: float) -> bool:
        """Whether a session that is not connected has expired, although `expired` has not taken it out yet."""
        session = self.kept.get(key)
        return session is not None and now_s - session.idle_since_s >= self.expiry_of(session)

    def expired(self, now_s: float, connected: Callable[[SessionKey], bool]) -> list[Session]:
        """Take out and return expired sessions. The caller must forget their marks (`forget`)."""
        over = [session for key, session in self.kept.items() if not connected(key) and self.is_over(key, now_s)]
        for session in over:
            self._take_out(session)
        return over

    def _load(self, by_name: dict[str, Session], key: str, value: bytes) -> bool:
        """Load one mark, sessions first; return whether it is valid and belongs to a session."""
        try:
            match key.split("/"):
                case [_, "session", name]:
                    kept = msgspec.msgpack.decode(value, type=KeptSession)
                    by_name[name] = Session(
                        (kept.user, kept.client_id), name, True, self.room, kept.number, on_disk=True
                    )
                    by_name[name].expiry_s = kept.expiry_s
                    for topic_filter, qos in kept.subscriptions.items():
                        self.subscribe(by_name[name], topic_filter, qos)
                case [_, "qos2", name, part] if name in by_name and part == RELEASED:
                    by_name[name].released = Released(value)
                case [_, "qos2", name, number] if name in by_name:
                    by_name[name].load_exchange(int(number), value)
                case [_, "command", name, number] if name in by_name:
                    by_name[name].load_command(int(number), msgspec.msgpack.decode(value, type=Command))
                case _:
                    return False
        except ValueError:  # of int, of a decoder, of UTF-8
            return False
        return True


def _longest_idle(sessions: Collection[Session], count: int, connected: Callable[[SessionKey], bool]) -> list[Session]:
    """Return `count` idle sessions, empty ones first. Raises SessionsFullError if too few are idle."""
    idle = [session for session in sessions if not connected(session.key)] if count > 0 else []
    if len(idle) < count:
        raise SessionsFullError
    return sorted(idle, key=lambda session: (session.holds_something, session.idle_since_s, session.number))[
        : max(count, 0)
    ]
