"""`streams.toml`: its declarations, and the words for its mistakes."""

import pickle
import re
from contextlib import suppress
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.decode.codec_declarations import Metric, Stream, Streams, Times, Windows
from spark.decode.streams_file import NO_STREAMS, ConfigError, load_streams, parse_streams
from tests.support import hostile
from tests.support.sizes import size

DOCS = Path(__file__).parents[3] / "docs" / "streams.md"


def parsed(text: str) -> Streams:
    return parse_streams(text, Path("streams.toml"))


def mistakes(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    return str(caught.value)


EXAMPLE = """
[streams."device-thermo"]
codec = "json"
doc = "Climate of the barns"

[streams."device-thermo".metrics.celsius]
unit = "Cel"
decimals = 2
min = -40
max = 125.50
from = "env.t"

[streams."device-thermo".metrics.humidity]
"""


def test_what_nobody_sees_is_named_with_its_line() -> None:
    told = mistakes(EXAMPLE.replace("celsius", '"celsius\u00a0"'))
    assert told.startswith("streams.toml:6: column 42: here stands no-break space (U+00A0)")


def test_a_stream_and_its_metrics() -> None:
    streams = parsed(EXAMPLE)

    assert streams.streams == (
        Stream(
            name="device-thermo",
            codec="json",
            doc="Climate of the barns",
            metrics=(
                Metric("celsius", ("env", "t"), "Cel", 2, Decimal(-40), Decimal("125.5")),
                Metric("humidity", ("humidity",)),
            ),
        ),
    )
    assert (streams.unknown, streams.registry) == ("quarantine", None)
    assert streams.windows == Windows((60, 3600, 86400), (Decimal(50), Decimal(95), Decimal(99)))
    assert streams.times == Times(date(2020, 1, 1), 86_400)


def test_what_is_for_the_whole_file() -> None:
    streams = parsed(
        """
        unknown = "accept"
        windows = { sizes = [300, 900], percentiles = [99.9, 50, 50.0] }
        times = { plausible_from = 2024-06-01, ahead_max_s = 60 }
        """
    )

    assert streams.unknown == "accept"
    assert streams.windows == Windows((300, 900), (Decimal(50), Decimal("99.9")))
    assert streams.times == Times(date(2024, 6, 1), 60)
    assert parsed('unknown = "accept"\nwindows.percentiles = []').windows.percentiles == ()
    assert parsed('unknown = "accept"\ntimes.plausible_from = "2024-06-01"').times.plausible_from == date(2024, 6, 1)


def test_the_examples_of_the_page_are_right(tmp_path: Path) -> None:
    found = []
    for number, rest in enumerate(DOCS.read_text().split("```toml\n")[1:]):
        path = tmp_path / f"{number}.toml"
        path.write_text(rest.partition("```")[0])
        found.append(load_streams(path))

    every_codec, mine = found
    assert {stream.codec for stream in every_codec.streams} == {
        *("json", "number", "senml-json", "senml-cbor", "cbor", "binary", "avro")
    }
    assert [metric.min for metric in mine.streams[0].metrics] == [16]


def test_the_version_is_of_what_the_file_says_not_of_how_it_is_written() -> None:
    streams = parsed(EXAMPLE)
    otherwise = """
        # A note.
        [streams.device-thermo.metrics]
        humidity = { decimals = 6 }
        celsius = { from = ["env", "t"], max = 125.5, min = -40.0, decimals = 2, unit = "Cel" }
        [streams.device-thermo]
        doc = "Climate of the barns"
        codec = "json"
        """

    assert parsed(otherwise) == streams
    assert parsed(EXAMPLE.replace("-40", "-41")).version != streams.version
    assert len(streams.version) == 12
    assert NO_STREAMS.version == "none"


def test_declarations_that_were_recorded_before_metrics_had_scales_are_read() -> None:
    streams = parsed(EXAMPLE)
    recorded = streams.to_json().replace(',"scale":null', "")
    assert recorded != streams.to_json()
    assert Streams.from_json(recorded) == streams


def test_the_very_name_goes_before_patterns_and_long_patterns_before_short_ones() -> None:
    names = ["device-*", "device-t*", "*", "device-thermo", "*-thermo"]
    streams = parsed("".join(f'[streams."{name}"]\ncodec = "json"\n' for name in names))

    def found(topic: str, declared: Streams = streams) -> str | None:
        return next((stream.name for stream in declared.in_order() if re.match(stream.regex, topic)), None)

    assert found("device-thermo") == "device-thermo"
    assert found("device-thermo.backlog") == "device-t*"
    assert found("device-power") == "device-*"
    # As many letters: the first in the alphabet.
    assert found("device-x-thermo") == "*-thermo"
    assert found("elsewhere") == "*"
    assert found("elsewhere", replace(streams, streams=streams.streams[1:2])) is None


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
BOUNDS = st.none() | st.decimals(-(10**6), 10**6, places=3)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z.*-]{1,8}", fullmatch=True),
        st.dictionaries(WORDS, st.tuples(st.integers(0, 6), BOUNDS, WORDS), max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_streams_go_through_json_and_pickle_unchanged(
    drawn: dict[str, dict[str, tuple[int, Decimal | None, str]]],
) -> None:
    streams = Streams(
        tuple(
            Stream(
                name,
                "json",
                metrics=tuple(
                    Metric(metric, (metric, "x"), unit, decimals, low, scale=low)
                    for metric, (decimals, low, unit) in metrics.items()
                ),
            )
            for name, metrics in drawn.items()
        )
    ).with_version()

    assert Streams.from_json(streams.to_json()) == streams
    assert pickle.loads(pickle.dumps(streams)) == streams  # noqa: S301 - our own
    assert Streams.from_json(NO_STREAMS.to_json()) == NO_STREAMS


ONE = '[streams.s]\ncodec = "json"\n'
PACKED = '[streams.s]\ncodec = "binary"\n'
TWICE = PACKED + 'layout = [{ name = "t", type = "u8" }, { name = "t", type = "u8" }]'


MISTAKES = [
    ("", "streams.toml: no stream is declared, so that every reading would go to the quarantine"),
    ("[streams.s]", 'streams.toml:1: streams.s.codec: is missing; write codec = one of "json"'),
    ('[streams.s]\ncodec = "xml"', 'streams.toml:2: streams.s.codec: "xml" will not do; write one of "json"'),
    ('[streams.s]\ncodex = "json"', "streams.s.codex: there is no such setting; write 'codec' instead"),
    ('[stream.s]\ncodec = "json"', "streams.toml:1: stream: there is no such setting; write 'streams' instead"),
    ('streams = "s"', 'streams.toml:1: streams: "s" will not do; write a section in [brackets]'),
    ("streams.s = 3", "streams.toml:1: streams.s: 3 will not do; write a section, [streams.s]"),
    ("streams.layout = 3", "streams.toml:1: streams.layout: 3 will not do; write a section, [streams.layout]"),
    (ONE + "metrics.layout = 3", "streams.s.metrics.layout: 3 will not do; write a section, [streams.s.metrics.layout"),
    (ONE + "[streams.s.metrics.t]\ndecimals = 7",
     "streams.toml:4: streams.s.metrics.t.decimals: 7 will not do; write a whole"),
    (ONE + "[streams.s.metrics.t]\nscale = 0.001", 'metrics.t.scale: 0.001 will not do; write one of "0.1", "0.01" to'),
    (ONE + '[streams.s.metrics.t]\nscale = "0.5"', 'metrics.t.scale: "0.5" will not do; write one of "0.1"'),
    (ONE + '[streams.s.metrics.t]\nscale = "0.001"\ndecimals = 2',
     'metrics.t.scale: "0.001" makes 3 decimals of a whole number, and decimals is 2; write decimals = 3 or more'),
    (PACKED + 'layout = [{ name = "t", type = "u8" }]\nmetrics.t.scale = "0.1"',
     "metrics.t.scale: stands in the field of the layout"),
    (ONE + '[streams.s.metrics.t]\nmin = "3"', 'metrics.t.min: "3" will not do; write a number, such as 21.5'),
    (ONE + "[streams.s.metrics.t]\nmin = true", "metrics.t.min: true will not do; write a number"),
    (ONE + "[streams.s.metrics.t]\nmin = nan", "metrics.t.min: NaN is not between"),
    (ONE + "[streams.s.metrics.t]\nmin = 0.0000001", "metrics.t.min: 1E-7 has more than 6 decimals"),
    (ONE + "[streams.s.metrics.t]\nmax = 1e12", "metrics.t.max: 1E+12 is not between -10^12 and 10^12"),
    (ONE + "[streams.s.metrics.t]\nmax = 1e9999999", "metrics.t.max: 1E+9999999 is not between"),
    (ONE + "[streams.s.metrics.t]\nmin = nan\nmax = 3", "metrics.t.min: NaN is not between"),
    (ONE + "[streams.s.metrics.t]\nmin = 5\nmax = 4", "streams.toml:4: streams.s.metrics.t.min: 5 is above"),
    (ONE + '[streams.s.metrics.t]\nfrom = "a..b"', 'metrics.t.from: "a..b" is no member\'s name'),
    (ONE + '[streams.s.metrics.t]\n[streams.s.metrics.u]\nfrom = "t"', 'metrics.u: is read from what "t" is'),
    (ONE + '[streams.s.metrics."t\\u0007"]', "is no metric's name; write 1 to 100 characters"),
    (ONE + 'doc = "\\u001b[31m"', "streams.s.doc: holds the character U+001B"),
    ('[streams."a b"]\ncodec = "json"', 'streams."a b": is no topic\'s name'),
    ('[streams.s]\ncodec = "number"\nmetrics.a = {}\nmetrics.b = {}', "a bare number is one metric; declare one"),
    ('[streams.s]\ncodec = "number"\nmetrics.a.from = "x"', "a bare number has no members; remove it"),
    (ONE + "header = true", 'streams.s.header: is of codec "binary", and codec is "json"; remove one'),
    (PACKED + "layout = {}", "streams.s.layout: a section will not do; write a list, as layout = [{ name ="),
    (PACKED, "streams.s.layout: is missing; write layout = [{"),
    (PACKED + 'layout = ["i16"]', 'streams.s.layout[0]: "i16" will not do; write { name = "...", type = "i16" }'),
    (PACKED + 'layout = [{ name = "t", type = "int" }]', 'layout[0].type: "int" will not do; write one of u8'),
    (PACKED + 'layout = [{ name = "t", type = "u8", scale = 0.1 }]', "layout[0].scale: 0.1 will not do"),
    (PACKED + 'layout = [{ name = "t" }]', "layout[0]: lacks name or type"),
    (PACKED + 'layout = [{ name = "t", skip = 1 }]', "layout[0]: has skip beside name"),
    (PACKED + 'layout = [{ name = "t", type = "u8" }, { name = "t", type = "u8" }]',
     'layout[1]: "t" is the name of two fields'),
    (PACKED + 'layout = [{ name = "t", type = "u8" }]\nmetrics.u = {}',
     'no field of the layout is called "u"; there are'),
    ('[streams.s]\ncodec = "avro"', 'streams.s.codec: is "avro", and nothing says where its schemas'),
    (ONE + '[avro]\nregistry = "file:///etc/passwd"', 'avro.registry: "file:///etc/passwd" is no address'),
    (ONE + '[avro]\nregistry = "http://u:p@host"', "avro.registry: holds a user or a password"),
    (ONE + "[windows]\nsizes = []", "windows.sizes: has 0 sizes"),
    (ONE + "[windows]\nsizes = [7]", "windows.sizes: 7 s do not divide a day"),
    (ONE + "[windows]\nsizes = [120, 180]", "windows.sizes: 180 s are no multiple of 120 s"),
    (ONE + "[windows]\nsizes = [60, 60]", "windows.sizes: 60 s stand here 2 times; write them once"),
    (ONE + '[windows]\nsizes = [60, "3600"]', 'windows.sizes: [60, "3600"] will not do; write a list of whole'),
    (ONE + "[windows]\npercentiles = [nan]", "windows.percentiles: NaN is no percentile"),
    (ONE + "[windows]\npercentiles = [101]", "windows.percentiles: 101 is no percentile"),
    (ONE + '[times]\nplausible_from = "soon"', 'times.plausible_from: "soon" will not do; write a date'),
    (ONE + "[times]\nahead_max_s = -1", "times.ahead_max_s: -1 will not do; write whole seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), MISTAKES)
def test_a_mistake_is_told_with_its_line_and_what_to_write(text: str, words: str) -> None:
    assert words in mistakes(text)


@pytest.mark.parametrize(("text", "words"), MISTAKES)
def test_no_mistake_is_hidden_by_one_elsewhere(text: str, words: str) -> None:
    told = mistakes(text + "\n[retention]\nlogs_days = 3\n")

    assert words in told
    assert "retention.logs_days: there is no such setting; write 'log_days' instead" in told


def test_all_mistakes_are_told_together_in_the_order_of_their_lines() -> None:
    told = mistakes(
        """
        [streams.a]
        codec = "jsn"
        metrics.t = { min = 5, max = 4, decimals = 7 }
        metrics.u = { from = "t", colour = "red" }
        metrics.v = { from = ["x", "y"] }
        [streams.b]
        codec = "binary"
        layout = [{ type = "int" }, { name = "t", type = "u8" }, { name = "t", skip = 1, scale = 0.1 }]
        [streams."c d"]
        codec = "avro"
        [windows]
        sizes = [7, 60, 60]
        percentiles = [101]
        [times]
        ahead = 3
        """
    )

    assert [line.removeprefix("streams.toml:").partition(";")[0] for line in told.splitlines()] == [
        '3: streams.a.codec: "jsn" will not do',
        "4: streams.a.metrics.t.decimals: 7 will not do",
        "4: streams.a.metrics.t.min: 5 is above max (4), so that no value would be right",
        "5: streams.a.metrics.u.colour: there is no such setting",
        '5: streams.a.metrics.u: is read from what "t" is read from',
        '9: streams.b.layout[0].type: "int" will not do',
        "9: streams.b.layout[0]: lacks name or type",
        "9: streams.b.layout[2].scale: 0.1 will not do",
        '9: streams.b.layout[2]: "t" is the name of two fields',
        "9: streams.b.layout[2]: has skip beside name, type or scale",
        '10: streams."c d": is no topic\'s name',
        '11: streams."c d".codec: is "avro", and nothing says where its schemas are',
        "13: windows.sizes: 60 s stand here 2 times",
        "13: windows.sizes: 7 s do not divide a day, so that a window would lie in two",
        "14: windows.percentiles: 101 is no percentile",
        "16: times.ahead: there is no such setting",
    ]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("streams = 3", ["streams"]),
        ('[stream.s]\ncodec = "json"', ["stream"]),
        ("unknown = 3", ["unknown"]),
        ('[streams.s]\ncodec = "avro"\n[avro]\nregistry = 3', ["avro.registry"]),
        ('[streams.s]\ncodec = "avro"\n[avor]\nregistry = "http://r"', ["avor"]),
        # With another codec, this would be a name, the layout missing, or in its place.
        ('[streams.s]\ncodec = "senml"\nmetrics.t.from = "a..b"', ["streams.s.codec"]),
        ('[streams.s]\ncodec = "binarie"\nlayout = [{ name = "t", type = "u8" }]', ["streams.s.codec"]),
        (PACKED + "layout = 3\nmetrics.t = {}", ["streams.s.layout"]),
        (PACKED + "layot = 3", ["streams.s.layot"]),
        # Which fields there are is not known.
        (PACKED + "layout = [3]\nmetrics.t = {}", ["streams.s.layout[0]"]),
        (PACKED + 'layout = [{ nam = "t", type = "u8" }]\nmetrics.t = {}', ["streams.s.layout[0].nam"]),
        (PACKED + "layout = [{ skip = 0 }]\nmetrics.t = {}", ["streams.s.layout[0].skip"]),
        # The member of the metric is not known.
        (PACKED + 'layout = [{ name = "t", type = "u8" }]\nmetrics.u.form = "t"', ["streams.s.metrics.u.form"]),
        (ONE + 'metrics.t.from = "u"\nmetrics.u.from = 3', ["streams.s.metrics.u.from"]),
        (ONE + "[streams.s.metrics.t]\nmin = 1e12\nmax = 3", ["streams.s.metrics.t.min"]),
        (ONE + "[windows]\nsizes = [7, 60]", ["windows.sizes"]),
    ],
)  # fmt: skip
def test_what_needs_a_wrong_value_is_not_looked_at(text: str, settings: list[str]) -> None:
    assert [line.split(": ")[1] for line in mistakes(text).splitlines()] == settings


def test_what_is_no_toml_is_told_with_its_line() -> None:
    assert "streams.toml:1: is not TOML" in mistakes("[streams.s\n")
    assert mistakes("x = " + "[" * 5000).startswith("streams.toml: arrays or tables stand too deep inside one another")
    assert mistakes("x = " + "9" * 5000).startswith("streams.toml: holds a number that is too long to be read")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"streams\.toml: there is no such file"):
        load_streams(tmp_path / "streams.toml")
    with pytest.raises(ConfigError, match=r": cannot be read: .*; name a file that you may read"):
        load_streams(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'unknown = "\xe4"')
    with pytest.raises(ConfigError, match=r"latin\.toml: is not UTF-8"):
        load_streams(tmp_path / "latin.toml")
    (tmp_path / "long.toml").write_bytes(b"#" * 4_000_001)
    with pytest.raises(ConfigError, match=r"long\.toml: is longer than 4000000 bytes; is it the right file\?"):
        load_streams(tmp_path / "long.toml")


