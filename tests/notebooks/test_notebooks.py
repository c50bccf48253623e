"""Notebooks run from top to bottom, in this process: no kernel is needed."""

import ast
import hashlib
import json
import re
import tempfile
from pathlib import Path

import pytest

from subtoken_train.evictions import EVICTIONS
from tests.support.places import real_folder

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path):
    """Run a notebook's cells; its variables, and the values that a notebook would show."""
    scope, shown = {"__name__": "__main__"}, []
    for cell in code_cells(path):
        tree = ast.parse(cell, str(path))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), scope)
            shown += [] if value is None else [value]
    return scope, shown


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A notebook may be run from any folder; its temporary files and its method go away with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    EVICTIONS.pop("long_values", None)


@pytest.fixture
def smollm2(elsewhere):
    (elsewhere / "checkpoints").mkdir()
    (elsewhere / "checkpoints/smollm2").symlink_to(real_folder("smollm2").resolve())


def test_all_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["01_smollm2", "02_own_text", "03_pictures", "04_own_method"]


@pytest.mark.slow
def test_smollm2(smollm2, capsys):
    scope, _ = run_notebook(FOLDER / "01_smollm2.ipynb")
    assert ": take kvzip" in capsys.readouterr().out
    assert scope["recalled"]["kvzip_42_int8"][1] > scope["recalled"]["snapkv_42_int8"][1] + 40
    assert scope["path"].stat().st_size < 0.25 * scope["whole"].cache_report().total_bytes


@pytest.mark.slow
def test_own_text(smollm2, capsys):
    scope, _ = run_notebook(FOLDER / "02_own_text.ipynb")
    said = capsys.readouterr().out
    assert all(arm in said for arm in ("trained", "anchor", "groups_by_norm", "kvzip", "bits_int8"))
    assert said.count("adapter folder: ") == 2
    assert scope["model"].cache_report().realised_fraction < 0.3


@pytest.mark.slow
def test_pictures(elsewhere, capsys):
    scope, shown = run_notebook(FOLDER / "03_pictures.ipynb")
    assert re.search(r"router less tiny_fastv25_s64k16_best_lf4_anchor-seed0: \+.*ahead", capsys.readouterr().out)
    assert scope["model"].cache_report().realised_fraction == pytest.approx(0.15625)
    assert [image.size for image in shown] == [(192, 192), (288, 288)]


@pytest.mark.slow
def test_own_method(smollm2):
    scope, _ = run_notebook(FOLDER / "04_own_method.ipynb")
    assert set(scope["recalled"]) == {"full cache", *scope["methods"]}
    assert scope["recalled"]["random"] < scope["recalled"]["kvzip"]


LARGEST = 600 * 1024  # bytes of a notebook that code hosts still draw at once


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_as_it_ran_light_and_starts_without_the_package(path):
    text, sources = path.read_text(encoding="utf-8"), code_cells(path)
    content = json.loads(text)
    assert (content["nbformat"], content["cells"][0]["cell_type"]) == (4, "markdown")
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for cell, source in zip(cells, sources, strict=True):
        compile(source, str(path), "exec")
        assert "IPython" not in source
        assert not source.lstrip().startswith(("%", "!"))
        ran = hashlib.sha256(source.encode()).hexdigest()[:16]
        assert cell["metadata"].get("ran") == ran, f"python notebooks/execute.py {path.stem}\n{source[:200]}"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {"image/png", "image/jpeg"} & {kind for output in outputs for kind in output.get("data", {})}
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert len(text) < LARGEST
    assert str(FOLDER.parent) not in text
    assert 'REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "")' in sources[0]
    assert "@ git+{REPOSITORY_URL}" in sources[0]
    assert '"pip", "install", "-q", PACKAGE]' in sources[0]
