"""Makes the page of all gateways: who needs somebody, a map of sites, and each gateway with its history.

The page is one file that needs nothing but a browser or a printer. The desk serves it, and a command writes it.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from typing import Final

from gateway.condition_codes import CODES
from gateway.host.terminal_text import counted, size
from spark.desk.asked import Asked
from spark.desk.gateway_history import DAY_US, HISTORY_DAYS, Key, Then, read_history
from spark.desk.nothing import why_nothing
from spark.desk.report_svg import PATTERNS, Times, bars, duration, words
from spark.desk.row_text import time_text
from spark.desk.tables import Tables
from spark.finality.box_figures import BoxFigures
from spark.finality.gateway_figures import GatewayFigures
from spark.finality.gateway_troubles import UNHEARD, WELL, GatewayNow, gateways_now, heard_us, is_old

GATEWAYS_MAX: Final = 2_000
"""Gateways on a page, those in trouble first. A browser takes a few seconds for so many."""
FIRST_MAX: Final = 12
"""Gateways that need somebody and are on top of the page. Others follow if they are asked for, and on paper."""
NEXT_MAX: Final = 188
"""Gateways that follow them. All others are in the list only."""
CHANGES_MAX: Final = 30
"""Changes of a gateway that are listed, the last ones."""
NO_SITE: Final = "without a site"
STATES: Final = {
    UNHEARD: ("not heard", "?"),
    "bad": ("bad", "✕"),
    "warn": ("warning", "!"),
    "note": ("well, with a note", "i"),
    WELL: ("well", "✓"),
}
"""By state, the worst first: its name, and the sign that shows it without colour."""
_FOOTER: Final = """<footer><p>Times are those of the tables. Retired gateways are left out. A site is that of the
registry. docs/conditions.md has the codes.</p></footer>"""


@dataclass(frozen=True, slots=True)
class OnPage:
    """A gateway on the page."""

    now: GatewayNow
    figures: GatewayFigures
    box: BoxFigures
    history: Sequence[Then]

    @property
    def state(self) -> str:
        """One of STATES."""
        if any(each.code == UNHEARD for each in self.now.troubles):
            return UNHEARD
        return self.box.level if self.now.level == WELL and self.box.level is not None else self.now.level

    @property
    def site(self) -> str:
        return self.now.site or NO_SITE


@dataclass(frozen=True, slots=True)
class Fleet:
    """All gateways that are not retired, those that need somebody first. Times are in microseconds since 1970."""

    warehouse: str
    newest_us: int | None
    """When Kafka had the newest heartbeat of all."""
    is_old: bool
    """Whether that is so long ago that ingest may not run."""
    gateways: Sequence[OnPage]

    @property
    def shown(self) -> Sequence[OnPage]:
        """Those on the page."""
        return self.gateways[:GATEWAYS_MAX]


def fleet(tables: Tables, now_us: int, site: str | None = None) -> Fleet:
    """Ask the tables how all gateways are, or those of a site. Raises UnknownNameError."""
    evidence = tables.evidence()
    newest_us = heard_us(evidence.states)
    found = [now for now in gateways_now(evidence.states, evidence.registry) if site in {None, now.site}]
    if not found:
        why_nothing(tables, Asked(site=site), None, lambda _: "")
    history: Mapping[Key, Sequence[Then]] = {}
    if newest_us is not None:
        wanted = [(now.namespace, now.gateway) for now in found[:GATEWAYS_MAX]]
        history = read_history(tables.source, tables.version()[0], evidence.sites.clocks, newest_us, wanted)
    buffers = {
        (figures.namespace, figures.gateway, figures.buffer): (figures, box)
        for figures, box in zip(evidence.gateways(), evidence.boxes(), strict=True)
    }
    gateways = [
        OnPage(now, *buffers[now.namespace, now.gateway, now.buffer], history.get((now.namespace, now.gateway), ()))
        for now in found
    ]
    return Fleet(tables.warehouse, newest_us, is_old(newest_us, now_us), gateways)


def page(found: Fleet, zone: tzinfo = UTC) -> str:
    """Draw the page."""
    body = "\n".join((_header(found, zone), _first(found), _map(found.shown), _all(found, zone), _FOOTER))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{words(verdict(found, zone))}</title>
<style>
{_read("desk.css")}{_read("gateways.css")}</style>
</head>
<body>
{PATTERNS}
{body}
<script>{_read("gateways.js")}</script>
</body>
</html>
"""


