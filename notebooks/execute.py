"""Run the notebooks from top to bottom and store what their cells show.

    pip install -e '.[notebooks]'
    python notebooks/execute.py             # all of them, or the names that are given

What differs from run to run for no reason (folders, times of cells, progress bars) is left out, so that a second run
changes little. A cell remembers the digest of the source that made its output; a test compares the two.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
CELL_SECONDS = 900
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def digest(source: str) -> str:
    """Of a code cell."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def tidy(text: str) -> str:
    """Without colours, and of a line that was written over only what stood there at last."""
    lines = (line.rsplit("\r", 1)[-1].rstrip() for line in _COLOUR.sub("", text).split("\n"))
    return re.sub(r"/tmp/\w+", "/tmp/folder", "\n".join(lines)).replace(f"{FOLDER.parent}/", "")


def tidied(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An output without what changes from run to run; a picture in the format that is smaller."""
    if output.output_type == "stream":
        output.text = tidy(output.text)
        return output
    output.metadata = nbformat.NotebookNode()
    pictures = {kind: len(data) for kind, data in output.data.items() if kind.startswith("image/")}
    if "text/plain" in output.data:
        output.data["text/plain"] = tidy(output.data["text/plain"])
    if pictures:
        smallest = min(pictures, key=pictures.__getitem__)
        output.data = nbformat.NotebookNode({smallest: output.data[smallest], "text/plain": "<picture>"})
    return output


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs without stderr (progress bars and notes of libraries), pieces of stdout that follow each other as one."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def run(path: Path) -> None:
    """Execute a notebook in its folder, and write it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the file is left as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", store_widget_state=False, resources=folder
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata = {"ran": digest(cell.source)}
        cell.outputs = [tidied(output) for output in joined(cell.outputs)]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), *sys.path[1:]])
    for name in args.names or names:
        run(FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
