"""Tensors of a packed cache that would send attention elsewhere are refused, whatever else is right."""

import pytest
import torch

from subtoken_train.cache import packed_record
from subtoken_train.cache.packed_record import PackedShape, check_pages, check_rows, checked_routed
from subtoken_train.kernels.formats import MODEL, Payload
from subtoken_train.kernels.storage import Block, BlockPart, PageIndex, pack_bits, stored_flags
from tests.inference.test_asking import asking, contexts_of
from tests.support.generation_cells import PLAIN
from tests.support.refusals import refuses
from tests.support.sampling import cells

CUT = {"family": "llama", "reducer": "none", "selector": "linear", "eviction": "own_sets"}
CELLS = {
    "routed": CUT | {"keys": "cut"},
    "turned": CUT | {"keys": "turned"},
    "window": {"family": "mistral_window", **PLAIN},
    "pages": {"family": "llama", **PLAIN, "eviction": "read_pages"},
    "mrope": {"family": "qwen2_5_vl", **PLAIN},
}
ROWS = [[[0, 1]], [[0, 1], [1, 2]], [[1, 0], [2]], [[0, 1], [3]], [[0, 1], [-1]], [[0], [1, 2], [0]]]
PAGES = [(0, 1, 0), (-1, 1, 0), (9, 1, 0), (2, -1, 0), (2, 2, 0), (2, 1, 2)]


@pytest.fixture(scope="module", params=cells(CELLS, every=2))
def packed(request):
    model = asking(**CELLS[request.param])
    model.ask(contexts_of(model), [[], []])
    family = model.backbone.family
    width = family.shape.num_kv_heads, family.shape.head_dim, torch.float32, MODEL
    axes = 3 if family.tower_positions == "mrope" else 1
    mirrors = 6 if CELLS[request.param].get("keys") == "turned" else 0  # 10 of 16 channels stay
    return *packed_record.packed_tensors(model.cache.packed), PackedShape(2, *width, family.windows, axes, mirrors)


def read(record, tensors, shape):
    return packed_record.packed_cache(record, tensors, shape, [torch.device("cpu")] * len(shape.windows))


def test_every_number_that_points_is_looked_at(packed):
    """Far up and far down, at the first and the last place of every tensor of whole numbers."""
    record, tensors, shape = packed
    pointing = [name for name, tensor in tensors.items() if tensor.dtype in (torch.int16, torch.int32, torch.int64)]
    wrong = [(name, at, value) for name in pointing if tensors[name].numel() for at in (0, -1) for value in (-1, 2**30)]
    assert wrong
    for name, place, value in wrong:
        spoilt = tensors[name].clone()
        spoilt.view(-1)[place] = value
        refuses(r"\w", read, record, {**tensors, name: spoilt}, shape)


def test_it_is_read_back_and_no_tensor_can_be_left_out_or_be_another(packed):
    record, tensors, shape = packed
    again, found = packed_record.packed_tensors(read(record, tensors, shape))
    assert again == record
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        rest = {key: value for key, value in tensors.items() if key != name}
        refuses(f"tensor {name} is missing", read, record, rest, shape)
        refuses(rf"{name.rpartition('.')[0]}|must be", read, record, {**tensors, name: tensor[None]}, shape)
        refuses(f"tensor {name} is of float64", read, record, {**tensors, name: tensor.double()}, shape)


def part(rows=2, heads=2, entries=5):
    payload = Payload(torch.zeros(rows, heads, entries, 4), None, torch.float32, MODEL)
    return BlockPart(payload, payload)


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rows_are_each_there_once(rows):
    blocks = [Block(torch.tensor(own), [part(len(own))]) for own in rows]
    refuses("do not hold each of the 3 rows once", check_rows, "layer 0", blocks, 3, 2)


FLAGS = torch.rand(2, 4, 11, generator=torch.Generator().manual_seed(0)) < 0.4
PIECE_BIT = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3], dtype=torch.int32)
OF_PIECES = FLAGS.index_select(1, PIECE_BIT)
STORED = int(OF_PIECES.sum())
OFFSETS = (OF_PIECES.sum(-1).flatten().cumsum(0) - OF_PIECES.sum(-1).flatten()).int()
ENTRIES = OF_PIECES.nonzero()
HEADS = ENTRIES[:, 0] * 2 + ENTRIES[:, 1] // 4
INDICES = {"bits": pack_bits(FLAGS), "places": (HEADS * 11 + ENTRIES[:, 2]).int()}  # of version 0.4 and before


def routed(index, offsets=OFFSETS, piece_bit=PIECE_BIT, stored=STORED, entries=11):
    pieces = Payload(torch.zeros(stored, 2), None, torch.float32, MODEL)
    return checked_routed("0.0.0", index, pieces, offsets, piece_bit, (2, 2, entries))


@pytest.mark.parametrize("form", INDICES)
def test_an_index_finds_each_piece_once(form):
    index = INDICES[form]
    assert torch.equal(stored_flags(routed(index)), OF_PIECES)
    swapped = index.clone()
    swapped.view(-1)[[0, 1]] = index.view(-1)[[1, 0]]
    wrong = [{"index": swapped}, {"index": index[:-1]}, {"offsets": OFFSETS.flip(0)}, {"entries": 3}]
    wrong += [{"stored": STORED + 1}, {"stored": STORED - 1}]
    if form == "bits":  # after the last entry
        wrong += [{"piece_bit": PIECE_BIT + 1}, {"piece_bit": PIECE_BIT - 1}]
        wrong.append({"index": index | torch.tensor([0, 0x80], dtype=torch.uint8)})
    for settings in wrong:
        refuses(r"0\.0\.0", routed, **{"index": index} | settings)


def test_pieces_without_an_index_are_stored_by_all_entries_or_by_none():
    bounds, piece_bit = torch.tensor([0, 11, 11, 22], dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    routed(None, bounds, piece_bit, 22)
    with pytest.raises(ValueError, match=r"0\.0\.0: pieces that some entries store and others do not need an index"):
        routed(None, bounds - torch.tensor([0, 1, 0, 0]), piece_bit, 22)


@pytest.mark.parametrize(("size", "count", "forced"), PAGES)
def test_pages_are_those_of_the_entries(size, count, forced):
    low, marks = torch.zeros(2, 2, 2, 4), torch.zeros(2, 2, dtype=torch.bool)
    check_pages("0.0", PageIndex(2, 1, low, low, marks), [part()])
    marks[0, :forced] = True
    with pytest.raises(ValueError, match="its page index does not fit its entries"):
        check_pages("0.0", PageIndex(size, count, low, low, marks), [part()])


def test_a_reader_takes_each_tensor_once():
    reader, of = packed_record._CacheReader({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, None), (torch.float32,)
    reader.take("a", of, 2, None)
    for call, words in (
        (lambda: reader.take("a", of, 2, None), "tensor a is missing"),
        (reader.check_all_taken, r"1 tensors are not expected: \['b'\]"),
        (lambda: reader.take("b", of, None, 4), r"tensor b has shape \[1\]; it must be \[any, 4\]"),
    ):
        refuses(words, call)