def policy() -> str:
    """The content security policy under which the page's own script and style run, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_read("gateways.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    )


@cache
def _read(name: str) -> str:
    return files("spark").joinpath("page", name).read_text("utf-8")


# -- who needs somebody -----------------------------------------------------------------------------


def verdict(found: Fleet, zone: tzinfo = UTC) -> str:
    """Say in a sentence how the gateways are, or that the tables cannot tell."""
    needing, count = _needing(found.gateways), len(found.gateways)
    if found.newest_us is None:
        return "No gateway was heard yet."
    if found.is_old:
        return f"Nothing was heard of any gateway since {time_text(found.newest_us, zone)}: does ingest run?"
    if not count:
        return "There is no gateway here that is not retired."
    if not needing:
        return "The only gateway is well." if count == 1 else f"All {count:,} gateways are well."
    return f"{needing:,} of {counted(count, 'gateway')} {_need(needing)} somebody."


def _needing(gateways: Sequence[OnPage]) -> int:
    """How many need somebody."""
    return sum(bool(each.now.troubles) for each in gateways)


def _need(number: int) -> str:
    return "needs" if number == 1 else "need"


def _header(found: Fleet, zone: tzinfo) -> str:
    states = Counter(each.state for each in found.gateways)
    worst = next(({UNHEARD: "bad"}.get(state, state) for state in STATES if states[state]), "note")
    kind = "bad" if found.is_old else worst
    counts = "".join(
        f"<li>{_sign(state)} <strong>{states[state]:,}</strong> {words(name)}</li>"
        for state, (name, _) in STATES.items()
        if states[state]
    )
    told = [] if found.newest_us is None else ["The page shows what the tables knew then."]
    if found.newest_us is not None and not found.is_old:
        told.insert(0, f"The newest heartbeat is of {time_text(found.newest_us, zone)}.")
    if left_out := found.gateways[GATEWAYS_MAX:]:
        needing = _needing(left_out)
        need = f"{needing:,} of these {_need(needing)}" if needing else "None of these needs"
        told.append(f"The page has no room for {counted(len(left_out), 'more gateway')}. {need} somebody.")
    return f"""<header><h1><span class="brand">Sluice</span> gateways</h1>
<p id="warehouse">{words(found.warehouse)}</p></header>
<main>
<section id="headline" class="{kind}"><p class="words">{words(verdict(found, zone))}</p>
<p class="means">{words(" ".join(told))}</p><ul class="counts">{counts}</ul></section>"""


def _first(found: Fleet) -> str:
    """Who needs somebody first, and what to do."""
    needing = [each for each in found.shown if each.now.troubles]
    if not needing:
        return ""
    listed = []
    for place, each in enumerate(needing[: FIRST_MAX + NEXT_MAX]):
        told = "".join(
            f'<p>{words(trouble.means)} <span class="todo">{words(trouble.todo)}</span> '
            f'<span class="quiet">{words(trouble.code)}</span></p>'
            for trouble in each.now.troubles
        )
        away = (
            f", not heard for {duration((found.newest_us or 0) - heard)}"
            if each.state == UNHEARD and (heard := each.now.heard_us)
            else ""
        )
        listed.append(
            f'<li>{_sign(each.state)}<p><a href="#g{place}">{words(each.now.gateway)}</a> '
            f'<span class="quiet">{words(each.site)}{words(away)}</span></p>{told}</li>'
        )
    after, more = listed[FIRST_MAX:], _needing(found.gateways) - len(listed)
    left_out = _needing(found.gateways[GATEWAYS_MAX:])
    but = f", except {left_out:,} that the page has no room for" if left_out else ""
    next_words = f"{more:,} more {_need(more)} somebody. They come next in the list below{but}."
    rest = f'<p class="aside">{next_words}</p>' if more else ""
    if after:
        rest = f'<details id="more"><summary>{len(after):,} more</summary><ol>{"".join(after)}</ol></details>{rest}'
    return f"""<section class="card" id="first" aria-labelledby="first-title">
