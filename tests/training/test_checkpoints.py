"""Checkpoint folders on disk: what counts as whole, and what every interruption leaves."""

import io
import json
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.training import checkpoints
from subtoken_train.training import trained_tensors as stored
from subtoken_train.training.module import is_sharded
from subtoken_train.training.run_folder import RunMarker
from tests.support.refusals import refuses
from tests.support.run_folders import Canary, put


def written(folder, step, content="state"):
    partial = checkpoints.begin(folder, step)
    (partial / "state.ckpt").write_text(content)
    return checkpoints.seal(partial, checkpoints.Marker(step, 2, "DDPStrategy", {"a.weight": [2, 3]}))


def test_the_newest_whole_one_counts_by_number_not_by_name(tmp_path):
    assert checkpoints.newest_complete(tmp_path / "none") is None
    for step in (10, 9, 100):
        written(tmp_path, step)
    assert [folder.name for folder in checkpoints.complete(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "step-100"
    assert checkpoints.state_path(tmp_path / "step-100").read_text() == "state"
    assert checkpoints.read_marker(tmp_path / "step-10") == checkpoints.Marker(
        10, 2, "DDPStrategy", {"a.weight": [2, 3]}
    )


def test_what_is_not_whole_is_ignored_and_named(tmp_path):
    written(tmp_path, 1)
    checkpoints.begin(tmp_path, 3)
    (written(tmp_path, 2) / "COMPLETE").unlink()
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-4.partial")  # marked, not renamed
    (tmp_path / "step-x").mkdir()
    (tmp_path / "last.ckpt").write_text("")
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "step-1"
    found = [folder.name for folder in checkpoints.incomplete(tmp_path)]
    assert found == ["step-2", "step-3.partial", "step-4.partial"]
    for name in ("step-2", "step-4.partial", "absent"):
        refuses("not a complete checkpoint", checkpoints.state_path, tmp_path / name)


def test_a_half_written_one_is_written_anew(tmp_path):
    (checkpoints.begin(tmp_path, 1) / "old").write_text("")
    (tmp_path / "step-1").mkdir()  # its marker is gone
    assert sorted(item.name for item in written(tmp_path, 1).iterdir()) == ["COMPLETE", "state.ckpt"]


def test_older_ones_and_rubbish_go(tmp_path):
    for step in range(1, 5):
        written(tmp_path, step)
    checkpoints.begin(tmp_path, 9)
    (tmp_path / "mine").mkdir()
    checkpoints.keep_newest(tmp_path, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mine", "step-3", "step-4"]


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        written(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.keep_newest(tmp_path, 1)
    assert checkpoints.complete(tmp_path) == [tmp_path / "step-2"]


@pytest.mark.parametrize("moment", ["flush", "mark", "rename"])
def test_an_interrupted_write_leaves_the_previous_one(tmp_path, monkeypatch, moment):
    written(tmp_path, 1)

    def die(*args, **kwargs):
        raise OSError(28, "No space left on device")

    target = {"flush": (checkpoints, "flush"), "mark": (json, "dumps"), "rename": (type(tmp_path), "rename")}[moment]
    monkeypatch.setattr(*target, die)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, 2)
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "step-1"


SHAPES = {"a": [4, 4]}


def state(**changes):
    parts = {"loops": {}, "optimizer_states": [], "lr_schedulers": [], "epoch": 0, "global_step": 2, "random_state": []}
    parts["pytorch-lightning_version"] = "2.6.0"
    return {"state_dict": {"a": torch.ones(4, 4)}, **parts, **changes}


def saved(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def resumable(folder, strategy="SingleDeviceStrategy"):
    partial = checkpoints.begin(folder, 2)
    (partial / "state.ckpt").write_bytes(saved(state()))
    return checkpoints.seal(partial, checkpoints.Marker(2, 1, strategy, SHAPES))


def trainer(strategy="SingleDeviceStrategy", world_size=1):
    return SimpleNamespace(strategy=type(strategy, (), {})(), world_size=world_size)


@pytest.fixture
def checkpoint(tmp_path):
    return resumable(tmp_path)


def unfit(checkpoint, words, here=SHAPES, **run):
    said = refuses(words, stored.check_resumable, checkpoint, trainer(**run), here)
    assert said.isprintable()
    assert len(said) < 500


@pytest.mark.parametrize("there", ["SingleDeviceStrategy", "DDPStrategy"])
def test_strategies_that_read_each_other(tmp_path, there):
    stored.check_resumable(resumable(tmp_path, there), trainer("DDPStrategy"), SHAPES)


def test_what_does_not_fit(tmp_path, checkpoint):
    words = "written by DeepSpeedStrategy and cannot be read by DDPStrategy"
    unfit(resumable(tmp_path / "a", "DeepSpeedStrategy"), words, strategy="DDPStrategy")
    differ = r"1 trained tensors differ, first [ab] \(there .*, here .*\); resume with the recipe that wrote it"
    for here in ({}, {"a": [5, 4]}, {**SHAPES, "b": [1]}):
        unfit(checkpoint, differ, here)
    put(checkpoint, "COMPLETE", "trained", {})
    unfit(checkpoint, "does not fit this recipe")
    shards = resumable(tmp_path / "b", "DDPStrategy")
    (shards / "state.ckpt").unlink()
    (shards / "state.ckpt").mkdir()
    unfit(shards, "it is missing")
    unfit(shards, r"holds the parts of 1 process\(es\), this run has 4", world_size=4)


def test_a_requeued_job_resumes_also_where_its_command_says_overwrite(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    argv = ["--config", "tiny_fastv25_s16k4", "--output_dir", str(tmp_path), "--overwrite"]
    resumable(tmp_path / "checkpoints")
    assert RecipeCLI(argv).replaces
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunMarker.new().write(tmp_path)
    cli = RecipeCLI(argv)
    assert (cli.config.resume, cli.config.overwrite, cli.replaces) == (True, False, False)


def test_every_cut_and_every_flipped_bit_is_found(checkpoint):
    path = checkpoint / "state.ckpt"
    content = path.read_bytes()
    assert len(content) > 500
    for place in range(0, len(content), 23):
        path.write_bytes(content[:place])
        unfit(checkpoint, "state.ckpt cannot be read as a checkpoint: .*; remove ")
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            found = stored.read_state(path, resumes=True)
        except ValueError:
            continue
        assert torch.equal(found["state_dict"]["a"], torch.ones(4, 4))  # a bit that says nothing (padding, a date)


STATES = [
    ([1], "has no state_dict"),
    ({}, "has no state_dict"),
    (state(state_dict=[]), "has no state_dict"),
    (state(state_dict={"a": 1}), "a is not a tensor of trainable numbers"),
    (state(state_dict={"a": torch.ones(4, 4, dtype=torch.int32)}), "not a tensor of"),
    (state(state_dict={"a": torch.full((4, 4), float("nan"))}), "tensor a holds NaN"),
    (state(state_dict={"a": torch.ones(5)}), "does not fit this recipe"),
    (state(optimizer_states=None), "has no optimizer_states"),
    (state(**{"pytorch-lightning_version": []}), "has no pytorch-lightning_version"),
    (state(loops=3), "has no loops"),
    (state(epoch="1"), "has no epoch"),
]


@pytest.mark.parametrize(("content", "words"), STATES)
def test_states_of_another_kind(checkpoint, content, words):
    (checkpoint / "state.ckpt").write_bytes(saved(content))
    unfit(checkpoint, words)


def test_code_in_a_state_is_not_run(checkpoint, tmp_path):
    for content in (saved(state(more=Canary(tmp_path / "ran"))), pickle.dumps(Canary(tmp_path / "ran"))):
        (checkpoint / "state.ckpt").write_bytes(content)
        unfit(checkpoint, "cannot be read as a checkpoint")
        refuses("cannot be read as a checkpoint", lambda: stored.trained_tensors(checkpoint / "state.ckpt"))
    assert not (tmp_path / "ran").exists()


MARKERS = {
    "step": ("x", -1, True),
    "world_size": (0,),
    "strategy": (None,),
    "trained": (None, []),
    "trained.a": (["4", 4], 4),
    "schema_version": ("1", ...),
    "more": (1,),
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, own in MARKERS.items() for value in own])
def test_markers_are_typed(checkpoint, place, value):
    put(checkpoint, "COMPLETE", place, value)
    refuses(r"COMPLETE cannot be read .* to use an older checkpoint", checkpoints.read_marker, checkpoint)


@pytest.mark.parametrize(
    "text", ['{"schema_version": 2, "more": 1}', '{"schema_version": 1, "step": 1}', '{"s', "[1]", ""]
)
def test_markers_of_other_versions(checkpoint, text):
    (checkpoint / "COMPLETE").write_text(text)
    words = "written in layout 2, and this reads up to 1" if "2" in text else "cannot be read"
    refuses(words, checkpoints.state_path, checkpoint)


def test_what_is_no_checkpoint(tmp_path):
    torch.save({"state_dict": {"a": torch.empty(0)}}, tmp_path / "empty.ckpt")
    for name, words in (
        ("nowhere.ckpt", "does not exist"),
        (".", "not a complete DeepSpeed checkpoint"),
        ("empty.ckpt", "tensor a is empty"),
    ):
        refuses(words, stored.trained_tensors, tmp_path / name)


def test_a_gathered_adapter_is_written_without_the_backbones_weights(tiny_run):
    module = RecipeCLI(tiny_run()[1:]).model
    assert not is_sharded(module.parts)
    assert stored.finished_parts(module) == (module.parts, module.peft_model)
    module.gathered = stored.adapter_tensors(module.parts)
    parts, _ = stored.finished_parts(module)
    for name, tensor in parts.named_parameters():
        assert tensor.is_meta == (name not in module.gathered)
        assert tensor.is_meta or torch.equal(tensor, module.gathered[name])
    assert {name for name, tensor in parts.named_parameters() if tensor.requires_grad} == module.gathered.keys()


def test_whole_shapes_stay_where_zero_3_leaves_an_empty_tensor():
    split = torch.zeros(0)
    split.ds_shape = torch.Size([3])
    assert stored.shapes_of({"a": torch.zeros(2), "b": split}) == {"a": [2], "b": [3]}
