"""The model of lmms-eval against a small stand-in for its base class: lmms-eval cannot live beside CPU torch."""

import abc
import importlib
import io
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.records import Record
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.plugins import manifest
from subtoken_train.types import Turn
from tests.support.refusals import refuses

MODULE = "subtoken_train.plugins.lmms_eval"
SETTINGS = {"max_new_tokens": 4, "temperature": 0, "do_sample": False, "image_aspect_ratio": "pad", "until": ["</s>"]}


class StandIn(abc.ABC):
    """What lmms-eval 0.6 to 0.7 gives its models."""

    is_simple = True

    def __init__(self):
        self.task_dict = {}
        self.kept = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *args: self.kept.append(args))

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @abc.abstractmethod
    def generate_until_multi_round(self, requests): ...

    def clean(self):
        self.task_dict = {}


@pytest.fixture
def plugin(monkeypatch):
    base = ModuleType("lmms_eval.api.model")
    base.lmms = StandIn
    for name in ("lmms_eval", "lmms_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    before = sys.modules.pop(MODULE, None)
    yield importlib.import_module(MODULE)
    del sys.modules[MODULE]
    if before is not None:
        sys.modules[MODULE] = before


def picture(seed, height=90, width=70):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


DOCUMENTS = [
    {"text": "What is on the left?", "images": [picture(0)]},
    {"text": "Is there a red digit in this image, or is there none at all?", "images": [picture(1, 40, 120)]},
    {"text": "Compare <image> with <image>", "images": [picture(2), picture(3)]},
    {"text": "No picture here.", "images": []}, {"text": "Which digit?", "images": [picture(4, 200, 30)]},
]  # fmt: skip


def made(plugin, batch_size=1, **given):
    model = plugin.SubTokenLmms(device="cpu", batch_size=batch_size, **given)
    model.task_dict = {"scenes": {"test": DOCUMENTS}}
    return model


def request(index, second, documents=DOCUMENTS):
    return SimpleNamespace(args=(documents[index]["text"], second, lambda doc: doc["images"], index, "scenes", "test"))


def placed(document):
    text = document["text"]
    return text if "<image>" in text else "<image>\n" * len(document["images"]) + text


@pytest.mark.filterwarnings("ignore:the prompt has no image")
def test_answers_come_in_order_whatever_the_batch(plugin, vlm_adapter, capsys):
    asked = [request(i, {**SETTINGS, "max_new_tokens": 3 + i % 2}) for i in (3, 0, 4, 2, 1)]
    single = SubTokenModel.from_pretrained(vlm_adapter)
    wanted = []
    for each in asked:
        _, settings, _, index, *_ = each.args
        inputs = single.inputs(placed(DOCUMENTS[index]), DOCUMENTS[index]["images"])
        out = single.generate(**inputs, max_new_tokens=settings["max_new_tokens"], do_sample=False)
        text = single.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        wanted.append(text)
    for size in (1, 8):
        model = made(plugin, size, adapter=str(vlm_adapter))
        assert model.generate_until(asked) == wanted
        assert sorted(text for _, _, text in model.kept) == sorted(wanted)
        assert model.runner.counted.prompts == 5
        assert 0.1 < model.runner.counted.facts["region_fraction_measured"] < 0.25
        capsys.readouterr()
        model.clean()
        assert "subtoken: 5 prompts; fastv, S4K1 linear" in capsys.readouterr().out
        assert model.task_dict == {}


def test_losses_are_those_of_the_whole_conversation(plugin, vlm_adapter):
    backbone = str(vlm_adapter.parent / "backbone")
    family = SubTokenModel.from_pretrained(backbone).backbone.family
    answers = ["yes", "a red digit on the left", "no"]
    asked = [request(i, answer) for i in (1, 0, 2, 3) for answer in answers]
    asked.append(request(4, lambda document: f"it is {len(document['images'])}"))
    wanted = []
    for each in asked:
        _, answer, _, index, *_ = each.args
        document = DOCUMENTS[index]
        answer = answer if isinstance(answer, str) else "it is 1"
        sample = encode(Record("r", [], [Turn(placed(document), answer)]), family, 2048, document["images"])
        pixels = family.process_images(document["images"])[0] if document["images"] else None
        ids, labels = torch.tensor([sample.input_ids]), torch.tensor(sample.labels)
        with torch.no_grad():
            logits = family.model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).logits[0]
        wanted.append(cross_entropy(logits[:-1], labels[1:]).item())
    for size in (1, 4):
        model = made(plugin, size, backbone=backbone)
        assert [loss for loss, _ in model.loglikelihood(asked)] == pytest.approx(wanted, abs=1e-4)
        assert model.runner.counted.prompts == 5  # one pass for the three answers of a question


def test_what_is_not_offered_is_worded_and_a_late_eviction_is_warned_about(plugin, vlm_adapter, text_adapter, capsys):
    model = made(plugin, adapter=str(vlm_adapter), eviction="snapkv", eviction_keep=0.5)
    assert "cannot change the first token" in capsys.readouterr().out
    with pytest.raises(NotImplementedError, match="several rounds"):
        model.generate_until_multi_round([])
    refuses("answers are greedy", model.generate_until, [request(0, {"temperature": 0.7, "do_sample": True})])
    clip = [{"text": "What happens?", "images": ["clip.mp4"]}]
    model.task_dict["scenes"]["test"] = clip
    refuses("scenes test 0: str is not an image", model.generate_until, [request(0, SETTINGS, clip)])
    refuses("unknown model argument 'context'", made, plugin, adapter=str(vlm_adapter), context=3)
    refuses("sees no images", made, plugin, backbone=str(text_adapter.parent / "backbone"))


def test_a_picture_is_turned_as_its_file_says(plugin):
    exif, content, upright = Image.Exif(), io.BytesIO(), picture(5)
    exif[274] = 8
    upright.transpose(Image.Transpose.ROTATE_270).save(content, "PNG", exif=exif)
    with Image.open(content) as image:
        encoded = plugin._encoded(image, "scenes test 0")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded))), np.asarray(upright))


PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_the_entry_point_names_a_class_that_is_there(monkeypatch):
    registry = ModuleType("lmms_eval.models.registry_v2")
    registry.ModelManifest = namedtuple("StandIn", "model_id simple_class_path")
    for module in (ModuleType("lmms_eval"), ModuleType("lmms_eval.models"), registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    written = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["lmms_eval.models"]["subtoken"]
    module, _, function = written.partition(":")
    made = getattr(importlib.import_module(module), function)()
    folder, _, name = made.simple_class_path.rpartition(".")
    assert made.model_id == "subtoken"
    assert f"class {name}(lmms)" in (PROJECT.parent / (folder.replace(".", "/") + ".py")).read_text()


def test_lmms_eval_itself_takes_it():
    registry = pytest.importorskip("lmms_eval.models.registry_v2").ModelRegistryV2()
    registry.register_manifest(manifest())
    assert registry.get_model_class("subtoken").is_simple
