# `make quickstart` trains the shipped tiny model; `make test` runs the suite. Both set up .venv first.
# The first of these that runs here; the documentation's numbers are of 3.11. `true`, as make discards the output of a shell that ends with 127.
PYTHON ?= $(firstword $(shell for each in python3.11 python3.12 python3.13 python3.14; do $$each -c "" 2>/dev/null && echo $$each; done; true) python3.11)
# Extra flags for pip, such as an index that has CPU builds of torch.
PIP_FLAGS ?=
QUIET := --quiet --disable-pip-version-check
BIN := .venv/bin
export RAY_USAGE_STATS_ENABLED = 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO = 0

.PHONY: setup lock quickstart cluster-demo compare-small search-small compare-time test test-slow coverage lint types arrows check gpu-check rehearsal bench parity soak combinations partitions fuzz audit shapes-model shapes-clip shapes-decoder shapes-video clean

setup: .venv/.ready

# Compiled here because pip compiles only what it copies: with PYTHONDONTWRITEBYTECODE, which many images of containers set, every process
# would compile these packages for more than two seconds.
PACKAGES := $(sort $(dir $(wildcard */*.py)))

# pip compares every package with the hashes in requirements/. torch is downloaded first, so that pip takes the build that it would take
# without hashes: with them it prefers an index that states them. Builds for CUDA then lack libraries: those of cuda.txt.
LOCKED := $(BIN)/python -m pip install $(QUIET) --require-hashes --no-deps
.venv/.ready: pyproject.toml $(wildcard requirements/*.txt) tools/fit_torchvision.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip download $(QUIET) $(PIP_FLAGS) --no-deps --dest .venv/torch torch==2.13.0
	$(LOCKED) --no-index --find-links .venv/torch -r requirements/torch.txt
	rm -r .venv/torch
	$(LOCKED) $(PIP_FLAGS) -r requirements/run.txt -r requirements/dev.txt
	$(BIN)/python -m pip check >/dev/null || $(LOCKED) $(PIP_FLAGS) -r requirements/cuda.txt
	$(BIN)/python -m pip install $(QUIET) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	$(BIN)/python tools/fit_torchvision.py
	$(BIN)/python -m compileall -q -j 0 $(PACKAGES)
	touch $@

# The files in requirements/, from constraints.txt and the package index; ARGS="--wheel FILE" adds a build of torch from elsewhere.
lock:
	$(PYTHON) -m tools.lock $(ARGS)

quickstart: setup
	$(BIN)/sol-rl train quickstart $(ARGS)

# A simulated cluster on this machine: a submitted job, scaled 1 -> 3 -> 2, one node lost; compared with an undisturbed run.
cluster-demo: setup
	$(BIN)/python -m tools.cluster_demo $(ARGS)

# The arms and objectives on the shapes model, five run seeds each; made for two and a half hours on two cores. Restartable.
compare-small: setup
	$(BIN)/sol-rl compare small $(ARGS)

# Settings for it, on other prompts, with the same effort for each objective. docs/methods.md
search-small: setup
	$(BIN)/sol-rl compare small_search $(ARGS)

# The arms against seconds and against operations, five run seeds each; made for two hours on two idle cores. Restartable.
compare-time: setup
	$(BIN)/sol-rl compare time $(ARGS)

# Two processes: one has the tests on Ray, whose actors serve one run after the other.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow --timeout=3000 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

arrows: setup
	$(BIN)/lint-imports

# The share of lines that `make test` reaches, in every process that it starts.
coverage: setup
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 2 --dist loadgroup $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

check: lint types arrows test

# One GPU, ten minutes, no network: every claim of docs/gpu.md that one GPU can settle. Runs on the .venv if there is one, else on
# $(PYTHON) with what is installed there. Without a GPU what a CPU can: ARGS="--out DIR --sections steps decode".
gpu-check:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu_check $(ARGS)

# SANA and SD3.5 Medium in full size with random weights, one iteration through the ring on CPUs, compared with the plan. 20 GB of memory.
rehearsal: setup
	$(BIN)/python -m tools.rehearsal $(ARGS)

bench: setup
	$(BIN)/python -m bench $(ARGS)

# Each learned scorer against other people's code on the same random weights; ARGS=--full for the real sizes.
parity: setup
	$(BIN)/python -m tools.parity $(foreach flag,$(PIP_FLAGS),--pip-flag=$(flag)) $(ARGS)

# Tiny runs with one or two random faults in each, compared with undisturbed ones: ARGS="--runs 1000 --seed 0". docs/reliability.md
soak: setup
	$(BIN)/python -m tools.soak $(ARGS)

# Tiny runs with random settings; each is repeated with other actors, and a killed one or a resume. docs/reliability.md
combinations: setup
	$(BIN)/python -m tools.combinations $(ARGS)

# Ray nodes in network namespaces with addresses of their own: delay, loss, partitions, a node that comes back. As root. docs/reliability.md
partitions: setup
	$(BIN)/python -m tools.partitions $(ARGS)

# Inputs made wrong at random, for every file and command: ARGS="--examples 20000". docs/reliability.md
fuzz: setup
	$(BIN)/python -m tools.fuzz $(ARGS)

# Pinned against installed packages, and known vulnerabilities where their index can be reached. docs/security.md
audit: setup
	$(BIN)/python -m tools.audit $(ARGS)

# Rebuilds shapes/model from nothing: an hour and a half on two cores.
shapes-model: setup
	$(BIN)/python -m shapes.build --out shapes/model $(ARGS)

# Trains the tiny CLIP of the preset quickstart_clip.
shapes-clip: setup
	$(BIN)/python -m shapes.clip_build --out shapes/clip $(ARGS)

# Trains a tiny model of clips, build/video/model, for shapes/video.toml: an hour and ten minutes of one core of its own.
shapes-video: setup
	$(BIN)/python -m shapes.video_build $(ARGS)

# Trains the tiny decoder of the shapes model, for explore.decoder = "tiny".
shapes-decoder: setup
	$(BIN)/python -m shapes.decoder_build --out shapes/decoder $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .coverage .coverage.*
