"""The memory limit of decoding: what an image reserves, who waits, and that everything is released."""

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from PIL import Image

from prelunet.evaluator.errors import DeadlinePassed, ImageError
from prelunet.evaluator.imaging.decode import decode_bytes, decode_image, max_decode_bytes
from prelunet.evaluator.imaging.decode_memory import DECODE_BYTES, ByteSemaphore
from prelunet.evaluator.imaging.limits import DecodeLimits
from tests.serving.serving_harness import eventually


def encoded(kind: str, mode: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (40, 30)).save(file, kind, **options)
    return file.getvalue()


def reserved_by(data: bytes, *, apply_exif: bool = False) -> int:
    found: list[int] = []
    decode_image(data, apply_exif=apply_exif, reserve=found.append)
    (size,) = found
    return size


# Peak MB of decoding 12 Mpixel and resizing to 256, 384 and 480; Pillow 13.0.
MEASURED = [
    ("JPEG", "RGB", {}, 58),
    ("JPEG", "L", {}, 60),
    ("JPEG", "CMYK", {}, 96),
    ("JPEG", "RGB", {"progressive": True, "subsampling": 0}, 120),
    ("JPEG", "CMYK", {"progressive": True, "subsampling": 0}, 144),
    ("PNG", "RGB", {}, 58),
    ("PNG", "RGBA", {}, 204),
    ("PNG", "I;16", {}, 108),
    ("PNG", "P", {"transparency": 0}, 168),
    ("GIF", "P", {}, 168),
    ("WEBP", "RGB", {"lossless": True}, 218),
    ("WEBP", "RGBA", {"lossless": True}, 335),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}, 84),
    ("TIFF", "RGBA", {"compression": "tiff_lzw"}, 204),
    ("BMP", "RGB", {}, 58),
    ("AVIF", "RGB", {"subsampling": "4:4:4"}, 133),
    ("AVIF", "RGBA", {}, 250),
    ("JPEG2000", "L", {}, 73),
    ("JPEG2000", "RGB", {}, 232),
    ("JPEG2000", "RGBA", {}, 293),
    ("JPEG2000", "I;16", {}, 120),
]


@pytest.mark.parametrize(("kind", "mode", "options", "measured"), MEASURED)
def test_an_image_reserves_the_memory_that_it_takes(
    kind: str, mode: str, options: dict[str, object], measured: int
) -> None:
    for_12_mpixel = reserved_by(encoded(kind, mode, **options)) / (40 * 30) * 12
    assert measured <= for_12_mpixel <= 2 * measured + 12


def test_a_rotated_copy_is_reserved_and_no_image_reserves_more_than_the_maximum() -> None:
    data = encoded("WEBP", "RGBA")
    assert reserved_by(data, apply_exif=True) == reserved_by(data) + 4 * 40 * 30
    limits = DecodeLimits(max_pixels=40 * 30)
    assert reserved_by(data, apply_exif=True) == max_decode_bytes(limits)
    cmyk = reserved_by(encoded("JPEG", "CMYK"), apply_exif=True)
    assert 3 * cmyk == max_decode_bytes(replace(limits, baseline_factor=3)), "three times the pixels"


def test_the_largest_accepted_jpeg_fits() -> None:
    assert reserved_by(encoded("JPEG", "RGB")) * DecodeLimits.max_pixels <= DECODE_BYTES * 40 * 30


def test_no_pixel_is_decoded_before_memory_is_reserved() -> None:
    whole = encoded("PNG", "RGB")
    reserved: list[int] = []
    with pytest.raises(ImageError):
        decode_image(whole[: len(whole) // 2], reserve=reserved.append)
    assert reserved == [decode_bytes(Image.open(io.BytesIO(whole)))], "the header is whole"


def waits(semaphore: ByteSemaphore, size: int) -> tuple[threading.Thread, threading.Event]:
    """Reserve bytes in a thread; the event is set once they are reserved."""
    reserved = threading.Event()

    def ask() -> None:
        with semaphore.reservation() as reserve:
            reserve(size)
            reserved.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, reserved


def must_wait(semaphore: ByteSemaphore, size: int) -> bool:
    """Return whether an image of this size would have to wait now."""
    try:
        with semaphore.reservation(time.monotonic()) as reserve:
            reserve(size)
    except DeadlinePassed:
        return True
    return False


@pytest.mark.parametrize("size", [41, 1000])
def test_an_image_that_does_not_fit_waits_until_memory_is_released(size: int) -> None:
    semaphore = ByteSemaphore(100)
    with semaphore.reservation() as reserve:
        reserve(60)
        thread, reserved = waits(semaphore, size)
        assert not reserved.wait(0.05)
    assert reserved.wait(30)
    thread.join(30)


def test_memory_is_released_after_an_error_and_nothing_is_held_without_a_reservation() -> None:
    semaphore = ByteSemaphore(100)
    with pytest.raises(ImageError), semaphore.reservation() as reserve:
        decode_image(encoded("PNG", "RGB")[:60], reserve=lambda _size: reserve(1000))
    with semaphore.reservation():
        pass
    with semaphore.reservation() as reserve:
        reserve(1000)


def test_many_threads_never_exceed_the_capacity_unless_one_is_alone() -> None:
    semaphore, lock, having = ByteSemaphore(100), threading.Lock(), list[int]()
    seen: list[list[int]] = []

    def one(size: int) -> None:
        with semaphore.reservation() as reserve:
            reserve(size)
            with lock:
                having.append(size)
                seen.append(list(having))
            with lock:
                having.remove(size)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [30, 70, 10, 150, 55, 45, 99, 1] * 20))
    assert all(len(sizes) == 1 or sum(sizes) <= 100 for sizes in seen)
    assert having == []


def test_the_first_in_the_queue_is_served_first_although_only_a_later_one_would_fit() -> None:
    semaphore = ByteSemaphore(100)
    with semaphore.reservation() as reserve:
        reserve(60)
        thread, large = waits(semaphore, 90)
        eventually(lambda: must_wait(semaphore, 10))  # behind the large one
        later, small = waits(semaphore, 10)
        assert not small.wait(0.05)
    assert large.wait(30)
    assert small.wait(30)
    for each in (thread, later):
        each.join(30)
    assert not must_wait(semaphore, 100)


@pytest.mark.parametrize("left", [0.05, -1.0])
def test_a_wait_ends_at_its_deadline_and_the_next_in_the_queue_is_served(left: float) -> None:
    semaphore = ByteSemaphore(100)
    with semaphore.reservation() as reserve:
        reserve(60)
        with (
            pytest.raises(DeadlinePassed, match="waited for memory"),
            semaphore.reservation(time.monotonic() + left) as late_reserve,
        ):
            late_reserve(90)
        thread, reserved = waits(semaphore, 40)
        assert reserved.wait(30)
        thread.join(30)
    assert not must_wait(semaphore, 100), "an image that need not wait is never too late"


def test_a_wait_that_ends_at_the_head_of_the_queue_lets_the_next_one_through() -> None:
    semaphore = ByteSemaphore(100)
    with semaphore.reservation() as reserve:
        reserve(60)
        late: list[type] = []

        def ask() -> None:
            try:
                with semaphore.reservation(time.monotonic() + 0.2) as late_reserve:
                    late_reserve(90)
            except DeadlinePassed as error:
                late.append(type(error))

        first = threading.Thread(target=ask, daemon=True)
        first.start()
        eventually(lambda: must_wait(semaphore, 40) or bool(late))
        second, reserved = waits(semaphore, 40)
        assert reserved.wait(30), "long before the first place is given back"
        first.join(30)
        second.join(30)
        assert late == [DeadlinePassed]
