"""The parts of the demo page that need no Gradio: preset prompts, the table of facts, and pictures of what was kept.

Legend: N positions, n kept tokens, S value groups, L layers.
"""

import threading
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.demo.side_by_side import SideAnswer
from subtoken_train.evaluation.charts import axes_in_a_row, draw_cells, image_of
from subtoken_train.evaluation.picture import kept_picture, kept_tokens
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.ledger.kv_budget import share_words
from subtoken_train.resources import resource
from subtoken_train.types import Plan, in_compressed_region

PICTURE_QUESTION = "what is at C2 ?"
"""Chosen because the shipped models answer it differently; the answer is yellow 7."""


def presets(pictures: bool = True) -> list[tuple[str, str]]:
    """Return (path of a picture, question), first one on which models differ; or (text, sentence to go on with)."""
    if not pictures:
        facts = build_task("facts", contexts=1, facts=4, words=250).samples()
        return [(each.prompt[: each.context_characters], each.prompt.rpartition("Answer: ")[2]) for each in facts]
    records = InstructionRecords(resource("data/samples") / "questions.json")
    found = (records[i] for i in range(len(records)))
    asked = [(str(each.images[0]), each.turns[-1].prompt.removeprefix("<image>").strip()) for each in found]
    return [(asked[0][0], PICTURE_QUESTION), *asked]


COLUMNS = (
    "model", "compressed by", "cache bytes", "of full", "nominal", "realised", "index bytes", "prefill s", "decode s",
    "tokens",
)  # fmt: skip
LEGEND = (
    "Nominal: the share of the keys and values of picture or text that reducer and routers promise, before an "
    "eviction (-: they keep all). Realised: what is stored of them. Cache bytes are measured: the whole prompt, answer "
    "and index with them, slack left out."
)


def facts_table(answers: Sequence[SideAnswer]) -> str:
    """Write an HTML row for each answer, a card on a narrow page. Bytes are ``CacheReport``'s, without slack."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = ""
    for answer in answers:
        report = answer.report
        held = report.total_bytes - report.slack_bytes
        whole = report.kept_entries is not None and report.nominal_fraction == 1
        nominal = "-" if whole else f"{report.nominal_fraction:.3%}"
        shares = share_words(held / report.dense_bytes, 1), nominal, f"{report.realised_fraction:.3%}"
        seconds = f"{answer.prefill_seconds:.2f}", f"{answer.decode_seconds:.2f}"
        texts = f"{held:,}", *shares, f"{report.index_bytes:,}", *seconds, str(answer.tokens)
        row = zip(COLUMNS, (answer.title, answer.method, *texts), strict=True)
        cells = "".join(f'<td data-name="{name}">{escape(text)}</td>' for name, text in row)
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{LEGEND}</p>"


_matplotlib = threading.Lock()  # its settings are the process's


class KeptGroups(NamedTuple):
    """Value groups that a plan keeps of picture or text, behind ``keys`` columns where heads keep keys of their own.

    ``shares_LS``: share of a layer's kept tokens that keep each key and group; ``marks_nS``: those of each token, bool.
    """

    keys: int
    shares_LS: Tensor
    marks_nS: list[Tensor]


def kept_groups(plan: Plan, regions_N: Tensor) -> KeptGroups | None:
    """Read the first sample of a plan, by the ``Region`` codes of the unreduced prompt; None if nothing is routed."""
    groups = next((layer.group_mask_BNS.shape[-1] for layer in plan.layers if layer.group_mask_BNS is not None), None)
    if groups is None:
        return None
    keys = next((layer.heads_BNh.shape[-1] for layer in plan.layers if layer.heads_BNh is not None), 0)
    marks = []
    for layer in plan.layers:
        valid, parts = layer.entries_BN[0] >= 0, list[Tensor]()
        shown = in_compressed_region(regions_N.cpu()[layer.entries_BN[0][valid].cpu()])
        for marks_BNk, columns in ((layer.heads_BNh, keys), (layer.group_mask_BNS, groups)):
            whole = torch.ones(int(shown.sum()), columns, dtype=torch.bool)
            parts.append(whole if marks_BNk is None else marks_BNk[0][valid].cpu()[shown])
        marks.append(torch.cat(parts, -1))
    # a layer that keeps no token keeps none of their groups
    return KeptGroups(keys, torch.stack([each.float().sum(0) / max(1, len(each)) for each in marks]), marks)


def token_words(answer: SideAnswer, layer: int) -> list[tuple[str, float | None]]:
    """Split the text into whole characters, each piece with the mean share of a layer's heads that keep its tokens."""
    shown_N = in_compressed_region(answer.batch.regions_BN[0])
    shares = kept_tokens(answer.plan.layers[layer], shown_N).share_T.tolist()
    decode, words = answer.family.tokenizer.decode, list[tuple[str, float | None]]()
    before, ids, own = list[int](), list[int](), list[float]()
    for token, share in zip(answer.batch.input_ids_BN[0][shown_N].tolist(), shares, strict=True):
        ids, own = [*ids, token], [*own, share]
        piece = decode([*before, *ids])[len(decode(before)) :]  # a piece alone may lose its space
        if not piece.endswith("\N{REPLACEMENT CHARACTER}"):  # which is half a character
            words.append((piece, None if answer.undrawn else sum(own) / len(own)))
            before, ids, own = ids, [], []
    return words


def marked_text(answer: SideAnswer, layer: int) -> str:
    """Write ``token_words`` as HTML: the larger a piece's share, the stronger its colour."""
    pieces = [
        f'<span style="background: rgb(37 99 235 / {0.7 * (share or 0):.2f})">{escape(piece)}</span>'
        for piece, share in token_words(answer, layer)
    ]
    said = f"<small>layer {layer}: the stronger the colour, the more of its heads keep it</small>"
    return f'{said}<div style="white-space: pre-wrap; line-height: 1.6">{"".join(pieces)}</div>'


def token_picture(answer: SideAnswer, layer: int, dark: bool = False) -> Image.Image | None:
    """Draw the tokens that a layer keeps on the picture; without them where that is impossible (``answer.undrawn``)."""
    if answer.undrawn is not None or answer.image is None:
        return answer.image
    return kept_picture(answer.image, answer.family, answer.batch, answer.plan, [layer], dark)


def group_pictures(answer: SideAnswer, layer: int) -> list[Image.Image]:
    """Draw the kept groups of all layers, and those of every kept token in one; none where nothing is routed."""
    if (kept := kept_groups(answer.plan, answer.batch.regions_BN[0])) is None:
        return []
    marks_nS, columns, what, kinds = kept.marks_nS[layer], "group", "a group", "groups"
    if kept.keys:
        columns, what, kinds = f"key of {kept.keys} heads, then group", "a key or group", "keys and groups"
    with _matplotlib:
        shares, (left,) = axes_in_a_row(1, (5.2, 3.6))
        draw_cells(left, kept.shares_LS.tolist(), f"share of the kept tokens that keep {what}", columns, "layer")
        marks, (right,) = axes_in_a_row(1, (5.2, 3.6))
        title = f"layer {layer}: {kinds} of its {len(marks_nS)} kept tokens"
        if len(marks_nS):
            draw_cells(right, marks_nS.float().tolist(), title, columns, "kept token, in the prompt's order")
        else:
            right.set(title=title)
        return [image_of(shares), image_of(marks)]
