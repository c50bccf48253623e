"""A run that replaces another one: the old one is whole in one place or the other, whatever ends the process."""

from pathlib import Path

import pytest

from subtoken_train.training.run_folder import (
    RunFolder,
    final_names,
    has_work,
    place_beside,
    read_run_marker,
    settle_after_kill,
)
from tests.support.run_folders import begun, checkpoint, complete, content, kill_in, made_run, states


def test_the_old_run_goes_when_the_new_one_is_whole_and_what_is_not_of_a_run_stays(tmp_path):
    run = made_run(tmp_path / "run")
    new = begun(run)
    assert states(tmp_path) == {"run": "old"}
    checkpoint(new.place, "new")
    new.take_place()
    (old,) = new.replaced()
    assert states(tmp_path) == {"run": "new", old.name: "old"}
    assert (old / "adapter" / "subtoken_config.json").read_text() == "old"
    assert str(old) in new.said()
    (said,) = new.finish()
    assert "notes.txt" in said
    new.close(keep=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run / "notes.txt").read_text() == (run / "logs" / "mine.txt").read_text() == "old"
    assert not (run / "logs" / "csv").exists()
    assert read_run_marker(run).replaces == ()


def test_files_opened_by_the_first_name_land_in_the_run(tmp_path):
    new = begun(made_run(tmp_path / "run"))
    complete(new)
    new.close(keep=True)
    assert (tmp_path / "run" / "logs" / "later.txt").read_text() == "new"


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_without_a_checkpoint_leaves_the_old_one_where_it_was(tmp_path, keep):
    run = made_run(tmp_path / "run")
    before = content(run)
    new = begun(run)
    assert f"where it was: {run}" in new.said()
    new.close(keep)
    assert {path: text for path, text in content(run).items() if path.name != ".lock"} == before
    assert new.place.exists() == keep


def test_a_kill_at_any_step_loses_nothing_and_the_next_run_tidies_up(tmp_path):
    def replace_run():
        complete(begun(tmp_path / str(number) / "run"))

    for number in range(1, 200):
        run = made_run(tmp_path / str(number) / "run")
        if not kill_in(number, replace_run):
            break
        found = states(run.parent)
        adapters = [path.read_text() for path in run.parent.glob("*/adapter/subtoken_config.json")]
        assert "new" in adapters or ("old" in found.values() and "old" in adapters), number
        assert [path.read_text() for path in run.parent.rglob("notes.txt")] == ["old"]
        settle_after_kill(run)
        assert run.is_dir()
        assert has_work(run)
        complete(again := begun(run))
        again.close(keep=True)
        assert [path.name for path in run.parent.iterdir()] == ["run"], number
        assert states(run.parent) == {"run": "new"}
        assert (run / "notes.txt").read_text() == (run / "logs" / "mine.txt").read_text() == "old"
    assert number > 20


def test_a_kill_when_the_first_checkpoint_stands_is_settled(tmp_path):
    run = made_run(tmp_path / "run")
    new = begun(run)
    checkpoint(new.place, "new")
    settle_after_kill(run)  # the process is at work: nothing happens
    assert states(tmp_path) == {"run": "old", new.place.name: "new"}
    new.close(keep=True)
    run.rename(new.place.with_name(new.place.name.replace(".new-", ".replaced-")))  # half of the swap
    settle_after_kill(run)
    assert states(tmp_path)["run"] == "new"
    assert [old.name for old in RunFolder(run, run).replaced()] == [name for name in states(tmp_path) if name != "run"]


def test_a_third_run_keeps_the_first_until_it_is_whole(tmp_path):
    run = made_run(tmp_path / "run")
    for text in ("second", "third"):
        new = begun(run)
        checkpoint(new.place, text)
        new.take_place()
        new.close(keep=True)
    assert sorted(states(tmp_path).values()) == ["old", "second", "third"]
    assert len(RunFolder(run, run).finish()) > 0
    assert states(tmp_path) == {"run": "third"}


def test_a_link_to_a_run_stays_a_link(tmp_path):
    made_run(tmp_path / "disk" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    new = begun(tmp_path / "link")
    complete(new)
    new.close(keep=True)
    assert (tmp_path / "link").is_symlink()
    assert states(tmp_path / "disk") == {"run": "new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_what_a_link_in_a_run_points_to_stays(tmp_path):
    run = made_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data.json").write_text("mine")
    (run / "checkpoints" / "step-9").symlink_to(tmp_path / "elsewhere")
    (run / "logs" / "tb").symlink_to(tmp_path / "elsewhere")
    new = begun(run)
    complete(new)
    new.close(keep=True)
    assert (tmp_path / "elsewhere" / "data.json").read_text() == "mine"


def test_recipes_name_the_final_folder():
    place = place_beside(Path("runs/my run"))
    assert final_names(f"a: {place}/logs\n", place) == "a: runs/my run/logs\n"
    assert final_names("a: runs/x.new-y", Path("runs/x.new-y")) == "a: runs/x.new-y"
