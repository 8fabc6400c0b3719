# Two commands do everything on a fresh machine: `make demo` and `make test`. Before a large change lands:
# `make test-all`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
DEMO := $(VENV)/.demo
# Thousands of processes import this project: none of them should compile it again, regardless of the
# caller's environment.
unexport PYTHONDONTWRITEBYTECODE
# Each run of pytest lists its slowest tests, and `make test` those of both runs.
DURATIONS := build/durations
SLOWEST = --durations=25 --durations-min=1 --junitxml=$(DURATIONS)/$@.xml
# Tests that mostly wait: for nodes, etcd, processes and timeouts. Three of their files run at a time, beside
# two of those that compute.
WAITING := tests/integration tests/kill tests/security
BY_FILE = --dist loadfile --no-loadscope-reorder $(SLOWEST)
# A guarantee's cheapest proof: within ten minutes on two cores. `make test-all` adds those marked slow.
TIER := not soak and not slow
# One run of mypy for everything: a run per folder would read torch's types again. Module names must
# then be unique, so each conftest.py gets a link with a unique name.
CONFTESTS := build/conftests
SPACE := $(subst ,, )
TYPED := $(filter-out tests/kit,$(patsubst %/,%,$(wildcard tests/*/ tests/unit/*/))) tests/kill/scripts tests scripts benchmarks \
  benchmarks/scripts
AS_USERS_WRITE := tests/(idioms/(scripts|refused)|integrations/scripts)/

.PHONY: demo test test-all concurrent check docs computing waiting compat matrix soak streams bench gpu gpu-tests gpu-kills gpu-frameworks gpu-bench format clean

$(STAMP): pyproject.toml constraints.txt scripts/bootstrap.sh
	bash scripts/bootstrap.sh $(VENV) dev
	touch $@

# What the demo runs, and no development tools. torch is compiled once here, not in each process.
$(DEMO): pyproject.toml constraints.txt scripts/bootstrap.sh
	bash scripts/bootstrap.sh $(VENV) demo
	$(BIN)/python -c 'from elastic.testing.forks import server; server.import_all()'
	touch $@

# What many processes are about to import at once, or each of them would compile it: pip does not, and
# pytest rewrites the assertions of each test file at its first import.
$(COMPILED): $(STAMP)
	$(BIN)/python -c 'import hypothesis, pytest; from elastic.testing.forks import server; server.import_all()'
	$(BIN)/pytest --collect-only -qq > $@.log || { tail -n 50 $@.log; exit 1; }
	touch $@

demo: $(or $(wildcard $(STAMP)),$(DEMO))
	$(BIN)/elastic demo $(DEMO_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(CONFTESTS) && mkdir -p $(CONFTESTS)
	for file in tests/conftest.py tests/*/conftest.py; do \
	  ln -s $(CURDIR)/$$file $(CONFTESTS)/$$(dirname $$file | tr / _)_conftest.py; \
	done
	MYPYPATH=$(subst $(SPACE),:,$(TYPED)) $(BIN)/mypy --explicit-package-bases \
	  --exclude '(^|/)conftest\.py$$' --exclude '$(AS_USERS_WRITE)' \
	  elastic checkpoints torch_elastic_harness.py tests benchmarks $(CONFTESTS)
	$(BIN)/lint-imports

# What computes runs at a lower priority than what waits, whose nodes have deadlines.
test: $(STAMP)
	rm -rf $(DURATIONS)
	$(MAKE) --no-print-directory -j2 --keep-going waiting concurrent; code=$$?; \
	  $(BIN)/python scripts/slowest_tests.py $(DURATIONS); exit $$code

test-all:
	$(MAKE) --no-print-directory test TIER="not soak"

concurrent: $(STAMP)
	nice -n 5 $(MAKE) --no-print-directory check docs computing

# In build/site. A broken link, or a public name without a docstring and an entry, fails; no network is needed.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

computing: $(COMPILED)
	$(BIN)/pytest -n 2 $(BY_FILE) -m "not gpu and $(TIER)" $(WAITING:%=--ignore=%)

waiting: $(COMPILED)
	$(BIN)/pytest -n 3 $(BY_FILE) -m "not gpu and $(TIER)" $(WAITING)

# Separate environments in ~/.cache: 25 GB on first use, then about 10 minutes for each.
compat: $(STAMP)
	$(BIN)/python scripts/compat.py $(COMPAT_ARGS)

# The same for each of Python 3.10 to 3.13 that is installed.
matrix: $(STAMP)
	$(BIN)/python scripts/compat.py --pythons $(MATRIX_ARGS)

soak: $(STAMP) streams
	$(BIN)/pytest -m soak --timeout 7200
	$(BIN)/pytest -m hypothesis --hypothesis-profile=soak --timeout 7200

# The in-process kill suite on a backend with NCCL's semantics: results are written after a collective
# has returned, and aborted collectives look complete.
streams: $(STAMP)
	TRAINING_BACKEND=nccl_semantics $(BIN)/pytest -m "not soak" \
	  tests/kill/test_in_process.py tests/kill/test_in_process_phases.py tests/kill/test_own_loops.py \
	  tests/kill/test_deaths_in_replicas.py tests/kill/test_building_in_worlds.py

bench: $(STAMP)
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/checkpoint.py

# Each of the two takes less than ten minutes. Ranks that NCCL would not let share a GPU do so as if they were
# on different hosts (tests/kit/shared_gpu.py). `make gpu-kills`: the in-process kill suite likewise;
# `make gpu-frameworks`: Accelerate, Fabric, Lightning and Trainer, with those that are installed there.
# `make gpu GPU_PYTHON=python3` uses that Python's torch, for example an image's, built for its driver.
ifdef GPU_PYTHON
GPU_BIN := build/gpu/bin
GPU_STAMP := build/gpu/.installed
else
GPU_BIN := $(BIN)
GPU_STAMP := $(STAMP)
endif

build/gpu/.installed: pyproject.toml scripts/gpu_environment.sh
	GPU_PYTHON="$(GPU_PYTHON)" bash scripts/gpu_environment.sh build/gpu
	touch $@

gpu: gpu-tests gpu-bench

gpu-tests: $(GPU_STAMP)
	$(GPU_BIN)/python -m pytest -n 4 tests/gpu tests/kill/test_nccl.py -m gpu

gpu-kills: $(GPU_STAMP)
	SHARED_GPU=1 $(GPU_BIN)/python -m pytest -n 3 --dist loadfile -m "not soak" \
	  tests/kill/test_in_process.py tests/kill/test_in_process_phases.py tests/kill/test_own_loops.py \
	  tests/kill/test_deaths_in_replicas.py tests/kill/test_hsdp.py tests/kill/test_hangs.py

gpu-frameworks: $(GPU_STAMP)
	SHARED_GPU=1 $(GPU_BIN)/python -m pytest -n 8 -m "not soak" tests/integrations

gpu-bench: $(GPU_STAMP)
	$(GPU_BIN)/python benchmarks/gpu.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
