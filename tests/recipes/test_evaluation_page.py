"""``docs/tasks.md`` lists every task with its numbers, and the grid of ``docs/evaluation.md`` can be read."""

from __future__ import annotations

import re

from subtoken_train.evaluation.runner.spec import read_grid
from subtoken_train.evaluation.tasks import TASKS
from tests.support.places import ROOT

TASKS_PAGE, GRID_PAGE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("tasks.md", "evaluation.md"))


def rows():
    """Task -> the cells beside its name."""
    table = TASKS_PAGE.partition("<!-- tasks:start -->")[2].partition("<!-- tasks:end -->")[0].strip().splitlines()[2:]
    found = {}
    for line in table:
        names, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), cells)
    return found


def test_every_task_has_a_row():
    assert sorted(rows()) == sorted(TASKS)


def test_rows_have_the_tasks_numbers():
    for name, (_, samples, _, score) in rows().items():
        task = TASKS[name]
        assert samples == (f"{task.rows:,}" if task.rows else samples)
        assert task.rows or samples in ("any", "yours")
        assert f"`{task.primary}`" in score or task.primary == "answered"


def test_its_grid_can_be_read(tmp_path):
    text = GRID_PAGE.partition("## The grid file\n")[2].partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "grid.yaml"
    path.write_text(text, encoding="utf-8")
    grid = read_grid(path)
    assert len(grid.arms) == 8
    assert [task.name for task in grid.tasks] == ["scenes_pope", "scenes_textvqa"]
