"""What the compiled step says about itself: whole-array copies inside its loops."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COPY = re.compile(r"%?([\w.\-]+) = (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(")


def copies_in_loops(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Names of copies of arrays with one of `shapes`, outside the entry computation.

    In the entry, equal zeros of the start may share a buffer that is then copied once a step; in a
    loop body a copy is paid at every tick.
    """
    wanted = {",".join(map(str, shape)) for shape in shapes}
    found, entry = [], False
    for line in hlo.splitlines():
        if line and not line[0].isspace():
            entry = line.startswith("ENTRY")
        match = _COPY.search(line)
        if match and not entry and match[3] in wanted:
            found.append(f"{match[1]} {match[2]}[{match[3]}]")
    return found
