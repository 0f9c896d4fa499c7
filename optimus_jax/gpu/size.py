"""How large a compiled program is, and how much of it only lists devices."""

from __future__ import annotations

import dataclasses
import re

# Iota groups, [8,2]<=[16], are as long for any number of devices; lists in braces are not.
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(?:\{[\d,]*\},?)*\}")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class ProgramSize:
    """Of an HLO text: its characters, its instructions, and those of the characters that list
    devices one by one, in the groups of collectives and the pairs of exchanges."""

    characters: int
    instructions: int
    listing_devices: int

    def __str__(self) -> str:
        share = self.listing_devices / max(1, self.characters)
        return (
            f"HLO of {self.instructions:,} instructions, {self.characters:,} characters,"
            f" {share:.0%} of which list devices"
        )


def program_size(hlo: str) -> ProgramSize:
    """Counts in the text of one HLO module."""
    lists = sum(len(match[0]) for match in _LISTS.finditer(hlo))
    return ProgramSize(len(hlo), len(_INSTRUCTION.findall(hlo)), lists)
