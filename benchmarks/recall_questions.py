"""Key-value recall as token ids: contexts whose pages are whole, each asked for several of its facts at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from subtoken_train.datasets.recall import RecallRecords
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.types import Batch

Collate = Callable[[Sequence[Sample]], Batch]


def recall_questions(records: RecallRecords) -> tuple[list[Sample], Collate]:
    """What is asked, for ``RecallScore``, and what makes the batch of some of its prompts.

    Unlike the task ``recall``, which asks in text, the context's tokens are those that were drawn.
    """
    drawn = [records[i] for i in range(len(records))]
    longest = max(len(sample.text.input_ids) - sample.text.prompt_length for sample in drawn)
    prompts = {
        sample.text.record_id: replace(sample.text, input_ids=sample.text.input_ids[: sample.text.prompt_length])
        for sample in drawn
    }
    samples = [
        Sample(sample.text.record_id, "", {"codes": sample.codes}, max_new_tokens=longest + 4, kind="recall")
        for sample in drawn
    ]
    pad_id = padding_id(records.task.tokenizer)
    return samples, lambda asked: collate_text([prompts[sample.id] for sample in asked], pad_id)


def recall_reference(records: RecallRecords) -> Callable[[Sample], Sequence[int]]:
    """The token ids of a question's right answer, as training labels them: end-of-text included."""
    texts = [records[i].text for i in range(len(records))]
    answers = {text.record_id: text.input_ids[text.prompt_length :] for text in texts}
    return lambda sample: answers[sample.id]
