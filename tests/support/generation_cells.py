"""Models of the cells of packed = truth behind ``SubTokenModel``, and what a processor would give them."""

from __future__ import annotations

from dataclasses import replace

from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Batch, Region
from tests.support.truth_cells import backbone_of, compression_of
from tests.support.truth_models import CONTEXT, prompts

CELL = {
    "family": "llava_gqa",
    "reducer": "fastv_embeds",
    "selector": "linear",
    "layout": "contiguous",
    "groups": "8/3",
    "budget": "per_token",
    "eviction": "own_sets",
    "batch": "three_left",
    "precision": "fp32",
}
PLAIN = {"reducer": "none", "selector": "none", "eviction": "none"}


def model_of(**levels: str) -> SubTokenModel:
    cell = CELL | levels
    if cell["family"] == "llama" and cell["reducer"] != "none":
        cell["reducer"] = "quest"
    backbone = backbone_of(cell)
    return SubTokenModel.around(backbone, compression_of(cell))


def inputs_of(model: SubTokenModel, kind: str = "three", pad_left: bool = True) -> dict:
    """What a processor would return."""
    family = model.backbone.family
    batch = prompts(family, kind, pad_left)
    inputs = {"input_ids": batch.input_ids_BN, "attention_mask": (batch.regions_BN != Region.PADDING).long()}
    if batch.pixel_values is not None:
        inputs |= family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    return inputs


def batch_of(model: SubTokenModel, inputs: dict) -> Batch:
    """The batch that was run last, with its pixels again."""
    assert model.last.batch.pixel_values is None
    given = batch_from_inputs(
        model.backbone.family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, context_length=None
    )
    return replace(model.last.batch, pixel_values=given.pixel_values)


def settings_of(model: SubTokenModel) -> dict:
    settings = {"pad_token_id": model.tokenizer.pad_token_id}
    return settings | ({"context_length": CONTEXT} if model.backbone.family.image_token_id is None else {})
