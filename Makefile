# Two commands do all the set-up: `make demo` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
RUN := env PATH="$(CURDIR)/.venv/bin:$$PATH:$$HOME/.local/bin"
BACKEND ?= local
PYTEST_ARGS ?=
ARGS ?=

.PHONY: help setup system demo learn serve-demo image sif nomad test test-fast test-cgroup2 test-arm64 test-engines test-fidelity test-inference test-trainers test-openhands lint format docs bench clean

help:  ## what there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

system:  ## install the system packages that slots need (root on Debian or Ubuntu), else name them
	@bash scripts/system.sh

setup: system  ## the Python environment, from the lock file
	@bash scripts/venv.sh

demo: setup  ## every example task, played in slots and scored; no Docker needed
	@$(if $(filter local,$(BACKEND)),,$(RUN) python scripts/engines.py $(BACKEND)) $(RUN) python -m examples.demo --backend $(BACKEND) $(ARGS)

learn: setup  ## train a tiny policy from nothing on the CPU, and show that shifted masks or logprobs teach nothing
	@$(if $(filter local,$(BACKEND)),,$(RUN) python scripts/engines.py $(BACKEND)) $(RUN) python -m examples.learn --backend $(BACKEND) $(ARGS)

serve-demo: setup  ## run-api, env processes in serve, and a trainer that checks every token of its batches
	@$(if $(filter local,$(BACKEND)),,$(RUN) python scripts/engines.py $(BACKEND)) $(RUN) python -m examples.serve --backend $(BACKEND) $(ARGS)

image:  ## the sandbox image, into the Docker engine (DOCKER_HOST)
	@bash docker/sandbox/build.sh

sif:  ## atropos-sandbox.sif, of the sandbox image: needs apptainer or singularity
	@p=$$(command -v apptainer || command -v singularity) || { echo "needs apptainer or singularity" >&2; exit 1; }; \
		$$p build atropos-sandbox.sif docker-daemon:atropos-sandbox:local

nomad:  ## a Nomad binary of the pinned version, built with Go where none is installed
	@bash scripts/nomad.sh

# asked for with what slots need, so that an ordinary user is told all at once
test: export ATROPOS_SYSTEM_PROGRAMS := busybox:busybox-static curl:curl ip:iproute2 less:less newuidmap:uidmap mke2fs:e2fsprogs node:nodejs ps:procps xz:xz-utils zstd:zstd
test: setup  ## every test, on real parts
	@bash scripts/test.sh $(PYTEST_ARGS)

test-fast: setup  ## the tests of small parts, in about a minute: no engine, no sandbox server
	@$(RUN) pytest -n "$$(($$(nproc) + 2))" --dist loadgroup --no-loadscope-reorder -m fast tests/unit $(PYTEST_ARGS)

test-cgroup2: setup  ## the tests of limits on an emulated machine with cgroup v2 alone (slow; root, for debootstrap)
	@$(RUN) python scripts/cgroup2.py $(PYTEST_ARGS)

test-arm64: setup  ## slots on an emulated arm64 machine (very slow; root, for debootstrap)
	@$(RUN) python scripts/arm64.py $(PYTEST_ARGS)

test-engines: setup  ## the Docker backend on dockerd and Podman of three Debian releases (slow; root, for debootstrap)
	@$(RUN) python scripts/engine_matrix.py $(PYTEST_ARGS)

test-fidelity: setup  ## what developers do, and what their tools see, in slots and in docker run (slow; root; 5 GB of packages, once)
	@$(RUN) python scripts/engines.py local,docker pytest -v -p no:cacheprovider tests/fidelity/on_the_workshop.py $(PYTEST_ARGS)

test-trainers: setup  ## an env's groups in the own functions of TRL, verl, SkyRL and tinker (installs gigabytes, once)
	@bash scripts/trainers.sh $(PYTEST_ARGS)

test-openhands: setup  ## slots as workspaces of OpenHands, with its agent server (a gigabyte, once; root)
	@bash scripts/openhands.sh $(PYTEST_ARGS)

test-inference: setup  ## exact tokens from a real vLLM with a tiny model (slow; 8 GB of packages, once)
	@$(RUN) bash scripts/inference.sh $(PYTEST_ARGS)

lint: setup  ## ruff, pyright strict, import-linter
	@bash scripts/lint.sh

format: setup  ## let ruff format and fix
	@$(RUN) ruff format . && $(RUN) ruff check --fix .

docs: setup  ## the documentation as a site, in site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --site-dir site

bench: setup  ## measure, beside fork+exec, a fresh bwrap and SWE-ReX in the same run
	@$(RUN) python -m benchmarks $(ARGS)

clean:  ## remove what the targets made in this folder
	@rm -rf .venv .peers .pytest_cache .ruff_cache .hypothesis .import_linter_cache site dist data runs bench-results .coverage*
