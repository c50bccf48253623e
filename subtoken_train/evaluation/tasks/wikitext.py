"""WikiText (Merity et al., 2016): perplexity of text that follows a context, which may be compressed.

The articles of the test split make one stream of text, cut into windows of words (what white space separates). A window
is a context, a short prefix of the query region and the words that are scored; the prefix is read in full and chooses
what is kept of the context, so that nothing that is scored takes part in the choice. Windows do not overlap: the words
of contexts and prefixes are never scored. What is left at the end is dropped.

Not lm-eval's ``wikitext``: that one undoes WikiText's own tokenisation first, and scores every word. The text here is
as in the files, so figures compare with others of this task only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.documents import check_file_name
from subtoken_train.errors import MAX_TOKENS
from subtoken_train.evaluation.metrics.likelihoods import Perplexity
from subtoken_train.evaluation.tasks.file_rows import benchmark_text, task_source
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample, Task

_WORD = re.compile(r"\s*\S+")
TEXT_FILES = ("test.txt", "wiki.test.raw", "wiki.test.tokens")


@dataclass
class WikiText(Task):
    """Windows of the test split: words that may be compressed, words read in full but not scored, words scored.

    ``config`` is the Hub's, and its folder's name.
    """

    config: str = "wikitext-103-raw-v1"
    context_words: int = 768
    prefix_words: int = 48
    query_words: int = 720

    name = "wikitext"
    modality = "text"
    hub_id = "Salesforce/wikitext"
    primary = "word_perplexity"
    scored_by = Perplexity
    ranges: ClassVar = dict.fromkeys(("context_words", "prefix_words", "query_words"), (1, MAX_TOKENS))
    where = (
        "hf download Salesforce/wikitext --include 'wikitext-103-raw-v1/*' --repo-type dataset --local-dir DIR; "
        f"a folder with a plain text file ({', '.join(TEXT_FILES)}) does, too"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file_name(self.config, "config of wikitext")

    @property
    def asks(self) -> str:
        return "raw text, no chat template; no question: what follows the context is scored"

    def samples(self) -> list[Sample]:
        """Return the windows in order, at least one; ids are their numbers."""
        sizes = (self.context_words, self.prefix_words, self.query_words)
        samples = list(windows(self._text(), sizes))
        if not samples:
            raise ValueError(f"{self.source or self.hub_id} has fewer words than one window of {sum(sizes)}; ask fewer")
        return samples

    def _text(self) -> str:
        source = task_source(self)
        if isinstance(source, Path):
            for path in (source / name for name in TEXT_FILES):
                if path.is_file():
                    return benchmark_text(path)
        return "".join(row.values["text"] for row in read_split(self, "test", ("text",), config=self.config))


def windows(text: str, sizes: Sequence[int]) -> Iterable[Sample]:
    """Cut samples of consecutive words; white space before a word belongs to it.

    ``sizes`` are the words of context, prefix and scored text.
    """
    ends = [match.end() for match in _WORD.finditer(text)]
    context, prefix, query = sizes
    window = context + prefix + query
    for number in range(len(ends) // window):
        first = number * window
        start = ends[first - 1] if first else 0
        context_end, prefix_end, end = (ends[first + words - 1] for words in (context, context + prefix, window))
        scored = text[prefix_end:end]
        yield Sample(
            id=str(number),
            prompt=text[start:prefix_end],
            reference={"words": query, "bytes": len(scored.encode())},
            choices=(scored,),
            context_characters=context_end - start,
            kind="window",
        )
