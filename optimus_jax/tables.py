"""Tables of words and figures as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

WIDTH = 120


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column stands left and is never cut short; the others stand right."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    first, *others = header
    table = Table(Column(first, no_wrap=True), *others, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, record=True, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.export_text().rstrip()
