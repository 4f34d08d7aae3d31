"""The engine in its own process, without a server: the baseline of run.py.

    python -m benchmarks.serving.engine '{"model": ..., "threads": ..., "folder": ...}'      then one question per line

The pipeline of `prelunet validate` on pictures in memory, in portions of 8: one is decoded while another is computed,
so that 16 are in flight, as with 16 clients of the server.
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.common.photos import dataset_in_memory
from benchmarks.serving.worker import Json, answer_questions
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.pipeline import MAX_DECODED_PORTIONS, evaluate_chunks

IN_FLIGHT = 16
TOP = 5


def main() -> None:
    """Answer questions: {"protocol", "images", "calls"}, or {"best": protocol, "images"}."""
    settings = json.loads(sys.argv[1])
    session = open_session(Path(settings["model"]), "cpu", threads=settings["threads"])
    encoded = [file.read_bytes() for file in sorted(Path(settings["folder"]).iterdir())]

    def answer(question: Json) -> Json:
        images = [encoded[index] for index in question["images"]]
        if "best" in question:
            protocol = build_protocol(question["best"], session.contract)
            answers = classify_images(session, [decode_image(image) for image in images], protocol)
            return {"best": [[(index, float(score)) for index, score in one.top(TOP)] for one in answers]}
        protocol = build_protocol(question["protocol"], session.contract)
        dataset, portion = dataset_in_memory(images, question["calls"]), IN_FLIGHT // MAX_DECODED_PORTIONS
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in evaluate_chunks([session], dataset, protocol, [dataset.samples], portion, 0):
            pass
        return {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}

    answer_questions(answer)


if __name__ == "__main__":
    main()
