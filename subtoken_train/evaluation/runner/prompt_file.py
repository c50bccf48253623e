"""A file of prompts, answered: JSON lines in, JSON lines out, on the records of an evaluation.

    {"id": "a", "prompt": "What is this?", "image": "cat.png"}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is this?"}]}

``id`` (default: the line's number), ``image`` or ``images`` (paths relative to the file) are optional. The answers are
the records of one arm on one task in a folder beside the output, which is written from them when the run ends, however
it ends: a stopped run goes on where it was, and lines may be added to the file. Answers are greedy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from subtoken_train.artifact.hub import adapter_folder
from subtoken_train.datasets.image_sources import find_image
from subtoken_train.errors import at_place, refuse
from subtoken_train.evaluation.metrics.short_answers import Answered
from subtoken_train.evaluation.runner.arms import describe_arm, load_arm
from subtoken_train.evaluation.runner.cell import ONE, Progress, alone, finished, make_cell, run_cell, write_manifest
from subtoken_train.evaluation.tasks.local import OwnLines, Paths, are_placed, listed
from subtoken_train.evaluation.tasks.task import Modality, Sample
from subtoken_train.families.chat_template import checked_variables
from subtoken_train.families.literal_marks import IMAGE_MARK
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.pool import ModelPool, family_named
from subtoken_train.inference.prompt_inputs import read_messages
from subtoken_train.inference.text_prompts import as_turns, check_raw
from subtoken_train.outputs import write_whole


@dataclass(frozen=True)
class PromptLine:
    """A line of a file of prompts: ``prompt`` or ``messages``, ``image`` or ``images``."""

    prompt: str | None = None
    messages: list[Any] | None = None
    image: Paths = None
    images: Paths = None
    id: str | int | None = None


@dataclass
class PromptFile(OwnLines):
    """The lines of a file, nothing to score; ``chat``: asked in a chat template, with these variables.

    For a model that sees some lines may have no image; of a text, what the default split says may be compressed.
    """

    modality: Modality = field(default="text", kw_only=True)  # type: ignore[misc]
    max_new_tokens: int = 64
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    name = "prompts"
    primary = "answered"
    scored_by = Answered
    where = 'write a .jsonl file with one prompt a line, {"id": "a", "prompt": "What is this?", "image": "cat.png"}'
    line = PromptLine

    @property
    def options(self) -> dict[str, Any]:
        written = {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        return {"max_new_tokens": self.max_new_tokens, **({"chat": True} if self.chat else {}), **written}

    def sample(self, line: PromptLine, name: str, folder: Path) -> Sample:
        for first, second in (("prompt", "messages"), ("image", "images")):
            if getattr(line, first) is not None and getattr(line, second) is not None:
                raise ValueError(f"{first} and {second} are given; write one of them")
        prompt, names = line.prompt if line.messages is None else line.messages, listed(line.image or line.images)
        refuse((prompt is None, "there is no prompt; write prompt or messages"))
        messages, _ = read_messages(prompt)
        images = self.images(names, folder)
        if missing := [image for image in images if not find_image(image).is_file()]:
            raise ValueError(f"image {missing[0]} is missing; check the path")
        sample = Sample(
            name,
            prompt if isinstance(prompt, str) else json.dumps(prompt),
            {"images": names} if line.messages is None else {"images": names, "messages": line.messages},
            images,
            max_new_tokens=self.max_new_tokens,
            kind="prompt",
        )
        if self.modality == "text":
            asked = tuple(messages) if self.chat or line.messages is not None else ()
            return replace(sample, messages=asked, variables=self.chat_template_kwargs)
        turns = as_turns(messages)
        if not are_placed([turn.prompt for turn in turns], len(names)):  # then the images stand in front
            turns[0] = replace(turns[0], prompt=f"{IMAGE_MARK}\n" * len(names) + turns[0].prompt)
        *earlier, last = turns
        refuse((last.answer is not None, "the last message is the assistant's; end with what the user says"))
        return replace(sample, prompt=last.prompt, earlier=tuple(earlier))


def answer_file(
    prompts: Path,
    output: Path,
    spec: ArmSpec,
    *,
    device: str | None = None,
    batch_size: int = 1,
    max_new_tokens: int = 64,
    images_outside_folder: bool = False,
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Answer what a file lacks, count all answers; records: ``OUTPUT.records``; texts in a template unless ``raw``."""
    folder = output.with_name(f"{output.name}.records")
    if output.exists() and not folder.is_dir():
        raise ValueError(f"{output} exists but has no {folder.name} to continue from; name another --output")
    path = str(spec.backbone) if spec.adapter is None else adapter_folder(spec.adapter)
    sees = family_named(path, None if spec.adapter is None else spec.backbone).sees_images
    modality: Modality = "image" if sees else "text"
    task = PromptFile(max_new_tokens, images_outside_folder, modality=modality, source=prompts)
    samples = task.samples()  # mistakes of the file show before weights are read
    if raw and (sees or any(sample.messages for sample in samples)):
        raise ValueError("raw prompts are texts for a language model to continue: no images, no messages")
    pool = ModelPool(device)
    arm = describe_arm(spec, pool)
    with alone(folder, ONE):
        backbone = load_arm(spec, pool)
        check_raw(backbone.family, raw)
        reads = not sees and backbone.family.tokenizer.chat_template and not raw
        variables = checked_variables(backbone.family.tokenizer if reads else None, chat_template_kwargs)
        if reads:
            task = replace(task, chat=True, chat_template_kwargs=variables)
            samples = task.samples()
        samples = [replace(sample, keep_space=raw) for sample in samples]
        instead = f"name another --output, or remove it and {folder.name}"
        with at_place(f"{output} was begun with other prompts or settings (", f"); {instead}"):
            write_manifest(arm, task, samples, folder, backbone.family, batch_size)
        try:
            run_cell(make_cell(arm, task, samples, backbone.family), folder, backbone, batch_size, ONE, progress)
        finally:
            found = finished(folder, samples)
            lines = [
                {
                    "id": record.id,
                    "answer": str(record.prediction).rstrip(),
                    "tokens": record.new_tokens,
                    "seconds": round(record.prefill_seconds + record.decode_seconds, 5),
                    "kv_bytes": record.kv_bytes,
                    "dense_kv_bytes": record.dense_kv_bytes,
                }
                for record in (found[sample.id] for sample in samples if sample.id in found)
            ]
            if lines:
                write_whole(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return len(found)
