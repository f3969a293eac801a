# Thin: each target is one or two commands that can be typed by hand.
PYTHON ?= python3.11
VENV   := .venv
SERVE  := .venv-serve
PIP    := -m pip --quiet --disable-pip-version-check

.PHONY: install demo test lint bench evidence lock ui clean

install: $(VENV)/.installed $(SERVE)/.installed

$(VENV)/.installed: infra/train/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) install --upgrade pip
	$(VENV)/bin/python infra/check_torch.py infra/train/cpu.lock
	$(VENV)/bin/python $(PIP) install --no-deps -r infra/train/cpu.lock
	$(VENV)/bin/python $(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(SERVE)/.installed: infra/serve/cpu.lock infra/serve/plugin/pyproject.toml
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python $(PIP) install --upgrade pip
	$(SERVE)/bin/python infra/check_torch.py infra/serve/cpu.lock
	$(SERVE)/bin/python $(PIP) install --no-deps -r infra/serve/cpu.lock
	$(SERVE)/bin/python $(PIP) install --no-deps --no-build-isolation -e infra/serve/plugin
	@touch $@

demo: install
	$(VENV)/bin/slipstream run deployments/pocket.yaml

test: install
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

lock: install
	$(VENV)/bin/python infra/lock.py infra/train/cpu.in
	$(SERVE)/bin/python infra/lock.py infra/serve/cpu.in

clean:
	rm -rf $(VENV) $(SERVE) work
