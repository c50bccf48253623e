"""What the notebooks show on a code host is what their cells made, and light."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.notebooks.test_notebooks import FOLDER, NOTEBOOKS, code_cells
from tests.support.places import ON_AN_INDEX

LARGEST = 600 * 1024
"""Bytes of a notebook that code hosts still draw at once."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_belong_to_their_cells(path):
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        source = "".join(cell["source"])
        ran = hashlib.sha256(source.encode()).hexdigest()[:16]
        assert cell["metadata"].get("ran") == ran, f"python notebooks/execute.py {path.stem}\n{source[:200]}"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}
    assert shown & {"image/png", "image/jpeg"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_light_and_says_nothing_of_where_it_ran(path):
    content = path.read_text(encoding="utf-8")
    assert len(content) < LARGEST
    outputs = [output for cell in json.loads(content)["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert str(FOLDER.parent) not in content


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_starts_without_the_package(path):
    first = code_cells(path)[0]
    assert f'PACKAGE = "{"subtoken_train" if ON_AN_INDEX else ".."}[report]"' in first
    assert '"pip", "install", "-q", PACKAGE]' in first
