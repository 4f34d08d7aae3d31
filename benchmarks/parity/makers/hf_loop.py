"""A ViT of transformers with random weights, a dataset of class folders, and what transformers' own pipeline answers.

Writes vit/ as `save_pretrained` does, with model.onnx beside; data/CLASS/*.jpg; and answers.json: the five best classes
of each file, best first, for each way to resize.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from PIL import Image

from benchmarks.parity.images import picture
from benchmarks.parity.makers.net import CLASSES, MakerNet
from benchmarks.parity.makers.torch_export import Logits, discriminating, export, stacked
from benchmarks.parity.makers.transformers_nets import SMALL, read

COUNT, SEED = 200, 20261201


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    """Yield nothing: no single image is compared."""
    place, data = folder / "vit", folder / "data"
    labels = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: index for index, name in enumerate(CLASSES)}}
    torch.manual_seed(1)
    net = hf.ViTForImageClassification(hf.ViTConfig(**SMALL, **labels)).eval()
    processor = hf.ViTImageProcessor()
    first = partial(read, processor)
    discriminating(net, stacked(first, images), Logits(net))
    net.save_pretrained(place)
    processor.save_pretrained(place)
    export(Logits(net), first(images[0]), place / "model.onnx")
    pipelines = {
        resizer: hf.pipeline(
            "image-classification",
            model=str(place),
            image_processor=hf.AutoImageProcessor.from_pretrained(place, backend=backend),
            device="cpu",
        )
        for resizer, backend in (("tensors", "torchvision"), ("Pillow", "pil"))
    }
    random = np.random.default_rng(SEED)
    answers: dict[str, dict[str, list[str]]] = {resizer: {} for resizer in pipelines}
    data.mkdir()
    for number in range(COUNT):
        file = data / f"{number:03}.jpg"
        Image.fromarray(picture(random, *map(int, random.integers(160, 640, 2)))).save(file, quality=93)
        best = {
            resizer: [answer["label"] for answer in classify(str(file), top_k=5)]
            for resizer, classify in pipelines.items()
        }
        # Labels of which the net gets about three quarters right, so that an error of one image shows.
        label = best["tensors"][0] if number % 4 else CLASSES[number // 4 % len(CLASSES)]
        (data / label).mkdir(exist_ok=True)
        file = file.rename(data / label / file.name)
        for resizer, classes in best.items():
            answers[resizer][str(file.relative_to(data))] = classes
    (folder / "answers.json").write_text(json.dumps(answers, indent=1), encoding="utf-8")
    yield from ()
