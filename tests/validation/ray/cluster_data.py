"""The images and the protocol of the cluster tests."""

from pathlib import Path

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.validation.run import CHUNK, RunInfo, build_run_info, describe_dataset
from tests.helpers.fakes import repeated

IMAGES = 100
COPIES = 6  # of each image
TOTAL = IMAGES * COPIES
CHUNKS = -(-TOTAL // CHUNK)


def cluster_protocol(session: Session) -> EvaluationProtocol:
    return build_protocol("dense-32", session.contract)


def info_of(session: Session, dataset: Dataset) -> RunInfo:
    return build_run_info(session, "m.onnx", describe_dataset(dataset), cluster_protocol(session))


def opened(session: Session, data: Path) -> Dataset:
    return repeated(open_dataset(data, split="val", wnids=[c.wnid for c in session.contract.classes]), COPIES)
