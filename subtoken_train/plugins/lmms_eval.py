"""The model ``subtoken`` of lmms-eval (0.6 or newer), found through the entry point ``lmms_eval.models``.

Images are handled as everywhere in this package, in the backbone's own chat format. Answers are greedy; there is one
process. There are no videos, and no tasks of several rounds.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmms_eval.api.model import lmms
from PIL import Image
from tqdm import tqdm

from subtoken_train.datasets.collate import Collator, encode
from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.datasets.records import Record
from subtoken_train.errors import MAX_TOKENS
from subtoken_train.families.images import to_rgb
from subtoken_train.plugins.harness import Runner, greedy_settings, read_arguments
from subtoken_train.types import Turn

ANSWER_TOKENS = 1024
"""Tokens of a generated answer if the task names no number, as in lmms-eval's own models."""
IGNORED = ("image_aspect_ratio", "image_sizes", "use_cache")
"""Settings for other models' image handling and loops."""


@dataclass(frozen=True)
class Question:
    """One prompt of a task, its place (task, split, document), and a function that reads its images when needed."""

    text: str
    place: str
    images: Callable[[], Any] = field(compare=False)


class SubTokenLmms(lmms):  # type: ignore[misc]  # lmms-eval is not installed where types are checked
    """An adapter or a backbone, its cache compressed; ``given`` are ``model_args`` (``ModelArguments``)."""

    is_simple = True

    def __init__(self, **given: Any) -> None:
        super().__init__()
        arguments = read_arguments(given, unavailable=("context",))
        model = arguments.model()
        self.family = model.backbone.family
        if self.family.image_token_id is None:
            raise ValueError(f"{self.family.name} sees no images; use a backbone that does, or lm-eval")
        collator = Collator(self.family, MAX_TOKENS, padding_side="left", generation=True)
        self.runner: Runner[Question] = Runner(
            model, arguments, lambda asked: collator([*map(self._record, asked)]), lambda question: len(question.text)
        )
        if (warning := self.runner.counted.warning()) is not None:
            print(warning)

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Answer greedily, cut at the first of the texts that end answers; in the order of the requests."""
        asked = [
            (self._question(context, to_visual, *place), greedy_settings(given, ANSWER_TOKENS, IGNORED))
            for context, given, to_visual, *place in (request.args for request in requests)
        ]
        with tqdm(total=len(requests), desc="Model responding") as bar:

            def done(i: int, text: str) -> None:
                bar.update()
                self.cache_hook.add_partial("generate_until", requests[i].args[:2], text)

            return self.runner.generate(asked, done)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return each answer's mean loss, as lmms-eval's models do, and whether greedy decoding gives it."""
        asked = []
        for context, target, to_visual, *place in (request.args for request in requests):
            question = self._question(context, to_visual, *place)
            answer = target if isinstance(target, str) else target(self._document(*place))
            images = [to_rgb(image, question.place) for image in question.images() or []]
            prompt = encode(self._record(question), self.family, MAX_TOKENS, images, generation=True)
            whole = encode(self._record(question, answer), self.family, MAX_TOKENS, images)
            asked.append((question, whole.input_ids[len(prompt.input_ids) :]))  # the answer's tokens in the chat format
        with tqdm(total=len(requests), desc="Model responding") as bar:
            scores = self.runner.score(asked, lambda *_: bar.update())
        return [(-logprob / len(ids), greedy) for (logprob, greedy), (_, ids) in zip(scores, asked, strict=True)]

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        """Refuse tasks of several rounds."""
        raise NotImplementedError("tasks of several rounds are not offered by 'subtoken'; choose another task")

    def clean(self) -> None:
        """Say what compression kept; lmms-eval calls this when all requests were answered."""
        print(self.runner.counted)
        super().clean()

    def _document(self, doc_id: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][doc_id]

    def _question(self, text: str, to_visual: Callable[[Any], Any], doc_id: int, task: str, split: str) -> Question:
        return Question(text, f"{task} {split} {doc_id}", lambda: to_visual(self._document(doc_id, task, split)))

    def _record(self, question: Question, answer: str | None = None) -> Record:
        images = list(question.images() or [])
        for image in images:
            if not isinstance(image, Image.Image):
                kind = type(image).__name__
                raise ValueError(f"{question.place}: {kind} is not an image; videos and sound are not supported")
        prompt = question.text if "<image>" in question.text else "<image>\n" * len(images) + question.text
        sources = [EncodedImage(partial(_encoded, image, question.place), question.place) for image in images]
        return Record(question.place, list(sources), [Turn(prompt, answer)])


def _encoded(image: Image.Image, place: str) -> bytes:
    content = io.BytesIO()
    to_rgb(image, place).save(content, "BMP")
    return content.getvalue()
