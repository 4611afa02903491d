"""The slot script in U-Boot itself: which root it starts, and that it counts only a slot on trial."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.host import boot_slots
from gateway.host.boot_slots import FILES, SlotState, decode, encode
from image import card
from tests.support.uboot_board import IMAGER, board, boot_file, kernel, make_card, make_root, skip_without_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GOOD_A = encode(SlotState(7, "a"))
ON_TRIAL = encode(SlotState(8, "a", "b", 3))
STATES: dict[str, tuple[bytes | None, bytes | None]] = {
    "no state": (None, None),
    "a is good": (GOOD_A, None),
    "b is good, in the second file": (None, encode(SlotState(1, "b"))),
    "the second file is newer": (encode(SlotState(9, "b")), encode(SlotState(0xA, "a"))),
    "the first file is newer": (encode(SlotState(0x100, "b")), encode(SlotState(0xFF, "a"))),
    "numbers as large as they get": (encode(SlotState(0x7FFFFFF0, "a")), encode(SlotState(0x7FFFFFF1, "b", "a", 1))),
    "first start on trial": (GOOD_A, ON_TRIAL),
    "last start on trial": (encode(SlotState(0xF, "b", "a", 1)), encode(SlotState(0xE, "b", "a", 2))),
    "no start is left": (encode(SlotState(10, "a", "b", 0)), encode(SlotState(9, "a", "b", 1))),
    "the newer one is torn": (GOOD_A, ON_TRIAL[:256] + GOOD_A[256:300] + b"\xff" * 212),
    "the newer one has one wrong bit": (GOOD_A, ON_TRIAL[:-1] + b"\1"),
    "the newer one is short": (GOOD_A, ON_TRIAL[:300]),
    "the newer one is long": (GOOD_A, ON_TRIAL + bytes(512)),
    "the newer one is empty": (GOOD_A, b""),
    "the older one is torn": (bytes(512), ON_TRIAL),
    "both are torn": (b"\xff" * 512, ON_TRIAL[:511] + b"?"),
}
BOOTABLE = ("vmlinuz", "initrd.img")


@dataclass(frozen=True, slots=True)
class Roots:
    """Roots by what they have, each for both slots."""

    folder: Path

    def make(self, slot: str, files: Sequence[str], name: str, *, then_off: bool = False) -> Path:
        content = {"vmlinuz": kernel(slot, then_off=then_off), "initrd.img": b"ramdisk", "broken": b"no kernel" * 500}
        found = {("vmlinuz" if file == "broken" else file): content[file] for file in files}
        return make_root(self.folder / f"{slot}-{name}.ext4", found)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    skip_without_tools()
    return Roots(tmp_path_factory.mktemp("roots"))


@pytest.fixture(scope="module")
def sound(roots: Roots) -> tuple[Path, Path]:
    """Both roots, as they should be."""
    return roots.make("a", BOOTABLE, "sound"), roots.make("b", BOOTABLE, "sound")


def state_files(states: tuple[bytes | None, bytes | None]) -> dict[str, bytes]:
    return {name: content for name, content in zip(FILES, states, strict=True) if content is not None}


def believed(path: Path, folder: Path) -> SlotState:
    """The state on a card, as the gateway reads it."""
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        content = boot_file(path, name)
        if content is not None:
            (folder / name).write_bytes(content)
    return boot_slots.read(folder)


def test_the_slot_is_the_one_that_the_state_says_and_only_a_trial_is_counted(
    tmp_path: Path, sound: tuple[Path, Path]
) -> None:
    cards = [make_card(tmp_path / f"card{n}", sound, state_files(states)) for n, states in enumerate(STATES.values())]
    with board(cards) as machine:
        for number, (name, states) in enumerate(STATES.items()):
            before = believed(cards[number], tmp_path / "state")
            letter, line = machine.start(number)
            assert letter == before.next_start, name
            part = {"a": 2, "b": 3}[letter]
            assert line.startswith(f"PARTUUID={card.DISK_SIGNATURE:08x}-{part:02} ro "), name
            assert line.endswith(f" rauc.slot={letter} {IMAGER.strip()}"), name
            written = {file: boot_file(cards[number], file) for file in FILES}
            if before.trial is None or before.tries == 0:
                assert written == dict(zip(FILES, states, strict=True)), f"{name}: nothing was to be counted"
            else:
                counted = replace(before, number=before.number + 1, tries=before.tries - 1)
                assert encode(counted) in written.values(), name
                assert believed(cards[number], tmp_path / "state") == counted, name


def test_a_slot_on_trial_that_never_ends_well_is_started_three_times_and_then_the_good_one(
    tmp_path: Path, roots: Roots, sound: tuple[Path, Path]
) -> None:
    good = roots.make("a", BOOTABLE, "off", then_off=True)
    path = make_card(tmp_path / "card", (good, sound[1]), {FILES[0]: GOOD_A, FILES[1]: ON_TRIAL})
    with board([path]) as machine:
        assert [machine.start_by_itself() for _ in range(4)] == ["b", "b", "b", "a"]
        machine.wait_until_off()
    assert believed(path, tmp_path / "state") == SlotState(11, "a", "b", 0)


def test_a_kernel_that_cannot_be_loaded_leads_to_the_other_slot_or_to_another_try(
    tmp_path: Path, roots: Roots, sound: tuple[Path, Path]
) -> None:
    broken = {files: roots.make("b", files, "-".join(files) or "empty") for files in
              ((), ("vmlinuz",), ("initrd.img",), ("broken", "initrd.img"))}  # fmt: skip
    a, b = sound
    tried = state_files((GOOD_A, ON_TRIAL))
    cases = [((a, root), tried, "a") for root in broken.values()]
    cases += [((broken[()], b), state_files((GOOD_A, None)), "b")]
    cases += [((broken[()], broken["broken", "initrd.img"]), tried, "")]
    cards = [make_card(tmp_path / f"card{n}", pair, files) for n, (pair, files, _) in enumerate(cases)]
    with board(cards) as machine:
        assert [machine.start(number)[0] for number in range(len(cards))] == [expected for *_, expected in cases]
    for path, (_, files, _) in zip(cards, cases, strict=True):
        expected = SlotState(9, "a", "b", 2) if files is tried else SlotState(7, "a")
        assert believed(path, tmp_path / "state") == expected


def test_a_trial_that_cannot_be_counted_is_not_begun(tmp_path: Path, sound: tuple[Path, Path]) -> None:
    path = make_card(tmp_path / "card", sound, {FILES[0]: GOOD_A, FILES[1]: ON_TRIAL})
    with board([path], read_only=[path]) as machine:
        assert machine.start(0)[0] == "a"


def test_power_that_goes_while_it_counts_leaves_the_state_before_or_after(
    tmp_path: Path, sound: tuple[Path, Path]
) -> None:
    """Of the sectors that U-Boot wrote, every part may have come onto the card."""
    files = {FILES[0]: GOOD_A, FILES[1]: ON_TRIAL}
    path = make_card(tmp_path / "card", sound, files)
    before = path.read_bytes()
    with board([path]) as machine:
        assert machine.start(0)[0] == "b"
    after = path.read_bytes()
    places = range(0, len(before), card.SECTOR)
    written = [at for at in places if before[at : at + card.SECTOR] != after[at : at + card.SECTOR]]
    assert 1 <= len(written) <= 6, written
    seen = set()
    for kept in itertools.product([False, True], repeat=len(written)):
        with path.open("r+b") as file:
            for at, is_kept in zip(written, kept, strict=True):
                file.seek(at)
                file.write((after if is_kept else before)[at : at + card.SECTOR])
        seen.add(believed(path, tmp_path / "state"))
    assert seen == {decode(ON_TRIAL), SlotState(9, "a", "b", 2)}
