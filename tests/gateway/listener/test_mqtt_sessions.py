"""Sessions without I/O: kept, forgotten and capped, also if commits fail."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.listener.session import (
    SESSION_MARKS,
    ClientBatch,
    Command,
    Room,
    Session,
    TooManyCommandsError,
    TooManyUnfinishedError,
    check_room,
    digest,
)
from gateway.listener.sessions import Sessions, SessionsFullError
from gateway.mqtt.protocol import PUBCOMP
from gateway.reading import Mark


def kept_marks(*marks: Mark) -> dict[str, bytes]:
    return {mark.key: mark.value for mark in marks if mark.value is not None}


def sessions(sessions_max: int = 10, per_user_max: int = 8, room: Room | None = None) -> Sessions:
    names = iter("abcdefghijklmnopqrstuvwxyz")
    return Sessions(sessions_max, per_user_max, 3_600.0, room or Room(1_000, 100), lambda: next(names))


def opened(table: Sessions, client_id: str = "m001", user: str | None = None) -> Session:
    """A session whose commit is done."""
    opening = table.open((user, client_id), clean=False)
    table.opened(opening)
    return opening.session


def begin(session: Session, packet_id: int, payload: bytes) -> ClientBatch:
    batch = ClientBatch()
    session.begin(batch, packet_id, digest("t", payload), 10)
    return batch


def release(session: Session, packet_id: int) -> ClientBatch:
    batch = ClientBatch()
    session.release(batch, packet_id, 0)
    return batch


def is_open(session: Session, packet_id: int, payload: bytes) -> bool:
    return session.is_known(packet_id, digest("t", payload))


@pytest.fixture
def table() -> Sessions:
    return sessions()


def test_a_batch_of_many_kinds() -> None:
    """One read makes one commit. Its marks hold all that a restart must know of it."""
    session, _, marks = sessions().open((None, "m001"), clean=False)
    assert list(marks) == ["mqtt/session/a"]
    batch = ClientBatch()
    assert session.begin(batch, 7, digest("t", b"x"), 10)
    assert not session.begin(batch, 7, digest("t", b"x"), 10)
    session.release(batch, 8, 0)
    assert batch.marks == {"mqtt/qos2/a/7": digest("t", b"x")}
    session.committed(batch)
    assert not batch.untrue
    later = release(session, 7)
    assert later.marks == {"mqtt/qos2/a/7": None, "mqtt/qos2/a/released": session.released.packed}
    session.undo(later)
    assert is_open(session, 7, b"x"), "a PUBREL whose commit failed has released nothing"
    session.committed(release(session, 7))
    assert not is_open(session, 7, b"x")
    assert session.unfinished == session.room.unfinished == 0


def test_a_clean_session_leaves_no_mark() -> None:
    session, _, marks = sessions().open((None, "m001"), clean=True)
    batch = begin(session, 1, b"x")
    session.release(batch, 1, 0)
    assert marks == batch.marks == {}


def test_what_is_loaded_is_what_was_kept() -> None:
    before = sessions()
    session = opened(before, "\u00fc/+#\0", "m001")
    before.subscribe(session, "command/m001/#", 1)
    batch = begin(session, 65_535, b"x")
    session.queue(batch, Command(0, "command/m001/set", b"\x00on"))
    begin_and_release = begin(session, 1, b"y")
    session.release(begin_and_release, 1, 0)
    for each in (batch, begin_and_release):
        session.committed(each)
    marks = batch.marks | begin_and_release.marks
    kept = kept_marks(session.mark(), *(Mark(key, value) for key, value in marks.items()))
    after = sessions()
    assert after.load(kept, 5.0) == []
    loaded = after.kept["m001", "\u00fc/+#\0"]
    assert (loaded.stored, loaded.unfinished, loaded.released.packed, loaded.commands, loaded.subscriptions) == (
        session.stored,
        session.unfinished,
        session.released.packed,
        session.commands,
        session.subscriptions,
    )
    assert len(session.released.packed) > 0
    assert (loaded.on_disk, loaded.idle_since_s, after.room) == (True, 5.0, before.room)
    assert after.subscribed == {"m001": [loaded]}
    loaded.resume()
    assert loaded.send_waiting()[0] == 0x3A, "it may have been sent before the restart"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qos2/gone/1", b"12345678"),
        ("qos2/a/x", b"12345678"),
        ("command/a/1", b"rubbish"),
        ("command/gone/1", b""),
        ("session/b", b"\xff"),
        ("session/b", b"\x93\xc0\xa1\xff\x80"),
        ("something", b""),
        ("", b""),
    ],
)
def test_marks_that_belong_to_nothing_are_forgotten(key: str, value: bytes) -> None:
    session = opened(sessions())
    after = sessions()
    assert after.load({**kept_marks(session.mark()), SESSION_MARKS + key: value}, 0.0) == [
        Mark(SESSION_MARKS + key, None)
    ]
    assert list(after.kept) == [(None, "m001")]


def test_of_two_sessions_with_one_key_the_later_counts(table: Sessions) -> None:
    """The older one's exchanges would make new messages look old."""
    table.open((None, "m000"), clean=False)
    first = opened(table)
    table.open((None, "m001"), clean=True)
    second = opened(table)
    batch = begin(first, 7, b"x")
    after = sessions()
    forgotten = after.load(kept_marks(second.mark(), first.mark(), *map(Mark, batch.marks, batch.marks.values())), 0.0)
    assert set(forgotten) == {Mark("mqtt/session/b", None), Mark("mqtt/qos2/b/7", None)}
    assert after.kept[None, "m001"].name == "c"
    assert after.room.unfinished == 0
    assert opened(after, "m002").number == second.number + 1


