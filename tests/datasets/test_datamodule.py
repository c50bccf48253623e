"""The order of training data through Lightning: resumed anywhere, it is the order of never having stopped."""

import json
import warnings
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.scene_files import write_scene_split
from tests.support.sampling import sampled
from tests.support.tiny_fits import fit

RECORDS, BATCH, STEPS_PER_EPOCH = 21, 4, 5


class Recorder(L.LightningModule):
    """Trains one number; notes epoch, batch, tokens and size of its accumulation window, and records."""

    def __init__(self, family, crash_at=None):
        super().__init__()
        self.family, self.crash_at = family, crash_at
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.crash_at:
            raise RuntimeError("crash")
        micro, tokens, window = batch
        self.seen.append((self.current_epoch, batch_idx, tokens, window, *micro.record_ids))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch.record_ids)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """Saves a checkpoint at one hook after a number of batches."""

    def __init__(self, hook, batches, path):
        self.hook, self.batches, self.path = hook, batches, path

    def save(self, hook, trainer):
        if hook == self.hook and trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, *args):
        self.save("batch", trainer)

    def on_validation_start(self, trainer, *args):
        self.save("validation start", trainer)

    def on_validation_end(self, trainer, *args):
        self.save("validation", trainer)

    def on_train_epoch_end(self, trainer, *args):
        self.save("epoch", trainer)

    def on_exception(self, trainer, *args):
        self.save("exception", trainer)


@pytest.fixture
def text_file(tmp_path):
    rows = [
        {"id": f"{i}", "conversations": [{"from": "human", "value": "what ?"}, {"from": "gpt", "value": f"{i % 10}"}]}
        for i in range(RECORDS)
    ]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    return str(tmp_path / "train.json")


# Lightning's counters differ at each of these moments; 5, 10 and (limited) 3, 6 are ends of epochs.
MOMENTS = [
    ("batch", 2, {"max_epochs": 3}),
    ("batch", 5, {"max_epochs": 3}),
    ("batch", 7, {"max_steps": 15, "max_epochs": -1}),
    ("batch", 10, {"max_steps": 15, "max_epochs": -1}),
    ("epoch", 5, {"max_epochs": 3}),
    ("epoch", 10, {"max_steps": 15, "max_epochs": -1}),
    ("validation", 5, {"max_epochs": 3}),
    ("validation", 7, {"max_epochs": 3, "val_check_interval": 2}),
    ("validation start", 5, {"max_epochs": 3}),
    ("validation start", 7, {"max_epochs": 3, "val_check_interval": 2}),
    ("batch", 4, {"max_epochs": 3, "accumulate_grad_batches": 2}),
    ("batch", 7, {"max_epochs": 3, "accumulate_grad_batches": 2}),
    ("batch", 5, {"max_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": 3}),
    ("batch", 4, {"max_epochs": 3, "limit_train_batches": 3}),
    ("epoch", 6, {"max_epochs": 3, "limit_train_batches": 3}),
]