<h2 id="first-title">Who needs somebody first</h2>
<ol>{"".join(listed[:FIRST_MAX])}</ol>{rest}</section>"""


# -- the map ----------------------------------------------------------------------------------------


def _map(gateways: Sequence[OnPage]) -> str:
    """A place for each site, the worst first, with a sign for each gateway."""
    sites: dict[str, list[str]] = {}
    for place, each in enumerate(gateways):
        about = words(f"{each.now.gateway}: {STATES[each.state][0]}")
        mark = f'<a href="#g{place}" title="{about}" aria-label="{about}">{_sign(each.state)}</a>'
        sites.setdefault(each.site, []).append(mark)
    shown = "".join(
        f'<div class="site"><h3>{words(site)} <span class="quiet">{len(marks):,}</span></h3>'
        f"<div>{''.join(marks)}</div></div>"
        for site, marks in sites.items()
    )
    keys = "".join(f"<li>{_sign(state)} {words(name)}</li>" for state, (name, _) in STATES.items())
    return f"""<section class="card" aria-labelledby="map-title"><h2 id="map-title">Sites</h2>
<ul class="counts">{keys}</ul><div id="map">{shown}</div></section>"""


def _sign(state: str) -> str:
    return f'<span class="state {state}" aria-hidden="true">{STATES[state][1]}</span>'


# -- all gateways -----------------------------------------------------------------------------------


def _all(found: Fleet, zone: tzinfo) -> str:
    gateways, count = found.shown, len(found.gateways)
    title = "All gateways" if len(gateways) == count else f"The first {len(gateways):,} gateways"
    states = Counter(each.state for each in gateways)
    state_options = [(state, f"{name} ({states[state]:,})") for state, (name, _) in STATES.items() if states[state]]
    sites = _options_of(each.site for each in gateways)
    versions = _options_of(map(_version, gateways))
    rows = "".join(_gateway(place, each, found, zone) for place, each in enumerate(gateways))
    return f"""<section class="card" id="all" data-count="{count}" aria-labelledby="all-title">
<h2 id="all-title">{title}</h2>
<form id="ask" aria-label="Which gateways to show" hidden>
<label>State <select name="state"><option value="">all</option>{_options(state_options)}</select></label>
<label>Site <select name="site"><option value="">all</option>{sites}</select></label>
<label>Version <select name="version"><option value="">all</option>{versions}</select></label>
<label>Words <input name="words" type="search" autocomplete="off" spellcheck="false"
placeholder="name, address, code"></label>
<button type="reset">Show all</button>
</form>
<p class="aside" id="matching" aria-live="polite"></p>
{rows}</section>
</main>"""


def _version(each: OnPage) -> str:
    return each.box.version or "not known"


def _options_of(names: Iterator[str]) -> str:
    return _options([(name, f"{name} ({count:,})") for name, count in sorted(Counter(names).items())])


def _options(options: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<option value="{words(value)}">{words(text)}</option>' for value, text in options)


def _gateway(place: int, each: OnPage, found: Fleet, zone: tzinfo) -> str:
    now, box = each.now, each.box
    codes = [UNHEARD] * (each.state == UNHEARD) + list(box.conditions or ())
    heard = "never"
    if now.heard_us is not None:
        ago_us = (found.newest_us or now.heard_us) - now.heard_us
        heard = "now" if ago_us < 60_000_000 else f"{duration(ago_us)} ago"
    waits = "-" if now.depth_rows is None else f"{now.depth_rows:,} wait"
    searched = " ".join(
        [now.namespace, now.gateway, each.site, _version(each), *codes, *(box.addresses or ()), *(box.silent or ())]
    )
    told = {"state": each.state, "site": each.site, "version": _version(each), "words": searched.lower()}
    data = " ".join(f'data-{name}="{words(value)}"' for name, value in told.items())
    return f"""<details class="gateway" id="g{place}" {data}><summary>{_sign(each.state)}\
