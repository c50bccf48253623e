"""Attention on a CPU is attention over dense keys and values, in C or not; which path attends, and what is said."""

import json
import os
import platform
import subprocess
import sys
import warnings
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.cli.main import main
from subtoken_train.errors import SubTokenWarning
from subtoken_train.functional.causal_attention import attention_received
from subtoken_train.kernels import choice, formats, native
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.cpu import packed_attention
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.storage import CacheWindow, Tail
from tests.support.packing import DRAWN, SETS, dense, masked_attention, states
from tests.support.refusals import refuses

needs_compiler = pytest.mark.skipif(choice.compiler() is None, reason="there is no C compiler")
SHAPES = [
    (3, 3, 64, 16),  # SmolLM2's: pieces of four channels
    (2, 7, 64, 16),  # Qwen2.5-0.5B's
    (2, 1, 128, 4),  # pieces of a whole head, one query row
    (3, 5, 24, 3),
    (2, 3, 6, 4),  # odd channels beside whole vectors
]
"""(key-value heads, query heads of each, width, S)."""

build = native.library.__wrapped__


@lru_cache
def plain_library():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", ([],))
        return build()


@contextmanager
def machine(threads, plain):
    """So many threads share the smallest work; ``plain``: built for every machine, without this one's instructions."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "SPLIT", 1)
            if plain:
                patch.setattr(native, "library", plain_library)
            yield
    finally:
        torch.set_num_threads(before)


@needs_compiler
@given(
    seed=st.integers(0, 999),
    sets=st.sampled_from(SETS),
    shape=st.sampled_from(SHAPES),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    routed=st.booleans(),
    threads=st.sampled_from([1, 1, 1, 3]),
    length=st.sampled_from([40, 40, 600]),
    plain=st.booleans(),
    bits=st.sampled_from([0, 8, 4]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
)
def test_one_token_attends_as_in_the_reference(seed, sets, shape, share, routed, threads, length, plain, bits, dtype):
    """Room behind the tail is not read, and threads share a head's channels."""
    kv_heads, query_heads, width, num_groups = shape
    groups, bits = num_groups if routed else None, bits if width % 8 == 0 else 0  # no odd pieces in int4
    blocks = dense(seed, 2, kv_heads, length, width, groups, share, sets, bits=bits, dtype=dtype).layer().blocks
    keys, values = (states(seed + i, 2, kv_heads, 7, width).to(dtype) for i in (1, 2))
    query = states(seed + 3, 2, kv_heads * query_heads, 1, width).to(dtype)
    expected = reference_attention(query, blocks, Tail(keys[:, :, :5], values[:, :, :5], 5), width**-0.5)
    keys[:, :, 5:] = values[:, :, 5:] = torch.nan
    tail = Tail(keys, values, 5)
    assert native.serves(query, blocks, tail)
    with machine(threads, plain):
        got = native.native_attention(query, {0: (blocks, tail)}, width**-0.5)
    assert got.dtype == dtype
    assert (got - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2**-6 * expected.abs().max())


