"""The registry's files: their content, one digest for one content, and words for every mistake."""

import random
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.record_contract import NAME_RULE
from spark.registry.registry import Calibration, Device, Gateway, Registry
from spark.registry.registry_file import RegistryError, load_registry_file, parse_registry
from tests.support import hostile

PATH = Path("registry.toml")
SITE = """
[[devices]]
namespace = "plant"
device = "42"
site = "hall-1"
labels = { floor = "2", line = "B" }
valid_to = 2026-03-01

[[devices]]
namespace = "plant"
device = "42"
site = "hall-3"
valid_from = 2026-03-01

[[calibrations]]
namespace = "plant"
device = "42"
stream = "device-thermo"
metric = "temperature"
valid_from = 2026-02-01T09:30:00+01:00
scale = 1.002
offset = "-0.25"

[[gateways]]
namespace = "plant"
gateway = "gw-1"
site = "hall-1"
retired_from = 2026-04-01T00:00:00Z
topics = ["site7.*", "device-seven"]
"""
MARCH = datetime(2026, 3, 1, tzinfo=UTC)
REGISTRY = Registry(
    devices=(
        Device("plant", "42", "hall-1", (("floor", "2"), ("line", "B")), None, MARCH),
        Device("plant", "42", "hall-3", (), MARCH, None),
    ),
    calibrations=(
        Calibration(
            *("plant", "42", "temperature", "device-thermo"),
            *(Decimal("1.002"), Decimal("-0.25"), datetime(2026, 2, 1, 8, 30, tzinfo=UTC), None),
        ),
    ),
    gateways=(Gateway("plant", "gw-1", "hall-1", datetime(2026, 4, 1, tzinfo=UTC), ("device-seven", "site7.*")),),
)
FOLDER = {
    "devices.csv": "namespace,device,site,labels,valid_from,valid_to\n"
    "plant,42,hall-1,floor=2; line=B,,2026-03-01\n"
    "plant,42,hall-3,,2026-03-01T00:00:00Z,\n",
    "calibrations.csv": "\ufeffdevice,namespace,metric,stream,valid_from,scale,offset\r\n"
    '42,plant,"temperature",device-thermo,2026-02-01 08:30Z,1.002000,-.25\r\n\r\n',
    "gateways.csv": "namespace,gateway,site,retired_from,topics\nplant,gw-1,hall-1,2026-04-01,site7.*; device-seven\n",
}


def csv_folder(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text, newline="")
    return path


def mistakes(text: str) -> list[tuple[int, str]]:
    with pytest.raises(RegistryError) as caught:
        parse_registry(text, PATH)
    return [(mistake.line, mistake.message) for mistake in caught.value.mistakes]


def mistake(text: str) -> str:
    """The only mistake, with its line."""
    ((line, message),) = mistakes(text)
    return f"{line}: {message}"


def test_a_small_sites_registry_is_one_toml_file() -> None:
    assert parse_registry(SITE, PATH) == REGISTRY


@pytest.mark.parametrize("device", ["north/42", "x--B-C3BC-ro-20-1/x--app-40-ttn"])
def test_a_device_may_have_other_names_before_its_own(device: str) -> None:
    """Routes whose `key` has more than `{device}` give such names."""
    found = parse_registry(SITE.replace('device = "42"', f'device = "{device}"'), PATH)
    assert {each.device for each in found.devices} == {each.device for each in found.calibrations} == {device}
    for wrong in (f"{device}/", f"/{device}", f"{device}//1", f"{device}/B ro"):
        text = SITE.replace('device = "42"', f'device = "{wrong}"')
        assert all(f"is no name; write {NAME_RULE}; or several such with '/'" in words for _, words in mistakes(text))
    assert "is no name" in mistake(SITE.replace('gateway = "gw-1"', 'gateway = "north/gw-1"'))


def test_thousands_of_devices_are_csv_files_in_a_folder(tmp_path: Path) -> None:
    folder = csv_folder(tmp_path / "registry", FOLDER)
    assert load_registry_file(folder) == REGISTRY
    assert load_registry_file(folder).version == REGISTRY.version
    (folder / "calibrations.csv").unlink()
    assert load_registry_file(folder).calibrations == ()
    assert load_registry_file(folder / "gateways.csv").gateways == REGISTRY.gateways


