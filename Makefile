# Every target sets up .venv first if it has to. `make PYTHON=/path/to/python3.12 test` chooses the interpreter.
.DEFAULT_GOAL := help
.PHONY: help set-up demo test conform kernels lint wheels bench clean distclean
.DELETE_ON_ERROR:

VENV_PYTHON := .venv/bin/python
STAMP := .venv/set-up-complete
TEST_DIRECTORIES := $(sort $(dir $(wildcard packages/*/tests/*.py tests/*.py)))

help:
	@echo "make demo     tokens from eight ranks on the tiny checkpoint, checked against one process"
	@echo "make test     the default tests"
	@echo "make conform  the tests with FLASH's real dimensions"
	@echo "make kernels  every kernel after all compiler passes, at FLASH's widths and inside TINY, with the time it took"
	@echo "make lint     ruff and mypy --strict"
	@echo "make wheels   build every wheel; install and test each one alone"
	@echo "make bench    run every benchmark"
	@echo "make clean    remove build products and caches (distclean: .venv too)"

$(STAMP): constraints.txt pyproject.toml $(wildcard packages/*/pyproject.toml) tools/set_up.sh tools/install_torch.sh
	@PYTHON="$(PYTHON)" tools/set_up.sh $@

set-up: $(STAMP)

demo: $(STAMP)
	$(VENV_PYTHON) -m v41_model.demo

test: $(STAMP)
	$(VENV_PYTHON) -m pytest -n 2 --dist worksteal

conform: $(STAMP)
	$(VENV_PYTHON) -m pytest -m conform

kernels: $(STAMP)
	@started=$$(date +%s); $(VENV_PYTHON) -m pytest -m kernels tests --durations=10; \
	status=$$?; echo "make kernels took $$(($$(date +%s) - started)) s"; exit $$status

lint: $(STAMP)
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m mypy packages/*/src tools conftest.py
	set -e; for directory in $(TEST_DIRECTORIES); do $(VENV_PYTHON) -m mypy $$directory; done

wheels: $(STAMP)
	$(VENV_PYTHON) tools/check_wheels.py

bench: $(STAMP)
	$(VENV_PYTHON) tools/run_benchmarks.py

clean:
	rm -rf build dist packages/*/dist .mypy_cache .pytest_cache .ruff_cache .hypothesis output
	find packages tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