def test_beyond_the_bound_the_longest_idle_session_goes_and_one_that_holds_something_last() -> None:
    table = sessions(sessions_max=3)
    for number, name in enumerate(("busy", "old", "new")):
        opened(table, name).idle_since_s = float(number)
    begin(table.kept[None, "busy"], 7, b"x")
    assert [session.key[1] for session in table.make_room(None, lambda _: False)] == ["old"]
    opened(table, "fourth").idle_since_s = 3.0
    assert [session.key[1] for session in table.make_room(None, lambda key: key[1] == "new")] == ["fourth"]
    assert table.make_room(None, lambda _: False) == []
    opened(table, "fifth")
    with pytest.raises(SessionsFullError):
        table.make_room(None, lambda _: True)


def test_where_there_is_no_room_after_all_nobody_is_displaced() -> None:
    """After a start with a lower `sessions_max` there are more sessions than may be: one in exchange is not enough."""
    before, after = sessions(), sessions(sessions_max=2)
    marks = [opened(before, name).mark() for name in ("idle", "busy", "busier")]
    after.load(kept_marks(*marks), 0.0)
    with pytest.raises(SessionsFullError):
        after.make_room(None, lambda key: key[1] != "idle")
    assert len(after.kept) == 3
    assert [session.key[1] for session in after.make_room(None, lambda key: key[1] == "busier")] == ["idle", "busy"]


def test_a_user_who_keeps_too_many_sessions_displaces_nobody_elses() -> None:
    table = sessions(per_user_max=2)
    opened(table, "other", "m002")
    for number in range(5):
        gone = table.make_room("m001", lambda _: False)
        assert [session.key[1] for session in gone] == ([str(number - 2)] if number >= 2 else [])
        opened(table, str(number), "m001").idle_since_s = 1.0 + number
    assert sorted(table.kept) == [("m001", "3"), ("m001", "4"), ("m002", "other")]
    for number in range(5):
        assert table.make_room(None, lambda _: False) == [], "anonymous clients have no user to be counted by"
        opened(table, str(number))


