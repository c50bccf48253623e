"""Packed blocks against the same stream cut by hand, the cache; what a tokenizer does not know is counted and said."""

import json
import os
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from subtoken_train.cli.main import main
from subtoken_train.datasets import corpus as packing
from subtoken_train.datasets.corpus import CorpusSource, iterate_blocks, iterate_documents, load_rows, packed_blocks
from subtoken_train.datasets.datamodule import CorpusDataModule, RecallDataModule
from subtoken_train.datasets.text_batches import TextSample, collate_text, padding_id
from subtoken_train.datasets.unknown_tokens import SomeTexts, say_unknown
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec
from subtoken_train.resources import resource
from subtoken_train.types import Region
from tests.support.chats import CHATML, byte_level
from tests.support.places import ROOT
from tests.support.refusals import refuses
from tests.support.training_memory import RECIPE

BOS, EOS = 1, 2
P, C, Q, A = Region.PADDING, Region.CONTEXT, Region.QUERY, Region.ANSWER


def write_jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text, "n": i}) + "\n" for i, text in enumerate(texts)))
    return CorpusSource(str(path), column=column)


def documents(rows, source):
    return list(iterate_documents(rows, source))


def stream(texts, tokenizer):
    """What the blocks are cut from, one document at a time."""
    return [i for text in texts if text.strip() for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS]]


@pytest.mark.parametrize("bos", [True, False])
@given(texts=st.lists(st.text("ab \n", max_size=9), max_size=12), block_length=st.integers(3, 20))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_blocks_are_the_stream_of_documents_and_ends(byte_tokenizer, bos, texts, block_length):
    tokenizer = byte_tokenizer(bos)
    rows = [{"text": text} for text in texts]
    blocks = list(iterate_blocks(iterate_documents(rows, CorpusSource("x")), tokenizer, block_length))
    assert all(len(block) == block_length for block in blocks)
    if bos:
        assert all(block[0] == BOS for block in blocks)
        blocks = [block[1:] for block in blocks]
    ids = stream(texts, tokenizer)
    assert [i for block in blocks for i in block] == ids[: len(ids) - len(ids) % (block_length - bos)]
    assert BOS not in ids


@given(context=st.integers(64, 200), after=st.integers(1, 300), place=st.integers(0, 63), bos=st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_second_block_goes_on_with_its_context(byte_tokenizer, context, after, place, bos):
    tokenizer = byte_tokenizer(bos)
    ids = [*[BOS] * bos, *tokenizer(" ".join(map(str, range(1000, 1300))), add_special_tokens=False)["input_ids"]]
    made = packing.repeat_context(ids[: context + after], context, place, tokenizer)
    assert (len(made), made[:context]) == (context + after, ids[:context])
    assert (made == ids[: context + after]) == (place % 2 == 0)
    text, said = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:context], made[context:]))
    for piece in said.split("\n\n")[1:-1] if place % 2 else ():  # whole ones
        asked = re.fullmatch('Repeat what follows "(.{8,10})":(.{30})', piece)
        assert bool(asked) == (place % 8 == 7)
        assert re.search(" ?".join(map(re.escape, asked.groups())), text) if asked else text.endswith(piece)


def test_many_documents_are_tokenised_together_without_losing_any(byte_tokenizer):
    texts = [f"document {i}" for i in range(700)]
    joined = [i for block in iterate_blocks(texts, byte_tokenizer(), 16) for i in block[1:]]
    assert joined == stream(texts, byte_tokenizer())[: len(joined)]


def test_wikitext_lines_become_articles():
    lines = [" \n", " = A = \n", " \n", " text \n", " = not a title = \n", " \n", " = = Section = = \n", " \n"]
    lines += [" = B ( film ) = \n", " \n", " end \n"]
    articles = documents([{"text": line} for line in lines], CorpusSource("x", documents="wikitext"))
    assert articles == ["".join(lines[1:8]), "".join(lines[8:])]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".txt"])
def test_local_files(tmp_path, cache, byte_tokenizer, suffix):
    texts, path = ["one\ntwo\n"] if suffix == ".txt" else ["one", "two"], tmp_path / f"corpus{suffix}"
    if suffix == ".txt":
        path.write_text(texts[0])
    elif suffix == ".parquet":
        Dataset.from_dict({"text": texts}).to_parquet(path)
    else:
        write_jsonl(path, texts)
    source = CorpusSource(str(path))
    assert documents(load_rows(source), source) == texts
    blocks = packed_blocks(load_rows(source), source, byte_tokenizer(), 5)
    assert [i for block in blocks["input_ids"] for i in block[1:]] == stream(texts, byte_tokenizer())[:8]


def test_a_second_run_reads_the_cache(tmp_path, cache, byte_tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 20)
    first, second, third = byte_tokenizer(), byte_tokenizer(), byte_tokenizer()
    blocks = packed_blocks(load_rows(source), source, first, 8)
    assert first.tokenised == 20
    second(["pad me", "x"], padding=True, truncation=True, max_length=4)  # leaves its mark in the tokenizer
    second.tokenised = 0
    again = packed_blocks(load_rows(source), source, second, 8)
    assert second.tokenised == 0
    assert again["input_ids"] == blocks["input_ids"]
    packed_blocks(load_rows(source), source, third, 9)
    assert third.tokenised == 20
    write_jsonl(tmp_path / "a.jsonl", ["other"] * 20)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    packed_blocks(load_rows(source), source, third, 8)
    assert third.tokenised == 40


