"""The page's files use nothing of anybody else, and can be read in sunlight."""

import re
from importlib.resources import files

import pytest

from tests.support.contrast import ENHANCED, GRAPHICS, contrast, palettes

PAGE = files("gateway").joinpath("page")
NAMES = ("index.html", "login.html", "app.js", "style.css")
STYLE = PAGE.joinpath("style.css").read_text()
LIGHT, DARK = palettes(STYLE)


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
