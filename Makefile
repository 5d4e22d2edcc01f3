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
#   make install-check  sdist and wheels, with and without a compiler, in fresh environments with the newest of everything but torch
#   make frameworks  what needs Lightning, Accelerate, Transformers, loggers or Triton, on the real packages in an environment of their own
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

.PHONY: demo test lint types layers native-test native-hostile unit bench cluster experiments experiments-variance experiments-federated experiments-language experiments-advice install-check frameworks fuzz docs vectors clean
.DEFAULT_GOAL := demo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/packages: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[flower,report,experiments,dev]"
	@touch $@

$(SANITIZED)/built: $(NATIVE) $(VENV)/packages
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DTERSEGRAD_TESTS=ON -DTERSEGRAD_SANITIZE=ON -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	$(BIN)/cmake --build $(SANITIZED)
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

# Not pinned, unlike everything else here: what a user gets today. Flower asks for an older typer, so it comes last.
TORCH ?= torch==2.13.0
FRESH := build/fresh
install-check:
	$(CLOCK) rm -rf $(FRESH); mkdir -p $(FRESH); \
	$(PYTHON) -m venv $(FRESH)/venv; pip="$(FRESH)/venv/bin/python -m pip --quiet --disable-pip-version-check"; \
	$$pip install build $(TORCH); \
	$(FRESH)/venv/bin/python -m build --sdist --outdir $(FRESH) . > $(FRESH)/sdist.log; \
	CC=/none/cc CXX=/none/c++ $$pip wheel --no-deps --wheel-dir $(FRESH)/plain $(FRESH)/tersegrad-*.tar.gz; \
	$$pip wheel --no-deps --wheel-dir $(FRESH)/native $(FRESH)/tersegrad-*.tar.gz; \
	ls -l $(FRESH)/*.tar.gz $(FRESH)/*/*.whl; \
	for kind in plain native; do \
		echo "$$kind:"; $$pip install --force-reinstall --no-deps $(FRESH)/$$kind/*.whl; \
		$$pip install $(TORCH) "tersegrad[report,experiments] @ file://$$(ls $(CURDIR)/$(FRESH)/$$kind/*.whl)"; \
		$(FRESH)/venv/bin/python tests/install/walk.py $$kind; \
	done; \
	echo "with Flower:"; $$pip install $(TORCH) "tersegrad[flower] @ file://$$(ls $(CURDIR)/$(FRESH)/native/*.whl)"; \
	$(FRESH)/venv/bin/python tests/install/walk.py native; rm -rf $(FRESH)/venv

FRAMEWORKS := build/frameworks
frameworks:
	$(CLOCK) rm -rf $(FRAMEWORKS); $(PYTHON) -m venv $(FRAMEWORKS); \
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ".[dev]" lightning accelerate transformers tensorboard wandb mlflow-skinny triton; \
	$(FRAMEWORKS)/bin/python -m pip list 2> /dev/null | grep -E "^(torch|lightning|accelerate|transformers|tensorboard|wandb|mlflow-skinny|triton) "; \
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -q -rs tests/integrations/test_frameworks.py tests/engine/test_logs.py tests/kernels/test_add_a_kernel.py tests/moments/test_triton.py; rm -rf $(FRAMEWORKS)

fuzz: $(SANITIZED)/built
	$(CLOCK) for program in $(SANITIZED)/fuzz_*; do [ -x "$$program" ] && [ -f "$$program" ] || continue; "$$program" $(FUZZ); done

vectors: $(VENV)/packages
	$(RUN) -m spec.make_vectors

table: $(VENV)/packages
	$(RUN) -c "from tersegrad.report.catalog import page; print(page(), end='')" > docs/compressors.md

docs: $(VENV)/packages
	$(CLOCK) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict; echo "open site/index.html"

clean:
	rm -rf $(VENV) build site out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
