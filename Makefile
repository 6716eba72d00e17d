# Everything a reader or a developer starts. Each target does its own set-up; a second run finds it done.
#   make lab LAB_ARGS="--no-browser --port=9999"     make test PYTEST_ARGS="-k rope"
PYTHON ?= python3.11
NOTEBOOK ?= notebooks/00_start_here.ipynb
LAB_ARGS ?=
PYTEST_ARGS ?=
BENCH ?= $(wildcard benchmarks/*.py)
BENCH_ARGS ?=

PY := .venv/bin/python
SETUP := PYTHON='$(PYTHON)' scripts/setup.sh
NBVAL := --nbval --nbval-sanitize-with=tests/nbval_sanitize.cfg --nbval-current-env --nbval-cell-timeout=300

.DEFAULT_GOAL := help
.PHONY: help lab test notebooks slides release bench clean

help: ## this list
	@grep -hE '^[a-z][a-z%-]*:.*## ' Makefile | sed -E 's/^([^:]*):.*## /\1\t/' | expand -t 12

lab: ## JupyterLab on the first notebook; LAB_ARGS are passed on
	@$(SETUP) notebooks
	@scripts/lab.sh $(PY) $(NOTEBOOK) $(LAB_ARGS)

# Two workers share two cores: kernels and tests with one thread each do not wait for one another.
test: ## linters, types, every test and every committed notebook; PYTEST_ARGS are passed on
	@$(SETUP) dev
	@scripts/debian.sh chromium chromium "browser test"
	@scripts/debian.sh bubblewrap bwrap "sandbox tests"
	@scripts/debian.sh curl curl "tests by a second client"
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	OMP_NUM_THREADS=1 $(PY) -m pytest tests notebooks solutions $(NBVAL) -n 2 --dist loadfile -q -rsx $(PYTEST_ARGS)

notebooks: ## execute notebooks/src/*.py into notebooks/*.ipynb
	@$(SETUP) notebooks
	$(PY) -m cs336_infer.course.build notebooks/src/*.py

slides: ## dist/slides/*.html, decks that open without a network (needs npm)
	@$(SETUP) notebooks
	$(PY) -m cs336_infer.course.slides

release: ## notebooks of assignments, dist/student.zip (ASSIGNMENT=aN), dist/*.whl; CHECK=1 only names what is stale; NBGRADER=1, OTTER=1 add their exports
	@$(SETUP) $(if $(NBGRADER)$(OTTER),dev,notebooks)
	$(PY) -m cs336_infer.course.build --check notebooks/src/*.py
	$(PY) -m cs336_infer.course.release $(if $(CHECK),--check)
	$(PY) -m cs336_infer.course.bundle $(ASSIGNMENT) $(if $(CHECK),--check)
ifndef CHECK
	$(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl
	$(if $(NBGRADER),$(PY) -m cs336_infer.course.nbgrader_export)
	$(if $(OTTER),$(PY) -m cs336_infer.course.otter_export)
endif

bench: ## run the benchmark scripts; BENCH names some, BENCH_ARGS are passed on
	@$(SETUP) dev
	@[ -n "$(BENCH)" ] || { echo "bench: there is no script in benchmarks/" >&2; exit 1; }
	@set -e; for script in $(BENCH); do echo "bench: $$script"; $(PY) $$script $(BENCH_ARGS); done

soak-%: ## the checks of issue N at full size (make soak-2)
	@[ -f scripts/soak-$*.sh ] || { echo "soak: there is no soak-$*; there is:" $(patsubst scripts/%.sh,%,$(wildcard scripts/soak-*.sh)) >&2; exit 1; }
	@$(SETUP) dev
	bash scripts/soak-$*.sh

clean: ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
