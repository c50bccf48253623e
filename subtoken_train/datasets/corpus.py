"""Packed text for language models: any Hugging Face text data set, or local text, JSON-lines or Parquet files.

Each document is tokenised without special tokens and followed by one EOS; the stream is cut into blocks, and what is
left at its end is dropped. Attention, positions and loss run across the borders of documents. A BOS, where the
tokenizer has one, starts every *block* and belongs to the context.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from subtoken_train.datasets.conversations import CONVERSATION_LISTS, checked_record, conversation_document
from subtoken_train.datasets.known_files import absent
from subtoken_train.datasets.record_format import SWITCHES, files_named, read_switch, refuse_files
from subtoken_train.datasets.row_files import COLUMNAR, Kind, file_kind, files_of_set, kept_rows, placed_rows
from subtoken_train.documents import text_problem
from subtoken_train.errors import at_place, clipped, refuse
from subtoken_train.families.online import hub_asked, silence

if TYPE_CHECKING:
    from datasets import Dataset

_KINDS = {".txt": "text", ".text": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_TOKENISED_TOGETHER = 256  # documents, for speed alone
_TITLE = re.compile(r"= [^=].* =")  # sections have more signs
_LAYOUT = "3"  # raise it when the same corpus is packed into other blocks, so that no old cache is read


IDS: dict[str, Kind] = {"input_ids": ("int32",)}  # the column of kept blocks, and one of chats


@dataclass(frozen=True)
class CorpusSource:
    """Says where documents come from.

    Attributes:
        name: Hub id (``Salesforce/wikitext``), or a local file (.txt, .jsonl, .json, .parquet, .arrow, these as .gz),
            or a folder of ``save_to_disk``.
        config: configuration of a Hub data set (``wikitext-103-raw-v1``).
        split: split of a Hub data set; a local file is one split, ``train``.
        column: the column with the text.
        documents: ``rows``: each row is a document (a .txt file is one row); ``wikitext``: rows are lines (of a .txt
            file, too), and a document starts at each title line, `` = Title = ``; ``conversations``: each record of a
            file is one (JSON, JSON lines, Parquet, Arrow), in any form of ``conversations``, without images.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    documents: Literal["rows", "wikitext", "conversations"] = "rows"


def load_rows(source: CorpusSource) -> "Dataset":
    """Open the raw rows; nothing is tokenised."""
    path = Path(source.name)
    if source.documents == "conversations":
        return _conversation_rows(source, path)
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    arguments: dict[str, Any] = {"path": source.name, "name": source.config}
    builder = "arrow" if (path / "state.json").is_file() else _KINDS.get(file_kind(path))  # None: a name of the Hub
    if builder is None and path.is_file():
        raise ValueError(f"{path} is none of {', '.join(_KINDS)}; of a table: subtoken-train init {path.parent}")
    if builder is not None:
        if not path.exists():
            raise absent("text file", source.name)
        _check_whole(source)
        arguments = {"path": builder, "data_files": list(map(str, files_of_set(path)))}
    if builder == "text":
        arguments |= {"sample_by": "line" if source.documents == "wikitext" else "document", "keep_linebreaks": True}
    from_hub = builder is None and not path.exists()
    try:
        with hub_asked() if from_hub else nullcontext():
            rows = load_dataset(**arguments, split=source.split)
    except (DatasetNotFoundError, ConnectionError) as error:
        reason = (silence() if from_hub else None) or error
        raise ValueError(f"data set {source.name!r} cannot be loaded ({reason}); give a Hub id, or a file") from None
    except DatasetGenerationError as error:
        raise ValueError(f"{source.name} cannot be read as {builder} ({error.__cause__ or error})") from None
    columns = rows.column_names
    if source.column not in columns:
        listed = clipped(", ".join(columns), 100)
        if {*columns} & {*CONVERSATION_LISTS}:
            listed += "; conversations are read with documents: conversations"
        raise ValueError(f"{source.name} has no column {source.column!r}; its columns are {listed}")
    return rows


def _check_whole(source: CorpusSource) -> None:
    if source.config is not None or source.split != "train":
        raise ValueError(f"{source.name} is a file: it has no config, and its only split is train; leave both out")


def _conversation_rows(source: CorpusSource, path: Path) -> "Dataset":
    from datasets import Dataset

    if not path.is_dir() and (file_kind(path) not in (".json", ".jsonl", *COLUMNAR) or not path.is_file()):
        raise ValueError(f"documents: conversations reads a .json or .jsonl file, Parquet or Arrow, not {source.name}")
    _check_whole(source)
    made: dict[str, list[str]] = {"name": [], "conversation": []}
    for place, read in placed_rows(path):
        row = checked_record(read, place, as_document=True)
        refuse_files(files_named(row), place, path.parent)
        made["name"].append(place)
        made["conversation"].append(json.dumps({"conversations": row["conversations"]}))
    return Dataset.from_dict(made)


