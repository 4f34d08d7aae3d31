"""A worker of a cluster alone, without Ray."""

import hashlib
import os
import pickle
import re
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.engine.session import Placement, Session
from prelunet.evaluator.errors import ContractError, DatasetError, EnvironmentFault, PreluNetError, UsageError
from prelunet.evaluator.files import sha256_of
from prelunet.evaluator.validation.pipeline import evaluate_chunks
from prelunet.evaluator.validation.ray_cluster import Job, Worker
from prelunet.evaluator.validation.run import CHUNK, Batching
from tests.validation.ray.cluster_data import cluster_protocol
from tests.validation.ray.ray_workers import DivergentReader


@pytest.fixture
def job(session: Session, model: Path, dataset: Dataset) -> Job:
    batches = {"batching": session.rules.to_json()}
    facts = {"model": {"sha256": session.model_sha256}, **session.circumstances.to_json(), **batches}
    image = dataset.samples[3]
    probes = [(image.file, hashlib.sha256(dataset.read(image)).hexdigest())]
    batching = Batching(CHUNK, session.rules)
    where = Placement("cpu", threads=1)
    return Job(
        Path.cwd(), model, where, replace(dataset, samples=()), cluster_protocol(session), batching, facts, probes
    )


def test_a_worker_evaluates_a_chunk_as_the_driver_would_and_receives_only_its_samples(
    job: Job, session: Session, dataset: Dataset
) -> None:
    worker = Worker(pickle.loads(pickle.dumps(job)))
    assert worker.start() == f"process {os.getpid()} on {socket.gethostname()}"
    chunk = dataset.samples[64:100]
    (expected,) = evaluate_chunks([session], dataset, cluster_protocol(session), [chunk], CHUNK, 1)
    found = worker.evaluate(chunk)
    assert not isinstance(found, PreluNetError)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_worker_predicts_among_the_classes_of_the_driver_and_ranks_the_best_of_several_true_ones(
    job: Job, session: Session, dataset: Dataset
) -> None:
    classes = sorted({label for sample in dataset.samples for label in sample.labels})
    some = replace(dataset, restriction={"name": "list", "classes": classes[:3]})
    worker = Worker(pickle.loads(pickle.dumps(replace(job, dataset=replace(some, samples=())))))
    worker.start()
    chunk = [replace(sample, label=classes[0], also=(classes[2],)) for sample in dataset.samples[:9]]
    (expected,) = evaluate_chunks([session], some, cluster_protocol(session), [chunk], CHUNK, 1)
    found = worker.evaluate(chunk)
    assert not isinstance(found, PreluNetError)
    assert found[0] == expected[0]
    assert {index for line in found[0] for index, _ in line.top} == set(classes[:3])
    assert {line.rank for line in found[0] if line.refused is None} <= {1, 2}, "two of three classes are true"


def test_a_worker_without_the_model_file_is_an_error(job: Job) -> None:
    error = Worker(replace(job, model=Path("/nowhere/m.onnx"))).start()
    assert isinstance(error, UsageError)
    assert re.match(r"worker on .* cannot start: /nowhere/m\.onnx: .*\nEvery machine needs", str(error))


def test_a_worker_with_another_model_or_version_is_refused_with_the_difference(job: Job) -> None:
    versions = {**job.facts["versions"], "pillow": "1.0"}
    for facts, difference in [
        ({**job.facts, "versions": versions}, r"versions\.pillow: 1\.0 on the driver, \d.* on this worker"),
        ({**job.facts, "model": {"sha256": "ab" * 32}}, rf"model\.sha256: {'ab' * 32} on the driver"),
        ({**job.facts, "provider": "CUDAExecutionProvider"}, "provider: CUDA.*, CPU.* on this worker"),
    ]:
        error = Worker(replace(job, facts=facts)).start()
        assert isinstance(error, EnvironmentFault)
        assert re.search(difference, str(error))


def test_a_worker_with_other_images_is_refused(job: Job) -> None:
    other = replace(job.dataset, reader=DivergentReader(job.dataset.reader, os.getpid() + 1))
    error = Worker(replace(job, dataset=other)).start()
    assert isinstance(error, DatasetError)
    assert re.search(r"worker on .* cannot start: .*\.png differs from the driver's image", str(error))


def test_nan_scores_arrive_as_a_fault_of_the_model_file(
    job: Job, dataset: Dataset, model: Path, tmp_path: Path
) -> None:
    graph = onnx.load(model)
    (bias,) = [tensor for tensor in graph.graph.initializer if tensor.name == "fc3.bias"]
    bias.CopyFrom(numpy_helper.from_array(np.full(bias.dims, np.nan, np.float32), bias.name))
    broken = tmp_path / "broken.onnx"
    onnx.save(graph, broken)
    facts = {**job.facts, "model": {"sha256": sha256_of(broken)}}
    worker = Worker(replace(job, model=broken, facts=facts))
    assert isinstance(worker.start(), str)
    error = worker.evaluate(dataset.samples[:5])
    assert isinstance(error, ContractError)
    assert re.match(r"worker on .*\.png: .*not finite", str(error))
