# Two commands do everything: `make demo` shows the pipeline at work, `make test` runs every check.
# Both set up .venv first, `make test` with the checks' tools as well; nothing outside this folder is
# changed. PYTHON=... picks the interpreter.

.DEFAULT_GOAL := help
.PHONY: help demo test setup clean

export PYTHON

help:
	@echo "make demo    install into .venv, then generate text from models/demo through all four processes"
	@echo "make test    install into .venv, then run every check: ruff, format, mypy, import rules, tests"
	@echo "make setup   install into .venv only (skipped when nothing changed)"
	@echo "make clean   remove .venv and everything that tools have left"
	@echo
	@echo "PYTHON=/path/to/python3.12 make demo   uses that interpreter (3.11 or newer)"

setup:
	@scripts/setup --no-tests

demo:
	@scripts/setup --no-tests
	@# The link is paced to a quarter of a GB/s, so that the split has something to decide even here,
	@# where slots and store are the same memory.
	@.venv/bin/headrace generate --model models/demo --slots 25% --emulate-link-gbps 0.25 \
		--max-tokens 200 --prompt "The function returns"

test:
	@scripts/setup --quiet
	@scripts/check

clean:
	@rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
