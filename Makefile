# make demo: the whole chain on the sample model.  make test: lint, types and the fast tests.
# Both make .venv on the first run and reuse it until pyproject.toml changes.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin

.PHONY: test-android test-ios setup-browser test-browser test-macos demo test test-slow lint study parity clean

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

# The iOS demo without a Mac: a Swift 6 toolchain (root, 3 GB in build/swift or $PIT_SWIFT); ios_demo/README.md.
test-ios: $(STAMP)
	ios_demo/tools/swift.sh --version || ios_demo/tools/setup_swift.sh
	$(RUN)/pytest -m 'slow or not slow' runtime_tests/ios_test.py

# The Android demo without a phone: needs a JDK, npm and gcc, keeps 130 MB in build/android; android_demo/README.md.
test-android: $(STAMP)
	android_demo/tools/test.sh build/android

# On a Mac: predictions in Core ML itself.
test-macos: $(STAMP)
	$(RUN)/pytest -m macos

# Browsers: Node, three packages in build/browser (630 MB) and Chromium; docs/browser.md.
setup-browser: $(STAMP)
	$(RUN)/python -m pit_deploy.runtimes.browser_tools

test-browser: setup-browser
	$(RUN)/pytest pit_deploy/web_view_test.py runtime_tests/browser_test.py

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
