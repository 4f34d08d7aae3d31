#!/usr/bin/env bash
# The main workflow from end to end; every step prints the command that a user would type.
#   tools/demo.sh        with the embedded Fashion-MNIST pictures
#   tools/demo.sh DIR    with DIR/train/CLASS/* and DIR/val/CLASS/*
#   tools/demo.sh --live [DIR]    only the model, unless it exists; then serve it with the live page
set -euo pipefail
out=demo/clothes
live=
if [ "${1:-}" = --live ]; then
  live=yes
  shift
fi

# Resume an interrupted demo; start a finished one from scratch, whatever version wrote it.
prepare() { [ -n "$live" ] || [ ! -e "$1/finished" ] || rm -rf "$1"; mkdir -p "$1"; }
bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
step() { printf '\n%s== %s%s\n' "$bold" "$1" "$plain"; }
run() { printf '$ %s\n' "$*"; "$@"; }

if [ $# -gt 0 ]; then
  data=$1
  if [ ! -d "$data/train" ] || [ ! -d "$data/val" ]; then
    echo "make demo DATA=$data: expected train/ and val/ with one folder per class" >&2
    exit 2
  fi
  out=demo/$(basename "$(realpath "$data")")
  prepare "$out"
  train_options=(--recipe small --data "$data" --crop auto)
  picture=$(find -L "$data/val" -type f -name '[!.]*' | LC_ALL=C sort | awk 'NR == 1')
else
  data=training/data/fashion_mnist.zip
  prepare "$out"
  python -c "import zipfile; zipfile.ZipFile('$data').extractall('$out/pictures')"
  train_options=(--recipe demo)
  picture=$out/shelf.png # a boot, trousers and a bag side by side, for the heatmap
  boots=("$out"/pictures/val/ankle-boot/*.png) trousers=("$out"/pictures/val/trouser/*.png)
  bags=("$out"/pictures/val/bag/*.png)
  python tools/make_shelf.py "$picture" 56 "${boots[7]}" "${trousers[1]}" "${bags[9]}"
fi

if [ -n "$live" ]; then
  if ! python -c 'import socket, sys; socket.create_server(("127.0.0.1", int(sys.argv[1])))' "${HTTP_PORT:-8080}" 2>/dev/null; then
    echo "make live: port ${HTTP_PORT:-8080} is in use. Choose another: make live HTTP_PORT=8081" >&2
    exit 2
  fi
  if [ ! -e "$out/model.onnx" ]; then
    step "Train the small PReLU-net, which takes minutes, and export it ($out/model.onnx)"
    run prelunet train "${train_options[@]}" --out "$out/train"
    run prelunet export "$out/train/last.safetensors" -o "$out/model.onnx"
  fi
  step "Open http://127.0.0.1:${HTTP_PORT:-8080}/ and drop an image there, e.g. $picture. Ctrl-C stops the server"
  run prelunet serve --model "demo=$out/model.onnx" --port 0 --http-port "${HTTP_PORT:-8080}" --lame-duck 0
  exit
fi

step "1. Train the small PReLU-net (checkpoint: $out/train/last.safetensors)"
run prelunet train "${train_options[@]}" --out "$out/train"

step "2. Inspect the learned slopes per layer, beside the paper's"
run prelunet inspect "$out/train/last.safetensors"

step "3. Export it to one ONNX file that includes the dense head, checked against torch ($out/model.onnx)"
run prelunet export "$out/train/last.safetensors" -o "$out/model.onnx" --force

step "4. Verify the file on this machine with its golden images"
run prelunet verify "$out/model.onnx"

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

step "6. Classify an image through the server; the heatmap shows where each class is seen: $out/heatmap.png"
run prelunet classify "$picture" --server "$address" --heatmap "$out/heatmap.png"

step "7. Evaluate on the validation images with one central crop, as most tools do"
run prelunet validate --model "$out/model.onnx" --data "$data" --protocol center --run "$out/center"

step "8. Evaluate as in the paper: whole images, three scales, mirrored too, every window"
run prelunet validate --model "$out/model.onnx" --data "$data" --protocol multi-scale --run "$out/multi-scale"

step "9. Write per-class error reports"
run prelunet report "$out/center" --data "$data"
run prelunet report "$out/multi-scale" --data "$data"

step "10. Stop the server; it finishes the calls in flight and exits with 0"
echo "\$ kill -TERM $server"
trap - EXIT
kill -TERM $server
wait $server
echo "exit code $?"

step "Done. Open $out/multi-scale/report/report.html and $out/heatmap.png"
touch "$out/finished"