@needs_compiler
@given(
    seed=st.integers(0, 999),
    shape=st.sampled_from([(1, 3, 64), (2, 1, 9)]),
    length=st.sampled_from([1, 40, 130]),
    threads=st.sampled_from([1, 3]),
    plain=st.booleans(),
    shares=st.tuples(*[st.sampled_from([0.0, 0.4, 1.0])] * 3),
    largest=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_keys_receive_what_they_receive_in_torch(seed, shape, length, threads, plain, shares, largest, dtype):
    """Rows of one tile and of several blocks, marked or not; some keys are hidden; queries are of the last rows."""
    (kv_heads, query_heads, width), offset = shape, int(shares[2] * (length - 1))
    query = 3 * states(seed, 2, length - offset, kv_heads * query_heads, width).to(dtype).transpose(1, 2)
    key = states(seed + 1, 2, length, kv_heads, width).to(dtype).transpose(1, 2)
    rows, keys = (states(seed + i, 2, 1, length, 1).flatten(1).sigmoid() <= shares[i] for i in (0, 1))
    weight = states(seed, 2, 1, length, 1).flatten(1)[:, offset:].exp() if plain else None
    given = query, key, rows[:, offset:], keys, width**-0.5, offset, None, weight, largest
    with machine(threads, plain):
        found = native.received(*given)
    expected = attention_received(*given)
    assert (found - expected).abs().max() < 1e-5 * expected.max().clamp(min=1)
    assert not found[~keys[:, None].expand_as(found)].any()


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cut", [1, 2**17])
def test_caches_of_unlike_lengths_and_formats_attend_in_one_call(threads, cut, monkeypatch):
    """Each as it does alone, two of one prompt with tails of their own among them; a row of no cache is zeros."""
    made = [(40, None, 0, 0.3), (700, 16, 8, 0.3), (45, None, 4, 0.0), (600, 16, 0, 1.0)]
    held = [
        dense(seed, 1, 3, length, 64, groups, share, SETS[seed % len(SETS)], bits=bits).layer().blocks
        for seed, (length, groups, bits, share) in enumerate(made)
    ]
    rooms = [[states(seed + i, 1, 3, 9, 64) for i in (10, 20)] for seed in range(5)]
    tails = [Tail(*room, length) for room, length in zip(rooms, (5, 1, 9, 2, 3), strict=True)]
    pairs = list(zip([*held, held[0]], tails, strict=True))
    query = states(3, 6, 9, 1, 64)
    with machine(threads, plain=False):
        monkeypatch.setattr(native, "SPLIT", cut)
        got = native.native_attention(query, {place + (place > 2): pair for place, pair in enumerate(pairs)}, 0.125)
    for row, (blocks, tail) in zip([0, 1, 2, 4, 5], pairs, strict=True):
        assert (got[row : row + 1] - reference_attention(query[row : row + 1], blocks, tail, 0.125)).abs().max() < 1e-5
    assert not got[3].any()


@needs_compiler
@given(
    seed=st.integers(0, 999),
    sizes=st.sampled_from([(2, 1, 40, 64), (1, 3, 17, 24), (3, 2, 1, 6), (1, 2, 0, 64)]),
    threads=st.sampled_from([1, 3]),
    plain=st.booleans(),
    fed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_keys_are_rounded_as_in_torch(seed, sizes, threads, plain, fed, dtype):
    form, width = formats.FORMATS["int4_rotated"], sizes[-1]
    keys, owed = states(seed, *sizes).to(dtype), states(seed + 1, *sizes[:2], width, width).tril(-1) / width**0.5
    given = keys if seed % 4 else 1.4e5 * keys, owed + torch.eye(width) if fed else None  # some need too large a scale
    with machine(threads, plain):
        found = native.stored_keys(form, *given)
    expected = form.store_keys(*given)
    assert (found.data.shape, found.dtype) == (expected.data.shape, dtype)
    assert torch.equal(found.scale, expected.scale)
    assert (found.data != expected.data).float().sum() <= 0.01 * found.data.numel()  # a sum that ties


@needs_compiler
@pytest.mark.parametrize("flags", native.FLAGS, ids=" ".join)
def test_it_compiles_wherever_the_compiler_knows_the_flags(tmp_path, flags):
    """Else a slower build takes the place of one that does not compile, and nobody hears of it."""
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing;\n")
    for source in (empty, native.SOURCE):
        command = [choice.compiler(), "-O3", *flags, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "built.so")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if source == empty and run.returncode:
            pytest.skip(f"this compiler does not know {' '.join(flags)}")
        assert run.returncode == 0, run.stderr


@pytest.fixture
def compiled_by(monkeypatch):
    def use(name: str) -> None:
        monkeypatch.setenv("CC", name)
        monkeypatch.setattr(choice, "_choices", {})
        monkeypatch.setattr(native, "library", lru_cache(native.library.__wrapped__))

    return use


def attended(query) -> torch.Tensor:
    layer = dense(2, 1, 2, 20, 8, 4, 0.3).layer()
    layer.update(*(states(i, 1, 2, 2, 8) for i in (1, 2)))
    return layer.attend(query, 1.0)


def test_without_a_compiler_torch_does_it_and_the_choice_says_so(compiled_by):
    query = states(3, 1, 2, 1, 8)
    with_it = attended(query)
    compiled_by("no-such-compiler")
    assert "no C compiler is here" in str(choice.choose_kernel("cpu"))
    assert (attended(query) - with_it).abs().max() < 1e-5


def test_a_compiler_that_fails_is_named_once(compiled_by):
    compiled_by("false")
    query = states(3, 1, 2, 1, 8)
    with pytest.warns(SubTokenWarning, match=r"decoding is slower: .*false did not compile attention.c"):
        attended(query)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attended(query)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    for name in (choice.VARIABLE, "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    choice._choices.clear()
    yield
    choice._choices.clear()


@pytest.mark.parametrize(
    ("device", "installed", "path", "why"),
    [
        ("cpu", True, "cpu", "device is cpu"),
        ("mps", True, "cpu", "device is mps"),
        ("cuda", True, "triton", "device is cuda"),
        ("cuda", False, "cpu", "not installed"),
    ],
)
def test_the_device_decides(device, installed, path, why, monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: name if installed else None)
    chosen = choose_kernel(device)
    assert (chosen.path, chosen.forced) == (path, False)
    assert why in str(chosen)


def test_a_forced_path_is_taken_and_said(monkeypatch, capsys):
    monkeypatch.setenv(choice.VARIABLE, "reference")
    assert choose_kernel("cuda").path == "reference"
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernel"] == "reference (SUBTOKEN_KERNEL says so)"


@pytest.mark.parametrize(
    ("forced", "installed", "words"),
    [
        ("fast", True, "use one of reference, cpu, triton"),
        ("triton", False, "triton is not installed"),
        ("triton", True, "lies on 'cpu'"),
    ],
)
def test_a_forced_path_that_cannot_run_is_one_message(forced, installed, words, monkeypatch, capsys):
    monkeypatch.setenv(choice.VARIABLE, forced)
    monkeypatch.setattr(choice, "find_spec", lambda name: name if installed else None)
    refuses(words, choose_kernel, "cpu")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["env"]) == 2
    assert words in capsys.readouterr().err


FEW = [
    (1, 1, 8, 4),
    (2, 1, 8, 4),  # a group is half a head
    (2, 3, 8, 1),  # one group of all heads
    (4, 1, 8, 2),  # a group is two heads
    (3, 2, 16, 2),  # a group is one and a half heads
    (2, 8, 8, 8),  # many query rows a head
]


def compare(state, query_heads: int, tail: int, new: int, seed: int, bound: float) -> None:
    kv_heads, width, dtype = state.key.shape[1], state.key.shape[-1], state.key.dtype
    layer = state.layer()
    tail_key, tail_value = (states(seed + i, len(state.key), kv_heads, tail, width, dtype) for i in (1, 2))
    query = states(seed + 3, len(state.key), kv_heads * query_heads, new, width, dtype)
    layer.update(tail_key, tail_value)
    expected = masked_attention(state, query, tail_key, tail_value)
    for path, in_c in (("cpu", True), ("cpu", False), ("reference", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SUBTOKEN_KERNEL", path)
            if not in_c:
                patch.setattr(native, "library", lambda: None)
            got = layer.attend(query, width**-0.5)
        assert got.dtype == dtype
        assert (got.float() - expected).abs().max() < bound


@settings(max_examples=120, deadline=None)
@given(
    **DRAWN,
    shape=st.sampled_from(FEW),
    routed=st.booleans(),
    new=st.sampled_from([1, 1, 3]),
    earlier=st.sampled_from([0, 5]),
    fill=st.sampled_from(["none", "mean", "learned"]),
)
def test_packed_attention_is_masked_dense_attention(seed, sets, layout, shape, share, routed, new, earlier, fill):
    kv_heads, query_heads, width, num_groups = shape
    state = dense(seed, 3, kv_heads, 21, width, num_groups if routed else None, share, sets, layout, fill=fill)
    compare(state, query_heads, earlier + new, new, seed, 1e-5)


@pytest.mark.parametrize(
    ("sets", "query_heads", "fill"), zip(SETS, [2, 8, 2], ["none", "mean", "learned"], strict=True)
)
def test_bf16(sets, query_heads, fill):
    compare(dense(3, sets=sets, dtype=torch.bfloat16, fill=fill), query_heads, 4, 2, 3, 0.05)


@given(
    **DRAWN,
    shape=st.sampled_from([(1, 1, 8, 4), (2, 1, 8, 4), (2, 3, 8, 1), (4, 2, 8, 2), (2, 8, 8, 4)]),
    bits=st.sampled_from([0, 8, 4]),
    chunk=st.sampled_from([formats.CHUNK, 200, 1]),
    new=st.sampled_from([1, 1, 3]),
    padded=st.booleans(),
    room=st.sampled_from([0, 4]),
    window=st.sampled_from([None, 9]),
)
def test_padded_tails_rooms_and_rounded_pieces(
    seed, sets, layout, shape, share, bits, chunk, new, padded, room, window
):
    """The two paths agree where the dense comparison does not reach; what lies behind the tail's end is not read."""
    kv_heads, query_heads, width, num_groups = shape
    blocks, reach = dense(seed, 3, kv_heads, 21, width, num_groups, share, sets, layout, bits).layer().blocks, None
    length, generator = 5 + new, torch.Generator().manual_seed(seed)
    keys, values = (states(seed + i, 3, kv_heads, length + room, width) for i in (1, 2))
    query = states(seed + 3, 3, kv_heads * query_heads, new, width)
    start = torch.randint(0, 6, (3,), generator=generator) if padded else None
    if window is not None:
        for part in (part for block in blocks for part in block.parts):
            part.position_RM = torch.randint(0, 21, part.keys.data.shape[::2][:2], generator=generator).int()
        reach = CacheWindow(window, torch.full((3,), 21))
    written = torch.tensor([length]) if room else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK", chunk)
        tail = Tail(keys, values, length, start, written)
        got = packed_attention(query, blocks, tail, width**-0.5, reach)
    tail = Tail(keys[:, :, :length], values[:, :, :length], length, start)
    assert (got - reference_attention(query, blocks, tail, width**-0.5, reach)).abs().max() < 1e-5


FAULTS = """
import resource, torch
from subtoken_train.kernels.native import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        layer = [torch.ones(2**22) for _ in range(6)]  # 16 MB each
        del layer
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory() or faults(), faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps freed memory as it likes")
def test_the_next_layer_faults_in_no_pages_again_unless_the_user_says_otherwise():
    there, after = {key: value for key, value in os.environ.items() if "MALLOC" not in key and "GLIBC" not in key}, []
    for own in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"}):
        run = subprocess.run(
            [sys.executable, "-c", FAULTS], env=there | own, capture_output=True, text=True, check=True
        )
        after.append(int(run.stdout.split()[1]))
    assert after[0] < after[1] / 50
