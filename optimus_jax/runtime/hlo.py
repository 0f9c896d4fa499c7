"""What the compiled step says about itself: copies in its loops, and work that left its loop."""

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


def products_beside_loops(hlo: str) -> list[str]:
    """Names of matrix products that run each time a loop's body does, though the body has loops of
    its own: in a tick, work that XLA moved out of the zero-or-one-trip loop that it belongs to, and
    that is now paid whether the tick has that task or not.

    The entry computation, which runs once a step, is left out.
    """
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head["name"]
            bodies[current] = []
            entry = current if head["entry"] else entry
        elif current:
            bodies[current].append(line)

    def has_product(line: str) -> bool:
        inside = [x for name in _CALLS.findall(line) for x in bodies.get(name, [])]
        return any(_PRODUCT.search(x) for x in (line, *inside))

    return [
        line.split("=")[0].strip().removeprefix("ROOT ").lstrip("%")
        for name, lines in bodies.items()
        if name != entry and any(" while(" in line for line in lines)
        for line in lines
        if has_product(line)
    ]


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*-> .*\{$")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_PRODUCT = re.compile(r"\b(dot|convolution)\(|custom_call_target=\"__\w*(matmul|gemm|dot)", re.I)
