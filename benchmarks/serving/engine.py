"""The engine in its own process, without a server: the baseline of run.py.

    python -m benchmarks.serving.engine '{"model": ..., "threads": ..., "folder": ...}'      then one question per line

Both ways use the same pictures, encoded in memory, with 16 of them in flight, like the server with 16 clients:

- validate:         the pipeline of `prelunet validate` in portions of 8: one is decoded while another is computed
- classify_images:  16 images decoded in threads, then computed, then the next 16
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common.photos import dataset_in_memory
from benchmarks.serving.worker import Json, answer_questions
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.imaging.views import cut_views
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.serving.classifier import max_view_pixels
from prelunet.evaluator.serving.decoding import PrepareOptions, prepare_image
from prelunet.evaluator.validation.pipeline import MAX_DECODED_PORTIONS, evaluate_chunks

WAYS = ("validate", "classify_images")
DECODING = "decoding"  # only: in one thread, as the server decodes and resizes an image
IN_FLIGHT = 16
TOP = 5


def main() -> None:
    """Answer questions: {"way", "protocol", "images", "calls"}, or {"best": protocol, "images"}."""
    settings = json.loads(sys.argv[1])
    session = open_session(Path(settings["model"]), "cpu", threads=settings["threads"])
    encoded = [file.read_bytes() for file in sorted(Path(settings["folder"]).iterdir())]
    pool = ThreadPoolExecutor(settings["threads"])

    def answer(question: Json) -> Json:
        images = [encoded[index] for index in question["images"]]
        if "best" in question:
            protocol = build_protocol(question["best"], session.contract)
            answers = classify_images(session, [decode_image(image) for image in images], protocol)
            return {"best": [[(index, float(score)) for index, score in one.top(TOP)] for one in answers]}
        protocol = build_protocol(question["protocol"], session.contract)
        begun, cpu = time.perf_counter(), time.process_time()
        count = question["calls"]
        if question["way"] == DECODING:
            options = PrepareOptions(
                protocol, DecodeLimits(), max_view_pixels(session.contract, protocol), picture=False
            )
            for number in range(count):
                cut_views(prepare_image(images[number % len(images)], options).resized, protocol)
        elif question["way"] == WAYS[0]:
            dataset, portion = dataset_in_memory(images, count), IN_FLIGHT // MAX_DECODED_PORTIONS
            for _ in evaluate_chunks([session], dataset, protocol, [dataset.samples], portion, 0):
                pass
        else:
            for start in range(0, count, IN_FLIGHT):
                some = (images[number % len(images)] for number in range(start, min(count, start + IN_FLIGHT)))
                for classified in classify_images(session, list(pool.map(decode_image, some)), protocol):
                    classified.top(TOP)
        return {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}

    answer_questions(answer)


if __name__ == "__main__":
    main()
