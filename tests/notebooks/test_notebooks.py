"""Notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, capsys):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    scope = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(path), "exec"), scope)
    assert "visual KV kept: 15.6250%" in capsys.readouterr().out
