"""Put pictures side by side on black, like things on a shelf: an image with many windows.

python tools/make_shelf.py OUT.png HEIGHT PICTURE PICTURE ...    of each its central square, HEIGHT pixels high
"""

import sys
from pathlib import Path

from PIL import Image, ImageOps

GAP = 8  # pixels


def main(output: Path, height: int, pictures: list[Path]) -> None:
    """Write the shelf."""
    shelf = Image.new("RGB", (len(pictures) * (height + GAP) - GAP, height))
    for place, path in enumerate(pictures):
        with Image.open(path) as picture:
            shelf.paste(ImageOps.fit(picture.convert("RGB"), (height, height)), (place * (height + GAP), 0))
    shelf.save(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
