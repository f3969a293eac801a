# Thin: each target is one or two commands that can be typed by hand.
PYTHON ?= python3.11
VENV   := .venv
SERVE  := .venv-serve
# A host with NVIDIA GPUs takes the CUDA builds.
HOST   := $(if $(wildcard /dev/nvidia0),gpu,cpu)
PIP    := -m pip --quiet --disable-pip-version-check

.PHONY: install demo test lint bench lock clean

install: $(VENV)/.installed $(SERVE)/.installed

$(VENV)/.installed: infra/train/$(HOST).lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) install --upgrade pip
	$(VENV)/bin/python infra/check_torch.py infra/train/$(HOST).lock
	$(VENV)/bin/python $(PIP) install --no-deps -r infra/train/$(HOST).lock
	$(VENV)/bin/python $(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(SERVE)/.installed: infra/serve/$(HOST).lock infra/serve/plugin/pyproject.toml
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python $(PIP) install --upgrade pip
	$(SERVE)/bin/python infra/check_torch.py infra/serve/$(HOST).lock
	$(SERVE)/bin/python $(PIP) install --no-deps -r infra/serve/$(HOST).lock
	$(SERVE)/bin/python $(PIP) install --no-deps --no-build-isolation -e infra/serve/plugin
	$(SERVE)/bin/python infra/serve/warm.py
	@touch $@

demo: install
	$(VENV)/bin/slipstream run deployments/pocket.yaml

test: install
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: install
	$(VENV)/bin/python benchmarks/pocket.py

lock: install
	for host in cpu gpu; do \
	  $(VENV)/bin/python infra/lock.py infra/train/$$host.in && \
	  $(SERVE)/bin/python infra/lock.py infra/serve/$$host.in || exit 1; done

clean:
	rm -rf $(VENV) $(SERVE) work
