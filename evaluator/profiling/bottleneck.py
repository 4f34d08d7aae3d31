"""Find what bounds a measured evaluation, and advise changes that the numbers justify."""

from collections.abc import Sequence
from typing import Literal

from ..machine import cores
from ..validation.pipeline import MAX_THREADS
from .engines import WORTHWHILE, EngineComparison
from .profile import Measurement

BUSY = 0.9  # share of the time: a session that needs it, or is busy for it, bounds the rate
FEEDS = 0.7  # share of the time: a step this busy keeps a session waiting
TOO_SHORT = 1.0  # seconds, in which the steps hardly begin to overlap
TOLERANCE = 1.05  # isolated computing may take this many times the whole run and still be plausible

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
_ADVICE = {
    "reading": ["use a faster disk, or an uncompressed archive of the images (.tar) on a local disk"],
    "decoding": ["images saved closer to the protocol's scales decode faster (docs/performance.md)"],
    "disturbed": ["measure again when the machine is idle"],
    "short": _LONGER,
    "nothing": _LONGER,
}


def find_bottleneck(measured: Measurement) -> Bottleneck:
    """Return what bounds the rate.

    `sharing`: the session computes far longer than it would alone, and the other steps take enough of the cores to
    explain that; `disturbed`: they do not, or isolated computing took longer than the whole run, so other programs were
    running.
    """
    if measured.seconds < TOO_SHORT:
        return "short"
    seconds = measured.totals.seconds
    others = sum(seconds[stage] for stage in ("decode", "resize", "pack", "upload", "average"))
    unexplained = seconds["compute"] - measured.pure_compute - 2 * others  # seconds, beyond the others' use of cores
    if measured.wall_by_compute < 1 / TOLERANCE or unexplained > (1 - BUSY) * measured.seconds:
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


def describe_bottleneck(measured: Measurement) -> str:
    """Return one sentence on what bounds the rate."""
    cause, computes, waits = find_bottleneck(measured), measured.share("compute"), measured.share("wait")
    if cause == "short":
        return f"too short to judge: {measured.seconds:.2f} s of measuring"
    if cause == "disturbed":
        return (
            "disturbed: other programs used this machine's cores, so the bottleneck is unknown "
            f"(computing took {measured.slowed:.2f} times as long as the same batches alone)"
        )
    subject = "the session" if measured.sessions == 1 else f"each of {measured.sessions} sessions"
    if cause == "compute":
        return f"bound by compute: {subject} alone would take {1 / measured.wall_by_compute:.0%} of the time"
    if cause == "sharing":
        return (
            f"bound by compute that shares its cores: {subject} computes {computes:.0%} of the time, "
            f"{measured.slowed:.2f} times as long as alone"
        )
    if cause == "nothing":
        return (
            f"{subject} waits {waits:.0%} of the time, but no earlier step is always busy: too few images for the "
            "steps to overlap"
        )
    return f"bound by {_WORDS[cause]}: {subject} waits {waits:.0%} of the time"


def advice(measured: Measurement, threads: int, engines: Sequence[EngineComparison] = ()) -> list[str]:
    """Return suggested changes, the most promising first; none if no number justifies any.

    threads: of a model on a CPU, as requested, 0 for one per core; engines: the other ones of this CPU, as measured.
    """
    cause = find_bottleneck(measured)
    if cause in {"compute", "sharing"}:
        more = [f"--threads 0 uses all {cores()} cores; now {threads} compute"] if 0 < threads < cores() else []
        faster = sorted(engines, key=lambda engine: -engine.times_as_fast)
        return more + [
            f"{engine}. Check the effect on errors with `prelunet compare`"
            for engine in faster
            if engine.times_as_fast >= WORTHWHILE
        ]
    most = min(cores(), MAX_THREADS)
    if cause == "decoding" and measured.threads < most:
        return [f"--threads {most}: {measured.threads} of {cores()} cores decode"]
    return _ADVICE.get(cause, [])
