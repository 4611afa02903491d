"""Finds rows of a partition whose numbers of lanes came before. Executors import this module.

It need not find all of them: the driver counts every number, and has the last word.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.arrow_pass.decimal_columns import Numbers
from spark.arrow_pass.groups import Mask, begins_of, group_numbers, integers_of, mask_of
from spark.log.lane_sequences import Lane, LowNumbers

_NONE: Numbers = np.empty(0, dtype=np.int64)


class Resends:
    """The numbers of lanes that came in earlier batches, and in the piece before."""

    def __init__(self, seen: Mapping[Lane, LowNumbers]) -> None:
        self._seen = seen
        self._piece: dict[Lane, Numbers] = {}

    def among(self, rows: pa.Table) -> Mask:
        """True for those rows of a piece of `log` whose number came before. No reject is among them."""
        again = np.zeros(len(rows), dtype=np.bool_)
        columns = {name: rows[name].combine_chunks() for name in ("buffer", "lane", "lane_sequence")}
        counts = mask_of(pc.and_(pc.is_null(rows["reject_reason"]), pc.is_valid(rows["ce_id"])).combine_chunks())
        places = np.flatnonzero(counts)
        numbers = integers_of(columns["lane_sequence"])[places]
        groups = group_numbers(columns[name].take(pa.array(places)) for name in ("buffer", "lane"))
        # Stable: of two rows with one number, the first stays the first.
        order = np.lexsort((numbers, groups))
        places, numbers = places[order], numbers[order]
        begins = begins_of(groups[order])
        examples = pa.array(places[begins])
        names = zip(*(columns[name].take(examples).to_pylist() for name in ("buffer", "lane")), strict=True)
        before, self._piece = self._piece, {}
        for lane, its, of_lane in zip(names, np.split(numbers, begins[1:]), np.split(places, begins[1:]), strict=False):
            is_again = np.isin(its, before.get(lane, _NONE))
            is_again[1:] |= its[1:] == its[:-1]
            if lane in self._seen:
                is_again |= _are_in(self._seen[lane], its)
            again[of_lane[is_again]] = True
            self._piece[lane] = its
        return again


def _are_in(seen: LowNumbers, numbers: Numbers) -> Mask:
    # Compared first: the difference of two numbers may need more than 64 bits.
    are_in: Mask = numbers < seen.below
    octets = seen.above.to_bytes((seen.above.bit_length() + 7) // 8, "little")
    bits = np.unpackbits(np.frombuffer(octets, dtype=np.uint8), bitorder="little").astype(np.bool_)
    if len(bits):
        near = ~are_in & (numbers < seen.below + len(bits))
        are_in[near] = bits[numbers[near] - seen.below]
    return are_in
