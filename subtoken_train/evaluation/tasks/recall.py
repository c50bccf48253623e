"""Key-value recall, held out: the embedded language model's task. Facts are stated in English, eight are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer

from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.evaluation.metrics.string_match import RecallScore
from subtoken_train.evaluation.tasks.base import Sample, Task
from subtoken_train.families.load import resolve


@dataclass
class Recall(Task):
    """Contexts of the test split's English with facts drawn for them.

    A context is a text here: where two of its parts make other tokens together, it is a token or two longer or shorter
    than it was drawn.

    Attributes:
        contexts: how many.
        context_length: tokens of each, by ``tokenizer``.
        num_facts: facts stated in each.
        num_questions: facts asked for.
        tokenizer: path or Hub id of what measures the context.
    """

    name = "recall"
    modality = "text"
    hub_id = None
    rows = None
    needs_files = False
    primary = "score"
    where = "Drawn on this machine from the English that ships with the package; there is nothing to fetch."

    contexts: int = 200
    context_length: int = 512
    num_facts: int = 24
    num_questions: int = 8
    tokenizer: str = "checkpoints/tiny-llama"

    def samples(self) -> Sequence[Sample]:
        """The contexts; a pure function of the options."""
        tokenizer = AutoTokenizer.from_pretrained(resolve(self.tokenizer))
        task = RecallTask(tokenizer, self.context_length, self.num_facts, self.num_questions)
        records = RecallRecords(task, "test", self.contexts)
        drawn = [records[i] for i in range(self.contexts)]
        longest = max(len(sample.text.input_ids) - sample.text.prompt_length for sample in drawn)
        made = []
        for sample in drawn:
            ids, start = [int(token) for token in sample.text.input_ids], sample.text.context_length
            context, question = (
                tokenizer.decode(part, skip_special_tokens=True)
                for part in (ids[:start], ids[start : sample.text.prompt_length])
            )
            made.append(
                Sample(
                    id=sample.text.record_id,
                    prompt=context + question,
                    reference={"codes": sample.codes},
                    context_characters=len(context),
                    max_new_tokens=longest + 4,
                    kind="recall",
                )
            )
        return made

    def metric(self) -> RecallScore:
        """Share of the asked facts that are stated exactly."""
        return RecallScore()
