"""The text of one answer as it grows, cut at stop texts: a streamer and a stopping criterion of ``generate``.

Legend: B batch (of one answer), N positions.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = "\N{REPLACEMENT CHARACTER}"
"""Character that stands for one of which tokens are missing."""
STRETCH = 16
"""Tokens that are decoded anew with every further one, at least."""
BEFORE = 16
"""Tokens before them that are decoded with them, and say how they begin: with a space, or half a character."""


def answer_text(decoded: str, goes_on: bool = False) -> str:
    """Return an answer without white space around it; of one that goes on with a text, the space in front stays."""
    return decoded.rstrip() if goes_on else decoded.strip()


class AnswerStream:
    """Hands on an answer's text in pieces, which joined are the answer that ``SubTokenModel.chat`` returns.

    A ``streamer`` and a stopping criterion. White space at an end, half a character and what may become a stop text are
    held back until more has come. ``goes_on``: the answer goes on with a text. ``text`` was handed on, ``token_ids``
    are all so far, end-of-text included; ``ended``: a stop text was said.
    """

    def __init__(
        self,
        tokenizer: Any,
        say: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        stops: Sequence[str] = (),
        goes_on: bool = False,
    ) -> None:
        self.text, self.ended = "", False
        self.token_ids: list[int] = []
        self._tokenizer, self._say, self._stopped = tokenizer, say, stopped
        self._stops, self._goes_on = [stop for stop in stops if stop], goes_on
        self._asked = False
        self._settled, self._begin, self._around = "", 0, ""

    def put(self, ids: Tensor) -> None:
        """Take new ids; the first ones are the prompt's."""
        if self._asked:
            self.token_ids += ids.flatten().tolist()
            self._hand_on(whole=False)
        self._asked = True

    def end(self) -> None:
        """Hand on what was held back."""
        self._hand_on(whole=True)

    def __call__(self, ids_BN: Tensor, scores: Any, **further: Any) -> Tensor:
        return torch.full((len(ids_BN),), self.ended or self._stopped(), device=ids_BN.device)

    def _hand_on(self, whole: bool) -> None:
        if self.ended:
            return
        said = self._decoded(0) if whole else self._grown()
        found = [said.find(stop) for stop in self._stops if stop in said]
        self.ended = bool(found)
        if found or whole:
            ready = answer_text(said[: min(found, default=len(said))], self._goes_on)
        else:
            beginnings = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
            held = max((len(each) for each in beginnings if said.endswith(each)), default=0)
            ready = answer_text(said[: len(said) - held].rstrip(HALF), self._goes_on)
        # a tokenizer may write earlier tokens otherwise once more follow; what was handed on stays
        if ready.startswith(self.text) and ready != self.text:
            piece, self.text = ready[len(self.text) :], ready
            self._say(piece)

    def _grown(self) -> str:
        """Return the text so far; what was said long ago is not decoded once more."""
        around = self._decoded(self._begin)
        if not around.startswith(self._around):  # earlier tokens are written otherwise now
            self._settled, self._begin, self._around = "", 0, ""
            around = self._decoded(0)
        said, begin = self._settled + around[len(self._around) :], len(self.token_ids) - BEFORE
        if begin >= self._begin + STRETCH and not said.endswith(HALF):
            self._settled, self._begin, self._around = said, begin, self._decoded(begin)
        return said

    def _decoded(self, first: int) -> str:
        return str(self._tokenizer.decode(self.token_ids[first:], skip_special_tokens=True))


def same_autocast(device: str) -> torch.autocast:
    """Return the autocast that acts now, to be entered in another thread, which has none of its own."""
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))


def pieces(tokenizer: Any, answer: Callable[[AnswerStream], None], goes_on: bool = False) -> Iterator[str]:
    """Yield what ``answer`` puts into its stream, as text, from another thread; closing the iterator ends it."""
    said: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
    closed = threading.Event()
    stream = AnswerStream(tokenizer, said.put, closed.is_set, goes_on=goes_on)

    def run() -> None:
        try:
            answer(stream)
            stream.end()
        except Exception as error:
            said.put(error)
        else:
            said.put(None)

    thread = threading.Thread(target=run, name="answer", daemon=True)
    thread.start()
    try:
        while (piece := said.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece
    finally:
        closed.set()
        thread.join()
