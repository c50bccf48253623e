"""The log of consumed records: what made the weights, in order, over resumes."""

import json
from types import SimpleNamespace

from subtoken_train.training.panels.run_progress import SampleLog


def trainer(tmp_path, consumed):
    data = SimpleNamespace(batches_consumed=lambda: consumed)
    process = SimpleNamespace(broadcast=lambda folder: str(tmp_path))  # what process 0 says
    return SimpleNamespace(
        default_root_dir="elsewhere", strategy=process, global_rank=1, global_step=consumed // 2, datamodule=data
    )


def consume(log, tmp_path, number):
    log.on_train_batch_start(trainer(tmp_path, number), None, (SimpleNamespace(record_ids=[f"r{number}"]), 1, 1), 0)


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "logs" / "samples-rank1.jsonl"
    log = SampleLog()
    log.on_train_start(trainer(tmp_path, 0), None)
    for number in range(4):
        consume(log, tmp_path, number)
    with path.open("a") as file:
        file.write('{"batch": 4, "ids')  # killed while writing
    again = SampleLog()
    again.on_train_start(trainer(tmp_path, 2), None)
    consume(again, tmp_path, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"batch": n, "step": n // 2, "ids": [f"r{n}"]} for n in range(3)]


def test_a_link_in_the_place_of_the_temporary_file_leads_nowhere(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "logs" / "samples-rank1.partial").symlink_to(tmp_path / "mine")
    SampleLog().on_train_start(trainer(tmp_path, 0), None)
    assert (tmp_path / "mine").read_text() == "mine"
