"""Blocks through Lightning: regions, an order that resumes anywhere, and streams."""

import json
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from subtoken_train.datasets.corpus import CorpusSource, load_rows, read_blocks
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule, SampleStream
from subtoken_train.types import Region
from tests.support.sampling import sampled
from tests.support.tiny_fits import fit

LENGTHS = {"block_length": 16, "context_length": 8, "prefix_tokens": 3}
BLOCKS, BATCH = 13, 2


class Recorder(L.LightningModule):
    """Trains one number; notes the ids it is given, its windows, and the tokens of the validation."""

    def __init__(self, tokenizer):
        super().__init__()
        self.family = SimpleNamespace(tokenizer=tokenizer)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        micro, tokens, window = batch
        self.seen.append((tokens, window, micro.input_ids_BN.tolist(), tuple(micro.record_ids)))
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.validated += batch.record_ids

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """Saves a checkpoint after a number of batches."""

    def __init__(self, batches, path):
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def source(tmp_path, cache):
    """13 blocks of 15 tokens and a BOS, and some tokens too many."""
    texts = [f"document {i:04d} words" for i in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return CorpusSource(str(tmp_path / "a.jsonl"))


def data(source, **options):
    return CorpusDataModule(source, **{**LENGTHS, "batch_size": BATCH, **options})


def test_full_batches_are_shown_alone(source, byte_tokenizer):
    family = SimpleNamespace(tokenizer=byte_tokenizer())
    batches = list(data(source).samples(family, BLOCKS, BATCH))
    assert [len(batch.record_ids) for batch in batches] == [BATCH] * (BLOCKS // BATCH)


def collated(source, tokenizer, **options):
    module = data(source, **options)
    module.trainer = SimpleNamespace(lightning_module=SimpleNamespace(family=SimpleNamespace(tokenizer=tokenizer)))
    module.setup("fit")
    return module.collator()([module._train[i] for i in (0, 5)])


@pytest.mark.parametrize(
    ("prefix_tokens", "regions", "first_label", "rank"), [(3, (8, 3, 5), 11, 10), (0, (8, 8, 0), 8, 15)]
)
def test_blocks_become_context_prefix_and_what_is_predicted(
    source, byte_tokenizer, prefix_tokens, regions, first_label, rank
):
    batch = collated(source, byte_tokenizer(), prefix_tokens=prefix_tokens)
    kinds = [Region.CONTEXT] * regions[0] + [Region.QUERY] * regions[1] + [Region.ANSWER] * regions[2]
    assert batch.regions_BN.tolist() == [kinds, kinds]
    assert torch.equal(batch.labels_BN[:, first_label:], batch.input_ids_BN[:, first_label:])
    assert set(batch.labels_BN[:, :first_label].flatten().tolist()) == {-100}
    assert batch.rank_position_B.tolist() == [rank, rank]
    assert batch.input_ids_BN[:, 0].tolist() == [1, 1]
    assert batch.record_ids == ["block 0", "block 5"]


@sampled("streaming", [False, True], every=4)
@sampled(("batches", "accumulate"), [(2, 1), (6, 1), (9, 1), (4, 2)], every=2)
def test_a_resumed_run_sees_what_an_unbroken_one_sees(source, byte_tokenizer, tmp_path, streaming, batches, accumulate):
    limits = {"max_steps": 14 // accumulate, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    unbroken, resumed = Recorder(byte_tokenizer()), Recorder(byte_tokenizer())
    fit(unbroken, data(source, streaming=streaming), SaveAt(batches, tmp_path / "a.ckpt"), **limits)
    fit(resumed, data(source, streaming=streaming), checkpoint=tmp_path / "a.ckpt", **limits)
    assert len(unbroken.seen) == 14
    assert resumed.seen == unbroken.seen[batches:]


def test_cached_blocks_are_shuffled_and_streamed_ones_are_not(source, byte_tokenizer):
    cached, streamed = Recorder(byte_tokenizer()), Recorder(byte_tokenizer())
    fit(cached, data(source), max_epochs=1)
    fit(streamed, data(source, streaming=True), max_steps=13, max_epochs=-1)
    order = [name for *_, names in cached.seen for name in names]
    assert len(set(order)) == 12
    assert order != sorted(order, key=lambda name: int(name.split()[1]))
    assert [name for *_, names in streamed.seen for name in names] == [f"block {i}" for i in range(26)]
    ids = [row for _, _, rows, _ in streamed.seen for row in rows]
    assert ids == 2 * [block.input_ids for block in read_blocks(load_rows(source), source, byte_tokenizer(), 16)]
    assert {tokens for tokens, *_ in streamed.seen} == {2 * 5}


def test_validation_is_in_order_and_never_streamed(source, byte_tokenizer):
    module = Recorder(byte_tokenizer())
    fit(module, data(source, val=source, streaming=True, val_batch_size=4), max_steps=2, max_epochs=-1,
        val_check_interval=2)  # fmt: skip
    assert module.validated == [f"block {i}" for i in range(BLOCKS)]


def test_another_order_is_refused_on_resume(source, byte_tokenizer, tmp_path):
    path, limits = tmp_path / "a.ckpt", {"max_steps": 4, "max_epochs": -1}
    fit(Recorder(byte_tokenizer()), data(source, streaming=True), SaveAt(2, path), **limits)
    with pytest.raises(ValueError, match=r"another order of the data \(records per global batch: 2, here 1\)"):
        fit(Recorder(byte_tokenizer()), data(source, streaming=True, batch_size=1), checkpoint=path, **limits)
    with pytest.raises(ValueError, match=r"another order of the data \(streaming: 1, here None\)"):
        fit(Recorder(byte_tokenizer()), data(source), checkpoint=path, **limits)


def test_processes_share_a_stream():
    def blocks(rank, world_size, batch_size, consumed=0):
        stream = SampleStream(
            lambda: iter(range(7)), lambda row, place: row, batch_size, rank, world_size, lambda: consumed
        )
        return [row for row, _ in zip(stream, range(12), strict=False)]

    alone = blocks(0, 1, 4)
    ranks = [blocks(rank, 2, 2) for rank in (0, 1)]
    assert alone == [i % 7 for i in range(12)]
    assert [i for b in range(0, 6, 2) for rank in ranks for i in rank[b : b + 2]] == alone
    assert blocks(0, 1, 4, consumed=2)[:4] == alone[8:]


def test_an_empty_stream_is_refused(source, byte_tokenizer):
    with pytest.raises(ValueError, match=r"has 200 tokens, fewer than one block of block_length 999"):
        fit(Recorder(byte_tokenizer()), data(source, streaming=True, block_length=999), max_steps=1, max_epochs=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 16}, "context_length 16 leaves a query region of zero tokens in blocks of 16"),
        ({"context_length": 20}, "context_length 20 leaves a query region of zero tokens"),
        ({"context_length": 0}, "context_length is 0; it must be 1 to"),
        ({"prefix_tokens": 8}, "prefix_tokens is 8; 0 to 7 are possible in a query region of 8 tokens"),
        ({"prefix_tokens": -1}, "prefix_tokens is -1; 0 to 7 are possible"),
        ({"streaming": True, "num_workers": 2}, "num_workers is 2; a stream is read in the training process"),
    ],
)
def test_bad_settings(source, options, message):
    with pytest.raises(ValueError, match=message):
        data(source, **options)
