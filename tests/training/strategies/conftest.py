"""What the tests of strategies train on."""

import json

import pytest

from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.scenes import write_scenes
from tests.support.helpers import drawn_llava, save_backbone
from tests.support.strategy_runs import Arena

TEXT_ONLY = [{"from": "human", "value": "what is blue ?"}, {"from": "gpt", "value": "red 8"}]


@pytest.fixture(autouse=True)
def _mixed_kinds(monkeypatch):
    """Runs of this process draw records as those of ``strategy_runs`` do."""
    monkeypatch.setattr(InstructionDataModule, "sizes", lambda self, records: None)


@pytest.fixture(scope="module")
def arena(tmp_path_factory) -> Arena:
    """Random tiny LLaVA of three layers; 22 records with an image and, at the end of batches, 22 of text only."""
    folder = tmp_path_factory.mktemp("arena")
    save_backbone(drawn_llava(3), folder / "backbone")
    write_scenes(folder / "scenes", train=22, dev=10, test=10)
    records = json.loads((folder / "scenes" / "train.json").read_text())
    text = [{"id": f"text-{number}", "conversations": TEXT_ONLY} for number in range(22)]
    (folder / "mixed.json").write_text(json.dumps(records + text))
    return Arena(folder)
