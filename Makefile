# `make help` lists the targets. ARGS passes overrides: make train ARGS="strategy=ddp trainer.devices=2"
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# images of containers set it; without it no process of a test compiles every Python file again
unexport PYTHONDONTWRITEBYTECODE

# everything but torch in the versions that were tested; CONSTRAINTS= takes the newest that the requirements allow
CONSTRAINTS ?= constraints.txt
# uv if it is there, else pip; UV= takes pip in any case
UV ?= $(shell command -v uv)
PIP = $(if $(UV),$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python,$(BIN)/python -m pip install --quiet)
INSTALL = $(PIP) $(addprefix --constraint ,$(CONSTRAINTS)) --requirement

# TORCH_INDEX=https://download.pytorch.org/whl/cu126 (an older driver), …/rocm7.1 (AMD): torch comes from there and nowhere else.
# GPU=1: on a login node without a GPU, whose environment jobs on GPUs use
GPU ?= $(wildcard /dev/nvidia[0-9]* /dev/dxg)
TORCH := $(if $(GPU)$(TORCH_INDEX),$(shell grep '^torch>' requirements.txt),torch==2.13.0)
INSTALL_TORCH = $(PIP) $(addprefix --index-url ,$(TORCH_INDEX)) "$(TORCH)"
# Without an NVIDIA GPU the CPU build is enough: PyPI's wheels for Linux bring gigabytes of CUDA libraries. It comes from where
# pip looks for packages, or from PyTorch's own index; where neither has it, from PyPI after all
ifeq ($(GPU)$(TORCH_INDEX)$(shell uname -s),Linux)
INSTALL_TORCH = $(BIN)/python -m pip install --quiet "$(TORCH)+cpu" 2>/dev/null || \
  $(PIP) --index-url https://download.pytorch.org/whl/cpu "$(TORCH)+cpu" || $(PIP) "$(TORCH)"
endif

PACKAGES_OF = $(BIN)/python -c 'import sys, tomllib; \
  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*(package for name in sys.argv[1:] for package in extras[name]), sep="\n")'

# make itself would ignore keys of a run that are typed beside ARGS, as in make train strategy=ddp; variables are in capitals
TYPED := $(foreach each,$(.VARIABLES),$(if $(filter command,$(origin $(each))),$(each)))
UNREAD := $(if $(TYPED),$(shell printf '%s\n' $(TYPED) | grep '[a-z]'))
KEYS := $(foreach each,$(UNREAD),$(each)=$($(each)))
$(if $(KEYS),$(error $(KEYS): no target reads it. Type ARGS="$(KEYS)"))

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] + ". Type make PYTHON=python3.11 …") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt $(CONSTRAINTS) | $(VENV)/bin/python
	$(INSTALL_TORCH)
	$(INSTALL) requirements.txt
	@touch $@

# torchmetrics imports transformers if it is on the path, which makes each start of Lightning three seconds longer: the packages
# of OFF_PATH lie in a folder of their own, and only the processes that need them have it on their path
ON_PATH := dev data deepspeed export notebooks sweep wandb
OFF_PATH := finetune peft timm
$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	$(PACKAGES_OF) $(ON_PATH) > $(VENV)/on-path.txt
	$(INSTALL) $(VENV)/on-path.txt
	$(PACKAGES_OF) $(OFF_PATH) > $(VENV)/off-path.txt
	$(INSTALL) $(VENV)/off-path.txt --no-deps --upgrade --target $(VENV)/extras
	@touch $@

# another extra; with its requirements timm would bring torchvision
$(VENV)/.installed-%: pyproject.toml $(VENV)/.installed
	$(PACKAGES_OF) $* > $(VENV)/$*.txt
	$(INSTALL) $(VENV)/$*.txt $(if $(filter timm,$*),--no-deps)
	@touch $@

setup: $(VENV)/.installed $(EXTRAS:%=$(VENV)/.installed-%) ## Create the environment in .venv; EXTRAS="data export" adds extras of pyproject.toml
new: RUN = scripts/new.py "$(NAME)" ## Start a model, data, task and test of your own: make new NAME=moons
train: RUN = train.py ## Train a small language model, or what ARGS choose
prove: RUN = scripts/prove.py ## Prove that an experiment (ARGS) is the same after stops and under every layout
notebooks: RUN = scripts/notebooks.py ## Execute notebooks/, each from a fresh kernel, and write their outputs; ARGS="1 3" for some
bench: RUN = -m benchmarks ## Compare training speed with a bare PyTorch loop and others (docs/measured.md)
test-gpus: RUN = scripts/gpus.py ## On 8 to 16 GPUs, half an hour: links, layouts, speed, a resume; writes gpus.json
schema: RUN = -m armature.command schema ## Write configs/.schema/ anew, with which editors complete and check configs/
size: RUN = scripts/size.py ## Print how large each part is, and its limits
checks schema: export PYTHONPATH = src
notebooks bench: $(VENV)/.installed-dev
new train prove notebooks bench test-gpus schema size: $(VENV)/.installed
	$(BIN)/python $(RUN) $(ARGS)

test: CHOSEN = -m "guarantee or not slow" ## Run the tests: 10–20 minutes on two cores; ARGS="-n 0" for one process
test-guarantees: CHOSEN = -m guarantee ## Run the tests that hold a sentence of docs/contract.md
test-fast: CHOSEN = -m "not slow" ## Run the tests that take seconds
test-all: CHOSEN = --all ## Run everything: 80 minutes on two cores; a missing package fails its tests; ARGS=tests/finetune for a part
test-gpu: CHOSEN = -n 0 -m gpu tests/gpu ## Run the tests for GPUs, on one
test test-guarantees test-fast test-all test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(CHOSEN) $(ARGS)

checks: $(VENV)/.installed-dev ## Lint, check types and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_contracts.py

format: $(VENV)/.installed-dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## Build the pages of docs/ as a site in .site; ARGS=serve shows it while you write
	$(BIN)/python scripts/reference.py > docs/reference.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

docs-check: ARGS = build --strict --quiet ## Build the site without a warning, and check the pages and the furniture
docs-check: docs $(VENV)/.installed-dev
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/pre-commit validate-config
	$(BIN)/hadolint Dockerfile
	$(BIN)/python -m pytest tests/test_docs.py tests/test_readme.py tests/test_furniture.py

# Versions in uv.lock stay, unless a requirement forbids them. constraints.txt has no hashes, which pip would then ask of all, and
# leaves torch and what it brings to `setup`: its builds for CPUs, CUDA and ROCm are other files of one version
lock: $(VENV)/bin/python ## Write uv.lock and constraints.txt anew after a change of requirements; UPGRADE=1 takes the newest versions
	$(PIP) --target $(VENV)/uv "uv>=0.13,<1"
	$(VENV)/uv/bin/uv lock $(if $(UPGRADE),--upgrade)
	$(VENV)/uv/bin/uv export --frozen --all-extras --no-emit-project --no-hashes --no-annotate --no-header --quiet \
		--output-file $(VENV)/constraints.txt
	(echo '# uv.lock without torch and hashes, for pip. make lock writes this file; CONSTRAINTS= ignores it.'; \
		sed -E '/^(torch|torchvision|triton|nvidia-.*|cuda-.*|setuptools|pip)==/d' $(VENV)/constraints.txt) > constraints.txt

tests: test
.PHONY: tests $(shell sed -nE 's/^([a-z-]+):.*##.*/\1/p' Makefile)