<span class="name">{words(now.gateway)} <small>{words(each.site)}</small></span><span>{words(_version(each))}</span>\
<span class="heard">{words(heard)}</span><span class="waits">{words(waits)}</span>\
<span class="codes">{words(", ".join(codes))}</span></summary>
<div class="told">{_troubles(each)}{_figures(each, zone)}{_history(each, found, zone)}</div></details>
"""


def _troubles(each: OnPage) -> str:
    notes = [(code, CODES[code]) for code in each.box.conditions or () if code in CODES]
    about = {code: (code_words.means, code_words.todo) for code, code_words in notes}
    about |= {trouble.code: (trouble.means, trouble.todo) for trouble in each.now.troubles}
    return "".join(
        f'<p>{words(means)} <strong>{words(todo)}</strong> <span class="quiet">{words(code)}</span></p>'
        for code, (means, todo) in about.items()
    )


def _figures(each: OnPage, zone: tzinfo) -> str:
    figures, box = each.figures, each.box

    def of(free: int | None, whole: int | None) -> str | None:
        return None if free is None or whole is None else f"{size(free)} of {size(whole)} free"

    def joined(*told: object) -> str:
        return ", ".join(str(part) for part in told if part not in {None, ""})

    def time(us: int | None) -> str | None:
        return None if us is None else time_text(us, zone)

    wear = box.disk_life_used_tenths
    clock = {None: None, True: "synced", False: "not synced"}[box.clock_synced]
    shown = {
        "Everything is here up to": time(figures.complete_to_us),
        "Last heard": time(each.now.heard_us),
        "Waits in its buffer": None if figures.depth_rows is None else counted(figures.depth_rows, "row"),
        "State of": time(box.state_us),
        "Version": joined(box.version, box.image and f"image {box.image}", box.slot and f"slot {box.slot}"),
        "Last update": joined(box.update_to, box.update_result, box.update_reason),
        "Booted": time(box.booted_us),
        "Kafka reached since": time(box.uplink_since_us),
        "Clock": joined(
            clock, box.clock_source, None if box.clock_error_us is None else f"± {duration(box.clock_error_us)}"
        ),
        "Disk": joined(
            of(box.disk_free_bytes, box.disk_bytes),
            None if wear is None else f"up to {10 * wear} % of its life used",
            None if box.disk_written_bytes_per_day is None else f"{size(box.disk_written_bytes_per_day)} written a day",
        ),
        "Memory": of(box.memory_free_bytes, box.memory_bytes),
        "Addresses": joined(*(box.addresses or ())),
        "Ports": joined(*(box.ports or ())),
        "Devices": None
        if box.devices_known is None
        else f"{box.devices_known:,} known, {box.devices_heard or 0:,} heard, {box.devices_silent or 0:,} silent",
        "Silent": joined(*(box.silent or ())),
        "Settings": box.settings,
        "Namespace, buffer": joined(figures.namespace, figures.buffer),
    }
    items = "".join(f"<dt>{words(name)}</dt><dd>{words(value)}</dd>" for name, value in shown.items() if value)
    return f"<dl>{items}</dl>"


def _history(each: OnPage, found: Fleet, zone: tzinfo) -> str:
    """A bar with the states of the last days, and their changes as a list, the newest first."""
    if not each.history or found.newest_us is None:
        return f'<p class="quiet">It has told no state within {HISTORY_DAYS} days.</p>'
    until_us = found.newest_us
    ends = [then.from_us for then in each.history[1:]]
    parts = [
        (f"h-{then.level}", then.from_us, until_us if end_us is None else end_us)
        for then, end_us in zip_longest(each.history, ends)
    ]
    if each.state == UNHEARD and each.now.heard_us is not None:
        kind, from_us, _ = parts[-1]
        parts[-1:] = [(kind, from_us, max(from_us, each.now.heard_us)), (f"h-{UNHEARD}", each.now.heard_us, until_us)]
    times = Times(until_us - HISTORY_DAYS * DAY_US, until_us, zone)
    title = f"States of {each.now.gateway} in {HISTORY_DAYS} days"
    listed = "".join(_change(then, zone) for then in reversed(each.history[-CHANGES_MAX:]))
    return f"<h3>The last {HISTORY_DAYS} days</h3>{bars([('', parts)], times, title)}<dl>{listed}</dl>"


def _change(then: Then, zone: tzinfo) -> str:
    name, _ = STATES[then.level]
    told = f": {', '.join(then.conditions)}" if then.conditions else ""
    what = "told nothing" if then.level == UNHEARD else f"{name}{told}, version {then.version}"
    return f"<dt>{words(time_text(then.from_us, zone))}</dt><dd>{words(what)}</dd>"
