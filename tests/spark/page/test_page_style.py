"""The desk's files use nothing of anybody else, look like the gateway's page, and can be read in sunlight."""

import re
from importlib.resources import files

import pytest

from tests.support.contrast import ENHANCED, GRAPHICS, contrast, palettes

PAGE = files("spark").joinpath("page")
STYLE = PAGE.joinpath("desk.css").read_text()
STYLE_OF_GATEWAYS = PAGE.joinpath("gateways.css").read_text()
LIGHT, DARK = palettes(STYLE.partition("@media print")[0])
PRINT = palettes(STYLE[STYLE.index("@media print") :] + "prefers-color-scheme: dark")[0]
GATEWAYS = palettes(files("gateway").joinpath("page", "style.css").read_text())


@pytest.mark.parametrize("colours", [LIGHT, DARK, PRINT], ids=["light", "dark", "print"])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        *(("ink", "ground"), ("ink", "card"), ("quiet", "card"), ("quiet", "ground"), ("accent", "card")),
        *(("well", "well-ground"), ("warn", "warn-ground"), ("bad", "bad-ground"), ("ink", "warn-ground")),
        *(("ink", "note-ground"), ("ink", "well-ground"), ("ink", "bad-ground"), ("bad", "card")),
    ],
)
def test_text_stands_out(colours: dict[str, str], text: str, ground: str) -> None:
    assert contrast(colours[text], colours[ground]) >= ENHANCED


@pytest.mark.parametrize("colours", [LIGHT, DARK, PRINT], ids=["light", "dark", "print"])
@pytest.mark.parametrize("mark", ["accent", "down", "waits", "up"])
def test_marks_stand_out(colours: dict[str, str], mark: str) -> None:
    assert contrast(colours[mark], colours["card"]) >= GRAPHICS


@pytest.mark.parametrize("place", [0, 1], ids=["light", "dark"])
def test_both_pages_have_one_palette(place: int) -> None:
    ours, theirs = (LIGHT, DARK)[place], GATEWAYS[place]
    # Its amber is too pale for the edge of a mark.
    shared = (ours.keys() & theirs.keys()) - {"waits"}
    assert len(shared) > 12
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


@pytest.mark.parametrize(
    "name",
    ["index.html", "desk.js", "desk.css", "gateways.js", "gateways.css", "uplot/uplot.js", "uplot/uplot.css"],
)
def test_nothing_is_fetched_from_anybody_else(name: str) -> None:
    text = PAGE.joinpath(name).read_text().removeprefix("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[^\s\"'<>]*", text))
    assert all(address.endswith("w3.org/2000/svg") for address in addresses)
    assert not re.search(r"@import|@font-face|insertAdjacentHTML|document\.write|\beval\b|\son[a-z]+=", text)
    if not name.startswith("uplot"):
        assert "innerHTML" not in text


def test_uplot_comes_with_its_licence() -> None:
    assert "Permission is hereby granted" in PAGE.joinpath("uplot", "LICENSE").read_text()


def test_no_colour_stands_beside_the_palette() -> None:
    rules = STYLE[STYLE.index("* { box-sizing") :] + STYLE_OF_GATEWAYS
    assert not re.search(r"#[0-9a-f]{3,8}\b(?![-\w])(?=\s*[;}])", rules)
