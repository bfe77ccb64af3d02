# In a clone, `make quickstart` runs the main job on a CPU, and `make test` runs the tests.
PYTHON ?= $(firstword $(foreach v,python3.12 python3,$(shell command -v $(v) 2>/dev/null)))
VENV := .venv
VLLM_VENV := .venv-ascend
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
CPU := retool_mcore/platforms/cpu
CUDA := retool_mcore/platforms/cuda
IMAGE_PYTHON ?= python
SEED ?= 0

BASE ?= HEAD~1
PYTEST := $(BIN)/python -m pytest -m "not gpu and not multi_gpu and not npu and not long"
# The folders of `make test`, slowest first. `make test-long` runs the tests marked `long`, such as tests/nightly.
PARTS := e2e sandbox parity engine unit

# Check the Python of an existing environment, because venv does not replace it.
define PYTHON_FITS
for python in "$(PYTHON)" $(wildcard $(BIN)/python); do \
	  $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { \
	    echo "error: Python 3.12 is needed, because megatron-core 0.18 supports no older and verl 0.9.1 no newer version; found: $$("$$python" --version 2>/dev/null || echo "no Python"). Set PYTHON=/path/to/python3.12, and delete $(VENV) if another version made it." >&2; exit 2; }; \
	done
endef

.PHONY: quickstart install install-cuda install-ascend test test-ascend $(PARTS:%=test-%) test-long test-fast test-fast-1 test-fast-2 lint docs perf clean

quickstart: install
	@$(BIN)/retool quickstart --seed $(SEED)

install: $(VENV)/.installed

# Install torch first, in the build that pip's indexes have: the CPU build is smaller, the CUDA build also works. A
# constraint keeps later steps from replacing it. The stamp file is written last, so an interrupted install resumes;
# pip skips installed packages.
$(VENV)/.installed: pyproject.toml $(CPU)/constraints.txt $(CPU)/no_deps.txt $(CPU)/no_torchvision/pyproject.toml
	@$(PYTHON_FITS)
	@free=$$(df -Pk . | awk 'NR==2 {print int($$4 / 1024)}'); test $$free -ge 6500 || test -x $(BIN)/retool || \
	  { echo "error: $$free MB free here; the environment and a quickstart run need 6500 MB." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch (1 of 2)"
	@$(PIP) --constraint $(CPU)/constraints.txt torch
	@echo "installing into $(VENV): verl, Megatron, SGLang and the rest (2 of 2), some minutes"
	@$(PIP) --constraint $(CPU)/constraints.txt --editable '.[cpu,dev]'
	@$(PIP) --constraint $(CPU)/constraints.txt --no-deps --requirement $(CPU)/no_deps.txt
	@$(PIP) --no-deps ./$(CPU)/no_torchvision
	@$(BIN)/python -W ignore -c 'import torch, verl, retool_mcore.cli.main; print("installed: torch", torch.__version__, "and verl", verl.__version__)'
	@touch $@

# For machines with NVIDIA GPUs. Install torch's CUDA build first, because Transformer Engine's torch
# extension is compiled against it and the cuDNN and NCCL headers that it installs.
install-cuda:
	@$(PYTHON_FITS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint $(CUDA)/constraints.txt torch setuptools wheel
	CPATH=$$($(BIN)/python -c 'import pathlib, sysconfig; print(":".join(map(str, pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/*/include"))))') \
	  NVTE_FRAMEWORK=pytorch $(PIP) --constraint $(CUDA)/constraints.txt --no-build-isolation 'transformer-engine[pytorch,core-cu13]'
	$(PIP) --constraint $(CUDA)/constraints.txt --editable '.[cuda]'
	$(PIP) --constraint $(CUDA)/constraints.txt --no-deps megatron-bridge
	$(BIN)/python -W ignore -c 'import torch, transformer_engine.pytorch, verl, retool_mcore.cli.main; print("installed: torch", torch.__version__, "for CUDA", torch.version.cuda)'

# For use in the CANN image (see ascend/README.md). Keeps the image's torch, torch_npu, MindSpeed, Megatron-Bridge
# and vLLM.
install-ascend:
	$(IMAGE_PYTHON) -c 'import torch, torch_npu' || \
	  { echo "error: $(IMAGE_PYTHON) has no torch with torch_npu. Start from the CANN image that ascend/README.md names." >&2; exit 2; }
	$(IMAGE_PYTHON) -m pip --disable-pip-version-check install --quiet --constraint ascend/overrides.txt --editable '.[ascend]'
	$(IMAGE_PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps 'megatron-bridge>=0.5,<0.5.3'

# Run two folders at a time, because a starting engine leaves a core idle for half of the time. A failure
# does not stop the others. CI also runs lint and docs: EXTRA="lint docs".
test: install
	@$(MAKE) --no-print-directory --keep-going -j2 $(EXTRA) $(PARTS:%=test-%)

$(PARTS:%=test-%): test-%:
	$(PYTEST) tests/$*

# The unit tests start no process. Two halves run at once.
HALF := $(addprefix tests/unit/,data evaluate platforms reward verl)
test-fast: install
	@$(MAKE) --no-print-directory --keep-going -j2 test-fast-1 test-fast-2

test-fast-1:
	$(PYTEST) -q $(HALF)

test-fast-2:
	$(PYTEST) -q tests/unit $(HALF:%=--ignore=%)

test-long: install
	$(BIN)/python -m pytest -m long

# Test the tool loop with a real vLLM. Its CPU build pins different versions from .venv, so it has a separate
# environment.
test-ascend: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -m long tests/nightly/ascend

$(VLLM_VENV)/.installed: pyproject.toml $(wildcard tests/nightly/ascend/vllm_by_name/*.t*)
	@$(PYTHON_FITS)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet 'torch==2.13.0' 'uv>=0.8,<1'
	$(VLLM_VENV)/bin/uv pip install --quiet --compile-bytecode --python $(VLLM_VENV)/bin/python \
	  --override tests/nightly/ascend/vllm_by_name/overrides.txt --editable '.[engine]' ./tests/nightly/ascend/vllm_by_name \
	  --requirement tests/nightly/ascend/vllm_by_name/requirements.txt
	$(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_VENV)/bin/python --constraint $(CPU)/constraints.txt --no-deps megatron-bridge
	@touch $@

# Build the documentation site in site/. mkdocs has a separate environment.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "built: site/index.html"

.venv-docs/.installed: pyproject.toml
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Compare this commit with BASE, alternating on this machine: an SFT step; an RL step without engine and
# Ray, which measures this package's own work per token; a start of RL; the requests of a trajectory. The
# output includes the smallest difference that perf/compare.py can detect.
INTERLEAVE = $(BIN)/python -W ignore perf/interleave.py --base $(BASE)
perf: install
	test -d runs/task || $(BIN)/retool data task runs/task
	$(INTERLEAVE) sft_tiny_cpu --rounds 2 --steps 15
	$(INTERLEAVE) rl_alone_cpu --rounds 2 --steps 4 --data runs/task/rl_train.parquet
	$(INTERLEAVE) rl_tiny_cpu --rounds 2 --steps 2 --data runs/task/rl_train.parquet

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-docs site runs build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
