"""How many tokens one's own records take in an embedded backbone, whose images all cost the same."""

from __future__ import annotations

from PIL import Image

from subtoken_train.cli.init_backbones import Chosen
from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.own.own_data import OwnData
from subtoken_train.datasets.record_format import image_names, record_id
from subtoken_train.datasets.records import Record, turns_of
from subtoken_train.errors import MAX_TOKENS
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, with_processor
from subtoken_train.families.positions import position_bound


def longest_record(data: OwnData, chosen: Chosen) -> tuple[int, int]:
    """Tokens of the longest record, images included, and the positions of the embedded backbone; no image is opened.

    Raises:
        ValueError: a record cannot be encoded, or cannot be trained on because what must stay whole has more tokens
            than the backbone has positions.
    """
    config = BackboneConfig(chosen.path)
    family = with_processor(layout_family(config), config)
    positions, longest, blank = position_bound(family.decoder.config) or MAX_TOKENS, 0, Image.new("RGB", (1, 1))
    for rows in data.splits.values():
        for number, row in enumerate(rows):
            name = record_id(row, number)
            sample = encode(Record(name, [], turns_of(row)), family, MAX_TOKENS, [blank] * len(image_names(row)))
            if sample.needed > positions:
                raise ValueError(
                    f"record {name!r} takes {sample.needed:,} tokens up to its answer, and {chosen.path} has "
                    f"{positions:,} positions; shorten it, drop it, or take another --backbone"
                )
            longest = max(longest, len(sample.input_ids))
    return longest, positions