def test_the_version_goes_by_what_is_said_and_not_by_how() -> None:
    blocks = SITE.strip().split("\n\n")
    random.Random(1).shuffle(blocks)  # noqa: S311
    other = "\n\n".join(["# as it is\n" + blocks[0], *blocks[1:]]).replace('"-0.25"', "-0.250")
    assert parse_registry(other, PATH).version == REGISTRY.version
    assert parse_registry(SITE.replace("1.002", "1.003"), PATH).version != REGISTRY.version
    assert parse_registry(SITE.replace("hall-3", "hall-4"), PATH).version != REGISTRY.version
    assert parse_registry(SITE.replace("retired_from", "#"), PATH).version != REGISTRY.version
    assert parse_registry("", PATH) == Registry()


def test_overlapping_spans_name_both_lines() -> None:
    assert mistake(SITE.replace("valid_to = 2026-03-01", "valid_to = 2026-03-02")) == (
        '9: devices: plant/42 is at "hall-3" from 2026-03-01T00:00:00Z on, without an end, here, and at "hall-1" from '
        "the beginning to 2026-03-02T00:00:00Z on line 2; a device is at one site at a time: end the one where the "
        "other begins (valid_to = its valid_from)"
    )
    # A calibration of every stream is one of that stream too.
    second = '\n[[calibrations]]\nnamespace="plant"\ndevice="42"\nmetric="temperature"\nscale=2\n{}'
    found = mistake(SITE + second.format("valid_from = 2026-05-01"))
    assert found.startswith(
        '31: calibrations: plant/42\'s "temperature" of every stream is calibrated from 2026-05-01T00:00:00Z on, '
        "without an end, here, and of stream device-thermo from 2026-02-01T08:30:00Z on, without an end, on line 15;"
    )
    parse_registry(SITE + second.format('stream = "device-other"'), PATH)
    parse_registry(SITE + second.format("valid_to = 2026-02-01T08:30:00Z"), PATH)
    assert "on line 24 already" in mistake(SITE + '\n[[gateways]]\nnamespace = "plant"\ngateway = "gw-1"')


def test_overlaps_of_csv_files_name_both_lines(tmp_path: Path) -> None:
    files = FOLDER | {"devices.csv": FOLDER["devices.csv"].replace("2026-03-01T00:00:00Z", "2026-02-28T23:59:59.999Z")}
    with pytest.raises(RegistryError, match=r"devices\.csv:3: .* on line 2;"):
        load_registry_file(csv_folder(tmp_path / "registry", files))


MISTAKES = [
    ("scale = 1.002", "scale = 1.0000001", "21: calibrations.scale: 1.0000001 cannot be used; write a decimal"),
    ("scale = 1.002", "scale = 1000000", "21: calibrations.scale: "),
    ("scale = 1.002", "scale = nan", "21: calibrations.scale: "),
    ("scale = 1.002", "scale = 1e9999999", "21: calibrations.scale: 1E+9999999 cannot be used; "),
    ("scale = 1.002", 'scale = "1,002"', "21: calibrations.scale: "),
    ("scale = 1.002", "scale = true", "21: calibrations.scale: "),
    ("scale = 1.002", "scala = 1.002", "21: calibrations.scala: there is no such setting; write scale instead"),
    ('scale = 1.002\noffset = "-0.25"', "scala = 1.002", "21: calibrations.scala: "),
    ('scale = 1.002\noffset = "-0.25"', "", "15: calibrations: has neither scale nor offset"),
    ('device = "42"\nstream', "device = 42\nstream", "17: calibrations.device: 42 is no name; "),
    ('"device-thermo"', '"device/thermo"', "18: calibrations.stream: "),
    ('device = "42"\nstream', 'device = "43"\nstream', "15: calibrations: plant/43 is not among the devices, "),
    ('site = "hall-3"', "", "9: devices: site is missing; "),
    ('site = "hall-3"', 'site = ""', "12: devices.site: "),
    ('site = "hall-3"', "site = 2026-03-01", "12: devices.site: 2026-03-01 is no text of "),
    ('site = "hall-3"', 'sit = "hall-3"', "12: devices.sit: there is no such setting; write site instead"),
    ('"2"', "2", '6: devices.labels: the label "floor" is 2, which is no text; '),
    ("valid_from = 2026-03-01\n", "valid_from = 2026-03-01T00:00:00\n", "13: devices.valid_from: "),
    ("valid_from = 2026-03-01\n", 'valid_from = "tomorrow"\n', "13: devices.valid_from: "),
    ("valid_from = 2026-03-01\n", 'valid_from = "2026-02-30"\n', "13: devices.valid_from: "),
    ("valid_from = 2026-03-01\n", "valid_from = 2026\n", "13: devices.valid_from: "),
    ("valid_from = 2026-03-01\n", 'valid_from = "0001-01-01T00:00:00+02:00"\n', "13: devices.valid_from: "),
    ("valid_from = 2026-03-01\n", "valid_from = 2026-03-01\nvalid_to = 2026-03-01\n", "14: devices.valid_to: "),
    ('["site7.*", "device-seven"]', '"site7.*"', '29: gateways.topics: "site7.*" cannot be used; write Kafka topics'),
    ('"device-seven"]', '"device*seven"]', "29: gateways.topics: "),
    ('"device-seven"]', '"*"]', "29: gateways.topics: "),
    ('"device-seven"]', "7]", "29: gateways.topics: "),
    ('["site7.*", "device-seven"]', "[]", "29: gateways.topics: [] cannot be used; "),
    ("[[gateways]]", "[[gateway]]", "24: gateway: there is no such section; write gateways instead"),
    ("[[gateways]]", "[gateways]", "24: gateways: begin each of them with a line [[gateways]]"),
]