@pytest.mark.slow
def test_another_process_reads_the_cache(tmp_path, cache, byte_tokenizer):
    source, tokenizer = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 20), byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    packed_blocks(load_rows(source), source, tokenizer, 8)
    program = (
        "import sys; from transformers import PreTrainedTokenizerFast as T;"
        "from subtoken_train.datasets import corpus; corpus.iterate_blocks = None;"
        "source = corpus.CorpusSource(sys.argv[1]); tokenizer = T.from_pretrained(sys.argv[2]);"
        "print(len(corpus.packed_blocks(corpus.load_rows(source), source, tokenizer, 8)))"
    )
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "PYTHONHASHSEED": "7", "PYTHONPATH": paths}
    command = [sys.executable, "-c", program, source.name, str(tmp_path / "tokenizer")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == str(200 // 7)


def test_a_text_that_is_weighed_or_not_learnt_is_refused(tmp_path, cache):
    path = tmp_path / "a.jsonl"
    source = CorpusSource(str(path))
    for change, words in (({"weight": 0}, "it is not to be learnt"), ({"weight": 0.5}, "it has weight 0.5; true or 1")):
        given = ({"text": "a", "weight": 1, "label": 0, **each} for each in ({}, change))
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        rows = iterate_documents(load_rows(source), source)
        assert next(rows) == "a"
        refuses(f"a.jsonl, document 2: {words}", next, rows)


def test_errors_of_sources_and_tokenizers(tmp_path, cache, byte_tokenizer):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    refuses("no EOS token", lambda: list(iterate_blocks(["a"], tokenizer, 8)))
    for pad, eos, found in ((0, 2, 0), (None, 2, 2)):
        assert padding_id(SimpleNamespace(pad_token_id=pad, eos_token_id=eos)) == found
    refuses("neither a pad nor an EOS token", lambda: padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=None)))
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ValueError, match=r"a.jsonl has no column 'body'; its columns are text, n"):
        load_rows(CorpusSource(source.name, column="body"))
    refuses(r"text file .*b.txt does not exist; check the path", load_rows, CorpusSource(str(tmp_path / "b.txt")))
    with pytest.raises(ValueError, match=r"a.jsonl is a file: it has no config, and its only split is train"):
        load_rows(CorpusSource(source.name, split="test"))
    (tmp_path / "bad.jsonl").write_text("{nonsense")
    refuses(r"bad.jsonl cannot be read as json", lambda: load_rows(CorpusSource(str(tmp_path / "bad.jsonl"))))
    with pytest.raises(ValueError, match=r"data set 'nobody/nothing' cannot be loaded .* give a Hub id, or a file"):
        load_rows(CorpusSource("nobody/nothing"))


@pytest.mark.parametrize(("texts", "tokens"), [(["ab", "cd"], 6), ([" ", "\n"], 0), ([], 0)])
def test_too_little_text(tmp_path, cache, byte_tokenizer, texts, tokens):
    Dataset.from_dict({"text": [*texts, ""]}).to_parquet(tmp_path / "a.parquet")
    source = CorpusSource(str(tmp_path / "a.parquet"))
    message = rf"a.parquet \(train\) has {tokens} tokens, fewer than one block of block_length 8; lower block_length"
    for _ in range(2):
        refuses(message, lambda: packed_blocks(load_rows(source), source, byte_tokenizer(), 8))


def test_context_query_answer_and_padding():
    batch = collate_text([TextSample([5, 6, 7, 8, 9], 2, 1, "a"), TextSample([3, 4, 2], 1, 1, "b")], pad_id=0)
    assert batch.input_ids_BN.tolist() == [[5, 6, 7, 8, 9], [3, 4, 2, 0, 0]]
    assert batch.regions_BN.tolist() == [[C, C, Q, A, A], [C, Q, A, P, P]]
    assert batch.labels_BN.tolist() == [[-100, -100, -100, 8, 9], [-100, -100, 2, -100, -100]]
    assert batch.rank_position_B.tolist() == [2, 1]
    assert batch.pixel_values is None
    assert batch.images_per_sample_B.tolist() == [0, 0]
    assert batch.record_ids == ["a", "b"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4))
def test_every_token_has_one_region_and_only_what_is_predicted_a_label(lengths):
    batch = collate_text([TextSample(range(1, c + q + a + 1), c, q, "x") for c, q, a in lengths], pad_id=0)
    for row, (context, query, answer) in enumerate(lengths):
        assert [int((batch.regions_BN[row] == region).sum()) for region in (C, Q, A)] == [context, query, answer]
        assert (batch.labels_BN[row] != -100).tolist() == (batch.regions_BN[row] == (A if answer else Q)).tolist()
        assert (batch.regions_BN[row] == P).tolist() == (batch.input_ids_BN[row] == 0).tolist()
        assert batch.regions_BN[row, batch.rank_position_B[row]] == Q


WORDS, PIECES = resource("checkpoints/tiny-llava"), resource("checkpoints/tiny-llama")


@pytest.fixture
def own(tmp_path):
    """A new user's own data: three records in words that no scene has."""
    Image.new("RGB", (96, 96)).save(tmp_path / "cat.png")
    turns = [{"from": "human", "value": "<image>\nwhat animal is there ?"}, {"from": "gpt", "value": "a sleepy cat"}]
    path = tmp_path / "own.json"
    path.write_text(json.dumps([{"id": str(i), "image": "cat.png", "conversations": turns} for i in range(3)]))
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