def iterate_documents(rows: Iterable[dict[str, Any]], source: CorpusSource) -> Iterator[str]:
    """Yield the documents of ``rows`` in order; those of white space alone are left out."""
    documents: Iterator[Any] = iter(rows)
    if source.documents == "wikitext":
        documents = _articles(row[source.column] or "" for row in rows)
    for number, found in enumerate(documents, 1):
        said, document = f"{source.name}, document {number}: it", found
        if source.documents == "conversations":
            with at_place(f"{found['name']}: "):
                document = conversation_document(json.loads(found["conversation"]))
        elif source.documents == "rows":
            document = found[source.column] or ""
            if read_switch({name: found.get(name) for name in SWITCHES if name != source.column}, said) is False:
                instead = f"({', '.join(SWITCHES)}); a text is learnt whole: drop the row"
                raise ValueError(f"{said} is not to be learnt {instead}")
        if problem := text_problem(document) if document.strip() else None:
            raise ValueError(f"{said} {problem}; fix it, or drop it")
        if document.strip():
            yield document


def _articles(lines: Iterable[str]) -> Iterator[str]:
    article, after_empty = list[str](), True
    for line in lines:
        if after_empty and _TITLE.fullmatch(line.strip()):
            yield "".join(article)
            article = []
        article.append(line)
        after_empty = not line.strip()
    yield "".join(article)


def iterate_blocks(documents: Iterable[str], tokenizer: Any, block_length: int) -> Iterator[list[int]]:
    """Yield ``block_length`` token ids at a time."""
    refuse((tokenizer.eos_token_id is None, "the tokenizer has no EOS token, which separates documents; set one"))
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    wanted, ids = block_length - len(prefix), list[int]()
    remaining = iter(documents)
    while some := list(islice(remaining, _TOKENISED_TOGETHER)):
        for encoded in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
            ids += [*encoded, tokenizer.eos_token_id]
        start = 0
        while len(ids) - start >= wanted:
            yield [*prefix, *ids[start : start + wanted]]
            start += wanted
        del ids[:start]


def read_blocks(rows: Any, source: CorpusSource, tokenizer: Any, block_length: int) -> Iterator[list[int]]:
    """Make one pass over a corpus: the blocks of its documents."""
    block: list[int] | None = None
    for block in iterate_blocks(iterate_documents(rows, source), tokenizer, block_length):
        yield block
    if block is None:
        one_token = 1 + (tokenizer.bos_token_id is not None)
        tokens = sum(1 for _ in iterate_blocks(iterate_documents(rows, source), tokenizer, one_token))
        few = f"{tokens} tokens, fewer than one block of block_length {block_length}"
        raise ValueError(f"{source.name} ({source.split}) has {few}; lower block_length, or add text")


def repeat_context(ids: list[int], context: int, place: int, tokenizer: Any) -> list[int]:
    """Let every second block (odd ``place``) go on with parts of its ``context`` first tokens, [N] -> [N].

    Three of four such blocks repeat stretches of it; the fourth answers what follows ten of its tokens.
    """
    if place % 2 == 0:
        return ids
    drawn, made, looks_up = random.Random(place), ids[:context], place % 8 == 7
    last = context - (41 if looks_up else len(ids) - context)  # start of a part that the context holds whole
    while len(made) < len(ids):
        start = drawn.randrange(1, max(2, last + 1))
        asked, said = "\n\n", ids[start:context]
        if looks_up:
            cue = tokenizer.decode(ids[start : start + 10], skip_special_tokens=True).strip()
            asked, said = f'\n\nRepeat what follows "{cue}":', ids[start + 10 : start + 40]
        made += [*tokenizer.encode(asked, add_special_tokens=False), *said]
    return made[: len(ids)]


def packed_blocks(rows: "Dataset", source: CorpusSource, tokenizer: Any, block_length: int) -> "Dataset":
    """Return all blocks of a corpus, kept, as rows of ``input_ids``."""
    generate = lambda: ({"input_ids": ids} for ids in read_blocks(rows, source, tokenizer, block_length))  # noqa: E731
    return kept_rows(generate, IDS, fingerprint(rows, source, tokenizer, block_length))


def fingerprint(rows: "Dataset", source: CorpusSource, tokenizer: Any, *settings: Any) -> str:
    """Return a name for a corpus's samples that is the same in every process, unlike a pickled tokenizer's hash."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # left by the last call, and overruled by the next
        del rules[setting]
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id
    # the raw rows' own says which files they are of, and their dates
    parts = (_LAYOUT, rows._fingerprint, source.column, source.documents, rules, *ends, *settings)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