@pytest.mark.parametrize(("written", "instead", "told"), MISTAKES)
def test_a_mistake_is_told_with_its_line(written: str, instead: str, told: str) -> None:
    assert SITE.count(written) == 1
    assert mistake(SITE.replace(written, instead)).startswith(told)


@pytest.mark.parametrize(("written", "instead", "told"), MISTAKES)
def test_no_mistake_is_hidden_by_one_elsewhere(written: str, instead: str, told: str) -> None:
    others = """
[[gatewais]]
[[devices]]
namespace = "plant"
device = "44"
site = "hall-1"
colour = "red"
"""
    found = [f"{line}: {message}" for line, message in mistakes(SITE.replace(written, instead) + others)]
    assert any(each.startswith(told) for each in found)
    assert any("gatewais: there is no such section; write gateways instead" in each for each in found)
    assert any("devices.colour: there is no such setting; there are: " in each for each in found)


def test_what_nobody_sees_is_named_with_its_line() -> None:
    ((line, told),) = mistakes(SITE.replace('"hall-3"', '"hall-3\u200b"'))
    assert (line, told.partition(" (")[0]) == (12, "column 15: here stands zero width space")


def test_overlaps_and_strange_devices_are_told_beside_other_mistakes() -> None:
    entries = """
[[devices]]
namespace = "plant"
device = "42"
sites = "hall-1"

[[devices]]
namespace = "plant"
device = "42"
site = "hall-3"
labels = 3

[[calibrations]]
namespace = "plant"
device = "42"
metric = "t"
scale = "two"

[[calibrations]]
namespace = "plant"
device = "42"
metric = "t"
scale = 2
colour = "red"

[[calibrations]]
namespace = "plant"
device = "other"
metric = ""
scale = 2

[[gateways]]
namespace = "plant"
gateway = "gw-1"
site = 3

[[gateways]]
namespace = "plant"
gateway = "gw-1"
"""
    assert [(line, message.partition(";")[0].partition(" from ")[0]) for line, message in mistakes(entries)] == [
        (5, "devices.sites: there is no such setting"),
        (7, 'devices: plant/42 is at "hall-3"'),
        (11, "devices.labels: 3 is no list of labels"),
        (17, 'calibrations.scale: "two" cannot be used'),
        (19, 'calibrations: plant/42\'s "t" of every stream is calibrated'),
        (24, "calibrations.colour: there is no such setting"),
        (26, "calibrations: plant/other is not among the devices, so that nothing would be calibrated"),
        (29, 'calibrations.metric: "" is no text of 1 to 256 characters on one line'),
        (35, "gateways.site: 3 is no text of 1 to 256 characters on one line"),
        (37, "gateways: plant/gw-1 stands on line 32 already"),
    ]


