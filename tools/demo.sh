#!/usr/bin/env bash
# The main job from end to end; every step prints the command that a user would type.
#   tools/demo.sh        on the embedded Fashion-MNIST pictures
#   tools/demo.sh DIR    on DIR/train/CLASS/* and DIR/val/CLASS/*
set -euo pipefail
out=demo/clothes

# An interrupted demo goes on where it stopped; a finished one starts anew, whatever version made it.
anew() { [ ! -e "$1/finished" ] || rm -rf "$1"; mkdir -p "$1"; }
bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
step() { printf '\n%s== %s%s\n' "$bold" "$1" "$plain"; }
say() { printf '$ %s\n' "$*"; "$@"; }

if [ $# -gt 0 ]; then
  data=$1
  if [ ! -d "$data/train" ] || [ ! -d "$data/val" ]; then
    echo "make demo DATA=$data: no folders train/ and val/ with one folder per class in there" >&2
    exit 2
  fi
  out=demo/$(basename "$(realpath "$data")")
  anew "$out"
  train_options=(--recipe small --data "$data" --crop auto)
  picture=$(find -L "$data/val" -type f -name '[!.]*' | LC_ALL=C sort | awk 'NR == 1')
else
  data=training/data/fashion_mnist.zip
  anew "$out"
  python -c "import zipfile; zipfile.ZipFile('$data').extractall('$out/pictures')"
  train_options=(--recipe demo)
  picture=$out/shelf.png # a boot, trousers and a bag side by side, so that there is something to find
  boots=("$out"/pictures/val/ankle-boot/*.png) trousers=("$out"/pictures/val/trouser/*.png)
  bags=("$out"/pictures/val/bag/*.png)
  python tools/make_shelf.py "$picture" "${boots[5]}" "${trousers[5]}" "${bags[5]}"
fi

step "1. Train the small PReLU-net (checkpoint: $out/train/last.safetensors)"
say prelunet train "${train_options[@]}" --out "$out/train"

step "2. What did it learn? Slopes per layer, beside the paper's"
say prelunet inspect "$out/train/last.safetensors"

step "3. Export it to one ONNX file with the dense head inside, checked against torch ($out/model.onnx)"
say prelunet export "$out/train/last.safetensors" -o "$out/model.onnx" --force

step "4. Certify the file on this machine with its golden images"
say prelunet verify "$out/model.onnx"

step "5. Serve it over gRPC"
echo "\$ prelunet serve --model demo=$out/model.onnx --port 0 --lame-duck 0 &"
prelunet serve --model "demo=$out/model.onnx" --port 0 --lame-duck 0 >"$out/server.log" 2>&1 &
server=$!
trap 'kill -TERM $server 2>/dev/null || true' EXIT
address=
for _ in $(seq 100); do
  address=$(grep -o '127\.0\.0\.1:[0-9]*' "$out/server.log" | head -n 1 || true)
  [ -n "$address" ] && break
  kill -0 $server 2>/dev/null || { cat "$out/server.log" >&2; exit 1; }
  sleep 0.2
done
cat "$out/server.log"

step "6. Classify a picture through the server; where each class is seen: $out/heatmap.png"
say prelunet classify "$picture" --server "$address" --heatmap "$out/heatmap.png"

step "7. Evaluate on the validation pictures: one central crop, as most tools do"
say prelunet validate --model "$out/model.onnx" --data "$data" --protocol center --run "$out/center"

step "8. The same as the paper tests: whole pictures, three scales, mirrored too, every window"
say prelunet validate --model "$out/model.onnx" --data "$data" --protocol multi-scale --run "$out/multi-scale"

step "9. Per-class error reports"
say prelunet report "$out/center" --data "$data"
say prelunet report "$out/multi-scale" --data "$data"

step "10. Stop the server; it finishes what is in flight and exits 0"
echo "\$ kill -TERM $server"
trap - EXIT
kill -TERM $server
wait $server
echo "exit code $?"

step "Done. Open $out/multi-scale/report/report.html and $out/heatmap.png"
touch "$out/finished"
