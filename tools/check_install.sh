#!/usr/bin/env bash
# Build the source distribution and, from it, the wheel. Test the wheel in a clean environment with only the extra `cpu`,
# that is, without torch, onnx and ray. verify, serve, classify, validate (also in shards), merge, ensemble and the numbers
# of reports must work; other verbs must name the missing extra. Adding `openvino`, `adopt`, which brings no torch, and
# `report` must work too. A user's own files named like our folders must not interfere.
# The models come from .venv, which can export.
#   tools/check_install.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT

"${1:-python3}" -m venv "$work/venv"
.venv/bin/python -m build --outdir "$work/dist" . >"$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
.venv/bin/twine check --strict "$work"/dist/*
wheel=$(echo "$work"/dist/*.whl)
PIP_CONSTRAINT=$root/constraints.txt "$work/venv/bin/pip" install --quiet --disable-pip-version-check "$wheel[cpu]"
installed=$(du -sm --exclude='pip*' --exclude='setuptools*' "$work"/venv/lib/python3*/site-packages | cut -f1)
if [ "$installed" -gt 270 ]; then
  echo "the extra cpu installs $installed MB, more than 270:" >&2
  du -sm "$work"/venv/lib/python3*/site-packages/* | sort -n | tail >&2
  exit 1
fi

.venv/bin/python - "$work" <<'PY'
"""Extract seven validation pictures of each embedded class (70 images: two chunks, hence two shards); export a net."""
import sys
import zipfile
from pathlib import Path

import torch
from torch import nn

work = Path(sys.argv[1])
with zipfile.ZipFile("training/data/fashion_mnist.zip") as archive:
    names = sorted(name for name in archive.namelist() if name.startswith("val/"))
    classes = sorted({name.split("/")[1] for name in names})
    for name in classes:
        for picture in [n for n in names if n.startswith(f"val/{name}/") and n.endswith(".png")][:7]:
            archive.extract(picture, work / "data")
(work / "classes.txt").write_text("\n".join(classes) + "\n")
foreign = nn.Sequential(nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
torch.onnx.export(foreign.eval(), (torch.zeros(1, 3, 28, 28),), work / "foreign.onnx", dynamo=False)
PY
for seed in 0 1; do # untrained: two different nets
  .venv/bin/prelunet init --arch demo --classes "$work/classes.txt" --seed $seed -o "$work/net$seed.safetensors"
  .venv/bin/prelunet export "$work/net$seed.safetensors" -o "$work/net$seed.onnx"
done

cd "$work" # import nothing from the checkout
export PATH=$work/venv/bin:$PATH
for name in evaluator export training; do
  if python -c "import $name" 2>/dev/null; then
    echo "the wheel installed '$name' beside prelunet" >&2
    exit 1
  fi
done
python -c "
from importlib.resources import files
import prelunet
names = ('py.typed', 'proto/prelunet/v1/prelunet.proto', 'proto/inference/inference.proto', 'training/recipes/A.toml',
         'training/data/fashion_mnist.zip', 'evaluator/datasets/labels/imagenet-1k.txt',
         'evaluator/datasets/labels/imagenet-real.txt.gz', 'evaluator/datasets/labels/imagenet-a.txt',
         'evaluator/reporting/page_files/report.html.j2', 'evaluator/reporting/page_files/report.css',
         'evaluator/reporting/page_files/report.js')
missing = [name for name in names if not (files(prelunet) / name).is_file()]
assert not missing, f'missing from the wheel: {missing}'"
mkdir training
echo "raise ImportError('a file of the user')" | tee evaluator.py export.py >training/__init__.py
export PYTHONPATH=.

# Run a command that must exit with 5 and name the missing extra.
lacks_extra() {
  local extra=$1 code=0
  shift
  "$@" 2>lacks.log || code=$?
  if [ $code != 5 ] || ! grep -qF "pip install 'prelunet[$extra] @ file://$wheel'" lacks.log; then
    echo "$*: exit code $code; expected 5 and a hint at the extra $extra:" >&2
    cat lacks.log >&2
    return 1
  fi
}

python -c "
import importlib.util
found = [name for name in ('torch', 'onnx', 'safetensors', 'ray', 'scipy', 'vl_convert') if importlib.util.find_spec(name)]
assert not found, f'the extra cpu brought {found}'"
prelunet verify net0.onnx --device cpu
prelunet inspect net0.onnx --json >inspect.json
prelunet protocols --model net0.onnx
prelunet validate --model net0.onnx --data data --protocol multi-scale --run run
prelunet report run 2>report.log
grep -q "there is no report.html" report.log
test -s run/report/report.json -a -s run/report/classes.csv -a ! -e run/report/report.html
for shard in 1 2; do
  prelunet validate --model net0.onnx --data data --protocol multi-scale --shard $shard/2 --run shards/$shard
done
prelunet merge shards/1 shards/2 --run merged
for file in run.json predictions.jsonl scores.f32.npy; do cmp run/$file merged/$file; done
lacks_extra report prelunet compare run run --out compared
prelunet validate --model net1.onnx --data data --protocol multi-scale --run other
prelunet ensemble run other --run both
test -s both/run.json
adopt=(prelunet adopt foreign.onnx --classes classes.txt --preset torchvision -o adopted.onnx)
lacks_extra adopt "${adopt[@]}"
lacks_extra train prelunet export net0.safetensors -o again.onnx
lacks_extra openvino prelunet classify "$(find data -name '*.png' | head -n 1)" --model net0.onnx --device openvino
lacks_extra ray prelunet validate --model net0.onnx --data data --protocol center --run elsewhere --ray local
prelunet serve --model net=net0.onnx --port 0 --lame-duck 0 >server.log &
server=$!
for _ in $(seq 100); do grep -q 'serving on' server.log && break || sleep 0.1; done
address=$(grep -o '127\.0\.0\.1:[0-9]*' server.log | head -n 1)
picture=$(find data -name '*.png' | head -n 1)
prelunet classify "$picture" --server "$address" --heatmap map.png
prelunet classify "$picture" --model net0.onnx
python -c "
import prelunet
net = prelunet.load('net0.onnx')
print(net.classify('$picture'), net.evaluate('data', protocol='multi-scale', output='by-python'))"
for file in predictions.jsonl report/report.json; do cmp run/$file by-python/$file; done
test -s map.png
kill -TERM "$server"
wait "$server"
server=
PIP_CONSTRAINT=$root/constraints.txt pip install --quiet --disable-pip-version-check "$wheel[openvino]"
prelunet verify net0.onnx --device openvino
prelunet classify "$picture" --model net0.onnx --device openvino
PIP_CONSTRAINT=$root/constraints.txt pip install --quiet --disable-pip-version-check "$wheel[adopt]"
"${adopt[@]}"
prelunet validate adopted.onnx data -o adopted
PIP_CONSTRAINT=$root/constraints.txt pip install --quiet --disable-pip-version-check "$wheel[report]"
prelunet report run
prelunet compare run run --out compared
test -s run/report/report.html -a -s compared/compare.html
prelunet report adopted
python -c "
import importlib.util
assert not importlib.util.find_spec('torch'), 'the extra adopt brought torch'"
echo "a clean environment works: $(python --version)"
