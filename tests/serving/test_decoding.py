"""Decoding in another process: the same pixels and errors, and nothing that an image does harms the server."""

import io
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.errors import DeadlinePassed, ImageError, UsageError
from prelunet.evaluator.imaging.decode_memory import ByteSemaphore
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.serving import decoding
from prelunet.evaluator.serving.decoding import DecodeProcess, PreparedImage, PrepareOptions, prepare_image
from tests.helpers.fakes import fake_contract

PROTOCOL = build_protocol("multi-scale", fake_contract())
OPTIONS = PrepareOptions(PROTOCOL, DecodeLimits(), 10**6, picture=True)
PICTURE = np.random.default_rng(3).integers(0, 256, (50, 71, 3), np.uint8)


def encoded(kind: str, picture: np.ndarray = PICTURE, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **options)
    return file.getvalue()


WEBP = encoded("WEBP", lossless=True)


@pytest.fixture(scope="module")
def process() -> Iterator[DecodeProcess]:
    process = DecodeProcess()
    yield process
    process.close()


def workers() -> list[int]:
    """Return the process ids of the decoding processes."""
    return [
        int(child)
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
        if b"serving.decoding" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def worker() -> int:
    """Return the process id of the only decoding process."""
    (pid,) = workers()
    return pid


def no_wait(_bytes: int) -> None:
    return


def nobody_left() -> bool:
    return False


def assert_same(found: PreparedImage, expected: PreparedImage) -> None:
    assert (found.height, found.width) == (expected.height, expected.width)
    assert found.resized.keys() == expected.resized.keys()
    for scale, (pixels, capped) in expected.resized.items():
        np.testing.assert_array_equal(found.resized[scale][0], pixels)
        assert found.resized[scale][1] is capped
    if expected.picture is None:
        assert found.picture is None
    else:
        np.testing.assert_array_equal(found.picture, expected.picture)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("picture", [True, False])
def test_a_process_prepares_what_a_thread_prepares(process: DecodeProcess, kind: str, picture: bool) -> None:
    options = PrepareOptions(PROTOCOL, DecodeLimits(), 10**6, picture)
    data = encoded(kind)
    assert_same(process.prepare(data, options, no_wait, nobody_left), prepare_image(data, options))


def test_an_elongated_image_is_capped_in_the_process_too(process: DecodeProcess) -> None:
    data = encoded("BMP", PICTURE[:3])
    found = process.prepare(data, OPTIONS, no_wait, nobody_left)
    assert all(capped for _, capped in found.resized.values())
    assert_same(found, prepare_image(data, OPTIONS))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (b"no image", OPTIONS),
        (WEBP[:-40], OPTIONS),
        (WEBP, PrepareOptions(PROTOCOL, DecodeLimits(max_pixels=3000), 10**6, picture=False)),
        (WEBP, PrepareOptions(PROTOCOL, DecodeLimits(), 1000, picture=False)),
    ],
)
def test_its_errors_are_those_of_a_thread(process: DecodeProcess, data: bytes, options: PrepareOptions) -> None:
    with pytest.raises((ImageError, UsageError)) as expected:
        prepare_image(data, options)
    with pytest.raises(expected.type) as found:
        process.prepare(data, options, no_wait, nobody_left)
    assert str(found.value) == str(expected.value)


def test_the_memory_that_an_image_takes_is_reserved_first(process: DecodeProcess) -> None:
    expected: list[int] = []
    found: list[int] = []
    prepare_image(WEBP, OPTIONS, expected.append)
    process.prepare(WEBP, OPTIONS, found.append, nobody_left)
    assert found == expected != []


def test_a_process_that_dies_is_replaced_and_its_image_tried_once_more(process: DecodeProcess) -> None:
    killed: list[int] = []
    semaphore = ByteSemaphore(1)  # less than the image takes: what the first attempt reserved must be free again

    def kill_once(size: int) -> None:
        reserve(size)
        if not killed:
            killed.append(worker())
            os.kill(killed[0], signal.SIGKILL)

    with semaphore.reservation(time.monotonic() + 30) as reserve:
        assert_same(process.prepare(WEBP, OPTIONS, kill_once, nobody_left), prepare_image(WEBP, OPTIONS))
    assert killed != [worker()]


