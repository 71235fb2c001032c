# Every command of the project. Each target first makes what it needs: .venv, and in it the package and its extras.

PYTHON ?= python3
ZOO ?= ../shared/zoo
INTAKE ?= ../shared/intake
FUZZ_SECONDS ?= 600
CASES ?= 200
SLOW ?= slow
SEED ?= 0
BASE ?= HEAD
SUBSET ?= all
JOBS ?= 2

BIN := .venv/bin
VERSIONS := tests/cli tests/data tests/files tests/passes tests/verification tests/report tests/autodiff/test_registry.py tests/autodiff/test_type_support.py tests/test_builder.py
TRAIN := build/digits_cnn.train.onnx
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE # else each of the many processes of the tests compiles all modules anew, which doubles its time

.PHONY: run web test test-slow test-all test-lowest lint docs types site mutants conformance fuzz-graphs fuzz-files fuzz-data fuzz-kills zoo intake digests roles opinfo bench bench-check clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

run: .venv/installed  ## build a training model of a sample, show its report, train on it
	mkdir -p $(dir $(TRAIN))
	$(BIN)/onnxgrad build sample_models/digits_cnn.onnx --loss cross-entropy --label y -o $(TRAIN)
	cat $(TRAIN).report.md
	$(BIN)/python sample_models/train.py $(TRAIN)

web: .venv/installed build/node/installed  ## serve pages that train the digits CNN in the browser, on port 8000; draw.html on digits drawn there
	$(BIN)/onnxgrad build sample_models/digits_cnn.onnx --loss cross-entropy --label y --optimizer adamw \
		--target portable --keep-outputs -o $(TRAIN)
	$(BIN)/onnxgrad pack $(TRAIN) -o build/site-digits --data sample_models/digits.npz --prefix train_ \
		--val sample_models/digits.npz --val-prefix test_ --runtime build/node/node_modules/onnxruntime-web/dist
	cp sample_models/web/draw.* build/site-digits
	$(BIN)/python -m http.server --directory build/site-digits

test: .venv/installed-test  ## the fast tests
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/installed-test  ## the rest of the tests
	$(BIN)/python -m pytest -m "$(SLOW)"

test-lowest: build/lowest/installed  ## the tests that versions of dependencies concern most, with the lowest that pyproject.toml admits
	build/lowest/bin/python -m pytest -m "not slow" $(VERSIONS)

test-all: test test-slow conformance lint  ## all tests, the node tests of onnx, and lint

lint: .venv/installed-lint  ## ruff, mypy, the contract of the layers, spelling, and the limits of tools/prose.py
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tools.prose --check

docs: .venv/installed-test  ## write the tables, pictures and reference of docs/ anew, from the code and what the tests have proven; a picture that changed needs Graphviz
	$(BIN)/python -m tests.proofs
	$(BIN)/python -m tests.pictures
	$(BIN)/python -m tests.type_support --page
	$(BIN)/python -m tools

types: .venv/installed-test build/lowest/installed  ## run the derivative of every operator in every type, on the newest and the lowest onnxruntime; docs/supported.md
	$(BIN)/python -m tests.type_support
	build/lowest/bin/python -m tests.type_support

site: .venv/installed-docs  ## build docs/ as a site in build/site; a dead link and a docstring that differs from its signature fail
	mkdir -p build
	$(BIN)/zensical build --strict --clean > build/site.log 2>&1 || { cat build/site.log; exit 1; }
	! grep "^griffe:" build/site.log

mutants: .venv/installed-test .venv/installed-mutants  ## change MODULE in small ways, each of which a test must notice
	$(BIN)/python -m tests.mutants $(MODULE)

conformance: .venv/installed-test  ## differentiate the node tests that onnx publishes, for each target and with recomputation too; build/conformance.md
	$(BIN)/python -m tests.conformance

fuzz-graphs: .venv/installed-test  ## differentiate random graphs for FUZZ_SECONDS
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m tests.test_random_graphs

fuzz-files: .venv/installed-test  ## send CASES mutated models, of SEED, through every command; those of INTAKE too
	$(BIN)/python -m tests.fuzz.files --cases $(CASES) --seed $(SEED) --folder $(INTAKE)

fuzz-data: .venv/installed-test  ## train, prove and go on with damaged data, checkpoints, settings, adapters, tokenizers, pictures, metadata
	$(BIN)/python -m tests.fuzz.data --cases $(CASES) --seed $(SEED)

fuzz-kills: .venv/installed-test  ## end commands by signals and full disks, run two at once, close their streams
	$(BIN)/python -m tests.fuzz.kills --cases $(CASES) --seed $(SEED)

zoo: .venv/installed-test  ## compare the gradients of the real models in ZOO with PyTorch's, for each target and with recomputation too
	$(BIN)/python -m tests.zoo $(ZOO)
	$(BIN)/python -m tests.zoo $(ZOO) --target ort-cpu
	$(BIN)/python -m tests.zoo $(ZOO) --target ort-cuda
	$(BIN)/python -m tests.zoo $(ZOO) --recompute elementwise
	$(BIN)/python -m tests.zoo $(ZOO) --keep 0.5

intake: .venv/installed-test  ## build the models of INTAKE, as exporters write them, by the command; each must end as is expected of it
	$(BIN)/python -m tests.intake $(INTAKE)

digests: .venv/installed  ## compare the models that the working tree and BASE build; SUBSET=quick takes two minutes
	$(BIN)/python -m tools.digests $(BASE) --zoo $(ZOO) --intake $(INTAKE) --subset $(SUBSET) -j $(JOBS)

roles: .venv/installed-test  ## count what each heuristic decides about parameters, and its errors, in ZOO, INTAKE and exports of PyTorch
	$(BIN)/python -W ignore -m tests.roles --zoo $(ZOO) --intake $(INTAKE)

opinfo: .venv/installed-test .venv/installed-interop  ## compare derivatives of PyTorch's sample inputs with PyTorch's, and count the verdicts of the default check; build/opinfo
	$(BIN)/python -W ignore -m tests.opinfo

bench: .venv/installed-bench  ## time and memory beside named peers: builds, operators' gradients, derivatives, training steps (benchmarks/RESULTS.md)
	$(BIN)/python -m benchmarks.build
	$(BIN)/python -m benchmarks.ops
	$(BIN)/python -m benchmarks.derivatives
	$(BIN)/python -m benchmarks.curvature
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.adapters
	$(BIN)/python -m benchmarks.qlora
	$(BIN)/python -m benchmarks.loop
	mkdir -p build
	$(BIN)/python -m benchmarks.train_step --json build/train_step.json
	$(BIN)/python -m benchmarks.results build/train_step.json

bench-check: .venv/installed  ## hold a quick subset against benchmarks/baseline.json, in counts and ratios; what is slower fails
	$(BIN)/python -m benchmarks.check

clean:  ## remove what make made
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/installed-%: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

build/node/installed:  # without the variable, the package wants to download libraries for CUDA
	mkdir -p build/node
	cd build/node && ONNXRUNTIME_NODE_INSTALL=skip npm install --no-audit --no-fund onnxruntime-node@1.30.0 \
		onnxruntime-web@1.30.0 playwright-core@1
	touch $@

build/lowest/installed: pyproject.toml .ci/constraints-lowest.txt
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet --editable ".[test]" --constraint .ci/constraints-lowest.txt
	touch $@
