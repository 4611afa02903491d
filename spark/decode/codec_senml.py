"""Reads SenML (RFC 8428) in JSON and in CBOR, and resolves base fields. Each measurement has its own time."""

import re
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Context, Decimal

from spark.decode import codec_cbor
from spark.decode.codec_declarations import IDENTITY_MEMBERS, Metric
from spark.decode.codec_numbers import (
    BYTES_MAX,
    DEPTH_MAX,
    Result,
    Uncomputed,
    UndecodableError,
    cut_names,
    exact_json,
    is_deep,
    is_number,
    judged,
)

RELATIVE_S_MAX = 2**28
"""Seconds below which a time is relative to now. Other times are since 1970 (section 4.5.3)."""
VERSION_MAX = 10
"""Version that RFC 8428 describes, and default of `bver`."""
SPAN_S_MAX = RELATIVE_S_MAX
"""Seconds between two times of one pack: 8.5 years, as far as times relative to now reach."""
NO_PACK = "undecodable: the payload is not one SenML pack"
BAD_TIME = "undecodable: a time in the SenML pack is no number"
FAR_TIMES = f"undecodable: times in the SenML pack are more than {SPAN_S_MAX} s apart"
MIXED_TIMES = "undecodable: the SenML pack has times since 1970 and times relative to now"
NO_NAME = "undecodable: a measurement in the SenML pack has no name"
TWICE = "undecodable: the SenML pack has two values of one metric and time"

# CBOR's integer labels (section 6).
_LABELS = {-1: "bver", -2: "bn", -3: "bt", -4: "bu", -5: "bv", -6: "bs", 0: "n", 1: "u", 2: "v", 3: "vs", 4: "vb"}
_LABELS |= {5: "s", 6: "t", 7: "ut", 8: "vd"}
_NAME_PART = re.compile(r"[^/:]+")
_HALF = re.compile("[\ud800-\udfff]")
_TIMES = Context(prec=60, rounding=ROUND_HALF_EVEN)


def of_json(payload: bytes, metrics: tuple[Metric, ...]) -> Result:
    """Metrics of a pack in JSON. Raises UndecodableError."""
    if len(payload) > BYTES_MAX:
        raise UndecodableError(f"undecodable: more than {BYTES_MAX} bytes")
    if is_deep(payload):
        raise UndecodableError(f"undecodable: more than {DEPTH_MAX} levels of JSON")
    try:
        pack = exact_json(payload.decode())
    except ValueError as error:
        raise UndecodableError(NO_PACK) from error
    return _of_pack(pack, metrics)


def of_cbor(payload: bytes, metrics: tuple[Metric, ...]) -> Result:
    """Metrics of a pack in CBOR. Raises UndecodableError."""
    pack = codec_cbor.decode(payload)
    if isinstance(pack, list):
        pack = [_labelled(record) for record in pack]
    return _of_pack(pack, metrics)


def _labelled(record: object) -> object:
    """A record with names instead of integer labels."""
    if not isinstance(record, Mapping):
        return record
    return {(_LABELS.get(label, label) if isinstance(label, int) else label): value for label, value in record.items()}


def _of_pack(pack: object, metrics: tuple[Metric, ...]) -> Result:
    measured = list(_measurements(pack))
    newest_us = max((us for _, _, us in measured), default=0)
    if any(us < RELATIVE_S_MAX * 1_000_000 <= newest_us for _, _, us in measured):
        raise UndecodableError(MIXED_TIMES)
    if any(newest_us - us > SPAN_S_MAX * 1_000_000 for _, _, us in measured):
        raise UndecodableError(FAR_TIMES)
    declared = {metric.path[0]: metric.name for metric in metrics}
    seen: set[tuple[str, int]] = set()
    numbers: list[tuple[str, object, int | None]] = []
    others: list[str] = []
    for name, value, us in measured:
        if metrics and name not in declared:
            others.append(name)
            continue
        metric = declared.get(name, name)
        if (metric, us) in seen:
            raise UndecodableError(TWICE)
        seen.add((metric, us))
        numbers.append((metric, value, newest_us - us or None))
    undeclared = cut_names(name for name in others if name not in IDENTITY_MEMBERS)
    return judged(numbers, metrics, undeclared)


def _measurements(pack: object) -> Iterator[tuple[str, object, int]]:
    """Yield name, value and time in microseconds of each number and truth value. Texts and data are left out."""
    if not isinstance(pack, list) or not pack:
        raise UndecodableError(NO_PACK)
    base: dict[object, object] = {}
    for record in pack:
        if not isinstance(record, Mapping):
            raise UndecodableError(NO_PACK)
        base |= {name: value for name, value in record.items() if name in {"bn", "bt", "bv", "bver"}}
        # Section 4.4: a field whose name ends with `_` must be understood, and we know none.
        if any(isinstance(name, str) and name.endswith("_") for name in record) or not _is_version(base):
            raise UndecodableError(NO_PACK)
        value = _value(record, base)
        if value is not None:
            time_us = _time_us(base.get("bt", 0), record.get("t", 0))
            yield _metric(base.get("bn", ""), record.get("n", "")), value, time_us


def _is_version(base: Mapping[object, object]) -> bool:
    version = base.get("bver", VERSION_MAX)
    return is_number(version) and 0 < version <= VERSION_MAX  # type: ignore[operator]


def _value(record: Mapping[object, object], base: Mapping[object, object]) -> object:
    """A record's number, or its truth value as 1 or 0; None if it has neither."""
    truth, number = record.get("vb"), record.get("v")
    if isinstance(truth, bool):
        return int(truth)
    start = base.get("bv")
    if "bv" in base and start is None:
        # The base value is NaN, and so is every sum with it.
        return None
    if not is_number(number):
        # A record with a name alone has the base value, unless it has a text, data or a sum.
        alone = is_number(start) and not {"v", "vs", "vb", "vd", "s"} & record.keys() and "n" in record
        return start if alone else None
    return _sum(number, start) if is_number(start) else number


def _sum(number: object, start: object) -> Decimal:
    for part in (number, start):
        if isinstance(part, Uncomputed):
            return part
    return Context(prec=400).add(Decimal(number), Decimal(start))  # type: ignore[arg-type]


def _metric(base: object, name: object) -> str:
    """The record's name, or else the last part of the base name."""
    if not isinstance(base, str) or not isinstance(name, str):
        raise UndecodableError(NO_PACK)
    parts = [name] if name else _NAME_PART.findall(base)
    if not parts:
        raise UndecodableError(NO_NAME)
    # JSON can write half a surrogate, which is no character.
    if not parts[-1].isascii() and _HALF.search(parts[-1]):
        raise UndecodableError(NO_PACK)
    return parts[-1]


def _time_us(base: object, time: object) -> int:
    """Microseconds since 1970 or relative to now, rounded half to even, as the gateway rounds."""
    total = Decimal(0)
    for part in (base, time):
        # This includes None, which stands for a NaN. A missing time is 0.
        if not is_number(part):
            raise UndecodableError(BAD_TIME)
        exact = Decimal(part)  # type: ignore[arg-type]
        if exact and exact.adjusted() > 13:
            raise UndecodableError(BAD_TIME)
        total = _TIMES.add(total, exact)
    return int((total * 1_000_000).quantize(Decimal(1), context=_TIMES))
