# make demo: the whole chain on the sample model.  make test: lint, types and the fast tests.
# Both make .venv on the first run and reuse it until pyproject.toml changes.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin

.PHONY: demo test test-slow lint study parity clean

demo: $(STAMP)
	$(RUN)/pit-deploy demo demo --overwrite

test: $(STAMP) lint
	$(RUN)/pytest

test-slow: $(STAMP)
	$(RUN)/pytest -m slow

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

# The training study of docs/study.md; finished runs are kept in build/study and not run again.
study: $(STAMP)
	$(RUN)/python -m pit_deploy.training.study

# The parity matrix of docs/parity.md, into build/parity. SAMPLE=1: the sample model; FULL=1: every slow cell too.
parity: $(STAMP)
	$(RUN)/python runtime_tests/matrix.py $(if $(SAMPLE),--sample) $(if $(FULL),--full)

$(STAMP): pyproject.toml
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet torch==2.13.0
	$(RUN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
