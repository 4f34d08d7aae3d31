"""Generate runs of ImageNet's shape: 50,000 images of 1,000 classes, 50 each, with stored scores.

    python -m benchmarks.reporting.imagenet_shape OUT [--runs 3] [--seed 0]

writes OUT/1, OUT/2, ... like `prelunet validate`: several "models" on the same images with one protocol. No model
runs. The random process:

- Class k has a difficulty d_k, uniform in 0..1; the first 113 classes (as many as the paper's Fig. 6 has without
  error) have none and are never wrong; the last 5 are hopeless: their images look like another class.
- Image i has an ease e_i, normal. Model m sees the truth with a logit of 10 + 2·e_i + n − 6·d_k, n normal (its own).
- Each class has 8 rivals, the same for all models, with logits of 4 + normal; all other classes get normal logits.
- Every 997th image has equal scores for all classes, every 10,007th is refused.
- A view's rank of the truth uses the same scores with new noise on the truth's logit.
"""

import argparse
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.dataset import Sample
from prelunet.evaluator.engine.scores import best_ranks, shortest_decimal, top_k
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.validation.predictions import Prediction
from prelunet.evaluator.validation.run import CHUNK, RunInfo
from prelunet.evaluator.validation.writer import open_run

CLASSES, PER_CLASS = 1000, 50
PERFECT, HOPELESS, RIVALS = 113, 5, 8
PROTOCOL = EvaluationProtocol("multi-scale", "dense", (256, 384, 480), mirror=True)


def main() -> None:
    """Write the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the runs")
    parser.add_argument("--runs", type=int, default=3, help="number of runs")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    options = parser.parse_args()
    for number in range(1, options.runs + 1):
        write(options.out / str(number), options.seed, number)
        print(options.out / str(number))


def write(folder: Path, seed: int, number: int) -> None:
    """Write the run of one model. number: the model's, from 1."""
    samples = [
        Sample(f"n{label:08}/ILSVRC2012_val_{label * PER_CLASS + index + 1:08}.JPEG", label, 100_000 + index)
        for label in range(CLASSES)
        for index in range(PER_CLASS)
    ]
    digest = hashlib.sha256("".join(f"{s.file} {s.label}\n" for s in samples).encode()).hexdigest()
    info = RunInfo(
        model={
            "file": f"model-{number}.onnx",
            "sha256": hashlib.sha256(f"{seed} {number}".encode()).hexdigest(),
            "architecture": "ABC"[(number - 1) % 3],
            "activation": "prelu",
        },
        classes=tuple(ClassEntry(f"n{index:08}", f"class {index}") for index in range(CLASSES)),
        protocol=PROTOCOL,
        dataset={
            "name": "imagenet-shape",
            "fingerprint": digest,
            "images": len(samples),
            "layout": "made by benchmarks/reporting/imagenet_shape.py",
            "selection": None,
        },
        circumstances={"provider": "none", "precision": "fp32", "versions": {"numpy": np.__version__}},
    )
    with open_run(folder, info, samples, fresh=True) as writer:
        for start, scores, views in _chunks(seed, number, len(samples)):
            chunk = samples[start : start + CHUNK]
            lines = [_prediction(s, row, ranks) for s, row, ranks in zip(chunk, scores, views, strict=True)]
            writer.append(lines, scores)


def _chunks(seed: int, number: int, images: int) -> Iterator[tuple[int, Float32Array, npt.NDArray[np.int64]]]:
    """Yield the first image, scores float32 (chunk, classes) and view ranks (chunk, views) of each chunk."""
    shared, own = np.random.default_rng(seed), np.random.default_rng((seed, number))
    difficulty = shared.random(CLASSES)
    difficulty[:PERFECT] = -2
    rivals = np.stack([shared.permutation(CLASSES - 1)[:RIVALS] for _ in range(CLASSES)])
    rivals += rivals >= np.arange(CLASSES)[:, None]  # never the class itself
    ease = shared.normal(size=images)
    for start in range(0, images, CHUNK):
        index = np.arange(start, min(start + CHUNK, images))
        label = index // PER_CLASS
        rows = np.arange(len(index))
        logits = own.normal(size=(len(index), CLASSES))
        logits[rows[:, None], rivals[label]] += 4
        truth = 10 + 2 * ease[index] + own.normal(size=len(index)) - 6 * difficulty[label]
        truth = np.where(label < PERFECT, 30.0, np.where(label >= CLASSES - HOPELESS, -5.0, truth))
        noisy = truth[:, None] + own.normal(scale=0.7, size=(len(index), len(PROTOCOL.views)))
        logits[rows, label] = -np.inf  # the truth is no rival of itself
        views = 1 + (logits[:, None, :] > noisy[:, :, None]).sum(axis=2)
        logits[rows, label] = truth
        logits[index % 997 == 996] = 0
        powers = np.exp(logits)
        scores = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        scores[index % 10_007 == 10_006] = np.nan
        yield start, scores, views


def _prediction(sample: Sample, scores: Float32Array, view_ranks: npt.NDArray[np.int64]) -> Prediction:
    if np.isnan(scores[0]):
        return Prediction(sample.file, sample.label, refused="truncated: 512 bytes are missing at its end")
    top = tuple((index, shortest_decimal(score)) for index, score in top_k(scores, 5))
    return replace(
        Prediction(sample.file, sample.label, top),
        rank=int(best_ranks(scores[None], [sample.labels])[0]),
        view_ranks=tuple(view_ranks.tolist()),
    )


if __name__ == "__main__":
    main()
