"""What a tokenizer does not know is counted and said: in records, texts and questions, by every command that reads."""

import json
import warnings

import pytest
from PIL import Image
from transformers import AutoTokenizer

from subtoken_train.cli.main import main
from subtoken_train.datasets.corpus import CorpusSource
from subtoken_train.datasets.datamodule import CorpusDataModule, RecallDataModule
from subtoken_train.datasets.unknown_tokens import SomeTexts, say_unknown
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec
from subtoken_train.resources import resource
from tests.support.chats import CHATML, byte_level
from tests.support.training_memory import RECIPE

WORDS, PIECES = resource("checkpoints/tiny-llava"), resource("checkpoints/tiny-llama")


@pytest.fixture
def own(tmp_path):
    """A new user's own data: three records in words that no scene has."""
    Image.new("RGB", (96, 96)).save(tmp_path / "cat.png")
    turns = [{"from": "human", "value": "<image>\nwhat animal is there ?"}, {"from": "gpt", "value": "a sleepy cat"}]
    records = [{"id": str(i), "image": "cat.png", "conversations": turns} for i in range(3)]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(records))
    return path


def test_one_percent_is_said_and_more_is_a_warning():
    tokenizer = AutoTokenizer.from_pretrained(WORDS)  # of whole words; it knows its own alone
    known = "is " * 99
    for name, text in ((PIECES, "a ☃"), (WORDS, known)):  # they know all
        assert say_unknown(AutoTokenizer.from_pretrained(name), SomeTexts([text], 1), "data") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert say_unknown(tokenizer, SomeTexts([known + "cat"], 9), "data") == (
            "data: 1 % of the text is unknown to the tokenizer (1 of 100 tokens, in 1 of 9 texts)"
        )
    with pytest.warns(SubTokenWarning, match=r"data: 1\.98 % of the text .* for instance 'cat', 'dog': the model can"):
        assert say_unknown(tokenizer, SomeTexts([known, "cat", "dog"], None), "data") is None


def test_corpora_and_recall_have_texts(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one\n", "", "two\n")))
    tokenizer = byte_level()
    assert CorpusDataModule(CorpusSource(str(path))).some_texts(tokenizer) == SomeTexts(["one\n", "two\n"], 3)
    assert CorpusDataModule(CorpusSource(str(path), documents="wikitext")).some_texts(tokenizer).total is None
    english = RecallDataModule().some_texts(tokenizer)
    assert english.total == len(english.texts) > 20


def test_chats_have_what_is_said_in_them_and_documents_their_marks(tmp_path):
    path = tmp_path / "chats.json"
    said = [("system", "Be brief."), ("user", "one ?"), ("assistant", "two")]
    path.write_text(json.dumps([{"messages": [{"role": role, "content": text} for role, text in said]}] * 3))
    corpus = CorpusDataModule(CorpusSource(str(path), documents="conversations"))
    assert corpus.some_texts(byte_level(CHATML)) == SomeTexts(["Be brief.\none ?\ntwo"] * 3, 3)
    assert corpus.some_texts(byte_level()) == SomeTexts(["USER: Be brief.\n\none ? ASSISTANT: two"] * 3, 3)


@pytest.mark.slow
def test_check_and_fit_warn(own, tmp_path, capsys):
    argv = ["--config", str(RECIPE), f"--data.train_file={own}", "--data.batch_size=1", "--trainer.max_steps=1"]
    argv += ["--trainer.accumulate_grad_batches=1", "--trainer.enable_model_summary=false"]
    for command, further in (("check", []), ("fit", [f"--output_dir={tmp_path / 'run'}"])):
        assert main([command, *argv, *further]) == 0
        err = capsys.readouterr().err
        assert "subtoken-train: warning: training data: 37.5 % of the text is unknown to the tokenizer" in err
        assert "(9 of 24 tokens, in 3 texts), for instance 'animal', 'sleepy', 'cat'" in err


@pytest.mark.slow
def test_evaluate_and_grids_say_it(own, tmp_path, capsys):
    common = ["evaluate", "--adapter", "checkpoints/adapters/tiny_lora_only", "--max-new-tokens=2"]
    assert main([*common, "--data", str(own)]) == 0
    assert f"warning: tiny_lora_only-seed0: {own}: 37.5 % of the text is unknown" in capsys.readouterr().err
    row = {"image": "cat.png", "question": "what is there ?", "answers": ["cat"], "metric": "exact_match"}
    (tmp_path / "local.jsonl").write_text(json.dumps(row) + "\n")
    task = TaskSpec("local", source=str(tmp_path / "local.jsonl"), options={"max_new_tokens": 2})
    said: list[str] = []
    run_grid(Grid((ArmSpec(adapter="checkpoints/adapters/tiny_lora_only"),), (task,), tmp_path / "r"), say=said.append)
    assert not any("unknown" in line for line in said)
