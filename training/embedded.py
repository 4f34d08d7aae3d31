"""The dataset that comes with prelunet: part of Fashion-MNIST, made by tools/build_fashion_mnist.py."""

from importlib import resources
from pathlib import Path

from prelunet.evaluator.errors import EnvironmentFault


def embedded_dataset_path() -> Path:
    """Return the path of the embedded archive: 10 classes, 6,000 images in train/ and 2,000 in val/, 5 to 28 pixels.

    Raises EnvironmentFault when it is no plain file, as in an installation without package data.
    """
    path = Path(str(resources.files("prelunet.training") / "data" / "fashion_mnist.zip"))
    if not path.is_file():
        raise EnvironmentFault(f"{path}: the embedded dataset is not there. Install prelunet again, as files")
    return path
