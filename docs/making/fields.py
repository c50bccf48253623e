"""The page of record fields: which are read, which are refused, and what becomes of any other."""

from __future__ import annotations

from collections.abc import Sequence

from subtoken_train.datasets.record_fields import READ, REFUSED

_HEAD = r"""# Fields of records

<!-- made by `python docs/generate.py` from the declaration in `subtoken_train/datasets/record_fields.py`; edit that -->

What becomes of each field of a record. A field that another trainer reads can change what is learnt, so nothing is
dropped in silence. A refused field stops the file with the record's id and the field's name, whoever reads it.

- **Obeyed.** A message with `loss: false` is read and not learnt: its tokens are context, and `preview` shows it as
  `masked`. `trainable`, `train`, `training`, `weight`, `loss_weight`, `loss_mask` and `loss_scale` with `false` or `0`
  say the same. A list of that name beside the messages has one switch for each. Only answers are learnt. A record of
  which no answer is learnt is refused.
- **Refused.** What no turn can say: switches of single tokens, weights between 0 and 1, pairs of answers, tools,
  sound, boxes, pictures under other names. An empty value (`null`, `""`, `[]`, `{}`) says nothing and is passed over.
- **Numbers** (`index`, `idx`, `turn`, `order`, `position`) of messages and parts are refused out of their order.
- **Any other name** is refused where it looks like a medium (`thumbnail: "a.jpg"`, a `data:` URL), like a switch
  (`token_loss: [0, 1]`), or nearly like a name that is read (`sytem`). Everything else is passed over, and `check`
  lists it under `fields that are not read`, but for ids, sources, URLs, sizes, hashes and notes.

An answer or a question without anything to be seen (white space, a BOM, a NUL) is refused; `<image>` alone is a
question.

**Pictures that a text names** would be trained without. Spellings that only media have are refused: a tag around a
target (`<img>0.png</img>`), tokens of other models (`<|image_1|>`, `<ImageHere>`, `[IMG]`), and in a record without
media `<image 1>`, a picture's own bytes, or a bare tag as a question's first or last line. A file that such a question
names is refused where it lies in the folder of the images.

**Marks that are text.** In a record with pictures `<image>` stands for one, and `<video>` for a video. Write `\<image>`
where a text is *about* the tag, also in prompts of `generate`, `chat`, `ask` and `--prompts`. For a language model
marks are always text.

"""
_TITLES = {
    "record": "## Beside the messages",
    "message": "## In a message",
    "part": "## In a part of a message's content",
}
_TABLE = "| field | here | |\n|---|---|---|\n"


def fields_page() -> str:
    """Return the text of ``data_fields.md``."""
    parts = [_HEAD]
    for place, title in _TITLES.items():
        rows = [(names, "read", words) for names, words in READ[place].items()]
        rows += [(patterns.split(), "refused", words) for places, patterns, words in REFUSED if place in places]
        parts.append(f"{title}\n\n{_TABLE}{''.join(_row(*row) for row in rows)}\n")
    return "".join(parts).rstrip() + "\n"


def _row(names: Sequence[str], fate: str, words: str) -> str:
    return f"| {', '.join(f'`{name}`' for name in names)} | {fate} | {words} |\n"
