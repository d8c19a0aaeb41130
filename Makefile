# `make help` lists the targets. ARGS passes overrides: make train ARGS="strategy=ddp trainer.devices=2"
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
EXTRAS ?=
# images of containers set it; without it no process of a test compiles every Python file again
unexport PYTHONDONTWRITEBYTECODE

# Without an NVIDIA GPU torch's CPU build is enough. PyPI's wheels for Linux bring gigabytes of CUDA libraries, so PyTorch's
# own index is asked there, unless pip finds a CPU build without it. TORCH_CPU_INDEX= asks no other index. GPU=1: on a login
# node without a GPU, whose environment jobs on GPUs use.
GPU ?= $(wildcard /dev/nvidia[0-9]* /dev/dxg)
TORCH := $(if $(GPU)$(TORCH_INDEX),torch,torch==2.13.0)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# TORCH_INDEX=https://download.pytorch.org/whl/cu126 (an older driver), …/rocm7.1 (AMD): torch comes from there and nowhere else
TORCH_INDEX ?=
TORCH_NEEDS_INDEX := $(if $(GPU)$(TORCH_INDEX),,$(if $(filter Linux,$(shell uname -s)),$(TORCH_CPU_INDEX)))
# with that index nothing but the CPU build will do: where it cannot be reached, pip fails and names it
TORCH_BUILD = $(if $(TORCH_NEEDS_INDEX),$(patsubst torch==%,torch==%+cpu,$(TORCH)),$(TORCH))
# everything but torch in the versions that were tested; CONSTRAINTS= takes the newest that the requirements allow
CONSTRAINTS ?= constraints.txt
# uv if it is there, else pip; UV= takes pip in any case
UV ?= $(shell command -v uv)
# into the environment of a folder. Python files are compiled on all cores afterwards: pip would take a minute more on one
PIP_TOOLS = $(if $(UV),$(UV) pip install --quiet --index-strategy unsafe-best-match --python $1/python,$1/python -m pip \
	install --quiet --no-compile) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV) || true # some packages ship files for other Pythons
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
PIP_INSTALL = $(call PIP_TOOLS,$(BIN)) $(if $(TORCH_NEEDS_INDEX),$$($(BIN)/python -m pip \
	index versions torch 2>/dev/null | grep -qF '$(patsubst torch==%,%,$(TORCH))+cpu' || echo --extra-index-url $(TORCH_NEEDS_INDEX)))

define PRINT_EXTRAS
import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
if wrong := {*sys.argv[1:]} - {*extras}:
    sys.exit(f"EXTRAS={' '.join(wrong)}: there is no such extra. Type some of {' '.join(extras)}.")
print(*(package for name in sys.argv[1:] for package in extras[name]), sep="\n")
endef
export PRINT_EXTRAS
PACKAGES_OF = $(BIN)/python -c "$$PRINT_EXTRAS"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] + ". Type make PYTHON=python3.11 …") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt $(wildcard constraints.txt) | $(VENV)/bin/python
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url $(TORCH_INDEX) "$$(grep '^torch>' requirements.txt)")
	$(PIP_INSTALL) --requirement requirements.txt "$(TORCH_BUILD)"
	@$(COMPILE)
	@touch $@

# torchmetrics imports transformers if it is on the path, which makes each start of Lightning three seconds longer: the packages
# of OFF_PATH lie in a folder of their own, and only the processes that need them have it on their path
ON_PATH := dev data deepspeed export notebooks sweep wandb
OFF_PATH := finetune peft timm
$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	$(PACKAGES_OF) $(ON_PATH) > $(VENV)/dev.txt
	$(PIP_INSTALL) --requirement $(VENV)/dev.txt "$(TORCH_BUILD)"
	$(PACKAGES_OF) $(OFF_PATH) > $(VENV)/off-path.txt
	$(call PIP_TOOLS,$(BIN)) --no-deps --upgrade --target $(VENV)/extras --requirement $(VENV)/off-path.txt
	@$(COMPILE)
	@touch $@

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

# with its requirements timm would bring torchvision
setup: $(VENV)/.installed $(if $(filter dev,$(EXTRAS)),$(VENV)/.installed-dev) ## Create the environment in .venv; EXTRAS="data export" adds extras of pyproject.toml
	@$(PACKAGES_OF) $(filter-out timm,$(EXTRAS)) > $(VENV)/wanted.txt
	@$(if $(filter-out timm,$(EXTRAS)),$(PIP_INSTALL) --requirement $(VENV)/wanted.txt "$(TORCH_BUILD)",true)
	@$(if $(filter timm,$(EXTRAS)),$(PIP_INSTALL) --no-deps $$($(PACKAGES_OF) timm),true)

new: $(VENV)/.installed ## Start a model, data, task and test of your own: make new NAME=moons
	@$(if $(NAME),$(BIN)/python scripts/new.py $(NAME),echo "Type make new NAME=moons" >&2; exit 2)

