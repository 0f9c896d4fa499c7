"""Captions in the forms that people have, and what is said of others."""

from __future__ import annotations

import pathlib

import pytest

from optimus_jax.data.caption_files import FORMS, find
from optimus_jax.errors import UserError

PICTURES = ("a.png", "sub/b.jpg")
TABLES = {
    "beside": {"a.txt": "A tree.\n", "sub/b.txt": "Two\n  houses\n", "README.txt": "Mine."},
    "csv": {"captions.csv": "file_name,text\na.png,A tree.\n\nsub/b.jpg,Two houses\n"},
    "marked": {
        "metadata.csv": '\ufeffCaption, Image\r\n"A tree.",a.png\r\nTwo houses,sub\\b.jpg\r\n'
    },
    "semicolons": {"captions.csv": "file;caption\n./a.png;A tree.\nsub/b.jpg;Two houses\n"},
    "jsonl": {
        "metadata.jsonl": '{"file_name": "a.png", "text": "A tree."}\n\n'
        '{"image": "sub/b.jpg", "caption": "Two houses", "more": 1}\n'
    },
    "two places": {
        "captions.csv": "file,text\na.png,A tree.\n",
        "sub/captions.jsonl": '{"file": "b.jpg", "text": "Two houses"}',
    },
}


def written(folder: pathlib.Path, files: dict[str, str]) -> list[str]:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode())
    return [*files, *PICTURES]


@pytest.mark.parametrize("form", TABLES)
def test_captions_are_found_in_every_form(tmp_path: pathlib.Path, form: str) -> None:
    found = find(tmp_path, written(tmp_path, TABLES[form]), PICTURES)
    assert found.of == {"a.png": "A tree.", "sub/b.jpg": "Two houses"}
    assert found.strays == found.twice == []


def test_lines_of_json_end_where_json_lets_them(tmp_path: pathlib.Path) -> None:
    entries = [f'{{"file": "{n}", "text": "a\u2028b\x85c"}}' for n in PICTURES]
    files = {JSONL: "\r\n".join(entries)}
    found = find(tmp_path, written(tmp_path, files), PICTURES)
    assert found.of == dict.fromkeys(PICTURES, "a\u2028b\x85c")


def test_rows_with_cells_that_no_column_names_are_listed(tmp_path: pathlib.Path) -> None:
    rows = [
        "a.png,a, big tree",
        '"x\ny",B',
        "",
        "sub/b.jpg,two,,  ",
        "sub/b.jpg,a,b,c",
        "c.png,C,,d",
    ]
    with pytest.raises(UserError) as raised:
        find(tmp_path, written(tmp_path, {CSV: "\n".join(["file,text,", *rows])}), PICTURES)
    message = str(raised.value)
    assert f"{CSV}: 3 rows have more cells than the 2 that the first line names, " in message
    assert "line 2, 7, 8: put a caption that has a ',' in it in quotes" in message
    assert message.endswith('as in a.png,"a, big tree"')


@pytest.mark.parametrize(
    ("files", "of", "strays", "twice"),
    [
        ({"a.txt": " \n", "c.txt": "C"}, [], ["c.txt"], []),
        (
            {"captions.csv": "file,text\na.png,A\na.png,B\nb.jpg,C\nsub/b.jpg\n"},
            ["a.png"],
            ["b.jpg in captions.csv"],
            ["a.png in captions.csv"],
        ),
        (
            {"sub/captions.jsonl": '{"file": "a.png", "text": null}\n{"file": "", "text": "B"}'},
            [],
            ["a.png in sub/captions.jsonl", "(no name) in sub/captions.jsonl"],
            [],
        ),
    ],
)
def test_what_does_not_match_is_listed(
    tmp_path: pathlib.Path,
    files: dict[str, str],
    of: list[str],
    strays: list[str],
    twice: list[str],
) -> None:
    found = find(tmp_path, written(tmp_path, files), PICTURES)
    assert (list(found.of), found.strays, found.twice) == (of, strays, twice)


CSV, JSONL = "captions.csv", "captions.jsonl"
REFUSED: list[tuple[dict[str, str], str]] = [
    ({"notes.txt": "x"}, f"has pictures but no captions: {FORMS}"),
    ({CSV: "file,text\n", JSONL: ""}, f"has captions twice, in {CSV} and in {JSONL}: keep one"),
    ({CSV: "file,text\n", "a.txt": "A"}, f"has captions twice, in {CSV} and in a.txt: keep one"),
    ({CSV: "a.png,A tree\n"}, f"{CSV}: its first line 'a.png,A tree' must name two columns"),
    ({CSV: ""}, f"{CSV}: its first line '' must name two columns"),
    ({JSONL: '{"file": "a.png", "text": "A"}\n{'}, f"{JSONL}, line 2: not JSON"),
    ({JSONL: "[1]"}, f"{JSONL}, line 1: must be an object with one of file_name, "),
    ({JSONL: '{"file": 3, "text": "A"}'}, f"{JSONL}, line 1: must be an object with one of "),
]


@pytest.mark.parametrize(("files", "wanted"), REFUSED)
def test_what_cannot_be_read_is_said(
    tmp_path: pathlib.Path, files: dict[str, str], wanted: str
) -> None:
    names = written(tmp_path, files)
    with pytest.raises(UserError) as raised:
        find(tmp_path, names, PICTURES)
    assert wanted in str(raised.value)


def test_other_encodings_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes("Bär".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 text .*: save it as UTF-8"):
        find(tmp_path, ["a.txt"], PICTURES)
