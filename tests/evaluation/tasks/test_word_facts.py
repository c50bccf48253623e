"""Facts in words: every text holds its facts once, asks for each, and gives no answer away; the loss of own texts."""

import pytest

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.likelihoods import TextLoss
from subtoken_train.evaluation.tasks.word_facts import PEOPLE, TEMPLATES
from tests.support.refusals import refuses


def test_each_text_states_its_facts_once_and_asks_for_each():
    samples = build_task("facts", contexts=5, words=300, seed=3).samples()
    assert len({sample.id for sample in samples}) == len(samples) == 30
    for place, sample in enumerate(samples):
        text, rest = sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]
        stated = [
            (kind, name, value)
            for kind, template in TEMPLATES.items()
            for name in PEOPLE
            for value in template.values
            if template.says.format(name=name, value=value) in text
        ]
        ((kind, name, value),) = [fact for fact in stated if fact[0] == sample.kind]
        assert len(stated) == len({name for _, name, _ in stated}) == 6
        assert (sample.reference["answers"], name in rest, value in rest) == ([value], True, False)
        assert rest.endswith(f"Answer: {TEMPLATES[kind].begins.format(name=name)}")
        assert 250 < len(text.split()) <= 300
        first = samples[place // 6 * 6]  # one text, six questions
        assert sample.prompt.startswith(first.prompt[: sample.context_characters])


def test_a_chat_question_begins_no_answer_and_a_compressed_one_is_context():
    kept, compressed = (
        build_task("facts", contexts=1, chat=True, question=each).samples()[0] for each in ("kept", "compressed")
    )
    assert kept.prompt[kept.context_characters :].strip().endswith("?")
    assert (kept.chat, kept.prefix_characters) == (True, 0)
    assert compressed.context_characters == len(compressed.prompt)


def test_ones_own_text_surrounds_them(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("The harbour was built by hand. Ferries left it twice a day! " * 3 + "x")
    sample = build_task("facts", contexts=1, words=150, haystack=str(path)).samples()[0]
    assert "Ferries left it twice a day!" in sample.prompt
    assert "Python" not in sample.prompt
    path.write_text("no")
    refuses("no sentence of 3 to 49 words to hide facts among", build_task("facts", haystack=str(path)).samples)


@pytest.mark.parametrize("wrong", [{"facts": 11}, {"facts": 0}, {"words": 149}, {"contexts": 0}, {"question": "no"}])
def test_options_out_of_range_are_refused(wrong):
    refuses(next(iter(wrong)), lambda: build_task("facts", **wrong))


def test_the_loss_of_a_text_is_its_mean_over_windows(tmp_path):
    (tmp_path / "test.txt").write_text("one two three four " * 25)
    samples = build_task("text_loss", source=tmp_path, context_words=10, prefix_words=2, query_words=8).samples()
    assert [sample.reference["words"] for sample in samples] == [8] * 5
    metric = TextLoss()
    metric.update([[-16.0], [-4.0]], [{"words": 8, "bytes": 1}, {"words": 4, "bytes": 9}])
    assert metric.compute() == {"nats_per_word": 1.5}
    assert not metric.higher_is_better