train: $(VENV)/.installed ## Train a small language model, or what ARGS choose
	$(BIN)/python train.py $(ARGS)

test: $(VENV)/.installed-dev ## Run the tests: 10–20 minutes on two cores; ARGS="-n 0" for one process
	$(PYTEST) -m "guarantee or not slow" $(ARGS)

test-guarantees: $(VENV)/.installed-dev ## Run the tests that hold a sentence of docs/contract.md
	$(PYTEST) -m guarantee $(ARGS)

test-fast: $(VENV)/.installed-dev ## Run the tests that take seconds
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev ## Run everything, for hours; a missing package fails its tests; ARGS=tests/finetune for a part
	$(PYTEST) --all $(ARGS)

prove: $(VENV)/.installed ## Prove that an experiment (ARGS) is the same after stops and under every layout
	$(BIN)/python scripts/prove.py $(ARGS)

runs: $(VENV)/.installed ## List runs: running, finished, stopped or failed, with step, best metric, age and size
	@$(BIN)/python scripts/runs.py $(ARGS)

notebooks: $(VENV)/.installed-dev ## Execute notebooks/, each from a fresh kernel, and write their outputs; ARGS="1 4" for some
	$(BIN)/python scripts/notebooks.py $(ARGS)

# the tools that build the pages have their own environment
.venv-docs/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m venv --clear .venv-docs
	@echo '*' > .venv-docs/.gitignore
	$(PACKAGES_OF) docs > .venv-docs/docs.txt
	$(call PIP_TOOLS,.venv-docs/bin) --requirement .venv-docs/docs.txt
	@touch $@

lock: CONSTRAINTS = # of what the tools of .venv-docs were, else a change of theirs could not be installed
# versions in uv.lock stay, unless a requirement forbids them. Torch's builds for CPUs, CUDA and ROCm are other files of one version:
# constraints.txt leaves torch and what it brings to `setup`, and has no hashes, which pip would then ask of all
lock: .venv-docs/.installed ## Write uv.lock and constraints.txt anew after a change of requirements; UPGRADE=1 takes the newest versions
	.venv-docs/bin/uv lock $(if $(UPGRADE),--upgrade)
	.venv-docs/bin/uv export --frozen --all-extras --no-emit-project --no-hashes --no-annotate --no-header --quiet \
		--output-file .venv-docs/constraints.txt
	(echo '# uv.lock without torch and hashes, for pip. make lock writes this file; CONSTRAINTS= ignores it.'; \
		sed -E '/^(torch|torchvision|triton|nvidia-.*|cuda-.*|setuptools|pip)==/d' .venv-docs/constraints.txt) > constraints.txt

docs: .venv-docs/.installed $(VENV)/.installed ## Build the pages of docs/ as a site in .site; ARGS=serve shows it while you write
	$(BIN)/python scripts/reference.py > docs/reference.md
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(or $(ARGS),build)

docs-check: .venv-docs/.installed $(VENV)/.installed-dev ## Build the site without a warning, and check the pages and the furniture
	$(BIN)/python scripts/reference.py > docs/reference.md
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	.venv-docs/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv-docs/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	.venv-docs/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	.venv-docs/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	.venv-docs/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	.venv-docs/bin/pre-commit validate-config
	.venv-docs/bin/hadolint Dockerfile
	$(BIN)/python -m pytest tests/test_docs.py tests/test_readme.py tests/test_furniture.py

bench: $(VENV)/.installed-dev ## Compare training speed with a bare PyTorch loop and others (docs/measured.md)
	$(BIN)/python -m benchmarks $(ARGS)

test-gpu: $(VENV)/.installed-dev ## On a GPU: run its tests, and benchmark gpt2_124m
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m benchmarks trainer.accelerator=gpu model=gpt2_124m data.context=1024 \
		data.global_batch_size=16 strategy.compile=block $(ARGS)

checks: $(VENV)/.installed-dev ## Lint, check types and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_contracts.py

schema: $(VENV)/.installed ## Write configs/.schema/ anew, with which editors complete and check configs/
	PYTHONPATH=src $(BIN)/python -m armature.command schema

size: $(VENV)/bin/python ## Print how large each part is, and its limits
	@$(BIN)/python scripts/size.py $(ARGS)

format: $(VENV)/.installed-dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove caches; runs and the environment stay
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf .site .pytest_cache .ruff_cache .hypothesis .import_linter_cache

test-gpus: $(VENV)/.installed ## On 8 to 16 GPUs, half an hour: links, layouts, speed, a resume; writes gpus.json
	$(BIN)/python scripts/gpus.py $(ARGS)

.PHONY: help setup new train test test-guarantees test-fast test-all test-gpu test-gpus prove \
	runs docs notebooks docs-check lock bench checks schema size format clean
