"""Key-value recall as token ids: contexts whose pages are whole, each asked for several of its facts at once."""

from dataclasses import replace

from subtoken_train.datasets.recall import RecallRecords
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.evaluation.runner.cell import Cell
from subtoken_train.evaluation.tasks.embedded_tasks import RecallScore
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.inference.compression import Compression


def recall_cell(records: RecallRecords) -> Cell:
    """What is asked, in the tokens that were drawn; a reference answer is labelled as in training."""
    drawn = [records[i] for i in range(len(records))]
    texts, pad_id = {sample.text.record_id: sample.text for sample in drawn}, padding_id(records.task.tokenizer)
    prompts = {name: replace(text, input_ids=text.input_ids[: text.prompt_length]) for name, text in texts.items()}
    answers = {name: text.input_ids[text.prompt_length :] for name, text in texts.items()}
    longest = max(map(len, answers.values()))
    samples = [
        Sample(sample.text.record_id, "", {"codes": sample.codes}, max_new_tokens=longest + 4, kind="recall")
        for sample in drawn
    ]
    return Cell(
        samples,
        RecallScore(),
        lambda asked: (collate_text([prompts[sample.id] for sample in asked], pad_id), []),
        Compression(),
        reference=lambda sample: answers[sample.id],
    )
