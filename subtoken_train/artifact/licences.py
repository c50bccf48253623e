"""Licences of published backbones, as the Hub's metadata names them: an adapter falls under its backbone's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Licence:
    """A licence in model-card metadata.

    Attributes:
        identifier: the Hub's identifier (``apache-2.0``, ``llama2``; ``other`` where it has none).
        name: short name of an ``other`` licence.
        link: its text, where ``identifier`` is ``other``.
    """

    identifier: str
    name: str | None = None
    link: str | None = None

    @property
    def words(self) -> str:
        """What a reader calls it."""
        return self.name or self.identifier


_APACHE, _LLAMA2 = Licence("apache-2.0"), Licence("llama2")
_LICENCES = {
    "llava-hf/llava-1.5-7b-hf": _LLAMA2,
    "llava-hf/llava-1.5-13b-hf": _LLAMA2,
    "meta-llama/Llama-2-7b-hf": _LLAMA2,
    "mistralai/Mistral-7B-v0.1": _APACHE,
    "Qwen/Qwen2.5-7B": _APACHE,
    "Qwen/Qwen2.5-VL-3B-Instruct": Licence(
        "other", "qwen-research", "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE"
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": _APACHE,
    "checkpoints/tiny-llava": _APACHE,
}


def licence_of(backbone: str) -> Licence | None:
    """The licence of a backbone by its name; None where it is not known here and the backbone must be asked."""
    return _LICENCES.get(backbone)