@pytest.mark.parametrize("in_time", [True, False])
def test_a_session_that_a_clean_connect_removed_does_not_come_back(in_time: bool) -> None:  # noqa: FBT001
    """Its own commit may still be under way, and may fail."""
    table = sessions()
    first = table.open((None, "m001"), clean=False)
    second = table.open((None, "m001"), clean=True)
    (table.opened if in_time else table.not_opened)(first)
    table.opened(second)
    assert not table.kept
    assert second.marks == {"mqtt/session/a": None}


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_clean_connect_whose_commit_failed_removed_nothing(kept_first: bool) -> None:  # noqa: FBT001
    """The session that it would have removed stays as it was, unless that session's own commit failed too."""
    table = sessions()
    first = table.open((None, "m001"), clean=False)
    second = table.open((None, "m001"), clean=True)
    (table.opened if kept_first else table.not_opened)(first)
    table.not_opened(second)
    assert list(table.kept.values()) == ([first.session] if kept_first else [])


def test_one_of_two_clean_connects_is_enough(table: Sessions) -> None:
    session = opened(table)
    one, two = table.open(session.key, clean=True), table.open(session.key, clean=True)
    assert one.marks == two.marks == {"mqtt/session/a": None}
    table.not_opened(one)
    assert not table.kept, "the other one may still forget it"
    table.opened(two)
    assert not table.kept


def test_a_clean_connect_forgets_what_failed_commits_left_of_several_sessions(table: Sessions) -> None:
    """Or the oldest would be there again after a restart, and take new messages for its own."""
    opened(table)
    failing = [table.open((None, "m001"), clean=True), table.open((None, "m001"), clean=False)]
    last = table.open((None, "m001"), clean=True)
    for opening in failing:
        table.not_opened(opening)
    assert last.marks == {"mqtt/session/a": None, "mqtt/session/b": None}
    table.opened(last)
    assert not table.kept


def test_what_could_not_be_forgotten_is_there_again(table: Sessions) -> None:
    """It is still on the disk. So a clean CONNECT must forget it, and gives back its room only then."""
    session = opened(table)
    begin(session, 7, b"x")
    over = table.expired(3_600.0, lambda _: False)
    assert over == [session]
    assert table.forget(over) == {"mqtt/session/a": None, "mqtt/qos2/a/7": None}
    meanwhile = table.open(session.key, clean=True)
    assert meanwhile.marks == {"mqtt/session/a": None, "mqtt/qos2/a/7": None}
    table.forgotten(over, False)
    table.not_opened(meanwhile)
    assert list(table.kept.values()) == [session]
    assert table.room.unfinished == 1
    table.opened(table.open(session.key, clean=True))
    assert not table.kept
    assert table.room.unfinished == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_refused_messages_of_one_identifier_leave_nothing(order: tuple[int, int]) -> None:
    session = opened(sessions())
    batches = [begin(session, 5, b"A"), begin(session, 5, b"B")]
    for number in order:
        session.undo(batches[number])
    assert (session.stored, session.changing) == ({}, {})
    assert session.unfinished == session.room.unfinished == 0


def test_a_refused_message_leaves_the_one_of_its_identifier_that_is_stored() -> None:
    session = opened(sessions())
    session.committed(begin(session, 5, b"A"))
    refused, stored = begin(session, 5, b"B"), begin(session, 5, b"C")
    session.undo(refused)
    session.committed(stored)
    session.undo(begin(session, 5, b"D"))
    assert is_open(session, 5, b"C")
    assert session.stored == {5: digest("t", b"C")}


def test_an_answer_is_true_only_if_the_batch_that_it_follows_is_stored() -> None:
    """A message came again, and its PUBREL came, while its first copy waited for a commit that failed."""
    session = opened(sessions())
    first, again = begin(session, 5, b"A"), begin(session, 5, b"A")
    session.release(again, 5, 0)
    session.release(again, 6, 0)
    session.undo(first)
    session.committed(again)
    assert again.answers[2:] == [PUBCOMP | 6]
    assert again.untrue == {0, 1}, "PUBCOMP too would say that the message is here"
    assert session.unfinished == 0


