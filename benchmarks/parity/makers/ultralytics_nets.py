"""A net of Ultralytics with random weights, with the metadata that its exporter writes, and no options."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# It must not change the environment, nor write its settings to the user's.
os.environ |= {"YOLO_AUTOINSTALL": "false", "YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": tempfile.mkdtemp()}

import torch
from ultralytics import YOLO
from ultralytics.nn.tasks import ClassificationModel

from benchmarks.parity.makers.net import CLASSES, Array, MakerNet, Run
from benchmarks.parity.makers.torch_export import discriminating

SIDE = 224
LEFT_OUT = {"cmyk.jpg": "OpenCV converts it otherwise than Pillow"}


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    used = [image for image in images if image.name not in LEFT_OUT]
    torch.manual_seed(1)
    any_net = YOLO("yolov8n-cls.yaml")
    net = ClassificationModel("yolov8n-cls.yaml", nc=len(CLASSES), verbose=False).eval()
    net.names, net.args, net.task = dict(enumerate(CLASSES)), any_net.model.args, any_net.task
    read = _runner(any_net)
    discriminating(net, torch.cat([torch.as_tensor(read(image)[0]) for image in used]), lambda values: net(values)[1])
    yolo = YOLO("yolov8n-cls.yaml")
    yolo.model = net
    file = shutil.move(yolo.export(format="onnx", imgsz=SIDE, simplify=False), folder / "yolov8n-cls.onnx")
    yield MakerNet(
        "ultralytics yolov8n-cls",
        "bilinear, shorter side 224, crop of 224",
        Path(file),
        _runner(yolo),
        left_out=LEFT_OUT,
        wrong=("--scale 256", "--mean 0.5"),
    )


def _runner(yolo: YOLO) -> Run:
    """Return what predicts, and notes what the predictor gives to the net."""
    seen: list[torch.Tensor] = []

    def run(image: Path) -> tuple[Array, Array]:
        answer = yolo.predict(image, imgsz=SIDE, verbose=False)[0]
        if not seen:  # the first call makes the predictor
            preprocess = yolo.predictor.preprocess

            def noticed(image: object) -> torch.Tensor:
                seen.append(preprocess(image))
                return seen[-1]

            yolo.predictor.preprocess = noticed
            return run(image)
        return seen[-1].numpy(), answer.probs.data.numpy()

    return run
