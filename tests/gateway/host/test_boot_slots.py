"""The state of the two slots: what was written is read, and a torn write leaves the state before."""

import errno
import os
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.host import boot_slots
from gateway.host.boot_slots import FILE_BYTES, FILES, SlotState, decode, encode, put_on_trial, read, settle, write

SLOTS = st.sampled_from(["a", "b"])
STATES = st.builds(
    SlotState,
    number=st.integers(1, 0xFFFF_FFFF),
    good=SLOTS,
    trial=st.none() | SLOTS,
    tries=st.integers(0, boot_slots.TRIES),
)


@given(state=STATES)
def test_what_was_written_is_read(state: SlotState) -> None:
    assert decode(encode(state)) == state
    assert len(encode(state)) == FILE_BYTES


@given(content=st.binary(max_size=FILE_BYTES + 2) | st.binary(min_size=FILE_BYTES, max_size=FILE_BYTES))
def test_bytes_that_are_no_state_are_none(content: bytes) -> None:
    assert decode(content) is None


@pytest.mark.parametrize(
    "values",
    ["good=a\0number=1\0trial=none\0", "good=c\0number=1\0trial=none\0tries=0\0", "good=a\0number=x\0tries=0\0"],
)
def test_a_state_with_other_values_is_none(values: str) -> None:
    body = values.encode().ljust(FILE_BYTES - 4, b"\0")
    assert decode(zlib.crc32(body).to_bytes(4, "little") + body) is None


def test_u_boots_own_tool_writes_the_same_bytes(tmp_path: Path) -> None:
    state = SlotState(0x1AF, "a", "b", 2)
    try:
        made = subprocess.run(
            ["mkenvimage", "-s", str(FILE_BYTES), "-p", "0x00", "-o", tmp_path / "env", "-"],
            input=b"good=a\nnumber=1af\ntrial=b\ntries=2\n",
            capture_output=True,
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no `mkenvimage`: install Debian's package u-boot-tools")
    assert made.returncode == 0
    assert (tmp_path / "env").read_bytes() == encode(state)


@given(states=st.lists(STATES, min_size=2, max_size=8))
def test_the_state_that_was_written_last_counts(
    tmp_path_factory: pytest.TempPathFactory, states: list[SlotState]
) -> None:
    folder = tmp_path_factory.mktemp("boot")
    assert read(folder) == SlotState()
    for number, state in enumerate(states, 1):
        assert write(folder, state) == replace(state, number=number)
        assert read(folder) == replace(state, number=number)
    assert {path.stat().st_size for path in folder.iterdir()} == {FILE_BYTES}


@given(
    states=st.tuples(STATES, STATES),
    writes_before=st.integers(1, 3),
    cut=st.integers(0, FILE_BYTES),
    rest=st.binary(max_size=FILE_BYTES),
)
def test_a_torn_write_leaves_the_state_before_or_the_new_one(
    tmp_path_factory: pytest.TempPathFactory,
    states: tuple[SlotState, SlotState],
    writes_before: int,
    cut: int,
    rest: bytes,
) -> None:
    folder = tmp_path_factory.mktemp("boot")
    for _ in range(writes_before):
        before = write(folder, states[0])
    old = contents(folder)
    after = write(folder, states[1])
    new = contents(folder)
    (name,) = (name for name in FILES if new.get(name) != old.get(name))
    # Of one sector a card keeps the former bytes or the new ones; a worse one leaves anything.
    for torn in (new[name][:cut] + old.get(name, b"")[cut:], new[name][:cut] + rest, rest):
        for path, content in {**new, name: torn}.items():
            (folder / path).write_bytes(content)
        found = read(folder)
        assert found in {before, after}
        assert write(folder, states[1]) == replace(states[1], number=found.number + 1) == read(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def test_a_file_that_cannot_be_read_counts_as_torn(tmp_path: Path) -> None:
    kept = write(tmp_path, SlotState(good="b"))
    (tmp_path / FILES[0]).mkdir()
    assert read(tmp_path) == kept


def test_a_card_that_takes_no_write_says_so_and_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write(tmp_path, SlotState(good="b"))

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda descriptor, *_: fail(descriptor))
        with pytest.raises(OSError, match="Input/output error"):
            write(tmp_path, put_on_trial(kept, "a"))
    assert read(tmp_path) == kept


def test_a_slot_on_trial_starts_until_its_tries_are_used_up() -> None:
    state = put_on_trial(SlotState(good="a"), "b")
    assert (state.next_start, state.tries) == ("b", 3)
    assert replace(state, tries=0).next_start == "a"
    assert settle(state, "b") == SlotState(good="b")
    assert settle(state, "a") == SlotState(good="a")
