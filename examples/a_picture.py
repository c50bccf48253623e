"""Ask a trained router about a picture, and see what its cache took.

python examples/a_picture.py
"""

from PIL import Image

from subtoken_train import SubTokenModel
from subtoken_train.resources import resource

adapter = resource("checkpoints/adapters/tiny_fastv25_s16k4")
model = SubTokenModel.from_pretrained(adapter, kv_dtype="int8")
picture = Image.open(resource("data/samples/a.png"))

print(model.chat("what is at C4 ?", [picture], max_new_tokens=16))
print(model.cache_report().table())
