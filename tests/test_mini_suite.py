"""The mini-suite: its page's table is that of the committed figures, its arms those that the suite runs."""

from xml.etree import ElementTree

from benchmarks import mini_suite, pruners_scenes
from subtoken_train.evaluation.reporting.exports import frame_csv
from subtoken_train.evaluation.runner.arms import arm_name
from subtoken_train.evaluation.runner.spec import suite
from tests.support.places import shown


def test_the_page_shows_the_committed_figures():
    assert shown(mini_suite.PAGE, "mini") == mini_suite.table()


def test_the_arms_are_those_of_the_suite(tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.evaluation.runner.spec.SCENES", 1)
    grids = suite("mini", tmp_path)
    names = {arm_name(spec).replace("-seed0", "", 1) for grid in grids for spec in grid.arms}
    assert names == set(mini_suite.ARMS)
    assert set(mini_suite.read_scores().arm) == names
    assert {task.name for grid in grids for task in grid.tasks} == {*mini_suite.SCENES, "recall"}


def test_the_committed_csv_is_written_as_it_was_read():
    assert frame_csv(mini_suite.read_scores()) == mini_suite.CSV_FILE.read_bytes().decode()


def test_answers_of_one_word_after_an_eviction_are_marked():
    late = {arm for (arm, _), row in mini_suite.printed_scores().items() if mini_suite.is_moot(row)}
    assert len(late) == 6
    rows = [line for line in mini_suite.table().splitlines() if line.startswith("|")]
    assert "".join(rows).count("†") == len(late & set(mini_suite.PRINTED)) * len(mini_suite.ONE_WORD)


def test_the_picture_is_drawn_from_the_committed_csv():
    text = pruners_scenes.SVG_FILE.read_text(encoding="utf-8")
    assert text == pruners_scenes.drawing()
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(name in words for name, _ in pruners_scenes.means() if name != pruners_scenes.WHOLE)
