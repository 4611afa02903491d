"""The page's files use nothing of anybody else, and can be read in sunlight."""

import re
from importlib.resources import files

import pytest

PAGE = files("gateway").joinpath("page")
NAMES = ("index.html", "login.html", "app.js", "style.css")
STYLE = PAGE.joinpath("style.css").read_text()
LIGHT, DARK = (
    dict(re.findall(r"--([a-z-]+):\s*(#[0-9a-f]+)", part)) for part in STYLE.split("prefers-color-scheme: dark")[:2]
)
ENHANCED = 7.0
"""WCAG 2.2, criterion 1.4.6; of large text 4.5 would do."""
GRAPHICS = 3.0
"""Criterion 1.4.11."""


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        *(("ink", "ground"), ("ink", "card"), ("quiet", "card"), ("quiet", "ground"), ("accent", "card")),
        *(("well", "well-ground"), ("warn", "warn-ground"), ("bad", "bad-ground"), ("bad", "card"), ("well", "card")),
        *(("ink", "warn-ground"), ("ink", "bad-ground"), ("warn", "card"), ("bad", "ground"), ("ink", "note-ground")),
    ],
)
def test_text_stands_out(colours: dict[str, str], text: str, ground: str) -> None:
    assert contrast(colours[text], colours[ground]) >= ENHANCED


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("bar", ["up", "down", "accent"])
def test_curves_stand_out(colours: dict[str, str], bar: str) -> None:
    assert contrast(colours[bar], colours["card"]) >= GRAPHICS


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fetched_from_anybody_else(name: str) -> None:
    text = PAGE.joinpath(name).read_text()
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+[^\s\"'<>]*", text))
    assert all(address.endswith("w3.org/2000/svg") for address in addresses)
    assert not re.search(r"@import|@font-face|innerHTML|insertAdjacentHTML|document\.write|\beval\b|\son[a-z]+=", text)


def test_no_colour_stands_beside_the_palette() -> None:
    """One that did would have to be chosen for light and dark."""
    rules = STYLE[STYLE.index("* { box-sizing") :]
    assert not re.search(r"#[0-9a-f]{3,8}\b(?![-\w])(?=\s*[;}])", rules)
