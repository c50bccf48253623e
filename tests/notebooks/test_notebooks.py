"""Notebooks run from top to bottom, in this process: no kernel is needed."""

import ast
import hashlib
import json
import tempfile
from pathlib import Path

import pytest

from tests.support.places import ON_AN_INDEX

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path):
    """The code cells of a notebook, each as one text."""
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
    """A notebook may be run from any folder; its temporary files go away with the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_all_are_there():
    assert [path.stem for path in NOTEBOOKS] == ["01_first_look", "02_own_data", "03_compare", "04_long_text"]


@pytest.mark.slow
def test_first_look(elsewhere, capsys):
    scope, shown = run_notebook(FOLDER / "01_first_look.ipynb")
    out = capsys.readouterr().out
    assert "visual KV kept: 15.6250%" in out
    losses = scope["losses"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert (scope["run"] / "adapter" / "router.safetensors").is_file()
    assert scope["rows"]
    assert all(sum(row) == 16 * 4 for row in scope["rows"])
    assert len({image.size for image in shown}) > 1
    assert all(image.convert("L").getextrema()[0] < image.convert("L").getextrema()[1] for image in shown)


@pytest.mark.slow
def test_compare(elsewhere, capsys):
    scope, shown = run_notebook(FOLDER / "03_compare.ipynb")
    out = capsys.readouterr().out
    assert "anchor tiny_fastv25_s16k4_anchor-seed0" in out
    assert "anchor tinylm_quest25_s16k12-seed0-untrained_anchor" in out
    scores, budgets, curves = shown
    assert "| Δ to FastV 15.6 %" in scores._repr_markdown_()
    assert "| KV measured |" in scores._repr_markdown_()
    assert "| with index |" in budgets._repr_markdown_()
    assert all(len(scope["lines"][method]) == 5 for method in ("kvcompose", "compactor", "snapkv"))
    assert curves.convert("L").getextrema()[0] < curves.convert("L").getextrema()[1]
    row = next(row for row in scope["report"].tables[0].rows if row.arm.name == "tiny_fastv25_s16k4")
    by_hand = sum(scope["apart"]) / len(scope["apart"])
    assert row.differences["scenes_textvqa"].value == pytest.approx(by_hand)
    assert f"difference {100 * by_hand:+.2f} points" in out
    assert "<svg" in scope["page"].read_text()


@pytest.mark.slow
def test_own_data(elsewhere, capsys):
    scope, _ = run_notebook(FOLDER / "02_own_data.ipynb")
    out = capsys.readouterr().out
    assert "1,200 train, 150 dev, 150 test" in out
    assert "mydata less mydata_anchor" in out
    assert (scope["work"] / "runs/mydata/adapter/training.png").is_file()
    assert scope["model"].cache_report().realised_fraction == pytest.approx(0.15625)


@pytest.mark.slow
def test_long_text(elsewhere, capsys):
    scope, shown = run_notebook(FOLDER / "04_long_text.ipynb")
    out = capsys.readouterr().out
    assert out.count("(100% right)") == 3
    assert "the cache was made with another compression" in out
    curves = scope["curves"]
    assert curves["compactor"][2] > curves["keydiff"][2] > curves["snapkv"][2]
    assert [image.size for image in shown] == [(720, 480)]


LARGEST = 600 * 1024
"""Bytes of a notebook that code hosts still draw at once."""


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
    assert f'PACKAGE = "{"subtoken_train" if ON_AN_INDEX else ".."}[report]"' in sources[0]
    assert '"pip", "install", "-q", PACKAGE]' in sources[0]
