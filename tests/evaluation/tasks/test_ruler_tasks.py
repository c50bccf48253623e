"""RULER and the map of needles: context and question in each form of files, made texts at their length, chats' ids."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.evaluation.reporting.page import map_chart
from subtoken_train.evaluation.reporting.score_tables import Estimate, KindScores
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.made_texts import MAKERS, NOISE, cell_of
from subtoken_train.evaluation.tasks.ruler import NEW_TOKENS, context_end, family
from subtoken_train.types import Region
from tests.support.benchmark_folders import refused, write_jsonl
from tests.support.places import ROOT
from tests.support.sampling import sampled
from tests.support.text_families import text_family

LLAMA, HAYSTACK = str(ROOT / "checkpoints/tiny-llama"), str(ROOT / "data/samples/reference.txt")
CONTEXT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\nThe grass is green.\nOne of the special magic numbers for calm-owl is: 1234567.\n"
)
QUESTION = "What is the special magic number for calm-owl mentioned in the provided text?"
PREFIX = " The special magic number for calm-owl mentioned in the provided text is"
VARIABLES = "VAR A = 1\nQuestion: Find all variables that are assigned the value"
QA = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


def split(sample):
    return sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]


def write_lines(folder, task, *rows):
    return write_jsonl(folder, f"{task}/validation.jsonl", rows)


def check(sample, name):
    assert (sample.id, *split(sample)) == (name, CONTEXT, QUESTION + PREFIX)
    assert sample.reference == {"task": "niah_single_1", "answers": ["1234567"]}
    assert (sample.max_new_tokens, sample.kind, sample.images, sample.choices) == (128, "niah_single_1", (), ())


def test_rulers_own_files_older_and_newer(tmp_path):
    older = {"index": 0, "input": CONTEXT + QUESTION + PREFIX, "outputs": ["1234567"], "length": 40}
    newer = {"index": 5, "input": CONTEXT + QUESTION, "outputs": ["1234567"], "answer_prefix": PREFIX}
    write_lines(tmp_path, "niah_single_1", older, newer, {**older, "index": 7, "answer_prefix": None})
    for sample, number in zip(build_task("ruler", tmp_path, tasks=["niah_single_1"]).samples(), (0, 5, 7), strict=True):
        check(sample, f"niah_single_1-{number}")


def test_the_hubs_files(tmp_path):
    row = {"context": CONTEXT, "question": QUESTION, "answer_prefix": PREFIX, "answer": ["1234567"]}
    row |= {"task": "niah_single_1", "max_new_tokens": 128}
    other = row | {"context": f"{QA}\n\n", "question": "Question: who?", "answer_prefix": " Answer:", "task": "qa_1"}
    (tmp_path / "4096").mkdir()
    Dataset.from_list([row, other, row]).to_parquet(tmp_path / "4096" / "test-00000-of-00001.parquet")
    samples = build_task("ruler", tmp_path).samples()
    assert [sample.id for sample in samples] == ["niah_single_1-0", "qa_1-0", "niah_single_1-1"]
    check(samples[0], "niah_single_1-0")
    assert samples[1].max_new_tokens == 32
    assert len(build_task("ruler", tmp_path, tasks=["qa_1"]).samples()) == 1
    refused(r"no 8192/test-\*\.parquet", "ruler", tmp_path, length=8192)


@pytest.mark.parametrize(
    ("task", "question"),
    [
        ("niah_multikey_2", "What are all the special magic numbers for a and b mentioned"),
        ("qa_2", f"{QA}\n\nQuestion: who?"),
    ],
)
def test_the_last_question_counts(task, question):
    example = f"before {question} an example\n\n"
    assert context_end(f"{example}context\n{question} Answer:", task) == len(example) + len("context\n")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"input": "no question", "outputs": ["1"]}, {}, "line 1: no question of RULER's task vt in it"),
        ({"input": "text", "outputs": []}, {}, "line 1: input must be a text and outputs a list"),
        ({"input": "text"}, {}, "line 1: no column outputs"),
        ({"input": f"{VARIABLES} 1", "outputs": ["A"]}, {"chat": True}, r"line 1: no answer prefix \(Answer: ...\)"),
        ({"input": f"{VARIABLES} 1", "outputs": ["A"]}, {"tasks": ["vt", "cwe"]}, r"cwe/validation.jsonl is missing"),
    ],
)
def test_files_that_cannot_be_asked(tmp_path, row, options, message):
    write_lines(tmp_path, "vt", {"index": 1, **row})
    refused(message, "ruler", tmp_path, **{"tasks": ["vt"], **options})


NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\.")


def solve_niah(context, asked):
    key = re.search(r"for (\S+) mentioned", asked).group(1)
    return [value for _, name, value in NEEDLE.findall(context) if name == key]


def solve_vt(context, asked):
    text = context[context.rindex("Memorize and track") :]  # after the example
    value = re.search(r"assigned the value (\d+)", asked).group(1)
    holds = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        holds[name] = holds.get(source, source)
    return [name for name, found in holds.items() if found == value]


def solve_cwe(context, asked):
    text = context[context.rindex("Below is a numbered list") :]
    return [word for word, _ in Counter(re.findall(r"\d+\. ([a-z]+)", text)).most_common(10)]


def solve_fwe(context, asked):
    (_, dots), *others = Counter(context.split("coded words. ")[-1].split()).most_common(5)
    assert dots > others[0][1] > others[1][1] > others[2][1] > others[3][1]
    return [word for word, _ in others[:3]]


SOLVERS = {"niah": solve_niah, "vt": solve_vt, "cwe": solve_cwe, "fwe": solve_fwe}


@pytest.mark.parametrize("length", [800, 4096])
@pytest.mark.parametrize("task", list(MAKERS))
def test_each_question_has_its_one_answer(task, length):
    samples = build_task("ruler_synthetic", tasks=[task], length=length, samples_per_task=4).samples()
    assert len(samples) == 4
    for sample in samples:
        assert sorted(SOLVERS[family(task)](*split(sample))) == sorted(sample.reference["answers"])
        assert context_end(sample.prompt, task) == sample.context_characters
        assert length - 60 <= len(sample.prompt.split()) + NEW_TOKENS[family(task)] <= length
        assert (sample.kind, sample.max_new_tokens) == (task, NEW_TOKENS[family(task)])


@pytest.mark.parametrize(
    ("name", "options"),
    [("ruler_synthetic", {"samples_per_task": 2, "length": 600}), ("needle_map", {"lengths": [300], "depths": [0.5]})],
)
def test_seeds_and_samples_differ(name, options):
    made = [build_task(name, seed=seed, **options).samples() for seed in (0, 0, 1)]
    assert made[0] == made[1]
    assert len({sample.prompt for samples in made[1:] for sample in samples}) == 2 * len(made[0])


def test_tokens_of_a_tokenizer(tmp_path):
    options = {"tasks": ["niah_single_1"], "length": 400, "samples_per_task": 2, "tokenizer": LLAMA}
    for sample in build_task("ruler_synthetic", **options).samples():
        tokens = len(AutoTokenizer.from_pretrained(LLAMA)(sample.prompt, add_special_tokens=False)["input_ids"])
        assert 300 <= tokens + 128 <= 400
    refused("cannot be loaded", "ruler_synthetic", tokenizer=str(tmp_path))
    words = r"100 tokens or words for a prompt of vt, and its shortest text has \d+; raise"
    refused(words, "ruler_synthetic", tasks=["vt"], length=130)


@pytest.mark.parametrize("haystack", [None, HAYSTACK])
def test_needles_stand_where_the_map_says(haystack):
    task = build_task(
        "needle_map", lengths=[300, 700], depths=[0.0, 0.3, 1.0], samples_per_cell=2, tokenizer=LLAMA, haystack=haystack
    )
    samples, tokenizer = list(task.samples()), AutoTokenizer.from_pretrained(LLAMA)
    assert len(samples) == task.expected_rows == 12
    assert [sample.id for sample in samples[:4]] == ["300-0-0", "300-0-1", "300-0.3-0", "300-0.3-1"]
    assert samples[2].kind == "300 long, depth 30 %"
    for sample in samples:
        length, depth, _ = sample.id.split("-")
        tokens = len(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
        assert int(length) - 60 < tokens + NEW_TOKENS["niah"] <= int(length)
        lines = split(sample)[0].splitlines()[1:]
        (place,) = (number for number, line in enumerate(lines) if NEEDLE.fullmatch(line))
        assert place == round(float(depth) * (len(lines) - 1))
        _, key, value = NEEDLE.fullmatch(lines[place]).groups()
        assert sample.reference == {"task": "niah_single_1", "answers": [value]}
        assert sample.prompt.endswith(f"special magic number for {key} mentioned in the provided text is")
        assert (NOISE in lines) == (haystack is None)
    assert len({sample.reference["answers"][0] for sample in samples}) == 2  # the same ones in every cell
    assert task.metric().score(f" {samples[0].reference['answers'][0]}.", samples[0].reference) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": []}, r"lengths of needle_map is \[\]; name one or more, each once"),
        ({"depths": [0.5, 0.5]}, "depths of needle_map is"),
        ({"depths": [1.5]}, r"depths of needle_map is 1\.5; it must be 0 to 1"),
        ({"lengths": [0]}, "lengths of needle_map is 0; it must be 1 to"),
        ({"lengths": [150]}, r"length 150 leaves 22 tokens or words .* raise it to \d+ or more"),
        ({"haystack": "empty.txt"}, r"empty\.txt holds no text"),
        ({"haystack": "nowhere.txt"}, r"nowhere\.txt"),
    ],
)
def test_maps_that_are_refused(tmp_path, options, words):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        build_task("needle_map", **options).check_options()


def test_the_picture_has_a_map_of_each_arm():
    kinds = [f"{length} long, depth {depth} %" for length in ("512", "1,024") for depth in ("0", "50", "100")]
    cells = {kind: cell_of(kind) for kind in kinds}
    assert cells[kinds[-1]] == ("1,024", "100 %")
    assert cell_of("niah_single_1") is None
    value = {kind: Estimate(place / 5, None, None, None, 4) for place, kind in enumerate(kinds)}
    scores = KindScores("needle_map", tuple(kinds), {"a": value, "b": {kind: value[kind] for kind in kinds[:-1]}})
    first, second = map_chart(scores, cells, {"a": "A", "b": "B"}).axes
    assert [text.get_text() for text in first.texts] == ["0", "60", "20", "80", "40", "100"]  # row by row: a depth each
    assert second.texts[-1].get_text() == ""
    assert [label.get_text() for label in first.get_xticklabels()] == ["512", "1,024"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["0 %", "50 %", "100 %"]
    assert (first.get_title(), second.get_title()) == ("A", "B")


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
KITE, ASKED = "The magic number of kite is 7. \n", "What is the special magic number? "


@pytest.fixture
def chatty():
    tokenizer = build_tokenizer()
    found = text_family("llama", vocab_size=len(tokenizer))
    found.processor = tokenizer
    found.processor.chat_template = CHATML
    found.model.config.max_position_embeddings = 8192
    return found


def kvpress_ids(tokenizer, context, question, answer_prefix, query_aware):
    """Ids of context and question: a separator in the template, its text cut there, both parts encoded alone."""
    if query_aware:
        context, question = context + question, ""
    mark = "#" * (len(context) + 10)
    turn = [{"role": "user", "content": context + mark}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    head, suffix = text.split(mark)
    return [tokenizer.encode(each, add_special_tokens=False) for each in (head, question + suffix + answer_prefix)]


def ids_of(chatty, sample):
    """(context, rest) of a sample as the runner encodes it."""
    batch, _ = model_inputs([sample], chatty, "text", None)
    ids, codes = batch.input_ids_BN[0], batch.regions_BN[0]
    assert set(codes.tolist()) <= {int(Region.CONTEXT), int(Region.QUERY)}
    return [ids[codes == region].tolist() for region in (Region.CONTEXT, Region.QUERY)]


def kites(folder, **options):
    """RULER on two rows, as older and newer programs write them."""
    older = {"index": 0, "input": KITE + ASKED + "The special magic number is", "outputs": ["7"]}
    newer = {"index": 1, "input": KITE + ASKED, "outputs": ["7"], "answer_prefix": "It is"}
    if not (folder / "niah_single_1").exists():
        write_lines(folder, "niah_single_1", older, newer)
    return build_task("ruler", folder, tasks=["niah_single_1"], **options)


@sampled("question", ["kept", "compressed"], every=2)
def test_rulers_ids_are_kvpresss(chatty, tmp_path, question):
    samples = kites(tmp_path, chat=True, question=question).samples()
    for sample, prefix in zip(samples, ("The special magic number is", "It is"), strict=True):
        expected = kvpress_ids(chatty.tokenizer, KITE, ASKED, prefix, question == "compressed")
        assert ids_of(chatty, sample) == expected
        assert chatty.tokenizer.decode(expected[1]).endswith(f"assistant\n<think>\n\n</think>\n\n{prefix}")


def test_raw_text_compresses_up_to_the_answer_prefix(chatty, tmp_path):
    kept, compressed = (kites(tmp_path, question=question).samples()[0] for question in ("kept", "compressed"))
    assert kept.prompt == compressed.prompt
    assert split(kept)[0] == KITE
    assert split(compressed)[1] == "The special magic number is"
    first, second = ids_of(chatty, compressed)
    assert first + second == chatty.tokenizer.encode(kept.prompt)
    assert chatty.tokenizer.decode(second).strip() == "The special magic number is"


@pytest.mark.slow
def test_longbench_compresses_up_to_its_last_line(tmp_path, chatty):
    row = {"input": "Who?", "context": "Some text.", "answers": ["Ann"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (sample,) = build_task("longbench", tmp_path, question="compressed", sets=["hotpotqa"]).samples()
    assert split(sample)[0].endswith("Question: Who?\n")
    assert split(sample)[1] == "Answer:"
    first, second = ids_of(chatty, replace(sample, chat=True))
    assert "Question: Who?" in chatty.tokenizer.decode(first)
    assert chatty.tokenizer.decode(second).startswith("Answer:<|im_end|>")
