"""WikiText in windows of words: nothing is lost, and nothing scored is compressed."""

from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.likelihoods import windows
from tests.support.vqa_cases import refused

SIZES = {"context_words": 3, "prefix_words": 1, "query_words": 2}
TEXT = " = Title = \n\n one two  three four five ,\nsix seven eight \u00fcber nine\n"


def test_one_window_written_out(tmp_path):
    (tmp_path / "test.txt").write_text(TEXT, encoding="utf-8")
    first, second = build_task("wikitext", tmp_path, **SIZES).samples()
    assert first.prompt == " = Title = \n\n one"
    assert first.prompt[: first.context_characters] == " = Title ="
    assert first.choices == (" two  three",)
    assert first.reference == {"words": 2, "bytes": 11}
    assert (second.id, second.prompt, second.choices) == ("1", " four five ,\nsix", (" seven eight",))


def test_the_hubs_files(tmp_path):
    folder = tmp_path / "wikitext-103-raw-v1"
    folder.mkdir()
    lines = [line + "\n" for line in TEXT.split("\n")]
    Dataset.from_dict({"text": lines}).to_parquet(folder / "test-00000-of-00001.parquet")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "test.txt").write_text(TEXT, encoding="utf-8")
    plain = build_task("wikitext", tmp_path / "plain", **SIZES).samples()
    for source in (tmp_path, folder):
        assert build_task("wikitext", source, **SIZES).samples() == plain


@given(
    text=st.text(st.sampled_from("ab \n\u00e9\u2028"), max_size=200),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
)
def test_windows_join_to_the_text(text, sizes):
    samples = list(windows(text, sizes))
    assert text.startswith("".join(sample.prompt + sample.choices[0] for sample in samples))
    assert len(samples) == len(text.split()) // sum(sizes)
    for sample in samples:
        context, asked = sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]
        scored = sample.choices[0]
        assert tuple(len(part.split()) for part in (context, asked, scored)) == sizes
        assert sample.reference == {"words": sizes[2], "bytes": len(scored.encode())}


def test_too_little_text(tmp_path):
    (tmp_path / "test.txt").write_text("only three words", encoding="utf-8")
    refused("has fewer words than one window of 1536; ask fewer", "wikitext", tmp_path)
    (tmp_path / "test.txt").write_bytes(b"one\n\xff")
    refused(r"test\.txt, line 2: not UTF-8", "wikitext", tmp_path)


def test_no_files(tmp_path):
    refused("hf download Salesforce/wikitext", "wikitext", tmp_path)


def test_real_text(shared):
    samples = build_task("wikitext", shared / "realdata" / "wikitext2").samples()
    assert len(samples) == 241_211 // 1_536
    assert samples[0].prompt.startswith(" \n = Robert <unk> = \n")
