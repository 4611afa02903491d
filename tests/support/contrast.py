"""The contrast of a page's colours, and how much of it there must be."""

import re

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


def palettes(style: str) -> tuple[dict[str, str], dict[str, str]]:
    """The named colours of a style sheet in light and in dark."""
    light, dark = (
        dict(re.findall(r"--([a-z-]+):\s*(#[0-9a-f]+)", part)) for part in style.split("prefers-color-scheme: dark")[:2]
    )
    return light, dark
