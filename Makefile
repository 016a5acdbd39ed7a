# make demo: the whole chain on the sample model.  make test: lint, types and the fast tests.
# Both make .venv on the first run and reuse it until pyproject.toml changes.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin

.PHONY: demo test test-slow lint clean

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

$(STAMP): pyproject.toml
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet torch==2.13.0
	$(RUN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
