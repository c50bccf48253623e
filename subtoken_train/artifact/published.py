"""The published language models that ``subtoken-train data`` fetches by a short name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.errors import shell_words
from subtoken_train.families.backbone_config import is_hub_id, resolve
from subtoken_train.resources import published_models


@dataclass(frozen=True)
class PublishedModel:
    """A model, and the places that have it: the Hub, in its authors' precision, and packages of the index."""

    hub_id: str
    packages: tuple[str, ...]
    """Their largest files make one GGUF file, in this order."""
    version: str
    sha256: str
    """SHA-256 of the GGUF file."""
    megabytes: int
    """Size of the packages."""
    gigabytes: float
    """Size of the folder in fp32."""
    licence: str


def _models() -> Iterator[tuple[str, PublishedModel]]:
    for name, row in published_models()["fetched"].items():
        package, parts = row["package"], row.get("parts")
        packages = (package,) if parts is None else tuple(f"{package}{part}" for part in range(1, parts + 1))
        own = {key: value for key, value in row.items() if key not in ("package", "parts")}
        yield name, PublishedModel(packages=packages, **own)


MODELS = dict(_models())
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
