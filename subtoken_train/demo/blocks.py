"""The demo page in Gradio: prompts, answers side by side, and what their caches kept, took and cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.demo.drawings import facts_table, group_pictures, marked_text, presets, token_picture
from subtoken_train.demo.side_by_side import SideAnswer, SideBySide
from subtoken_train.errors import plain
from subtoken_train.evictions import EVICTIONS
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.settings import KVDtype

TITLE = "Sub-token routing, side by side"
NO_EVICTION = "none"
STYLE = files(__package__).joinpath("page.css").read_text("utf-8")
"""Style for ``launch``: on a phone each row of the facts is a card; drawings on white paper turn dark in the dark."""
SEEN = (
    "The same question goes to the whole model and to models whose cache is smaller. Below each answer stands what "
    "its cache keeps, and the facts say how many bytes that takes. The first example is one on which the models may "
    "differ: it shows how to compare them, and proves nothing about which is better."
)
_HOUR = 3600  # seconds that a visitor's answers and pictures are kept


def build_page(models: SideBySide) -> gr.Blocks:
    """Build the page over some models; ``launch`` it with ``looks()``."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(_HOUR, _HOUR)) as page:
        gr.Markdown(f"# {TITLE}\n\n{SEEN}")
        samples = [list(preset) for preset in presets(models.sees_images)]
        (shown_first, asked_first), alone = samples[0], models.sides[1].title == "compressed"
        with gr.Row():
            with gr.Column():
                texted = {"label": "text", "lines": 8, "max_lines": 12, "elem_id": "text"}
                about = _picture(shown_first) if models.sees_images else gr.Textbox(shown_first, **texted)
            with gr.Column():
                question = gr.Textbox(asked_first, label="question", elem_id="question")
                settings = _settings(compresses=alone, reads=not models.sees_images)
                button = gr.Button("Ask", variant="primary", elem_id="ask")
                words = gr.Textbox(label="to know", visible=False, elem_id="words")
        texts, tokens = [], []
        with gr.Row():
            for place, side in enumerate(models.sides):
                with gr.Column():
                    texts.append(gr.Textbox(label=side.title, lines=2, elem_id=f"answer-{place}"))
                    drawn = f"tokens-{place}"
                    tokens.append(_drawing(drawn) if models.sees_images else gr.HTML(elem_id=drawn))
        last = models.num_layers - 1
        layer = gr.Slider(0, last, last, step=1, label="layer that is drawn", elem_id="layer")
        facts = gr.HTML(elem_id="facts")
        with gr.Row(elem_id="groups"):
            groups = [_drawing(f"groups-{place}", visible=False) for place in range(2)]
        gr.Examples(samples, [about, question], label="examples")
        answers, dark = gr.State([], time_to_live=_HOUR), gr.Checkbox(visible=False)
        page.load(None, None, dark, js="() => document.body.classList.contains('dark')", api_name=False)

        def respond(*given: Any) -> Iterator[list[Any]]:
            yield from _respond(models, *given)

        def draw(answers: list[SideAnswer], layer: int, dark: bool) -> list[Any]:
            kept = partial(token_picture, dark=dark) if models.sees_images else marked_text
            pictures: list[Any] = [kept(answer, layer) for answer in answers]
            missing = len(models.sides) - len(answers)
            found: list[Any] = [] if missing else group_pictures(answers[-1], layer)
            shares = [gr.update(value=each, visible=each is not None) for each in found or [None, None]]
            return [*pictures, *[None] * missing, *shares]

        asked = {"concurrency_limit": 1, "concurrency_id": "ask"}
        drawing = draw, [answers, layer, dark], [*tokens, *groups]
        shown: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "draw", "show_progress": "hidden"}
        for event in (button.click, question.submit):
            given, shows = [about, question, *settings], [*texts, facts, words, answers]
            event(respond, given, shows, api_name=False, **asked).then(*drawing, api_name=False, **shown)
        layer.change(*drawing, trigger_mode="always_last", api_name=False, **shown)
    return page


def _picture(shown: str) -> gr.Image:
    taken = {"type": "filepath", "sources": ["upload", "clipboard"]}
    picture = gr.Image(shown, label="picture", height=300, elem_id="picture", **taken)
    # Gradio's own decodes the picture, and has no words for one that it cannot read; the file lies in its own folder
    picture.preprocess = lambda file: None if file is None else str(file.path)
    return picture


def _settings(compresses: bool, reads: bool) -> list[gr.components.Component]:
    """Make the fields that compress; those of a backbone alone start compressed, so that its sides differ."""
    chosen, share = ("kvzip", "0.25") if compresses else (NO_EVICTION, "0.5")
    with gr.Row():
        said = {"label": "eviction", "info": "all but the backbone's; or write ada(snapkv)", "elem_id": "eviction"}
        eviction = gr.Dropdown([NO_EVICTION, *EVICTIONS], value=chosen, allow_custom_value=True, **said)
        keep = gr.Textbox(share, label="it keeps", info="0.5 of the entries, 32tokens or 20kB", elem_id="keep")
        kinds = gr.Dropdown(list(FORMATS), label="held in", info="all but the backbone's", elem_id="kv-dtype")
    words = "go on with this sentence (else it is a question in the chat template)"
    return [eviction, keep, kinds, gr.Checkbox(reads, label=words, visible=reads, elem_id="raw")]


def looks() -> gr.themes.Base:
    """Return a theme without fonts of others."""
    return gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


def _drawing(name: str, visible: bool = True) -> gr.Image:
    """A place for one of our pictures, whose title is in it; without Gradio's buttons, one of which would upload it."""
    return gr.Image(format="png", interactive=False, show_label=False, buttons=[], visible=visible, elem_id=name)


def _respond(
    models: SideBySide, about: str | None, question: str, eviction: str, keep: str, kv_dtype: KVDtype, raw: bool
) -> Iterator[list[Any]]:
    texts, answers, said = [""] * len(models.sides), list[SideAnswer](), list[str]()

    def values() -> list[Any]:
        told = gr.update(value=plain("\n".join(said)), visible=bool(said))
        return [*texts, facts_table(answers) if answers else "", told, list(answers)]

    yield values()
    try:
        if about is None:
            raise ValueError("there is no picture; upload one, or use one of the examples")
        shown = open_image(Path(about)) if models.sees_images else about
        for spoken in models.ask(shown, question, None if eviction == NO_EVICTION else eviction, keep, kv_dtype, raw):
            texts[spoken.place] = spoken.text
            if spoken.answer is not None:
                answers.append(spoken.answer)
                undrawn = spoken.answer.undrawn
                notes = [*spoken.answer.notes, *([] if undrawn is None else [f"kept tokens: {undrawn}"])]
                said += [f"{spoken.answer.title}: {note}" for note in notes]
            yield values()
    except (ValueError, OSError) as error:  # what the visitor can mend
        said.append(" ".join(str(error).split()))
        yield values()