ALL = """
unknown = "accept"
[streams.packed]
codec = "binary"
doc = "text"
endian = "big"
header = true
conflicts = "keep"
layout = [{ name = "a", type = "u8", scale = "0.1" }, { skip = 1 }]
[streams.packed.metrics.a]
unit = "V"
decimals = 1
min = 0
max = 5.5
doc = "text"
[streams.nested]
codec = "json"
[streams.nested.metrics.b]
from = "x.b"
[avro]
registry = "http://registry.example:8081"
[windows]
sizes = [60, 3600]
percentiles = [50]
[times]
plausible_from = 2020-01-01
ahead_max_s = 60
[retention]
log_days = 30
windows_days = 40
window_changes_days = 50
"""


@pytest.mark.slow
@pytest.mark.campaign(seconds=12)
def test_any_content_of_the_file_is_declared_or_reported_as_a_mistake() -> None:
    parsed(ALL)
    lines = ALL.splitlines()
    for place, line in list(enumerate(lines))[:: size(3, 1)]:
        name, equals, _ = line.partition(" = ")
        for value in hostile.declarations():
            instead = [f"{name} = {value}", *([f"[{value}]"] if line.startswith("[") else []), f"{value} = 1"]
            for each in instead if equals or line.startswith("[") else ():
                with suppress(ConfigError):
                    parsed("\n".join([*lines[:place], each, *lines[place + 1 :]]))
