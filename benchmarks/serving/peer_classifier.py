"""A classifier as one writes it for Triton or MLServer: Pillow, decoding threads, onnxruntime.

Runs in the peers' own environments, which have onnxruntime, numpy and Pillow but nothing of this project; peers.py
copies it there. It decodes, resizes, crops and averages like `prelunet`, on the same model file; images of equal shape
share a batch. `spec.json` beside it: model (path), scale, crop (None for the whole image), mirror, threads (per run),
decoders (decoding threads), at_once (concurrent runs), top, null (answer without running the model).
"""

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image

LONG_SIDE_CAP = 4  # times the shorter side; the pictures of the benchmark are less elongated


class Classifier:
    """Classifies several encoded images at once."""

    def __init__(self, folder: Path) -> None:
        self.spec: dict[str, Any] = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
        self._pool = ThreadPoolExecutor(self.spec["decoders"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.spec["threads"]
        self._session = onnxruntime.InferenceSession(
            self.spec["model"], options, providers=["CPUExecutionProvider"]
        )  # fmt: skip
        self._classes = self._session.get_outputs()[0].shape[-1]

    def classify(self, images: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the best classes of each image: indices, int32 (N, top), and scores, float32 (N, top)."""
        views = list(self._pool.map(self._view, images))
        scores = np.zeros((len(views), self._classes), np.float32) if self.spec["null"] else self._scores(views)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.spec["top"]]
        return best.astype(np.int32), np.take_along_axis(scores, best, axis=1)

    def _view(self, image: bytes) -> np.ndarray:
        picture = Image.open(io.BytesIO(image)).convert("RGB")
        scale, short = self.spec["scale"], min(picture.size)
        assert max(picture.size) <= LONG_SIDE_CAP * short, "prelunet would crop so elongated an image"
        size = [(2 * side * scale + short) // (2 * short) for side in picture.size]
        pixels = np.asarray(picture.resize(size, Image.Resampling.BILINEAR))
        if crop := self.spec["crop"]:
            top, left = ((side - crop) // 2 for side in pixels.shape[:2])
            pixels = pixels[top : top + crop, left : left + crop]
        return pixels

    def _scores(self, views: Sequence[np.ndarray]) -> np.ndarray:
        of_shape = defaultdict(list)
        for index, view in enumerate(views):
            of_shape[view.shape].append(index)
        scores = np.zeros((len(views), self._classes), np.float32)
        for indices in of_shape.values():
            batch = np.stack([views[index] for index in indices])
            scores[indices] = self._run(batch)
        return scores

    def _run(self, batch: np.ndarray) -> np.ndarray:
        """Return the scores of images of one shape; mirrored copies double the batch."""
        mirror = self.spec["mirror"]
        images = np.concatenate([batch, batch[:, :, ::-1]]) if mirror else batch
        sizes = np.array([images.shape[1:3]] * len(images), np.int64)
        (scores,) = self._session.run(["scores"], {"images": images, "sizes": sizes})
        means: np.ndarray = scores.reshape(1 + mirror, len(batch), -1).mean(axis=0)
        return means
