"""What bounds a measured evaluation, and what to change; each advice only where the numbers give reason."""

from dataclasses import dataclass
from typing import Literal

from prelunet.evaluator.engine.memory import GPU_SWITCH_SECONDS
from prelunet.evaluator.profiling.profile import Measurement
from prelunet.evaluator.validation.pipeline import MAX_THREADS

BUSY = 0.9  # of the time: a session that needs so much of it, or is kept at it so long, bounds the whole
FEEDS = 0.7  # of the time: a step that is busy so much keeps a session waiting
MUCH_PADDING, MUCH_CHANGING = 0.15, 0.05  # of all pixels, and of the time

TOO_SHORT = 1.0  # seconds, in which steps hardly begin to overlap
TOLERANCE = 1.05  # times as long as the whole may computing alone take, and still be believed

Bottleneck = Literal[
    "short", "disturbed", "compute", "sharing", "reading", "decoding", "packing", "averaging", "nothing"
]
_WORDS = {
    "reading": "reading the images",
    "decoding": "decoding and resizing",
    "packing": "packing and uploading batches",
    "averaging": "averaging scores",
}
_LONGER = ["measure longer: --seconds or --limit, with more images"]
_ALWAYS = {
    "reading": ["a faster disk, or images in one archive without compression (.tar) on a disk of this machine"],
    "disturbed": ["measure again when the machine is idle"],
    "short": _LONGER,
    "nothing": _LONGER,
}
_LESS_DECODING = "images that are saved nearer to the protocol's scales take less to decode (docs/performance.md)"


@dataclass(frozen=True)
class ExecutionSettings:
    """What could be changed.

    device, precision: that ran; file_precision: of the model file; model_threads: that were asked for, 0 for one per
    core; cores: of this machine; bf16: whether its instructions know bfloat16; limited: whether memory of what
    computes was limited.
    """

    device: str
    precision: str
    file_precision: str
    model_threads: int
    cores: int
    bf16: bool
    limited: bool


def find_bottleneck(measured: Measurement) -> Bottleneck:
    """Return what bounds the rate.

    `sharing`: the session computes far longer than it would alone, and the other steps take enough of the cores to
    explain that; `disturbed`: they do not, or computing alone took longer than the whole, so other programs were there.
    """
    if measured.seconds < TOO_SHORT:
        return "short"
    if measured.wall_by_compute < 1 / TOLERANCE or _unexplained(measured):
        return "disturbed"
    if measured.wall_by_compute <= 1 / BUSY:
        return "compute"
    if measured.share("compute") >= BUSY:
        return "sharing"
    reading, decoding = measured.share("read"), measured.share("decode") + measured.share("resize")
    busy: dict[Bottleneck, float] = {
        "reading" if reading > decoding else "decoding": reading + decoding,  # the same threads do both
        "packing": measured.share("pack") + measured.share("upload"),
        "averaging": measured.share("average"),
    }
    cause = max(busy, key=lambda one: busy[one])
    if busy[cause] >= FEEDS:
        return cause
    slowed = measured.share("compute") - 1 / measured.wall_by_compute
    return "sharing" if slowed > measured.share("wait") else "nothing"


def _unexplained(measured: Measurement) -> bool:
    """Say whether computing took longer than alone by more than the other steps can have taken of the cores."""
    seconds = measured.totals.seconds
    others = sum(seconds[stage] for stage in ("decode", "resize", "pack", "upload", "average"))
    return seconds["compute"] - measured.pure_compute > 2 * others + (1 - BUSY) * measured.seconds


