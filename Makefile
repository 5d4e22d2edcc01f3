# Everything sets itself up: a virtual environment in .venv, the pinned packages, the compiled kernels.
#   make demo   four worker processes train a network, dense and compressed: a table and a page with figures
#   make test   everything CI runs
#   make bench  speeds and rates, as a table and JSON
#   make experiments  the papers' experiments: tables and figures in experiments/*/results (DATA=folder adds LIBSVM sets)
#   make experiments-variance, make experiments-federated  the same for the other experiments (DATA=folder; digits without it)
#   make experiments-language  loss of a language model against bytes (DATA=folder of text; downloads pinned packages without it)
#   make experiments-advice  which setting to choose, by optimiser and bytes (DATA=folder with mnist and tinyshakespeare adds the report)
#   make cluster  one all-reduce between hosts in network namespaces, by link speed (needs root)
#   make fuzz   long fuzzing of the native decoders
#   make wheel  sdist and wheels in dist/: one for every Linux with glibc that is new enough, one without compiled kernels
#   make install-check  these wheels in fresh environments, with the newest and the lowest of everything but torch; docs/versions.md
#   make pythons  the sdist with other Pythons of this machine and the newest torch, which brings gigabytes of CUDA
#   make frameworks  the same for what needs Lightning, Accelerate, Transformers, loggers or Triton
#   make aarch64  cross-built for 64-bit Arm and run under qemu with the lowest torch: the same bytes (needs root)
#   make docs   the documentation as a website in site/
#   make clean  remove everything that was made
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/python
NATIVE := CMakeLists.txt $(wildcard native/*/*.cpp native/*/*.hpp native/include/*/*.hpp)
SANITIZED := build/sanitized
FUZZ ?= 100000
CLOCK = @start=$$(date +%s); trap 'echo "make $@: $$(( $$(date +%s) - start )) s"' EXIT; set -e;

.PHONY: demo test lint types layers native-test native-hostile unit bench cluster experiments experiments-variance experiments-federated experiments-language experiments-advice wheel install-check pythons frameworks aarch64 fuzz docs vectors clean
.DEFAULT_GOAL := demo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/packages: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[flower,report,experiments,dev]"
	@touch $@

$(SANITIZED)/built: $(NATIVE) $(VENV)/packages
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DTERSEGRAD_TESTS=ON -DTERSEGRAD_SANITIZE=ON -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	env -u MAKEFLAGS $(BIN)/cmake --build $(SANITIZED)
	@touch $@

demo: $(VENV)/packages
	$(CLOCK) $(BIN)/tersegrad demo

test: $(VENV)/packages
	$(CLOCK) $(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types layers native-test; $(MAKE) --no-print-directory unit

lint: $(VENV)/packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/packages
	$(BIN)/mypy

layers: $(VENV)/packages
	$(BIN)/lint-imports

native-test: $(SANITIZED)/built
	@find $(SANITIZED) -maxdepth 1 -type f -executable -name "test_*" -print0 | sort -z | xargs -0 -n 1 -P 2 sh -c '"$$0" || exit 255'
	@find $(SANITIZED) -maxdepth 1 -type f -executable -name "fuzz_*" -print0 | sort -z | xargs -0 -n 1 -P 2 sh -c '"$$0" 2000 || exit 255'
	@$(MAKE) --no-print-directory native-hostile

# Every function of the module with hostile arguments, under the sanitizers. Python itself leaks.
native-hostile: $(SANITIZED)/built
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	$(BIN)/python -W ignore tests/kernels/hostile.py $(SANITIZED)/_native*.so

unit: $(VENV)/packages
	$(RUN) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

bench: $(VENV)/packages
	$(CLOCK) $(RUN) -m benchmarks.run

experiments: $(VENV)/packages
	$(CLOCK) $(RUN) -m experiments.optimal_compression.run $(if $(DATA),--data $(DATA))

experiments-variance: $(VENV)/packages
	$(CLOCK) $(RUN) -m experiments.variance_based.run --data $(or $(DATA),digits)

experiments-language: $(VENV)/packages
	$(if $(DATA),,$(RUN) -m experiments.low_communication.corpus out/source)
	$(CLOCK) $(RUN) -m experiments.low_communication.run $(or $(DATA),out/source)

experiments-advice: $(VENV)/packages
	$(CLOCK) $(RUN) -m experiments.advice.run --seeds 1
	$(CLOCK) $(RUN) -m experiments.advice.run --part delay --task digits
	$(if $(DATA),$(CLOCK) $(RUN) -m experiments.advice.run --part report --data $(DATA))

experiments-federated: $(VENV)/packages
	$(CLOCK) $(RUN) -m experiments.federated.run $(if $(DATA),--task mnist --folder $(DATA))
	$(CLOCK) $(RUN) -m experiments.federated.hostile
	$(CLOCK) $(RUN) -m experiments.federated.deployment

cluster: $(VENV)/packages
	$(CLOCK) $(RUN) -m benchmarks.cluster allreduce

wheel:
	$(CLOCK) $(PYTHON) -m tests.install.wheels dist

# Not pinned, unlike everything else here: what a user gets today. TORCH: the only release that is not left to pip.
TORCH ?= 2.13.0
MATRIX := $(PYTHON) -m tests.install.matrix --torch $(TORCH)
install-check:
	$(CLOCK) $(MATRIX) "newest, plain" newest "newest, Flower" lowest "lowest, Flower"

pythons:
	$(CLOCK) $(MATRIX) "Python 3.12" "Python 3.13"

frameworks:
	$(CLOCK) $(MATRIX) frameworks

AARCH64 := build/aarch64
aarch64: $(VENV)/packages
	$(CLOCK) $(BIN)/cmake -S . -B $(AARCH64) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DTERSEGRAD_TESTS=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null; \
	$(BIN)/cmake --build $(AARCH64); $(PYTHON) -m tests.install.aarch64 $(AARCH64)

fuzz: $(SANITIZED)/built
	$(CLOCK) for program in $(SANITIZED)/fuzz_*; do [ -x "$$program" ] && [ -f "$$program" ] || continue; "$$program" $(FUZZ); done

vectors: $(VENV)/packages
	$(RUN) -m spec.make_vectors

table: $(VENV)/packages
	$(RUN) -c "from tersegrad.report.catalog import page; print(page(), end='')" > docs/compressors.md

docs: $(VENV)/packages
	$(CLOCK) $(RUN) -m benchmarks.pages build/docs; $(BIN)/zensical build --clean --strict; echo "open site/index.html"

clean:
	rm -rf $(VENV) build site out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