@given(
    st.lists(st.tuples(st.sampled_from(["A", "B", "release", "next batch"]), st.integers(1, 2)), max_size=20),
    st.lists(st.booleans(), min_size=21, max_size=21),
    st.integers(0, 3),
)
def test_after_any_commits_that_fail_the_session_is_as_its_marks_say(
    steps: list[tuple[str, int]], outcomes: list[bool], refused_newest: int
) -> None:
    """A restart finds the state that the next message meets."""
    table = sessions()
    session = opened(table)
    batches = [ClientBatch()]
    for step, packet_id in steps:
        if step == "next batch":
            batches.append(ClientBatch())
        elif step == "release":
            session.release(batches[-1], packet_id, 0)
        else:
            session.begin(batches[-1], packet_id, digest("t", step.encode()), 10)
    for _ in range(min(refused_newest, len(batches))):
        session.undo(batches.pop())
    kept = kept_marks(session.mark())
    for batch, is_stored in zip(batches, outcomes, strict=False):
        if is_stored:
            session.committed(batch)
            kept = {key: value for key, value in (kept | batch.marks).items() if value is not None}
        else:
            session.undo(batch)
    after = sessions()
    assert after.load(kept, 0.0) == []
    assert after.kept[session.key].stored == session.stored
    assert session.changing == {}
    assert session.unfinished == len(session.stored) == table.room.unfinished == after.room.unfinished
    assert session.forgetting().keys() >= kept.keys()
    table.close(session)
    assert table.room.unfinished == 0


def test_unfinished_exchanges_of_all_sessions_are_bounded() -> None:
    table = sessions(room=Room(1_000, 5))
    one, two = opened(table), opened(table, "m002")
    for packet_id in (1, 2, 3):
        begin(one, packet_id, b"x")
    with pytest.raises(TooManyUnfinishedError):
        begin(one, 4, b"x")
    begin(two, 1, b"x")
    with pytest.raises(TooManyUnfinishedError):
        begin(two, 2, b"x")
    begin(two, 1, b"y")
    table.close(one)
    begin(two, 2, b"x")
    assert (table.room.unfinished, two.unfinished) == (2, 2)


def test_commands_keep_their_order_and_their_bounds() -> None:
    table = sessions(room=Room(20, 10))
    session = opened(table)
    batch = ClientBatch()
    for payload in (b"1", b"2"):
        check_room([session], 2, 2)
        session.queue(batch, Command(0, "t", payload))
    with pytest.raises(TooManyCommandsError):
        check_room([session], 2, 2)
    check_room([session, session], 8, 9)
    with pytest.raises(TooManyCommandsError):
        check_room([session, session], 9, 9)
    assert session.send_waiting() == b"", "not before the commit"
    session.committed(batch)
    assert session.send_waiting() == b"\x32\x06\x00\x01t\x00\x011" + b"\x32\x06\x00\x01t\x00\x022"
    done = ClientBatch()
    assert session.acknowledged(done, 1)
    assert done.marks == {"mqtt/command/a/1": None}
    session.resume()
    assert session.send_waiting() == b"\x3a\x06\x00\x01t\x00\x022"
    table.close(session)
    assert table.room.commands_bytes == 0


@pytest.mark.parametrize("more", [(), (b"", 5, "boot")])
def test_a_commands_mark_is_read_as_it_was_written_before_it_had_more_fields(more: tuple[Any, ...]) -> None:
    former = msgspec.msgpack.encode((7, "t", b"on", *more))
    assert msgspec.msgpack.decode(former, type=Command) == Command(7, "t", b"on", *more)


def test_a_command_whose_commit_failed_was_never_there(table: Sessions) -> None:
    session = opened(table)
    batch = ClientBatch()
    session.queue(batch, Command(0, "t", b"1"))
    session.undo(batch)
    assert session.commands == {}
    assert table.room.commands_bytes == 0
    assert not session.acknowledged(ClientBatch(), 1)
