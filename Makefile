# Two commands do all set-up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
# torch first and pinned: a bare `torch` may bring gigabytes of CUDA to a machine without a GPU
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check format proto docs clean

demo: $(VENV)/.runtime
	$(BIN)/python examples/demo.py --out demo-out

# Both tiers run, and both closing lines show, even if the first fails.
test: $(VENV)/.dev
	@failed=0; \
	$(BIN)/python -m pytest -q -m "not e2e" || failed=1; \
	$(BIN)/python -m pytest -q -m e2e || failed=1; \
	exit $$failed

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format -q .

# With the oldest protobuf that hivemind allows: runtimes refuse code newer than themselves.
proto:
	$(PYTHON) -m venv build/proto-venv
	build/proto-venv/bin/pip install -q "grpcio-tools==1.70.0" "setuptools<80" "protobuf>=5.29,<6"
	build/proto-venv/bin/python -m grpc_tools.protoc -I proto --python_out=spesd/net/pb proto/spesd/v1/*.proto

# The table of rounds in ARCHITECTURE.md is made from the code; a test compares them.
docs: $(VENV)/.dev
	$(BIN)/python tests/helpers/docs.py

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	touch $@

$(VENV)/.runtime: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[plot]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build demo-out .pytest_cache .mypy_cache .ruff_cache
