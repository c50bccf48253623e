"""What follows the prompts of a packed cache: tokens decoded greedily, and log-probabilities of given ones.

Legend: B batch, T generated tokens, q appended tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.finite_states import broken_rows
from subtoken_train.errors import no_numbers
from subtoken_train.inference.prefill import append, decode
from subtoken_train.types import Batch

APPENDED = 256  # tokens of a continuation that are run at a time
LOGITS = 2**25  # logits that are held at a time, in fp32


@torch.no_grad()
def greedy_tokens(
    backbone: CompressedBackbone,
    cache: PackedCache,
    logits_BV: Tensor,
    max_new_tokens: int,
    ended: Callable[[list[Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Go on greedily from a filled cache.

    Room for the tokens is made before the first step. Once a token the host reads whether all samples are done; the
    steps themselves read nothing.

    Args:
        backbone: in evaluation mode.
        cache: with the prompts; it grows.
        logits_BV: of the first token.
        max_new_tokens: at least 1.
        ended: called with the ids of every step so far, [B] each; says which samples are done (bool [B]) beside those
            that said end-of-text.

    Returns:
        Ids [B, T], padding after a sample's end; and how many of them are the sample's own, end-of-text included, [B].

    Raises:
        ValueError: the model gives NaN or infinity.
    """
    tokenizer = backbone.family.tokenizer
    end, pad = tokenizer.eos_token_id, padding_id(tokenizer)
    next_B, broken_B = logits_BV.argmax(-1), broken_rows(logits_BV)
    done_B, count_B = torch.zeros_like(next_B, dtype=torch.bool), torch.zeros_like(next_B)
    generated: list[Tensor] = []
    cache.reserve(max_new_tokens - 1)  # the last one is not appended
    while True:
        broken = (broken_B & ~done_B).any()  # a sample that is done goes on, and says nothing
        generated.append(next_B.masked_fill(done_B, pad))
        count_B = count_B + ~done_B
        done_B = done_B | (next_B == end)
        if ended is not None:
            done_B = done_B | ended(generated)
        is_broken, all_done = torch.stack([broken, done_B.all()]).tolist()
        if is_broken:
            raise no_numbers(f"at token {len(generated)} of an answer", logits_BV.dtype)
        if len(generated) == max_new_tokens or all_done:
            return torch.stack(generated, dim=1), count_B
        logits_BV = decode(backbone, next_B[:, None], cache)
        next_B, broken_B = logits_BV.argmax(-1), broken_rows(logits_BV)


@dataclass(frozen=True)
class TokenScore:
    """Given tokens, read one after another as if each had been said (teacher forcing).

    Attributes:
        logprob: sum of their log-probabilities, log-softmax in fp32, in nats.
        right: how many of them are the likeliest token at their place, the given ones standing before it.
        count: how many there are, at least 1.
    """

    logprob: float
    right: int
    count: int


def given_tokens(
    backbone: CompressedBackbone,
    cache: PackedCache,
    logits_BV: Tensor,
    given: Sequence[Sequence[int]],
    chooses_pages: bool = False,
) -> list[TokenScore | None]:
    """Score the tokens that are given after each prompt of a filled cache; the cache is as before afterwards.

    They read what decoding reads: the packed cache, after reducer, routers and eviction, in its own precision, and the
    given tokens before them whole. The first ones need no pass, the others share one (``APPENDED`` at a time) unless
    the rotary embedding's frequencies depend on the length.

    Args:
        backbone: in evaluation mode.
        cache: with the prompts; nothing is evicted from it while tokens are decoded.
        logits_BV: of the first token.
        given: ids after each prompt; none: not scored.
        chooses_pages: every token chooses the pages that it reads, as a decoded one does: a pass for each. Otherwise
            all read everything. The same where a cache has no pages.

    Returns:
        One per prompt; None where no tokens are given.

    Raises:
        ValueError: the model gives NaN or infinity.
    """
    rows = [b for b, ids in enumerate(given) if len(ids)]
    sums_B, right_B = (torch.zeros(len(given), dtype=torch.float64) for _ in range(2))

    def add(rows: Tensor, logits: Tensor, wanted: Tensor) -> None:
        logprobs = logits.float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        sums_B.index_add_(0, rows.cpu(), logprobs.cpu().double())
        right_B.index_add_(0, rows.cpu(), (logits.argmax(-1) == wanted).cpu().double())

    device = logits_BV.device
    if rows:
        first, scored = (torch.tensor(x, device=device) for x in ([given[b][0] for b in rows], rows))
        add(scored, logits_BV[scored], first)
    longest = max(map(len, given), default=1) - 1
    alone = chooses_pages or backbone.family.length_dependent  # as when each is said: at its own length
    size, step = 1 if alone else APPENDED, max(1, LOGITS // logits_BV.shape[1])
    for start in range(0, longest, size):
        stop = min(start + size, longest)
        padded = [[*ids[start:stop], *[0] * (stop - max(start, len(ids[:stop])))] for ids in given]
        hidden_BqD = append(backbone, torch.tensor(padded, device=device), cache, chooses_pages=chooses_pages)
        real = [(b, t) for b, ids in enumerate(given) for t in range(start, min(stop, len(ids) - 1))]
        for part in range(0, len(real), step):
            places = real[part : part + step]
            at, columns = (torch.tensor(x, device=device) for x in zip(*places, strict=True))
            wanted = torch.tensor([given[b][t + 1] for b, t in places], device=device)
            add(at, backbone.family.logits(hidden_BqD[at, columns - start]), wanted)
    if longest > 0:
        cache.crop(-longest)
    if bool(sums_B.isnan().any()):
        raise no_numbers("for a text that is scored", logits_BV.dtype)
    scores = zip(sums_B.tolist(), right_B.tolist(), map(len, given), strict=True)
    return [TokenScore(logprob, int(right), count) if count else None for logprob, right, count in scores]


def check_continuations(prompts: Batch, continuations: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise a worded ``ValueError`` unless every prompt has its list, and no continuation is empty."""
    if len(continuations) != len(prompts.record_ids):
        raise ValueError(f"{len(continuations)} lists of continuations for {len(prompts.record_ids)} prompts")
    for name, of_prompt in zip(prompts.record_ids, continuations, strict=True):
        for k, ids in enumerate(of_prompt):
            if not len(ids):
                raise ValueError(f"continuation {k} of {name!r} has no tokens; there is nothing to score")
