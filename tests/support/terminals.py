"""Characters that a terminal would obey, or not show: for tests of all that is printed."""

import unicodedata

from hypothesis import strategies as st

OBEYED = frozenset(
    {
        *map(chr, (*range(0x20), *range(0x7F, 0xA0))),
        *map(chr, (0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF)),
        *map(chr, (0xAD, 0x034F, 0x115F, 0x1160, 0x180E, 0x3164, 0xFE0F, 0xFFA0, 0xE0001, 0xE0041, 0xE0100)),
    }
)
"""Controls (C0, DEL, C1), line ends, bidi marks and overrides, and what takes no room and hides what a name is."""
AFTER_LINE_END = "¶"
"""Stands behind each line end of a name: no line of what is printed may begin with it."""
WORST = "x" + "".join(sorted(OBEYED)) + "\\" + AFTER_LINE_END + "y"

# No surrogates: nothing that comes over a wire as text, and nothing in SQLite, has any.
names = st.text(st.sampled_from([*sorted(OBEYED), *"ab7\\ü€😀"]), min_size=1, max_size=12).map(
    lambda name: name.replace("\n", f"\n{AFTER_LINE_END}")
)


def is_obeyed(character: str) -> bool:
    """Whether a character must not come out as it is; by Unicode's own classes beside the list above."""
    return character in OBEYED or unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def assert_harmless(printed: str) -> None:
    """Line ends are ours, and nothing else of it is any terminal's."""
    found = {f"U+{ord(character):04X}" for character in printed if character != "\n" and is_obeyed(character)}
    assert not found, f"{sorted(found)} in {printed!r}"
    broken = [line for line in printed.split("\n") if line.lstrip().startswith(AFTER_LINE_END)]
    assert not broken, f"a name broke the line before {broken!r}"
