"""What an eviction method has the model read after a prompt: a task of a second pass, before its rows are made.

``inference/second_pass.py`` makes the rows, from a text by the family's tokenizer and from tokens of the prompt by the
embeddings that they had (an image's features among them), and shows the method each layer of them as a ``TaskView``.

Legend: B batch, N positions of the unreduced prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TaskPlan:
    """One task.

    Attributes:
        pieces: its rows, in order: a text, or marked tokens of the prompt again (bool [B, N]; those that the token
            reducer left). None: the whole prompt again, as it stands.
        about_BN: tokens of the prompt whose entries it scores, bool; None: all of them.
    """

    pieces: tuple[str | Tensor, ...] | None = None
    about_BN: Tensor | None = None
