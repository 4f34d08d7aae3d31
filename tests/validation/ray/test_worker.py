"""A worker of a cluster alone, without Ray."""

import os
import pickle
import re
import socket
import uuid
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
from prelunet.evaluator.validation.ray_cluster import Job, evaluate_group
from prelunet.evaluator.validation.run import CHUNK
from tests.validation.ray.cluster_data import cluster_protocol, info_of
from tests.validation.ray.ray_workers import DivergentReader


@pytest.fixture
def job(session: Session, model: Path, dataset: Dataset) -> Job:
    where = Placement("cpu", threads=1)
    return Job(uuid.uuid4().hex, Path.cwd(), model, where, replace(dataset, samples=()), info_of(session, dataset))


def refusal(job: Job, dataset: Dataset) -> PreluNetError:
    """Return the error of a task whose worker must not start."""
    with pytest.raises(PreluNetError, match=rf"^worker on {socket.gethostname()}: cannot start: ") as caught:
        evaluate_group(job, [dataset.samples[:5]])
    return caught.value


def test_a_worker_evaluates_chunks_as_the_driver_would_and_receives_only_their_samples(
    job: Job, session: Session, dataset: Dataset
) -> None:
    chunks = [dataset.samples[64:100], dataset.samples[20:30]]
    expected = evaluate_chunks([session], dataset, cluster_protocol(session), chunks, CHUNK, 1)
    found = evaluate_group(pickle.loads(pickle.dumps(job)), chunks)
    for (lines, scores), (expected_lines, expected_scores) in zip(found, expected, strict=True):
        assert lines == expected_lines
        np.testing.assert_array_equal(scores, expected_scores)


def test_a_session_is_opened_for_the_first_task_only(
    job: Job, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_group(job, [dataset.samples[:5]])
    monkeypatch.setattr("prelunet.evaluator.validation.ray_cluster.open_with_placement", None)
    assert len(evaluate_group(pickle.loads(pickle.dumps(job)), [dataset.samples[5:9]])) == 1


def test_a_worker_predicts_among_the_classes_of_the_driver_and_ranks_the_best_of_several_true_ones(
    job: Job, session: Session, dataset: Dataset
) -> None:
    classes = sorted({label for sample in dataset.samples for label in sample.labels})
    some = replace(dataset, restriction={"name": "list", "classes": classes[:3]})
    chunk = [replace(sample, label=classes[0], also=(classes[2],)) for sample in dataset.samples[:9]]
    (expected,) = evaluate_chunks([session], some, cluster_protocol(session), [chunk], CHUNK, 1)
    (found,) = evaluate_group(pickle.loads(pickle.dumps(replace(job, dataset=replace(some, samples=())))), [chunk])
    assert found[0] == expected[0]
    assert {index for line in found[0] for index, _ in line.top} == set(classes[:3])
    assert {line.rank for line in found[0] if line.refused is None} <= {1, 2}, "two of three classes are true"


def test_a_worker_without_the_model_file_is_an_error(job: Job, dataset: Dataset) -> None:
    error = refusal(replace(job, model=Path("/nowhere/m.onnx")), dataset)
    assert isinstance(error, UsageError)
    assert re.search(r"cannot start: /nowhere/m\.onnx: .*\nEvery machine needs", str(error))


def test_a_worker_with_another_model_or_version_or_portions_is_refused_with_the_difference(
    job: Job, dataset: Dataset
) -> None:
    info = job.info
    assert info.batching is not None
    versions = {**info.circumstances["versions"], "pillow": "1.0"}
    for changed, difference in [
        (
            {"circumstances": {**info.circumstances, "versions": versions}},
            r"versions\.pillow: 1\.0 on the driver, \d.* on this worker",
        ),
        (
            {"circumstances": {**info.circumstances, "provider": "CUDAExecutionProvider"}},
            "provider: CUDA.*, CPU.* on this worker",
        ),
        ({"model": {**info.model, "sha256": "ab" * 32}}, rf"model\.sha256: {'ab' * 32} on the driver"),
        ({"batching": replace(info.batching, images_together=7)}, rf"images_together: 7 on the driver, {CHUNK} on"),
    ]:
        error = refusal(replace(job, info=replace(info, **changed)), dataset)  # type: ignore[arg-type]
        assert isinstance(error, EnvironmentFault)
        assert re.search(difference, str(error))


def test_a_worker_with_other_images_is_refused(job: Job, dataset: Dataset) -> None:
    other = replace(job.dataset, reader=DivergentReader(job.dataset.reader, os.getpid() + 1))
    with pytest.raises(DatasetError, match=r"^worker on .*\.png has .* bytes, but had"):
        evaluate_group(replace(job, dataset=other), [dataset.samples[:5]])


def test_nan_scores_arrive_as_a_fault_of_the_model_file(
    job: Job, dataset: Dataset, model: Path, tmp_path: Path
) -> None:
    graph = onnx.load(model)
    (bias,) = [tensor for tensor in graph.graph.initializer if tensor.name == "fc3.bias"]
    bias.CopyFrom(numpy_helper.from_array(np.full(bias.dims, np.nan, np.float32), bias.name))
    broken = tmp_path / "broken.onnx"
    onnx.save(graph, broken)
    info = replace(job.info, model={**job.info.model, "sha256": sha256_of(broken)})
    with pytest.raises(ContractError) as caught:
        evaluate_group(replace(job, model=broken, info=info), [dataset.samples[:5]])
    assert re.match(r"worker on .*\.png: .*not finite", str(caught.value))
