# Everything runs from Debian's (or any) python3.11, make and go: environments, programs and models go to the cache in
# ~/.cache/prefill-operator, nothing else outside this folder is touched.
export PYTHONPATH := .links:.

.PHONY: help links env engine-env models lint check fmt locks test bench demo clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

links:  ## folder .links: our import names and the plugin's entry point, for PYTHONPATH
	@python3 -m localcluster.envs links

env:  ## the development environment
	@python3 -m localcluster.envs dev

engine-env:  ## vLLM on CPU
	@python3 -m localcluster.envs engine

models:  ## the model folders of demo and tests
	@python3 -m localcluster.models smollm2 toy tiny emu

lint: links  ## style, types, import contracts
	@bin=$$(python3 -m localcluster.envs dev)/bin; set -x; \
	$$bin/ruff check -q . && $$bin/ruff format -q --check . && $$bin/mypy $(TYPED) && $$bin/lint-imports --no-logo
TYPED := $(addprefix .links/prefill_runtime/,scheduler profiling telemetry agent) .links/prefill_operator observability

check: lint  ## lint and unit tests, in under a minute once the environment is there
	@bin=$$(python3 -m localcluster.envs dev)/bin; set -x; $$bin/python -m pytest -n 2 -m "not slow" tests/unit tests/cases

fmt:  ## format, and mend what ruff can mend
	@bin=$$(python3 -m localcluster.envs dev)/bin; $$bin/ruff check -q --fix . ; $$bin/ruff format .

locks:  ## make the lock files again from requirements/*.in (UPGRADE=--upgrade for newer versions)
	@uv=$$(python3 -m localcluster.envs dev)/bin/uv; cd requirements; \
	for source in *.in; do name=$${source%.in}; set -- $$source --output-file $$name.txt; \
	  overrides=$$name.overrides; [ ! -f $$overrides ] || set -- "$$@" --overrides $$overrides; \
	  excludes=$${name%-[0-9]*}.excludes; [ ! -f $$excludes ] || set -- "$$@" --excludes $$excludes; \
	  $$uv pip compile -q --config-file uv.toml $(UPGRADE) "$$@" || exit 1; \
	done

test: links  ## everything: unit, operator, engine, cluster and end to end
	@python3 -m tests.run

bench: links  ## stock vLLM against the policies on real engines (BENCH="run toy", see docs/benchmarks.md)
	@exec "$$(python3 -m localcluster.envs engine)/bin/python" -m benchmarks.engine $(BENCH)
BENCH := run

demo: links  ## from nothing to a measured first token on a real cluster
	@python3 -m localcluster.demo

clean:  ## remove what was made in this folder, and environments no lock file asks for any more
	rm -rf .links out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@python3 -m localcluster.envs prune
