"""On a GPU: the scores that the file states, in every precision, also of images that share a canvas with others.

Everything else about GPUs is tested with stand-ins (test_cuda.py, test_session.py, tools/placement).
"""

from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.load import open_session, visible_gpus
from prelunet.evaluator.engine.runtimes.base import Precision
from prelunet.evaluator.engine.verify import TOLERANCES
from tests.conftest import ExportedNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not visible_gpus(), reason="no GPU is visible here"),
]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_golden_images_on_one_canvas_get_the_scores_that_the_file_states(
    exported: dict[str, ExportedNet], precision: Precision
) -> None:
    path: Path = exported["demo-channel"].path
    session = open_session(path, "cuda", precision=precision)
    golden = session.contract.golden
    height, width = max(image.height for image in golden), max(image.width for image in golden)
    images = np.full((len(golden), height, width, 3), 255, np.uint8)  # what is left of it has to be ignored
    for row, image in enumerate(golden):
        images[row, : image.height, : image.width] = golden_image(image.height, image.width)
    for _ in range(2):  # the second time in the memory of the first
        outputs = session.run(images, np.array([(image.height, image.width) for image in golden]))
        for row, image in enumerate(golden):
            assert abs(outputs.scores[row] - np.array(image.scores)).max() <= TOLERANCES[precision].scores