@pytest.mark.parametrize(
    ("written", "instead", "told"),
    [
        # Whether the two overlap, or are two at all, is not known.
        ("valid_from = 2026-03-01\n", "valid_form = 2026-03-01\n", "13: devices.valid_form: "),
        ("valid_from = 2026-03-01\n", "valid_from = 2026\n", "13: devices.valid_from: "),
        ("valid_to = 2026-03-01\n\n", "valid_to = 2026\n\n", "7: devices.valid_to: "),
        # Which devices there are is not known.
        (
            "[[gateways]]",
            '[[calibrations]]\nnamespace = "plant"\ndevice = "43"\nmetric = "t"\nscale = 2\n[[device]]\n[[gateways]]',
            "29: device: ",
        ),
        ('device = "42"\nsite = "hall-3"', 'device = 42\nsite = "hall-3"', "11: devices.device: "),
    ],
)
def test_what_needs_a_wrong_value_is_not_looked_at(written: str, instead: str, told: str) -> None:
    assert SITE.count(written) == 1
    assert mistake(SITE.replace(written, instead)).startswith(told)


def test_a_strange_device_is_told_with_one_that_is_like_it() -> None:
    words = "is not among the devices, so that nothing would be calibrated;"
    like = SITE.replace('device = "42"\nstream', 'device = "43"\nstream')
    assert mistake(like) == f"15: calibrations: plant/43 {words} write plant/42 if that is meant, or add the device"
    other = SITE.replace('device = "42"\nstream', 'device = "basement-7"\nstream')
    assert mistake(other) == f"15: calibrations: plant/basement-7 {words} add the device"


def test_what_is_no_toml_is_told_with_its_line() -> None:
    assert mistake(SITE.replace("[[gateways]]", "[[gateways]")).startswith("24: is not TOML at column")
    assert mistake(SITE.replace('"hall-3"', "hall-3")).startswith("12: is not TOML at column 8: no value stands behind")
    assert mistake("x = 1e99999999999999999999").startswith("0: holds a number that is too long")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("devices.csv", "namespace;device;site\nplant;42;hall\n", ":1: the columns are separated by ;"),
        ("devices.csv", "namespace,device,sight\nplant,42,hall\n", ':1: "sight" is no column of devices; write site'),
        ("devices.csv", "namespace,device\nplant,42\n", ":1: the column site is missing"),
        ("devices.csv", "namespace,device,site,site\nplant,42,a,b\n", ':1: the column "site" stands twice'),
        ("devices.csv", "namespace,device,site\nplant,42,hall,3\n", ":2: 4 columns stand here, and 3 in the first"),
        ("devices.csv", 'namespace,device,site\nplant,42,"hall\n', ":2: is not CSV: "),
        ("devices.csv", 'namespace,device,site\n"plant",41,"a\nb"\nplant,,x\n', ":2: devices.site: "),
        ("devices.csv", "namespace,device,site,labels\nplant,42,x,floor\n", ":2: devices.labels: "),
        ("devices.csv", "namespace,device,site,labels\nplant,42,x,a=1;a=2\n", ":2: devices.labels: "),
        ("gateways.csv", "namespace,gateway\nplant,gw 1\n", ":2: gateways.gateway: "),
        ("gateways.csv", "namespace,gateway,topics\nplant,gw-1,site 7\n", ":2: gateways.topics: "),
        ("sites.csv", "", ": must be called devices.csv, "),
    ],
)  # fmt: skip
def test_a_mistake_in_csv_is_told_with_its_line(tmp_path: Path, name: str, text: str, told: str) -> None:
    folder = csv_folder(tmp_path / "registry", {name: text})
    with pytest.raises(RegistryError) as caught:
        load_registry_file(folder / name)
    assert f"{name}{told}" in str(caught.value)


def test_all_mistakes_of_a_folder_are_told_together(tmp_path: Path) -> None:
    folder = csv_folder(
        tmp_path / "registry",
        {
            "devices.csv": "namespace,device,sight,valid_from,colour\nplant,42,a,,\nplant,42,b,noon,\n"
            "plant,42,c,2026-03-01,\nplant,43\n",
            "calibrations.csv": 'namespace,device,metric,scale\nplant,42,t,two\nplant,42,t,2\nplant,other,t,2\n"plant',
            "gateways.csv": "namespace;gateway\nplant;gw-1\n",
        },
    )
    with pytest.raises(RegistryError) as caught:
        load_registry_file(folder)
    told = str(caught.value).replace(f"{folder}/", "").splitlines()
    assert [each.partition(";")[0].partition(" from ")[0] for each in told] == [
        'calibrations.csv:2: calibrations.scale: "two" cannot be used',
        'calibrations.csv:3: calibrations: plant/42\'s "t" of every stream is calibrated',
        "calibrations.csv:5: is not CSV: unexpected end of data",
        'devices.csv:1: "colour" is no column of devices',
        'devices.csv:1: "sight" is no column of devices',
        'devices.csv:3: devices.valid_from: "noon" is no time',
        'devices.csv:4: devices: plant/42 is at "?"',
        "devices.csv:5: 2 columns stand here, and 5 in the first line",
        "gateways.csv:1: the columns are separated by ",
    ]
    # With all devices known, the one that is not among them is told too.
    (folder / "devices.csv").write_text("namespace,device,sight\nplant,42,a\n")
    with pytest.raises(RegistryError, match=r"calibrations\.csv:4: calibrations: plant/other is not among the devices"):
        load_registry_file(folder)
    (folder / "devices.csv").write_bytes(b"\xff")
    with pytest.raises(RegistryError, match=r"(?s)calibrations\.csv:2: .*devices\.csv: is not UTF-8 text"):
        load_registry_file(folder)


