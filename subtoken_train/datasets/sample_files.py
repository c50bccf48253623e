"""The pictures and texts that README and pages ask about, which an installed package holds inside."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from subtoken_train.artifact.whole_folder import DATA_MARKER, Layout, mark_data, whole_folder
from subtoken_train.resources import resource


def write_samples(folder: str | Path, overwrite: bool = False) -> None:
    """Copy the shipped ``data/samples``: two pictures, three texts, and folders as a user of ``init`` may have them."""
    source = resource("data/samples")
    names = [path.relative_to(source).as_posix() for path in source.rglob("*")]
    ours = re.compile("|".join(map(re.escape, (*names, DATA_MARKER))))
    layout = Layout(ours, ours, last=DATA_MARKER, kind="a folder of samples", made_by="subtoken-train data samples")
    with whole_folder(Path(folder), overwrite, layout) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        mark_data(partial, layout)
