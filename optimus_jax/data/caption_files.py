"""Captions of a folder's pictures, as people keep them: text files beside them, or a table."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
import posixpath
from collections.abc import Iterable, Iterator

from optimus_jax.errors import UserError

TABLES = ("captions.csv", "metadata.csv", "captions.jsonl", "metadata.jsonl")
NAMES = ("file_name", "file", "image", "filename")  # keys of the picture's name, the first counts
TEXTS = ("text", "caption")
DELIMITERS = (",", ";", "\t")  # spreadsheets write one of them
NO_CAPTIONS = ("readme", "license", "licence", "copying")  # text files about the folder itself
SHOWN = 20  # numbers of lines that an error gives
FORMS = (
    "captions are NAME.txt beside each picture,"
    f" or a table {', '.join(TABLES[:-1])} or {TABLES[-1]} with the picture's file name"
    f" ({' or '.join(NAMES)}) and its caption ({' or '.join(TEXTS)})"
)


@dataclasses.dataclass(frozen=True)
class Captions:
    """`of`: the caption of each picture that has one, as written, by its path in the folder.
    `strays`: captions of no picture, `twice`: pictures with several, both by file and name."""

    of: dict[str, str]
    strays: list[str]
    twice: list[str]


def find(folder: pathlib.Path, files: Iterable[str], pictures: Iterable[str]) -> Captions:
    """The captions of `pictures`, of all `files` of a folder; both are paths in it with slashes.

    A table names pictures from where it lies, as Hugging Face's imagefolder does. Empty captions
    count as none. Raises UserError where there are no captions, two forms of them, or a table that
    cannot be read.
    """
    files, pictures = sorted(files), set(pictures)
    tables = [name for name in files if posixpath.basename(name) in TABLES]
    stems = {posixpath.splitext(name)[0] for name in pictures}
    texts = [name for name in files if name.lower().endswith(".txt")]
    beside = [name for name in texts if posixpath.splitext(name)[0] in stems]
    _one_form(folder, tables, beside)
    if tables:
        pairs = [pair for table in tables for pair in _rows(folder, table)]
    else:
        pairs = list(_beside(folder, texts, pictures))
    of: dict[str, str] = {}
    strays, twice = [], []
    for source, name, caption in pairs:
        if name not in pictures:
            strays.append(source)
        elif name in of:
            twice.append(source)
        elif caption.strip():
            of[name] = caption
    return Captions(of, strays, twice)


def _one_form(folder: pathlib.Path, tables: list[str], beside: list[str]) -> None:
    if not tables and not beside:
        raise UserError(f"{folder} has pictures but no captions: {FORMS}")
    places = [posixpath.dirname(table) for table in tables]
    rivals = [table for table in tables if places.count(posixpath.dirname(table)) > 1]
    if not rivals and tables and beside:
        rivals = [tables[0], beside[0]]
    if rivals:
        raise UserError(
            f"{folder} has captions twice, in {' and in '.join(rivals[:2])}: keep one of them"
        )


def _beside(
    folder: pathlib.Path, texts: list[str], pictures: set[str]
) -> Iterator[tuple[str, str, str]]:
    """The text file, the picture's name and the caption, of every text file."""
    named: dict[str, list[str]] = {}
    for picture in sorted(pictures):
        named.setdefault(posixpath.splitext(picture)[0], []).append(picture)
    for text in texts:
        stem = posixpath.splitext(text)[0]
        found = named.get(stem, [])
        if not found and posixpath.basename(stem).lower() in NO_CAPTIONS:
            continue
        for name in found or [stem]:
            yield text, name, " ".join(_read(folder / text).split())


def _rows(folder: pathlib.Path, table: str) -> Iterator[tuple[str, str, str]]:
    """Of each row, its name and the table's, the picture's path in the folder, and the caption."""
    content = _read(folder / table)
    own = posixpath.dirname(table)
    entries = _lines_of_json if table.endswith(".jsonl") else _lines_of_csv
    for name, caption in entries(folder / table, content):
        plain = posixpath.normpath(posixpath.join(own, name.strip().replace("\\", "/")))
        yield f"{name.strip() or '(no name)'} in {table}", plain, caption


def _lines_of_csv(path: pathlib.Path, content: str) -> Iterator[tuple[str, str]]:
    header: list[str] = []
    for delimiter in DELIMITERS:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
        header = [word.strip().lower() for word in next(reader, [])]
        name, text = _key(header, NAMES), _key(header, TEXTS)
        if name is not None and text is not None:
            break
    else:
        first = (content.splitlines() or [""])[0]
        raise UserError(
            f"{path}: its first line {first[:80]!r} must name two columns, one of"
            f" {', '.join(NAMES)} and one of {', '.join(TEXTS)}, such as file_name,caption"
        )
    columns = header.index(name), header.index(text)
    named = max(k for k, word in enumerate(header) if word) + 1
    rows, longer, line = [], [], reader.line_num + 1
    try:
        for row in reader:
            if any(map(str.strip, row[named:])):
                longer.append(line)
            elif any(map(str.strip, row)):
                filled = row + [""] * len(header)
                rows.append((filled[columns[0]], filled[columns[1]]))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None
    if longer:
        more = ", ..." if len(longer) > SHOWN else ""
        raise UserError(
            f"{path}: {len(longer)} rows have more cells than the {named} that the first line"
            f" names, line {', '.join(map(str, longer[:SHOWN]))}{more}: put a caption that has a"
            f' {delimiter!r} in it in quotes, as in a.png{delimiter}"a{delimiter} big tree"'
        )
    yield from rows


def _lines_of_json(path: pathlib.Path, content: str) -> Iterator[tuple[str, str]]:
    # not splitlines: strings of JSON may hold what it takes for ends of lines, such as U+2028
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from None
        keys = list(entry) if isinstance(entry, dict) else []
        name, text = _key(keys, NAMES), _key(keys, TEXTS)
        if name is None or text is None or not isinstance(entry[name], str):
            raise UserError(
                f"{path}, line {number}: must be an object with one of {', '.join(NAMES)} and one"
                f' of {", ".join(TEXTS)}, such as {{"file_name": "a.png", "text": "a tree"}}'
            )
        yield entry[name], "" if entry[text] is None else str(entry[text])


def _key(keys: list[str], wanted: tuple[str, ...]) -> str | None:
    return next((key for key in wanted if key in keys), None)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # spreadsheets put a mark in front
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
