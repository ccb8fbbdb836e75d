# Everything runs in .venv; PYTHON, TORCH and OUT can be set on the command line: make demo TORCH=torch OUT=runs/mine
PYTHON ?= python3
TORCH  ?= torch==2.13.0
OUT    ?= runs/nano
MINUTES ?= 12
BIN    := .venv/bin

.PHONY: demo test slow lint install dev clean help

help:
	@echo "make demo   train nano K3 for $(MINUTES) minutes on this machine, say how good it is, complete code with it"
	@echo "make test   run the tests: it is K3, and not something like it"
	@echo "make slow   the longer tests        make lint   ruff and pyright"

demo: .venv/installed
	$(BIN)/openk3 train --config nano --minutes $(MINUTES) --out $(OUT) --overwrite
	$(BIN)/openk3 generate $(OUT) --prompt "def read_lines(path):" --max-new-tokens 120 --temperature 0.6 --seed 1
	@echo "report: $(OUT)/report.html        talk to it: $(BIN)/openk3 generate $(OUT)"

test: .venv/installed-dev
	$(BIN)/python -m pytest

slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

lint: .venv/installed-dev
	$(BIN)/ruff check openk3 tests
	$(BIN)/pyright --pythonpath $(BIN)/python

install: .venv/installed
dev: .venv/installed-dev

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "openk3 needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e . "$(TORCH)"
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]" "$(TORCH)"
	touch $@

clean:
	rm -rf .venv build *.egg-info
