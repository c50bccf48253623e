"""Put what programs make into pages: tables between marks, and pictures as files of their own."""

from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from subtoken_train.evaluation.charts import svg_of

STYLE = "svg{color:#57606a;font-family:sans-serif}@media(prefers-color-scheme:dark){svg{color:#9aa4b0}}"


def svg_file(figure: Figure, name: str, title: str, words: str) -> str:
    """Return a figure as the text of an SVG file that reads on white and on dark pages; arguments as of ``svg_of``."""
    style = Markup("<style>{}</style>").format(Markup(STYLE))
    text = str(svg_of(figure, name, title, words)).replace("<title", f"{style}<title", 1)
    return "\n".join(map(str.lstrip, text.splitlines())) + "\n"


def put(page: Path, name: str, text: str) -> None:
    """Write a text between the marks ``<!-- NAME:start -->`` and ``<!-- NAME:end -->`` of a page."""
    start, end = f"<!-- {name}:start -->\n", f"\n<!-- {name}:end -->"
    before, rest = page.read_text(encoding="utf-8").split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}{text}{end}{after}", encoding="utf-8")
