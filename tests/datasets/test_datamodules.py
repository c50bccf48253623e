"""The data modules through Lightning: an order that resumes anywhere, windows, processes, and regions."""

import json
import warnings
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.datasets.corpus import CorpusSource, load_rows, read_blocks
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule, RecallDataModule
from subtoken_train.datasets.image_sources import MOST_PIXELS
from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.types import Region
from tests.support.chats import talk
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.training_memory import fit

RECORDS, BATCH, STEPS_PER_EPOCH = 21, 4, 5


class Recorder(L.LightningModule):
    """Trains one number; notes place, tokens, window and names of every batch, and its ids."""

    def __init__(self, family, crash_at=None):
        super().__init__()
        self.family, self.crash_at = family, crash_at
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.given, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.crash_at:
            raise RuntimeError("crash")
        micro, tokens, window = batch
        self.seen.append((self.current_epoch, batch_idx, tokens, window, *micro.record_ids))
        self.given.append((tokens, window, micro.input_ids_BN.tolist(), tuple(micro.record_ids)))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch.record_ids)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """Saves a checkpoint at one hook after a number of batches."""

    def __init__(self, hook, batches, path):
        self.batches, self.path = batches, path
        setattr(self, HOOKS[hook], self.save)

    def save(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches:
            trainer.save_checkpoint(self.path)


HOOKS = {
    "batch": "on_train_batch_end", "validation start": "on_validation_start", "validation": "on_validation_end",
    "epoch": "on_train_epoch_end", "exception": "on_exception",
}  # fmt: skip


def trainer_of(family, rank=0, world_size=1):
    """What loaders ask of a trainer that stands at the first batch."""
    total = SimpleNamespace(processed=0)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total)))
    sizes = {"world_size": world_size, "global_rank": rank, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    return SimpleNamespace(**sizes, lightning_module=SimpleNamespace(family=family), fit_loop=loop)


@pytest.fixture
def text_file(tmp_path):
    rows = [{"id": f"{i}", "conversations": talk("what ?", f"{i % 10}")} for i in range(RECORDS)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    return str(tmp_path / "train.json")


def instructions(path, **options):
    return InstructionDataModule(path, **{"batch_size": BATCH, **options})


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
    val_file = text_file if hook.startswith("validation") else None
    unbroken, resumed = Recorder(tiny_family), Recorder(tiny_family)
    fit(unbroken, instructions(text_file, val_file=val_file), SaveAt(hook, batches, tmp_path / "a.ckpt"), **limits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(resumed, instructions(text_file, val_file=val_file), checkpoint=tmp_path / "a.ckpt", **limits)
    assert resumed.seen == unbroken.seen[batches:]
    assert len(unbroken.seen) == 3 * limits.get("limit_train_batches", STEPS_PER_EPOCH)
    assert not [w for w in caught if "not resumable" in str(w.message)]


@pytest.mark.slow
def test_a_crashed_run_with_workers_resumes_at_the_batch_it_lost(tiny_family, text_file, tmp_path):
    path = tmp_path / "a.ckpt"
    unbroken, crashed, resumed = Recorder(tiny_family), Recorder(tiny_family, crash_at=2), Recorder(tiny_family)
    fit(unbroken, instructions(text_file), max_epochs=2)
    with pytest.raises(RuntimeError, match="crash"):  # by now, two workers have fetched all five batches
        fit(crashed, instructions(text_file, num_workers=2), SaveAt("exception", 2, path))
    fit(resumed, instructions(text_file, num_workers=2), checkpoint=path, max_epochs=2)
    assert crashed.seen + resumed.seen == unbroken.seen


def test_another_place_than_the_checkpoints_is_refused_on_resume(tiny_family, text_file, tmp_path):
    path = tmp_path / "a.ckpt"
    fit(Recorder(tiny_family), instructions(text_file), SaveAt("batch", 2, path))
    for options, words in (
        ({"batch_size": 2}, r"another order of the data \(records per global batch: 4, here 2\); resume"),
        ({"seed": 1}, "seed: 0, here 1"),
    ):
        refuses(words, fit, Recorder(tiny_family), instructions(text_file, **options), checkpoint=path)
    limits = {"max_epochs": 2, "accumulate_grad_batches": 2}
    fit(Recorder(tiny_family), instructions(text_file), SaveAt("batch", 6, path), **limits)
    with pytest.raises(ValueError, match="micro-batch 1 of the epoch, inside an accumulation window of 2"):
        fit(Recorder(tiny_family), instructions(text_file), checkpoint=path, **limits)


def test_one_module_serves_a_second_fit(tiny_family, text_file, tmp_path):
    path = tmp_path / "a.ckpt"
    data = instructions(text_file)
    first, second = Recorder(tiny_family), Recorder(tiny_family)
    fit(first, data, SaveAt("batch", 2, path), max_epochs=1)
    fit(Recorder(tiny_family), data, checkpoint=path, max_epochs=1)
    fit(second, data, max_epochs=1)
    assert second.seen == first.seen


def test_images_validation_and_folders(tiny_family, tmp_path):
    write_scene_split(tmp_path / "scenes", "train", 4, seed=0)
    write_scene_split(tmp_path / "scenes", "dev", 3, seed=0)
    (tmp_path / "scenes/dev.json").rename(tmp_path / "dev.json")  # images are found beside the *training* file
    module, val = Recorder(tiny_family), str(tmp_path / "dev.json")
    path = str(tmp_path / "scenes/train.json")
    fit(module, instructions(path, val_file=val, batch_size=2, val_batch_size=3, num_workers=1), max_epochs=1)
    assert sorted(name for row in module.seen for name in row[4:]) == [f"train-00000{i}" for i in range(4)]
    assert module.validated == [["dev-000000", "dev-000001", "dev-000002"]]


def loaders_of_two_processes(path, family):
    """(training loader, validation loader) of either process, both on one file, two records at a time."""
    loaders = []
    for rank in (0, 1):
        data = instructions(path, val_file=path, batch_size=2)
        data.trainer = trainer_of(family, rank, 2)
        data.setup("fit")
        loaders.append((data.train_dataloader(), data.val_dataloader()))
    return loaders


def test_no_step_of_two_processes_mixes_records_with_and_without_images(tiny_family, tmp_path):
    write_scene_split(tmp_path, "train", 7, seed=0)
    rows = json.loads((tmp_path / "train.json").read_text())
    texts = [{"conversations": talk("what ?", "7")}] * 12
    (tmp_path / "train.json").write_text(json.dumps(texts[:6] + rows + texts[6:]))
    loaders = loaders_of_two_processes(str(tmp_path / "train.json"), tiny_family)
    training = [[batch.pixel_values is not None for batch, *_ in train] for train, _ in loaders]
    assert training[0] == training[1]
    assert sorted(training[0]) == [False] * 3 + [True]  # 3 + 0 images and texts are left, too few for a batch
    validation = [[batch.pixel_values is not None for batch in val] for _, val in loaders]
    assert validation[0] == validation[1] == [True, True, False, False, False]


LENGTHS = {"block_length": 16, "context_length": 8, "prefix_tokens": 3}
BLOCKS = 13


@pytest.fixture
def source(tmp_path, cache):
    """13 blocks of 15 tokens and a BOS, and some tokens too many."""
    texts = [f"document {i:04d} words" for i in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return CorpusSource(str(tmp_path / "a.jsonl"))


def corpus(source, **options):
    return CorpusDataModule(source, **{**LENGTHS, "batch_size": 2, **options})


@pytest.mark.parametrize(("prefix", "regions", "first", "rank"), [(3, (8, 3, 5), 11, 10), (0, (8, 8, 0), 8, 15)])
def test_blocks_become_context_prefix_and_what_is_predicted(source, byte_tokenizer, prefix, regions, first, rank):
    module = corpus(source, prefix_tokens=prefix)
    module.trainer = trainer_of(SimpleNamespace(tokenizer=byte_tokenizer()))
    module.setup("fit")
    batch = module.collator()([module._train[i] for i in (0, 5)])
    kinds = [Region.CONTEXT] * regions[0] + [Region.QUERY] * regions[1] + [Region.ANSWER] * regions[2]
    assert batch.regions_BN.tolist() == [kinds, kinds]
    assert torch.equal(batch.labels_BN[:, first:], batch.input_ids_BN[:, first:])
    assert set(batch.labels_BN[:, :first].flatten().tolist()) == {-100}
    assert batch.rank_position_B.tolist() == [rank, rank]
    assert batch.input_ids_BN[:, 0].tolist() == [1, 1]
    assert batch.record_ids == ["block 0", "block 5"]


@sampled(("batches", "accumulate"), [(2, 1), (6, 1), (9, 1), (4, 2)], every=2)
def test_a_resumed_corpus_goes_on_where_it_was(source, byte_tokenizer, tmp_path, batches, accumulate):
    limits = {"max_steps": 14 // accumulate, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    unbroken, resumed = (Recorder(SimpleNamespace(tokenizer=byte_tokenizer())) for _ in range(2))
    fit(unbroken, corpus(source, val=source, val_batch_size=4), SaveAt("batch", batches, tmp_path / "a.ckpt"), **limits)
    fit(resumed, corpus(source), checkpoint=tmp_path / "a.ckpt", **limits)
    assert len(unbroken.given) == 14
    assert resumed.given == unbroken.given[batches:]
    order = [name for *_, names in unbroken.given[:6] for name in names]  # of one pass, shuffled
    assert len(set(order)) == 12
    assert order != sorted(order, key=lambda name: int(name.split()[1]))
    assert [name for names in unbroken.validated for name in names][:BLOCKS] == [f"block {i}" for i in range(BLOCKS)]


def test_training_blocks_alone_go_on_with_their_context(source, byte_tokenizer):
    sizes = {"block_length": 80, "context_length": 64, "prefix_tokens": 0}
    shown = {}
    for repeats in (False, True):
        module = corpus(source, val=source, repeat_context=repeats, **sizes)
        module.trainer = trainer_of(SimpleNamespace(tokenizer=byte_tokenizer()))
        module.setup("fit")
        records = {"train": module._train, "val": module._val, "shown": list(module.records_to_show())}
        shown[repeats] = {name: [[*map(int, one.input_ids)] for one in some] for name, some in records.items()}
    plain, repeated = shown[False], shown[True]
    assert plain["train"] == plain["val"] == plain["shown"] == repeated["val"]
    assert repeated["train"] == repeated["shown"]
    assert [a == b for a, b in zip(plain["train"], repeated["train"], strict=True)] == [True, False]
    refuses(r"^context_length, under repeat_context, is 8; it must be 64 or more$", corpus, source, repeat_context=True)


def test_blocks_are_shown_in_order_without_packing(source, byte_tokenizer):
    family = SimpleNamespace(tokenizer=byte_tokenizer())
    shown = [row for batch in corpus(source).samples(family, BLOCKS) for row in batch.input_ids_BN.tolist()]
    assert shown == list(read_blocks(load_rows(source), source, byte_tokenizer(), 16))
    with pytest.raises(ValueError, match=r"has 200 tokens, fewer than one block of block_length 999"):
        list(corpus(source, block_length=999).samples(family, 1))


def recall(**options):
    data = RecallDataModule(**{"train_samples": 7, "val_samples": 3, "batch_size": 2, **options})
    data.trainer = trainer_of(SimpleNamespace(tokenizer=build_tokenizer()))
    data.setup("fit")
    return data


def test_recall_samples_become_batches():
    data = recall(num_facts=10, num_questions=4)
    train, val = list(data.train_dataloader()), list(data.val_dataloader())
    names = [name for batch, _, _ in train for name in batch.record_ids]
    assert len(names) == len(set(names)) == 6
    assert names != sorted(names)
    assert [name for batch in val for name in batch.record_ids] == [f"dev-00000{i}" for i in range(3)]
    batch, tokens, window = train[0]
    assert (tokens, window) == (int((batch.labels_BN != -100).sum()), 1)
    assert (batch.regions_BN == Region.CONTEXT).sum(1).tolist() == [512, 512]
    assert torch.equal(batch.labels_BN != -100, batch.regions_BN == Region.ANSWER)
    assert tokens == 2 * (4 * 4 + 1)  # name adjective noun . per question, and the end
    assert recall(val_samples=0).val_dataloader() == []


BAD = {
    "max_length is 0; it must be 1 to": (InstructionDataModule, {"max_length": 0}),
    "^batch_size is 0; it must be 1 to": (InstructionDataModule, {"batch_size": 0}),
    "max_video_frames is 0": (InstructionDataModule, {"max_video_frames": 0}),
    "max_image_pixels is": (InstructionDataModule, {"max_image_pixels": MOST_PIXELS + 1}),
    "context_length, of block_length 16, is 16; it must be 1 to 15": (corpus, {"context_length": 16}),
    "prefix_tokens, of the 8 behind the context, is 8; it must be 0 to 7": (corpus, {"prefix_tokens": 8}),
    "num_questions 9 and num_facts 3": (RecallDataModule, {"num_facts": 3, "num_questions": 9}),
    "train_samples is 0": (RecallDataModule, {"train_samples": 0}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_settings(words):
    make, options = BAD[words]
    given = {InstructionDataModule: ["train.json"], corpus: [CorpusSource("x.txt")]}.get(make, [])
    refuses(words, make, *given, **options)
