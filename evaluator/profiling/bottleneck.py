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

Cause = Literal["short", "disturbed", "compute", "sharing", "reading", "decoding", "packing", "averaging", "nothing"]
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
class Surroundings:
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


def cause_of(measured: Measurement) -> Cause:
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
    busy: dict[Cause, float] = {
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
    seconds = measured.tally.seconds
    others = sum(seconds[stage] for stage in ("decode", "resize", "pack", "upload", "average"))
    return seconds["compute"] - measured.pure_compute > 2 * others + (1 - BUSY) * measured.seconds


def in_words(measured: Measurement) -> str:
    """Return in one sentence what bounds the rate."""
    cause, computes, waits = cause_of(measured), measured.share("compute"), measured.share("wait")
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
            f"{_WORDS[_most_of_the_rest(measured)]} takes the most beside it"
        )
    if cause == "nothing":
        return (
            f"{whose} waits {waits:.0%} of the time, but no step before it is always busy: too few images for the "
            "steps to overlap"
        )
    return f"bound by {_WORDS[cause]}: {whose} waits {waits:.0%} of the time"


def _most_of_the_rest(measured: Measurement) -> Cause:
    """Return what takes the most of the cores besides computing; reading, which waits for the disk, takes few."""
    seconds = measured.tally.seconds
    taken: dict[Cause, float] = {
        "decoding": seconds["decode"] + seconds["resize"],
        "packing": seconds["pack"] + seconds["upload"],
        "averaging": seconds["average"],
    }
    return max(taken, key=lambda one: taken[one])


def advice(measured: Measurement, around: Surroundings) -> list[str]:
    """Return what to change, the most promising first; nothing where no number gives reason."""
    cause = cause_of(measured)
    if cause in {"compute", "sharing"}:
        less = cause == "sharing" and _most_of_the_rest(measured) == "decoding"
        return [*([_LESS_DECODING] * less), *_faster_compute(around), *_less_to_compute(measured, around)]
    if cause == "decoding":
        most = min(around.cores, MAX_THREADS)
        if measured.threads < most:
            return [f"--threads {most}: {measured.threads} of {around.cores} cores decode"]
        return [f"every core that can decode does: {_LESS_DECODING}"]
    return _ALWAYS.get(cause, [])


def _faster_compute(around: Surroundings) -> list[str]:
    """Return how the same could be computed faster."""
    if around.device == "cuda":
        if around.file_precision == "fp32" and around.precision == "fp32":
            return [
                "a file of `prelunet export --precision fp16` runs on the tensor cores; this file does with "
                "--precision tf32, less fast. Look at what it does to the errors with `prelunet compare`"
            ]
        return []
    found = []
    if 0 < around.model_threads < around.cores:
        found.append(f"--threads 0 takes all {around.cores} cores; now {around.model_threads} compute")
    if around.bf16 and around.precision != "bf16":
        device = "" if around.device == "openvino" else "--device openvino "
        found.append(
            f"{device}--precision bf16: this CPU has instructions for it, with which the paper's nets take about half "
            "of the time. Look at what it does to the errors with `prelunet compare`"
        )
    elif around.device == "cpu" and not around.bf16:
        found.append("--device openvino computes float32 somewhat faster on most CPUs, to the same errors")
    return found


def _less_to_compute(measured: Measurement, around: Surroundings) -> list[str]:
    """Return how less would be computed."""
    found, option = [], "--gpu-memory-limit" if around.device == "cuda" else "--memory-limit"
    if measured.tally.padding > MUCH_PADDING and around.limited:
        found.append(
            f"{measured.tally.padding:.0%} of the pixels are padding: a larger {option} puts more images of like "
            "shapes together"
        )
    changing = measured.tally.changes * GPU_SWITCH_SECONDS / (measured.sessions * measured.seconds)
    if around.device == "cuda" and changing > MUCH_CHANGING and around.limited:
        found.append(f"changes of canvas take about {changing:.0%} of the time: a larger {option} makes fewer")
    return found
