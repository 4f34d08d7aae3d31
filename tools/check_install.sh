#!/usr/bin/env bash
# A clean environment with the extra `cpu` alone has no torch and no onnx, and verifies, serves, classifies, validates
# and reports. The model comes from .venv, which can export.
#   tools/check_install.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT

"${1:-python3}" -m venv "$work/venv"
PIP_CONSTRAINT=$root/constraints.txt "$work/venv/bin/pip" install --quiet --disable-pip-version-check "$root[cpu]"

.venv/bin/python - "$work" <<'PY'
"""Export an untrained demo net with the embedded classes, and lay out three validation pictures of each class."""
import sys
import zipfile
from pathlib import Path

work = Path(sys.argv[1])
with zipfile.ZipFile("training/data/fashion_mnist.zip") as archive:
    names = sorted(name for name in archive.namelist() if name.startswith("val/"))
    classes = sorted({name.split("/")[1] for name in names})
    for name in classes:
        for picture in [n for n in names if n.startswith(f"val/{name}/") and n.endswith(".png")][:3]:
            archive.extract(picture, work / "data")
(work / "classes.txt").write_text("\n".join(classes) + "\n")
PY
.venv/bin/prelunet init --arch demo --classes "$work/classes.txt" -o "$work/net.safetensors"
.venv/bin/prelunet export "$work/net.safetensors" -o "$work/net.onnx"

cd "$work" # so that nothing is imported from the checkout
export PATH=$work/venv/bin:$PATH
python -c "
import importlib.util
found = [name for name in ('torch', 'onnx', 'safetensors') if importlib.util.find_spec(name)]
assert not found, f'the extra cpu brought {found}'"
prelunet verify net.onnx --device cpu
prelunet inspect net.onnx --json >inspect.json
prelunet validate --model net.onnx --data data --protocol multi-scale --run run
prelunet report run
prelunet serve --model net=net.onnx --port 0 >server.log &
server=$!
for _ in $(seq 100); do grep -q 'serving on' server.log && break || sleep 0.1; done
address=$(grep -o '127\.0\.0\.1:[0-9]*' server.log | head -n 1)
picture=$(find data -name '*.png' | head -n 1)
prelunet classify "$picture" --server "$address" --heatmap map.png
prelunet classify "$picture" --model net.onnx
test -s map.png -a -s run/report/report.html
kill -TERM "$server"
wait "$server"
server=
echo "a clean environment works: $(python --version)"
