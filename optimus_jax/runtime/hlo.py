"""What the compiled step says about itself: copies in its loops, and work that left its loop."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COPY = re.compile(r"%?([\w.\-]+) = (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(")


def copies_in_loops(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Names of copies of arrays with one of `shapes`, in loops: paid each time the loop goes round.

    Truth values do not count: no slot or gradient has any. Before and after all loops, equal zeros
    of the start may share a buffer that is then copied once a step.
    """
    wanted = {",".join(map(str, shape)) for shape in shapes}
    bodies, _ = _computations(hlo)
    return [
        f"{match[1]} {match[2]}[{match[3]}]"
        for name in _in_loops(bodies)
        for line in bodies[name]
        if (match := _COPY.search(line)) and match[3] in wanted and match[2] != "pred"
    ]


def copies_beside_loops(hlo: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Names of copies of arrays with one of `shapes`, whatever dimensions of size 1 they have,
    outside all loops: paid once a step, and the copy is held beside the array.

    Copies of one value at all places do not count: two arrays that start equal are each filled
    anyway.
    """
    wanted = {tuple(n for n in shape if n > 1) for shape in shapes}
    bodies, _ = _computations(hlo)
    loops = set(_in_loops(bodies))
    return [
        f"{match[1]} {match[2]}[{match[3]}]"
        for name, lines in bodies.items()
        if name not in loops
        for line in lines
        if (match := _COPY.search(line))
        and not _FILLED.search(line)
        and tuple(int(n) for n in match[3].split(",") if n and n != "1") in wanted - {()}
    ]


def products_beside_loops(hlo: str) -> list[str]:
    """Names of matrix products that run each time a loop's body does, though the body has loops of
    its own: in a tick, work that XLA moved out of the zero-or-one-trip loop that it belongs to, and
    that is now paid whether the tick has that task or not.

    The entry computation, which runs once a step, is left out.
    """
    bodies, entry = _computations(hlo)

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


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by name, and the name of the entry."""
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
    return bodies, entry


def _in_loops(bodies: dict[str, list[str]]) -> list[str]:
    """Computations that run inside some loop."""
    loops = [name for lines in bodies.values() for x in lines for name in _LOOP.findall(x)]
    found: dict[str, None] = {}
    while loops:
        name = loops.pop()
        if name not in found and name in bodies:
            found[name] = None
            for x in bodies[name]:
                loops += [other for part in _CALLED.findall(x) for other in _NAME.findall(part)]
    return list(found)


_FILLED = re.compile(r"copy\(%?(wrapped_)?broadcast[.\d]*\)")
_LOOP = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|[%\w.\-]+)")
_NAME = re.compile(r"[\w.\-]+")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*-> .*\{$")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_PRODUCT = re.compile(r"\b(dot|convolution)\(|custom_call_target=\"__\w*(matmul|gemm|dot)", re.I)
