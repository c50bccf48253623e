"""Ask a language model for facts that its compressed context states: key-value recall, greedily.

Legend: B batch.
"""

from __future__ import annotations

import time
from dataclasses import replace

from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.answer import Answer, Answers, merged_ledger
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.decoding import generate_greedy
from subtoken_train.ledger.measure import measured_ledger

KIND = "recall"


def answer_recall(backbone: CompressedBackbone, task: RecallTask, count: int, batch_size: int = 32) -> Answers:
    """Held-out contexts (the test split's English, facts drawn for them), each asked for several of its facts at once.

    The score of a context is the share of its asked facts whose code is stated exactly.

    Args:
        backbone: in evaluation mode, of a language model.
        task: context length, facts and questions.
        count: contexts.
        batch_size: contexts decoded together.
    """
    clock, family = time.perf_counter(), backbone.family
    records = RecallRecords(task, "test", count)
    rows, ledgers, kv_bytes = [], [], 0
    for start in range(0, count, batch_size):
        samples = [records[i] for i in range(start, min(start + batch_size, count))]
        prompts = [replace(s.text, input_ids=s.text.input_ids[: s.text.prompt_length]) for s in samples]
        batch = collate_text(prompts, padding_id(family.tokenizer))
        longest = max(len(s.text.input_ids) - s.text.prompt_length for s in samples)
        result = generate_greedy(backbone, batch, max_new_tokens=longest + 4)
        texts = family.tokenizer.batch_decode(result.token_ids_BT, skip_special_tokens=True)
        for sample, text in zip(samples, texts, strict=True):
            answer = "".join(f" {name} {code}." for name, code in sample.codes.items())
            score = recall_accuracy(text, sample.codes)
            rows.append(Answer(sample.text.record_id, KIND, text.strip(), answer.strip(), score))
        ledgers.append(measured_ledger(result.plan, batch.regions_BN, family.shape))
        kv_bytes += result.cache.prompt_bytes
    seconds = time.perf_counter() - clock
    return Answers(rows, merged_ledger(family.shape, ledgers), kv_bytes, seconds, Compression())
