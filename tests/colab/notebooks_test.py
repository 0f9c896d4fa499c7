"""The notebooks run from top to bottom, and the outputs kept in them are those of such a run."""

from __future__ import annotations

import base64
import io
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.conftest import ROOT

COLAB = ROOT / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))
READ = re.compile(r"held-out (?:digits|captions) read right +([\d.]+)%")
SHUFFLED = re.compile(r"with pictures shuffled +([\d.]+)%")
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execute(notebook: nbformat.NotebookNode, seconds: int) -> None:
    """Runs the cells in order, in the notebook's folder. Raises CellExecutionError at the first
    that fails, also if only a command in it does, which a notebook itself passes over."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            checked = r"\g<0>\nassert _exit_code == 0, _exit_code"
            cell.source = re.sub(r"(?m)^!.*$", checked, cell.source)
    client = NotebookClient(
        notebook,
        timeout=seconds,
        kernel_name="python3",
        resources={"metadata": {"path": str(COLAB)}},
    )
    client.execute()


def text(notebook: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


def figures(notebook: nbformat.NotebookNode) -> list[Image.Image]:
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    # what is shown at a width of its own is a user's picture, with nothing in it to be read
    outputs = [o for o in outputs if "width" not in o.get("metadata", {}).get("image/png", {})]
    data = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(one))) for one in data]


@named
def test_runs_from_top_to_bottom(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SHELL", raising=False)  # then commands run in sh, which may not be bash
    kept, fresh = nbformat.read(path, 4), nbformat.read(path, 4)
    execute(fresh, 400)
    assert len(figures(fresh)) == len(figures(kept))
    right, shuffled = READ.search(text(fresh)), SHUFFLED.search(text(fresh))
    assert right and shuffled, text(fresh)
    assert float(right[1]) > 80 > 20 > float(shuffled[1])


@named
def test_the_outputs_kept_are_those_of_one_run(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(o.output_type != "error" for cell in cells for o in cell.outputs)
    said = text(notebook)
    # absolute paths are those of one machine, but for the folder of the run
    assert not re.search(r"(?m)(^|[\s'\"(=])/(?!tmp/)\w+/", said) and "Traceback" not in said
    assert all(figure.width >= 700 for figure in figures(notebook))


def test_lines_are_short_and_no_pipe_hides_a_failure() -> None:
    notebook = nbformat.read(COLAB / "own_pictures.ipynb", 4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    lines = [line for source in cells for line in source.splitlines()]
    assert [line for line in lines if len(line) > 100] == []
    assert [line for line in lines if re.match(r"!.*[^|]\|[^|]", line)] == []


def test_a_command_that_fails_ends_the_run() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("!exit 3")])
    with pytest.raises(Exception, match="AssertionError"):
        execute(notebook, 60)
