"""The page of record fields: which are read, and what becomes of any other."""

from subtoken_train.datasets.record_format import READ

_HEAD = r"""# Fields of records

<!-- made by `python docs/generate.py` from the declaration in `subtoken_train/datasets/record_format.py`; edit that -->

What becomes of each field of a record. A field that another trainer reads can change what is learnt, so nothing is
dropped in silence. A refused field stops the file with the record's id and the field's name, whoever reads it.

- **Obeyed.** A message with `loss: false` is read and not learnt: its tokens are context, and `preview` shows it as
  `masked`. `trainable`, `train`, `training`, `weight`, `loss_weight`, `loss_mask` and `loss_scale` with `false` or `0`
  say the same; all need a chat template. A record of which no answer is learnt is refused.
- **Any other name is refused**, with the nearest name that is read (`sytem`: did you mean `system`?): preferences,
  tools, sound, boxes, pictures under other names, switches of single tokens.
- **Passed over**: empty values (`null`, `""`, `[]`, `{}`), `metadata`, ids, sources, URLs, sizes, hashes and notes
  (`image_id`, `source`, `url`, `num_turns`, `comment`, `category`).
- **Columns of a table** that are not read are passed over, and `init` prints them. Those that may change what is learnt
  (`history`, `rejected`, `audio`, `weight: 0.5`) are refused.

An answer or a question without anything to be seen (white space, a BOM, a NUL) is refused; `<image>` alone is a
question.

**Pictures that a text names** would be trained without. Spellings that only media have are refused: a tag around a
target (`<img>0.png</img>`), tokens of other models (`<|image_1|>`, `<ImageHere>`, `[IMG]`), and in a record without
media `<image 1>`, a picture's own bytes, or a bare tag as a question's first or last line. What only names a file
(a Markdown picture, `<img src="a.png">`, `see a.png`) is text.

**Marks that are text.** In a record with pictures `<image>` stands for one, and `<video>` for a video. Write `\<image>`
where a text is *about* the tag, also in prompts of `generate`, `chat`, `ask` and `--prompts`. For a language model
marks are always text.

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
