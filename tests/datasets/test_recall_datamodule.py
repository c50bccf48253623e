"""Recall samples through the loaders."""

from types import SimpleNamespace

import pytest
import torch

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.types import Region


def ready(**options):
    data = RecallDataModule(**{"train_samples": 7, "val_samples": 3, "batch_size": 2, **options})
    total = SimpleNamespace(processed=0)
    data.trainer = SimpleNamespace(
        world_size=1,
        global_rank=0,
        limit_train_batches=1.0,
        accumulate_grad_batches=1,
        lightning_module=SimpleNamespace(family=SimpleNamespace(tokenizer=build_tokenizer())),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total))),
    )
    data.setup("fit")
    return data


def test_batches():
    data = ready(num_facts=10, num_questions=4)
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


@pytest.mark.slow
def test_without_validation():
    assert ready(val_samples=0).val_dataloader() == []


def test_errors():
    with pytest.raises(ValueError, match="num_questions 9 and num_facts 3"):
        ready(num_facts=3, num_questions=9)
    with pytest.raises(ValueError, match="train_samples is 0"):
        ready(train_samples=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ready(batch_size=0)