def test_a_registry_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"nothing\.toml: there is no such file or folder"):
        load_registry_file(tmp_path / "nothing.toml")
    with pytest.raises(RegistryError, match=r"the folder holds none of devices\.csv, calibrations\.csv, gateways\.csv"):
        load_registry_file(tmp_path)
    latin = tmp_path / "registry.toml"
    latin.write_bytes('[[devices]]\nsite = "Köln"'.encode("latin-1"))
    with pytest.raises(RegistryError, match="save it as UTF-8"):
        load_registry_file(latin)


def test_of_very_many_mistakes_the_first_are_told() -> None:
    text = "[[gateways]]\n" * 1_000
    with pytest.raises(RegistryError) as caught:
        parse_registry(text, PATH)
    assert len(caught.value.mistakes) == 2_000
    assert str(caught.value).endswith("and 1950 more mistakes")


@given(
    st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
        max_size=5,
    )
)
def test_spans_are_refused_where_a_reading_would_have_two(
    spans: list[tuple[str | None, int | None, int | None]],
) -> None:
    def day(number: int) -> str:
        return (MARCH + timedelta(days=number)).date().isoformat()

    text, empty = "", False
    for stream, begins, ends in spans:
        text += '[[calibrations]]\nnamespace = "plant"\ndevice = "42"\nmetric = "t"\nscale = 2\n'
        text += f'stream = "{stream}"\n' if stream else ""
        text += f"valid_from = {day(begins)}\n" if begins is not None else ""
        text += f"valid_to = {day(ends)}\n" if ends is not None else ""
        empty |= begins is not None and ends is not None and begins >= ends

    def calibrations_at(number: int, stream: str) -> int:
        return sum(
            of in (None, stream) and (begins is None or begins <= number) and (ends is None or number < ends)
            for of, begins, ends in spans
        )

    clash = any(calibrations_at(number, stream) > 1 for number in range(-1, 11) for stream in ("a", "b"))
    if clash or empty:
        with pytest.raises(RegistryError):
            parse_registry(text, PATH)
    else:
        assert len(parse_registry(text, PATH).calibrations) == len(spans)


@pytest.mark.slow
def test_any_content_of_a_registry_is_taken_or_reported_as_a_mistake(tmp_path: Path) -> None:
    lines = SITE.splitlines()
    for place, line in enumerate(lines):
        name, equals, _ = line.partition(" = ")
        for value in hostile.declarations() if equals else ():
            text = "\n".join([*lines[:place], f"{name} = {value}", *lines[place + 1 :]])
            with suppress(RegistryError):
                expect_showable(parse_registry(text, PATH))
    for number, (name, text) in enumerate(FOLDER.items()):
        first, *rest = text.splitlines()
        for place, written in enumerate([*hostile.TEXTS.values(), *map(str.encode, hostile.declarations())]):
            folder = tmp_path / f"{number}-{place}"
            folder.mkdir()
            row = b",".join([written or b""] * len(first.split(",")))
            (folder / name).write_bytes(first.encode() + b"\n" + row + b"\n" + "\n".join(rest).encode())
            with suppress(RegistryError):
                expect_showable(load_registry_file(folder))


def expect_showable(registry: Registry) -> None:
    """PySpark shows no time of the year 1."""
    times = [device.valid_from for device in registry.devices]
    times += [calibration.valid_from for calibration in registry.calibrations]
    times += [gateway.retired_from for gateway in registry.gateways]
    assert all(time is None or time.year > 1 for time in times)
