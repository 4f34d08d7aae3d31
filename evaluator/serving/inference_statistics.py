"""Triton's model statistics, read from what the server counts for Prometheus."""

from prometheus_client import Gauge, Histogram, Summary

from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.serving.inference_messages import VERSION
from prelunet.evaluator.serving.metrics import Metrics

_STAGES = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "average"}


def model_statistics(name: str, metrics: Metrics) -> pb.ModelStatistics:
    """Return what one model has done since the server started."""
    success = _duration(metrics.request_seconds.labels(name))
    stages = {field: _duration(metrics.stage_seconds.labels(name, stage)) for field, stage in _STAGES.items()}
    return pb.ModelStatistics(
        name=name,
        version=VERSION,
        last_inference=round(1000 * _samples(metrics.last_answer.labels(name))[""]),
        inference_count=success.count,
        execution_count=_duration(metrics.batch_seconds.labels(name)).count,
        inference_stats=pb.InferStatistics(
            success=success, fail=_duration(metrics.failed_seconds.labels(name)), **stages
        ),
    )


def _duration(instrument: Histogram | Summary) -> pb.StatisticDuration:
    """Return how often something was observed, and the sum of its seconds in nanoseconds."""
    samples = _samples(instrument)
    return pb.StatisticDuration(count=round(samples["_count"]), ns=round(1e9 * samples["_sum"]))


def _samples(instrument: Gauge | Histogram | Summary) -> dict[str, float]:
    """Return an instrument's values by the ends of their names: "_count", "_sum", of a gauge "" alone."""
    (metric,) = instrument.collect()
    return {
        sample.name.removeprefix(metric.name): sample.value for sample in metric.samples if "le" not in sample.labels
    }
