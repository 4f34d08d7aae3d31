#!/usr/bin/env bash
# A published net on real photos, in one command; every step prints the command that a user would type.
#   tools/demo_photos.sh           adopt it, classify, draw heat maps, evaluate and report
#   tools/demo_photos.sh --live    then serve it with the live page, which offers the photos
set -euo pipefail
out=demo/lite0
bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
step() { printf '\n%s== %s%s\n' "$bold" "$1" "$plain"; }
run() { printf '$ %s\n' "$*"; "$@"; }

if [ "${1:-}" != --live ] || [ ! -e "$out/lite0.onnx" ]; then
  rm -rf "$out"
  mkdir -p "$out"

  step "1. Export EfficientNet-Lite0 with its published weights from torch ($out/efficientnet-lite0.onnx)"
  run python tools/export_photo_net.py "$out"

  step "2. Adopt it with the preparation of its training; --dense: it can look at whole images ($out/lite0.onnx)"
  run prelunet adopt "$out/efficientnet-lite0.onnx" --crop 224 --classes imagenet-1k --mean 127 --std 128 --range 255 \
    --interpolation bicubic --dense -o "$out/lite0.onnx"
fi

if [ "${1:-}" = --live ]; then
  step "Open http://127.0.0.1:${HTTP_PORT:-8080}/ and click a photo, or drop your own. Ctrl-C stops the server"
  run prelunet serve "$out/lite0.onnx" --port 0 --http-port "${HTTP_PORT:-8080}" --examples "$out/photos" --lame-duck 0
  exit
fi

step "3. Classify the photos: whole images at three scales, mirrored too, every window"
run prelunet classify "$out"/photos/* --model "$out/lite0.onnx"

step "4. See where it sees what: heat maps over all three side by side ($out/heatmap.png)"
python tools/make_shelf.py "$out/shelf.png" 320 "$out"/photos/*
run prelunet classify "$out/shelf.png" --model "$out/lite0.onnx" --heatmap "$out/heatmap.png"

step "5. Evaluate it on 186 photos from shops, among the eight classes they show, and write the report"
run prelunet evaluate "$out/lite0.onnx" tools/photos/groceries.zip --restrict-classes dataset --heatmaps 100 -o "$out/run"

step "6. Whole images need not be better: evaluate the central crop, too, and compare image by image"
run prelunet validate "$out/lite0.onnx" tools/photos/groceries.zip --restrict-classes dataset --protocol center -o "$out/center"
run prelunet compare "$out/center" "$out/run" --out "$out/compared"

step "Done. Open $out/run/report/report.html, $out/compared/compare.html and $out/heatmap.png. To try it on your own photos: make live-photos"