@sampled("moment", MOMENTS, every=4, ids=lambda moment: "-".join(map(str, (*moment[:2], *moment[2]))))
def test_a_resumed_run_sees_what_an_unbroken_one_sees(tiny_family, text_file, tmp_path, moment):
    hook, batches, limits = moment

    def data():
        val_file = text_file if hook.startswith("validation") else None
        return InstructionDataModule(text_file, val_file=val_file, batch_size=BATCH)

    path = tmp_path / "a.ckpt"
    unbroken, resumed = Recorder(tiny_family), Recorder(tiny_family)
    fit(unbroken, data(), SaveAt(hook, batches, path), **limits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(resumed, data(), checkpoint=path, **limits)
    assert resumed.seen == unbroken.seen[batches:]
    assert len(unbroken.seen) == 3 * limits.get("limit_train_batches", STEPS_PER_EPOCH)
    assert not [w for w in caught if "not resumable" in str(w.message)]


@pytest.mark.slow
def test_a_crashed_run_with_workers_resumes_at_the_batch_it_lost(tiny_family, text_file, tmp_path):
    path = tmp_path / "a.ckpt"
    unbroken, crashed, resumed = Recorder(tiny_family), Recorder(tiny_family, crash_at=2), Recorder(tiny_family)
    fit(unbroken, InstructionDataModule(text_file, batch_size=BATCH), max_epochs=2)
    with pytest.raises(RuntimeError, match="crash"):  # by now, two workers have fetched all five batches
        fit(crashed, InstructionDataModule(text_file, batch_size=BATCH, num_workers=2), SaveAt("exception", 2, path))
    fit(resumed, InstructionDataModule(text_file, batch_size=BATCH, num_workers=2), checkpoint=path, max_epochs=2)
    assert crashed.seen + resumed.seen == unbroken.seen


@pytest.mark.slow
def test_a_finished_run_can_be_extended_with_workers(tiny_family, text_file, tmp_path):
    unbroken, first, second = Recorder(tiny_family), Recorder(tiny_family), Recorder(tiny_family)
    fit(unbroken, InstructionDataModule(text_file, batch_size=BATCH), max_steps=12, max_epochs=-1)
    trainer = fit(first, InstructionDataModule(text_file, batch_size=BATCH), max_steps=7, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    data = InstructionDataModule(text_file, batch_size=BATCH, num_workers=2)
    fit(second, data, checkpoint=tmp_path / "a.ckpt", max_steps=12, max_epochs=-1)
    records = [row[2:] for row in first.seen + second.seen]
    assert records == [row[2:] for row in unbroken.seen]


def test_passes_are_shuffled_anew_and_drop_the_partial_batch(tiny_family, text_file):
    module = Recorder(tiny_family)
    fit(module, InstructionDataModule(text_file, batch_size=BATCH, seed=4), max_epochs=2)
    passes = [[name for epoch, _, _, _, *names in module.seen if epoch == which for name in names] for which in (0, 1)]
    assert [len(set(names)) for names in passes] == [20, 20]
    assert passes[0] != passes[1]
    again = Recorder(tiny_family)
    fit(again, InstructionDataModule(text_file, batch_size=BATCH, seed=5), max_epochs=1)
    assert again.seen != module.seen[:5]


def test_another_order_is_refused_on_resume(tiny_family, text_file, tmp_path):
    path = tmp_path / "a.ckpt"
    fit(Recorder(tiny_family), InstructionDataModule(text_file, batch_size=BATCH), SaveAt("batch", 2, path))
    with pytest.raises(ValueError, match=r"another order of the data \(records per global batch: 4, here 2\); resume"):
        fit(Recorder(tiny_family), InstructionDataModule(text_file, batch_size=2), checkpoint=path)
    with pytest.raises(ValueError, match="seed: 0, here 1"):
        fit(Recorder(tiny_family), InstructionDataModule(text_file, batch_size=BATCH, seed=1), checkpoint=path)


def test_a_checkpoint_from_inside_an_accumulation_window_is_refused(tiny_family, text_file, tmp_path):
    path, limits = tmp_path / "a.ckpt", {"max_epochs": 2, "accumulate_grad_batches": 2}
    fit(Recorder(tiny_family), InstructionDataModule(text_file, batch_size=BATCH), SaveAt("batch", 6, path), **limits)
    with pytest.raises(ValueError, match="micro-batch 1 of the epoch, inside an accumulation window of 2"):
        fit(Recorder(tiny_family), InstructionDataModule(text_file, batch_size=BATCH), checkpoint=path, **limits)


def test_one_module_serves_a_second_fit(tiny_family, text_file, tmp_path):
    path = tmp_path / "a.ckpt"
    data = InstructionDataModule(text_file, batch_size=BATCH)
    first, second = Recorder(tiny_family), Recorder(tiny_family)
    fit(first, data, SaveAt("batch", 2, path), max_epochs=1)
    fit(Recorder(tiny_family), data, checkpoint=path, max_epochs=1)
    fit(second, data, max_epochs=1)
    assert second.seen == first.seen


def test_images_validation_and_folders(tiny_family, tmp_path):
    write_scene_split(tmp_path / "scenes", "train", 4, seed=0)
    write_scene_split(tmp_path / "scenes", "dev", 3, seed=0)
    (tmp_path / "scenes/dev.json").rename(tmp_path / "dev.json")  # images are found beside the *training* file
    module = Recorder(tiny_family)
    files = {"train_file": str(tmp_path / "scenes/train.json"), "val_file": str(tmp_path / "dev.json")}
    fit(module, InstructionDataModule(**files, batch_size=2, val_batch_size=3, num_workers=1), max_epochs=1)
    assert sorted(name for row in module.seen for name in row[4:]) == [f"train-00000{i}" for i in range(4)]
    assert module.validated == [["dev-000000", "dev-000001", "dev-000002"]]


def loaders_of_two_processes(path, family):
    """(training loader, validation loader) of either process, both on one file, two records at a time."""
    loaders = []
    for rank in (0, 1):
        data = InstructionDataModule(path, val_file=path, batch_size=2)
        data.trainer = SimpleNamespace(
            world_size=2,
            global_rank=rank,
            limit_train_batches=1.0,
            accumulate_grad_batches=1,
            lightning_module=SimpleNamespace(family=family),
            fit_loop=fit_loop_at(0),
        )
        data.setup("fit")
        loaders.append((data.train_dataloader(), data.val_dataloader()))
    return loaders


def test_two_processes_share_the_records(tiny_family, text_file):
    loaders = loaders_of_two_processes(text_file, tiny_family)
    names = [[name for batch, _, _ in train for name in batch.record_ids] for train, _ in loaders]
    assert len(names[0]) == len(names[1]) == 10
    assert len(set(names[0]) | set(names[1])) == 20
    validated = [[name for batch in val for name in batch.record_ids] for _, val in loaders]
    assert len(validated[0]) == len(validated[1]) == 11
    assert set(validated[0]) | set(validated[1]) == {str(i) for i in range(RECORDS)}


def test_no_step_of_two_processes_mixes_records_with_and_without_images(tiny_family, tmp_path):
    write_scene_split(tmp_path, "train", 7, seed=0)
    rows = json.loads((tmp_path / "train.json").read_text())
    texts = [{"conversations": [{"from": "human", "value": "what ?"}, {"from": "gpt", "value": "7"}]}] * 12
    (tmp_path / "train.json").write_text(json.dumps(texts[:6] + rows + texts[6:]))
    loaders = loaders_of_two_processes(str(tmp_path / "train.json"), tiny_family)
    training = [[batch.pixel_values is not None for batch, *_ in train] for train, _ in loaders]
    assert training[0] == training[1]
    assert sorted(training[0]) == [False] * 3 + [True]  # 3 + 0 images and texts are left, too few for a batch
    validation = [[batch.pixel_values is not None for batch in val] for _, val in loaders]
    assert validation[0] == validation[1] == [True, True, False, False, False]


def fit_loop_at(batches):
    """The part of a fit loop that counts batches."""
    total = SimpleNamespace(processed=batches)
    return SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total)))


@pytest.mark.parametrize("name", ["max_length", "batch_size", "val_batch_size"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 to"):
        InstructionDataModule("train.json", **{name: 0})
