"""The page of record fields: which are read, and what becomes of any other."""

from __future__ import annotations

from subtoken_train.datasets.record_format import READ

_HEAD = r"""# Fields of records

<!-- made by `python docs/generate.py` from the declaration in `subtoken_train/datasets/record_format.py`; edit that -->

Records are written for many trainers, and a field that one of them reads can change what another one learns. Each
field is read, obeyed, or refused, so nothing is dropped in silence: a refused field stops the file with the record's id
and the field's name, whoever reads it (`check`, `fit`, `preview`, `evaluate --data`, `init`, `documents:
conversations`).

- **Obeyed.** A message with `loss: false` (or `trainable`, `train`, `training`, `weight`, `loss_weight`, `loss_mask`,
  `loss_scale`; `false` or `0`) is read and not learnt: its tokens are context and have the label -100. `preview` shows
  such an answer as `masked`. Only answers are ever learnt, so a question's switch may say `false` or nothing; in a
  text of `documents: conversations` for a tokenizer without a chat template, where questions are learnt too, their
  switch is obeyed as well. A record of which no answer is learnt is refused. `init` keeps the switches in what it
  writes, and `evaluate --data` asks for the last answer that is learnt.
- **Any other name is refused**, with the nearest name that is read (`sytem`: did you mean `system`?): preferences,
  tools, sound, boxes, pictures under other names, switches of single tokens. A value that is empty (`null`, `""`,
  `[]`, `{}`) says nothing and is passed over, and so are notes: `metadata`, which takes any value, ids, sources, URLs,
  sizes, hashes (`image_id`, `source`, `url`, `num_turns`, `comment`, `category`).
- **Columns of a table** that are not read are passed over, and `init` prints them; those that may change what is learnt
  (`history`, `rejected`, `audio`, `weight: 0.5`) are refused.

An answer or a question that holds nothing to be seen (empty, white space, a BOM, zero-width characters) or a NUL is
refused in every form, and in tables, texts and files of prompts; `<image>` alone is a question.

**Pictures that a text names** would be trained without. Refused are spellings that only media have: a tag around a
target (`<img>0.png</img>`, `<video>a.mp4</video>`), tokens of other models (`<|image_1|>`, `<ImageHere>`, `[IMG]`,
`<image_placeholder>`), and in a record that has no media `<image 1>`, a picture's own bytes
(`data:image/png;base64,...`), or a bare tag (`<video>`, `[image]`) as the first or last line of a question. What
only names a file (a Markdown picture, `<img src="a.png">`, `see a.png`) is text.

**Marks that are text.** In a record with pictures `<image>` stands for one, and `<video>` for a video. Where a text
is *about* the tag, write `\<image>`: the model reads the characters `<image>`, even if its tokenizer has a token of
that name, and no picture is meant. It holds in prompts of `generate`, `chat`, `ask` and `--prompts`, too. `<video>`
in a record without videos is text as it stands (but not as a line of its own at either end). For a language model,
marks are always text, and a backslash is a backslash.

"""
_TITLES = {
    "record": "## Beside the messages",
    "message": "## In a message",
    "part": "## In a part of a message's content",
}
_TABLE = "| field read | |\n|---|---|\n"


def fields_page() -> str:
    """Return the text of ``data_fields.md``."""
    parts = [_HEAD]
    for place, title in _TITLES.items():
        rows = (f"| {', '.join(f'`{name}`' for name in names)} | {words} |\n" for names, words in READ[place].items())
        parts.append(f"{title}\n\n{_TABLE}{''.join(rows)}\n")
    return "".join(parts).rstrip() + "\n"