def test_an_image_that_kills_its_process_twice_is_refused_and_the_next_one_works(process: DecodeProcess) -> None:
    with pytest.raises(ImageError, match="makes its decoder fail"):
        process.prepare(WEBP, OPTIONS, lambda _: os.kill(worker(), signal.SIGSEGV), nobody_left)
    assert_same(process.prepare(WEBP, OPTIONS, no_wait, nobody_left), prepare_image(WEBP, OPTIONS))


def test_a_process_killed_between_two_images_is_replaced(process: DecodeProcess) -> None:
    process.prepare(WEBP, OPTIONS, no_wait, nobody_left)
    os.kill(worker(), signal.SIGKILL)
    assert_same(process.prepare(WEBP, OPTIONS, no_wait, nobody_left), prepare_image(WEBP, OPTIONS))


def test_a_process_that_stops_in_the_middle_of_an_image_is_replaced(
    process: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit the call, its memory and its decoder would be lost until somebody ends the process."""
    large = encoded("PPM", np.zeros((1000, 1000, 3), np.uint8))  # more than a socket holds
    process.close()
    with monkeypatch.context() as short:
        short.setattr(decoding, "STALL_SECONDS", 0.2)
        process.prepare(WEBP, OPTIONS, no_wait, nobody_left)  # starts it
    os.kill(stopped := worker(), signal.SIGSTOP)
    assert_same(process.prepare(large, OPTIONS, no_wait, nobody_left), prepare_image(large, OPTIONS))
    assert worker() != stopped


def test_a_process_that_stops_while_it_decodes_is_replaced(
    process: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    def stop_once(_bytes: int) -> None:
        if not stopped:
            monkeypatch.setattr(decoding, "REPLY_SECONDS", 0.1)
            os.kill(worker(), signal.SIGSTOP)
            stopped.append(worker())

    def somebody_waits() -> bool:
        monkeypatch.undo()  # not for the start of the next process
        return False

    assert_same(process.prepare(WEBP, OPTIONS, stop_once, somebody_waits), prepare_image(WEBP, OPTIONS))
    assert stopped != [worker()]


def test_an_image_that_uses_up_its_processor_time_is_refused_at_once(process: DecodeProcess) -> None:
    tried: list[int] = []

    def time_is_up(_bytes: int) -> None:
        tried.append(worker())
        os.kill(tried[-1], signal.SIGXCPU)

    with pytest.raises(ImageError, match="more than 30 s of processor time"):
        process.prepare(WEBP, OPTIONS, time_is_up, nobody_left)
    assert len(tried) == 1


def test_an_image_that_nobody_waits_for_is_given_up(process: DecodeProcess) -> None:
    """Meanwhile its process has limits, and lets others go first."""
    limits: list[str] = []
    nice: list[int] = []

    def given_up() -> bool:
        if not started:
            return False
        limits.append(Path(f"/proc/{worker()}/limits").read_text())
        nice.append(os.getpriority(os.PRIO_PROCESS, worker()))
        return len(limits) > 1

    started: list[int] = []
    large = encoded("WEBP", np.zeros((7000, 7000, 3), np.uint8), lossless=True)  # decoded in about a second
    with pytest.raises(DeadlinePassed, match="nobody waits"):
        process.prepare(large, OPTIONS, started.append, given_up)
    assert "Max cpu time              unlimited" not in limits[-1]
    assert "Max address space         unlimited" not in limits[-1]
    assert nice[-1] >= os.getpriority(os.PRIO_PROCESS, 0) + 10 or nice[-1] == 19
    assert_same(process.prepare(WEBP, OPTIONS, no_wait, nobody_left), prepare_image(WEBP, OPTIONS))


def test_a_closed_process_has_ended() -> None:
    before = workers()
    process = DecodeProcess()
    process.prepare(WEBP, OPTIONS, no_wait, nobody_left)
    assert len(workers()) == len(before) + 1
    process.close()
    assert workers() == before


def test_a_signal_to_the_whole_process_group_is_left_to_the_server(process: DecodeProcess) -> None:
    process.prepare(WEBP, OPTIONS, no_wait, nobody_left)
    before = worker()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(before, number)
    assert_same(process.prepare(WEBP, OPTIONS, no_wait, nobody_left), prepare_image(WEBP, OPTIONS))
    assert worker() == before


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PIL.py").write_text("raise SystemExit('this is not Pillow')")
    monkeypatch.chdir(tmp_path)
    process = DecodeProcess()
    try:
        assert_same(process.prepare(WEBP, OPTIONS, no_wait, nobody_left), prepare_image(WEBP, OPTIONS))
    finally:
        process.close()
