# Two commands do everything on a fresh clone: `make demo` and `make test`.
# TORCH_INDEX=URL chooses where torch comes from (an index with CPU builds, say).
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test setup dev export readme lint clean

setup: .venv/.demo
dev: .venv/.dev

.venv/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@

.venv/.demo: .venv/.torch settings.ini setup.py
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[notebook,rewards]'
	touch $@

.venv/.dev: .venv/.torch settings.ini setup.py
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/.demo

# One thread a process: small models gain nothing from two, and two processes run side by side. Each notebook has a process of its
# own: the type-checking hook that one installs must not reach the next.
test: export OMP_NUM_THREADS := 1

demo: .venv/.demo
	$(BIN)/python tutorials/demo.py

test: .venv/.dev lint
	ls nbs/*.ipynb tutorials/*.ipynb | xargs -n 1 -P 2 $(BIN)/nbdev-test --n-workers 0 --timing
	$(BIN)/python -m pytest tests

export: .venv/.dev
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean --fname nbs
	$(BIN)/nbdev-clean --fname tutorials

readme: .venv/.dev
	$(BIN)/python nbs/make_readme.py

lint: .venv/.dev
	$(BIN)/ruff check rlblocks tests benchmarks tutorials nbs
	$(BIN)/pyright

clean:
	rm -rf .venv build dist *.egg-info
