"""Put pictures side by side on black, like things on a shelf: an image with many windows.

python tools/make_shelf.py OUT.png PICTURE PICTURE ...
"""

import sys
from pathlib import Path

from PIL import Image

HEIGHT, GAP = 56, 8  # pixels


def main(output: Path, pictures: list[Path]) -> None:
    """Enlarge each picture so that its longer side is HEIGHT, and center them in a row."""
    things = []
    for path in pictures:
        with Image.open(path) as picture:
            factor = HEIGHT / max(picture.size)
            size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
            things.append(picture.convert("L").resize(size))
    shelf = Image.new("L", (sum(thing.width for thing in things) + GAP * (len(things) - 1), HEIGHT))
    left = 0
    for thing in things:
        shelf.paste(thing, (left, (HEIGHT - thing.height) // 2))
        left += thing.width + GAP
    shelf.save(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
