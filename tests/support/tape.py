"""A CUDA graph's stand-in without a GPU: a step's operations, recorded once and run again on the same tensors.

As in a capture nothing may be read by the host, and nothing of Python runs again. What an operation made, stays where
it was made, and every replay writes it anew. What comes from outside must stay at its address; views stay views.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.shards import waits


def _refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the host reads a tensor of a captured step")


class Tape(TorchDispatchMode):
    """Records the operations inside its block, and ``replay`` runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(func, args, kwargs):
            _refused()
        made = func(*args, **kwargs)
        kinds = [each.alias_info for each in func._schema.returns]
        if any(kind is not None and kind.is_write for kind in kinds):
            self.calls.append((func, args, kwargs, []))
        elif not any(kinds):
            self.calls.append((func, args, kwargs, [each for each in tree_leaves(made) if isinstance(each, Tensor)]))
        return made

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call what torch does not see as operations, and record it as one."""
        with torch.utils._python_dispatch._disable_current_modes():
            made = function(*args)
        self.calls.append((function, args, {}, [made]))
        return made

    def replay(self) -> None:
        """Run everything again; results are written where they were."""
        for func, args, kwargs, made in self.calls:
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for held, new in zip(made, again, strict=bool(made)):
                assert held.shape == new.shape
                held.copy_(new)


@contextmanager
def unread(tape: Tape | None = None) -> Iterator[None]:
    """Refuse whatever makes the host wait for numbers of a device."""
    with pytest.MonkeyPatch.context() as patch, tape or Tape():
        for name in ("tolist", "numpy", "__array__", "cpu"):
            patch.setattr(Tensor, name, _refused)
        yield


@torch.no_grad()
def on_tape(step: Callable[[], Tensor], again: Callable[[], None], device: torch.device) -> Callable[[], Tensor]:
    """``decode_step.capture`` without a GPU: two steps before make the same operations, of the same shapes."""
    tapes = [Tape() for _ in range(3)]
    for tape in tapes:
        again()
        with unread(tape):
            logits_BV = step()
    again()
    _, *same = [[(str(func), [x.shape for x in made]) for func, _, _, made in tape.calls] for tape in tapes]
    assert same[0] == same[1]

    def replay() -> Tensor:
        tapes[2].replay()
        return logits_BV

    return replay
