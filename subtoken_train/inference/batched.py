"""Answer or score whole batches of prompts, with what every sample's cache took.

Legend: B batch, T generated tokens, q appended tokens, D model width, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import broken_rows
from subtoken_train.errors import no_numbers, refuse
from subtoken_train.families.family import Family
from subtoken_train.inference.cache_report import Outcome, TokenScore, account
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import append, decode, open_prompts, with_gates
from subtoken_train.types import Batch, Protocol

APPENDED = 256  # tokens of a continuation that are run at a time
LOGITS = 2**25  # logits that are held at a time, in fp32


def end_ids(family: Family) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's, and the generation configuration's."""
    own: Any = getattr(getattr(family.model, "generation_config", None), "eos_token_id", None)
    ends = [family.tokenizer.eos_token_id, *(own if isinstance(own, list | tuple) else [own])]
    return sorted({int(end) for end in ends if end is not None})


@torch.no_grad()
def greedy_tokens(
    backbone: CompressedBackbone,
    cache: PackedCache,
    logits_BV: Tensor,
    max_new_tokens: int,
    ended: Callable[[list[Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Go on greedily until samples end, or ``ended(steps)`` says so; ids [B, T], padded, and how many are own, [B]."""
    pad, ends = padding_id(backbone.family.tokenizer), torch.tensor(end_ids(backbone.family), device=logits_BV.device)
    next_B, broken_B = logits_BV.argmax(-1), broken_rows(logits_BV)
    done_B, count_B = torch.zeros_like(next_B, dtype=torch.bool), torch.zeros_like(next_B)
    generated: list[Tensor] = []
    cache.reserve(max_new_tokens - 1)  # the last one is not appended
    with cache.answering():
        while True:
            broken = (broken_B & ~done_B).any()  # a sample that is done goes on, and says nothing
            generated.append(next_B.masked_fill(done_B, pad))
            count_B = count_B + ~done_B
            done_B = done_B | torch.isin(next_B, ends)
            if ended is not None:
                done_B = done_B | ended(generated)
            is_broken, all_done = torch.stack([broken, done_B.all()]).tolist()
            if is_broken:
                raise no_numbers(f"at token {len(generated)} of an answer", logits_BV.dtype)
            if len(generated) == max_new_tokens or all_done:
                return torch.stack(generated, dim=1), count_B
            logits_BV = decode(backbone, next_B[:, None], cache)
            next_B, broken_B = logits_BV.argmax(-1), broken_rows(logits_BV)


def given_tokens(
    backbone: CompressedBackbone,
    cache: PackedCache,
    logits_BV: Tensor,
    given: Sequence[Sequence[int]],
    chooses_pages: bool = False,
) -> list[TokenScore | None]:
    """Score the tokens that are given after each prompt of a filled cache, which is as before afterwards; None of none.

    They read what decoding reads. The first ones need no pass, the others share one (``APPENDED`` at a time) unless the
    rotary embedding's frequencies depend on the length, or every token ``chooses_pages`` as a decoded one does.
    """
    device, rows = logits_BV.device, [b for b, ids in enumerate(given) if len(ids)]
    sums_B, right_B = (torch.zeros(len(given), dtype=torch.float64) for _ in range(2))

    def add(rows: Sequence[int], logits: Tensor, wanted: Sequence[int]) -> None:
        at, ids = torch.tensor(rows), torch.tensor(wanted, device=device)
        sums_B.index_add_(0, at, logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0].cpu().double())
        right_B.index_add_(0, at, (logits.argmax(-1) == ids).cpu().double())

    if rows:
        add(rows, logits_BV[torch.tensor(rows, device=device)], [given[b][0] for b in rows])
    longest = max(map(len, given), default=1) - 1
    alone = chooses_pages or backbone.family.length_dependent  # as when each is said: at its own length
    size, step = 1 if alone else APPENDED, max(1, LOGITS // logits_BV.shape[1])
    for start in range(0, longest, size):
        stop = min(start + size, longest)
        padded = [[*ids[start:stop], *[0] * (stop - max(start, len(ids[:stop])))] for ids in given]
        hidden_BqD = append(backbone, torch.tensor(padded, device=device), cache, chooses_pages=chooses_pages)
        real = [(b, t) for b, ids in enumerate(given) for t in range(start, min(stop, len(ids) - 1))]
        for places in in_batches(real, step):
            at, columns = (torch.tensor(x, device=device) for x in zip(*places, strict=True))
            logits = backbone.family.logits(hidden_BqD[at, columns - start])
            add([b for b, _ in places], logits, [given[b][t + 1] for b, t in places])
    if longest > 0:
        cache.crop(-longest)
    if bool(sums_B.isnan().any()):
        raise no_numbers("for a text that is scored", logits_BV.dtype)
    scores = zip(sums_B.tolist(), right_B.tolist(), map(len, given), strict=True)
    return [TokenScore(logprob, int(right), count) if count else None for logprob, right, count in scores]


def _check_continuations(prompts: Batch, continuations: Sequence[Sequence[Sequence[int]]]) -> None:
    lists, names = len(continuations), prompts.record_ids
    refuse((lists != len(names), f"{lists} lists of continuations for {len(names)} prompts"))
    for name, of_prompt in zip(names, continuations, strict=True):
        for k, ids in enumerate(of_prompt):
            refuse((not len(ids), f"continuation {k} of {name!r} has no tokens; there is nothing to score"))


T = TypeVar("T")


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in order as lists of ``size``; the last may be shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))


@torch.no_grad()
def generate_batch(
    backbone: CompressedBackbone,
    prompts: Batch,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    compression: Compression | None = None,
    protocol: Protocol = "query_aware",
    references: Sequence[Sequence[int]] | None = None,
) -> list[Outcome]:
    """Answer a batch of prompts greedily; their references (token ids), unless empty, are scored, too."""
    compression = with_gates(backbone, compression or Compression())
    online = references is not None and compression.every is not None
    refuse(
        (max_new_tokens < 1, f"max_new_tokens={max_new_tokens} must be at least 1"),
        (online, f"references cannot be scored with eviction_every={compression.every}; leave one out"),
    )
    if references is not None:
        _check_continuations(prompts, [[ids] if len(ids) else [] for ids in references])
    tokenizer, stops = backbone.family.tokenizer, [text for text in stop if text]
    # a special token is no part of the decoded text
    said_ends = {*end_ids(backbone.family), *(i for text, i in _special_ids(tokenizer).items() if text in stops)}

    # a token that is text has a byte at least: no stop begins before these
    window = max((len(text.encode()) for text in stops), default=0) + 1

    def ended(generated: list[Tensor]) -> Tensor:
        rows = torch.stack(generated[-window:], dim=1).tolist()
        pairs = zip(rows, tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True)
        said = [row[-1] in said_ends or any(each in text for each in stops) for row, text in pairs]
        return torch.tensor(said, device=generated[-1].device)

    cache, logits_BV, outcomes = _opened(backbone, prompts, compression, protocol)
    scores: list[TokenScore | None] = [None] * len(outcomes)
    if references is not None:
        reads = compression.eviction is not None and compression.eviction.reads
        scores = given_tokens(backbone, cache, logits_BV, references, chooses_pages=reads)
    begun = _now(prompts)
    tokens_BT, count_B = greedy_tokens(backbone, cache, logits_BV, max_new_tokens, ended if stops else None)
    seconds = round((_now(prompts) - begun) / len(outcomes), 5)
    for i, (row, count) in enumerate(zip(tokens_BT.tolist(), count_B.tolist(), strict=True)):
        ids = row[: count - 1] if row[count - 1] in said_ends else row[:count]
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        cut = min((text.find(each) for each in stops if each in text), default=len(text))
        said: dict[str, Any] = {"text": text[:cut], "token_ids": ids, "new_tokens": count, "reference": scores[i]}
        outcomes[i] = replace(outcomes[i], decode_seconds=seconds, **said)
    return outcomes


@torch.no_grad()
def score_batch(
    backbone: CompressedBackbone,
    prompts: Batch,
    continuations: Sequence[Sequence[Sequence[int]]],
    *,
    compression: Compression | None = None,
    protocol: Protocol = "query_aware",
) -> list[Outcome]:
    """Return the log-probabilities of each prompt's continuations, log-softmax in fp32."""
    _check_continuations(prompts, continuations)
    compression = with_gates(backbone, compression or Compression())
    longest = max((len(ids) for of_prompt in continuations for ids in of_prompt), default=0)
    late = compression.every is not None and longest > compression.every
    words = f"a continuation of {longest} tokens is scored, and eviction_every={compression.every}"
    refuse((late, f"{words} evicts while tokens are generated; leave it out to score texts"))
    cache, logits_BV, outcomes = _opened(backbone, prompts, replace(compression, every=None), protocol)
    begun = _now(prompts)
    table: dict[tuple[int, int], TokenScore] = {}
    by_length = [sorted(range(len(c)), key=lambda k, c=c: -len(c[k])) for c in continuations]  # type: ignore[misc]
    for turn in range(max(map(len, by_length))):
        chosen = {b: order[turn] for b, order in enumerate(by_length) if turn < len(order)}
        ids = [continuations[b][chosen[b]] if b in chosen else [] for b in range(len(by_length))]
        found = given_tokens(backbone, cache, logits_BV, ids)
        table |= {(b, k): score for (b, k), score in zip(chosen.items(), filter(None, found), strict=True)}
    seconds = round((_now(prompts) - begun) / len(outcomes), 5)
    for b, of_prompt in enumerate(continuations):
        of_texts = [table[b, k] for k in range(len(of_prompt))]
        logprobs, greedy = [x.logprob for x in of_texts], [x.right == x.count for x in of_texts]
        said: dict[str, Any] = {"logprobs": logprobs, "greedy": greedy, "new_tokens": sum(map(len, of_prompt))}
        outcomes[b] = replace(outcomes[b], decode_seconds=seconds, **said)
    return outcomes


def _now(prompts: Batch) -> float:
    if (device := prompts.input_ids_BN.device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _opened(
    backbone: CompressedBackbone, prompts: Batch, compression: Compression, protocol: Protocol
) -> tuple[PackedCache, Tensor, list[Outcome]]:
    start, cache = _now(prompts), PackedCache(backbone.family.shape.num_layers)
    opened, seconds = open_prompts(backbone, prompts, cache, compression, protocol), _now(prompts) - start
    parts = account(backbone, prompts, opened, cache)  # before eviction_every changes it
    return cache, opened.logits_BV, [replace(part, prefill_seconds=round(seconds / len(parts), 5)) for part in parts]


def _special_ids(tokenizer: object) -> dict[str, int]:
    tokens, ids = tokenizer.all_special_tokens, tokenizer.all_special_ids  # type: ignore[attr-defined]
    return dict(zip(tokens, ids, strict=True))
