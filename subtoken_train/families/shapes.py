"""A backbone's shapes as one number, and whether a calibration was made on them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from subtoken_train.calibrations import Calibration
from subtoken_train.families.family import Family
from subtoken_train.functional.quantized import dense_shape
from subtoken_train.reducers.base import Reducer
from subtoken_train.typed import shown


def shapes_digest(family: Family) -> str:
    """``Identity.digest`` of a backbone, in hexadecimal."""
    shapes = {
        # a weight that ZeRO-3 has split is empty, and knows its shape
        name.replace(".base_layer.", "."): list(getattr(parameter, "ds_shape", dense_shape(parameter)))
        for name, parameter in family.model.named_parameters()
        if ".lora_" not in name
    }
    model_type = str(family.model.config.model_type)
    return hashlib.sha256(json.dumps([model_type, sorted(shapes.items())]).encode()).hexdigest()


def check_calibration(calibration: Calibration[Any] | None, family: Family) -> None:
    """Raise a worded ``ValueError`` where a calibration meets another backbone than its own; None fits all."""
    if calibration is not None:
        shape = family.shape
        calibration.check_backbone(shapes_digest(family), shape.num_layers, shape.num_kv_heads, shape.head_dim)


def check_reducer(reducer: Reducer, family: Family) -> None:
    """Raise a worded ``ValueError`` where a reducer does not fit a backbone, or its calibration is another one's."""
    if not isinstance(reducer, Reducer):
        raise ValueError(f"reducer is {shown(reducer)}; pass an object, for instance build_reducer('fastv', 0.25)")
    tower = family.tower_statistics(family.model.config)
    reducer.check_fit(family.name, family.image_token_id is not None, family.shape.num_layers, tower)
    check_calibration(reducer.calibrated, family)