def describe_bottleneck(measured: Measurement) -> str:
    """Return in one sentence what bounds the rate."""
    cause, computes, waits = find_bottleneck(measured), measured.share("compute"), measured.share("wait")
    if cause == "short":
        return f"too short to judge: {measured.seconds:.2f} s of measuring"
    if cause == "disturbed":
        return (
            "disturbed: other programs used this machine's cores, so that what bounds the rate cannot be told "
            f"(computing took {measured.slowed:.2f} times as long as the same alone)"
        )
    whose = "the session" if measured.sessions == 1 else f"each of {measured.sessions} sessions"
    if cause == "compute":
        return f"bound by compute: {whose} alone would take {1 / measured.wall_by_compute:.0%} of the time"
    if cause == "sharing":
        return (
            f"bound by compute that shares its cores: {whose} computes {computes:.0%} of the time, "
            f"{measured.slowed:.2f} times as long as alone; "
            f"{_WORDS[_largest_other_cost(measured)]} takes the most beside it"
        )
    if cause == "nothing":
        return (
            f"{whose} waits {waits:.0%} of the time, but no step before it is always busy: too few images for the "
            "steps to overlap"
        )
    return f"bound by {_WORDS[cause]}: {whose} waits {waits:.0%} of the time"


def _largest_other_cost(measured: Measurement) -> Bottleneck:
    """Return what takes the most of the cores besides computing; reading, which waits for the disk, takes few."""
    seconds = measured.totals.seconds
    taken: dict[Bottleneck, float] = {
        "decoding": seconds["decode"] + seconds["resize"],
        "packing": seconds["pack"] + seconds["upload"],
        "averaging": seconds["average"],
    }
    return max(taken, key=lambda one: taken[one])


def advice(measured: Measurement, settings: ExecutionSettings) -> list[str]:
    """Return what to change, the most promising first; nothing where no number gives reason."""
    cause = find_bottleneck(measured)
    if cause in {"compute", "sharing"}:
        less = cause == "sharing" and _largest_other_cost(measured) == "decoding"
        return [*([_LESS_DECODING] * less), *_faster_compute(settings), *_less_to_compute(measured, settings)]
    if cause == "decoding":
        max_threads = min(settings.cores, MAX_THREADS)
        if measured.threads < max_threads:
            return [f"--threads {max_threads}: {measured.threads} of {settings.cores} cores decode"]
        return [f"every core that can decode does: {_LESS_DECODING}"]
    return _ALWAYS.get(cause, [])


def _faster_compute(settings: ExecutionSettings) -> list[str]:
    """Return how the same could be computed faster."""
    if settings.device == "cuda":
        if settings.file_precision == "fp32" and settings.precision == "fp32":
            return [
                "a file of `prelunet export --precision fp16` runs on the tensor cores; this file does with "
                "--precision tf32, less fast. Look at what it does to the errors with `prelunet compare`"
            ]
        return []
    found = []
    if 0 < settings.model_threads < settings.cores:
        found.append(f"--threads 0 takes all {settings.cores} cores; now {settings.model_threads} compute")
    if settings.bf16 and settings.precision != "bf16":
        device = "" if settings.device == "openvino" else "--device openvino "
        found.append(
            f"{device}--precision bf16: this CPU has instructions for it, with which the paper's nets take about half "
            "of the time. Look at what it does to the errors with `prelunet compare`"
        )
    elif settings.device == "cpu" and not settings.bf16:
        found.append("--device openvino computes float32 somewhat faster on most CPUs, to the same errors")
    return found


def _less_to_compute(measured: Measurement, settings: ExecutionSettings) -> list[str]:
    """Return how less would be computed."""
    found, option = [], "--gpu-memory-limit" if settings.device == "cuda" else "--memory-limit"
    if measured.totals.padding > MUCH_PADDING and settings.limited:
        found.append(
            f"{measured.totals.padding:.0%} of the pixels are padding: a larger {option} puts more images of like "
            "shapes together"
        )
    changing = measured.totals.canvas_changes * GPU_SWITCH_SECONDS / (measured.sessions * measured.seconds)
    if settings.device == "cuda" and changing > MUCH_CHANGING and settings.limited:
        found.append(f"changes of canvas take about {changing:.0%} of the time: a larger {option} makes fewer")
    return found
