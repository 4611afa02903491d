# make demo   the main job on a fresh machine: sensors → gateway → Kafka → Delta tables, with an outage and an audit
# make demo FLEET=20   twenty gateways, a change to their settings that goes well and one that goes back (five minutes)
# make test   every promise and every real part, in small sizes; what it draws is always the same
# make test-fast   those of its tests that need no server, no Java, no box, no compiler and no whole system, and are quick
# make test-long   all tests, in their whole sizes, drawn anew each time; as root also the demo on other systems; with npm,
#                  go and cargo on the PATH also MQTT clients of theirs
# make test-slice   a thirtieth of what `make test` leaves out, chosen by the commit (SLICE=0 to 29)
# make check  lint, format, types, layers  make lock        constraints.txt anew from pyproject.toml
# make docs   docs/settings.md and docs/commands.md anew from the code
# make deb    the .deb files into build/deb, signed (SIGNING_KEY=FILE, VERSION=...)
# make apt-repo   a folder for a web server, from which apt installs those packages (APT_URL=URL, VERSION=..., PHASED=PERCENT)
# make dist   wheel and sdist of both sides into build/dist, checked; then: .venv/bin/twine upload --repository-url URL build/dist/*
# make image  the card to flash into build/image, with an update of it (as root; see docs/flashing.md; IMAGE_URL=FOLDER)
# make test-image   that card in emulated machines: first start, power cut, a bad and a good update (half an hour)
# make cloud  the ingest job alone into /opt/sluice (CLOUD=FOLDER), for systemd or a container (see docs/ingest.md)
# make bench-gateway   what the gateway does beside its peers (BENCH_QUICK=1 to try it; see tests/bench/gateway.py)
# make bench-uplink    how the way to Kafka drains, comes back and what it costs (as root; see tests/bench/uplink.py)
# make bench-serial    boards, a noisy serial line, many ports (see tests/bench/serial_lines.py)
# make bench-clock     how far readings' times are off and may be, and what that costs (see tests/bench/clock.py)
# make bench-spark     how fast records become tables, beside simpler ways, and fresh (see tests/bench/spark_tables.py)
# make bench-analyst   how soon a look-up answers, of the demo and of a year of readings (see tests/bench/analyst.py)
# make bench-install   from a bare Debian to the first reading in Kafka; service, page, questions (as root; tests/bench/install.py)
# make bench-image     the card to flash: size, first start, power cuts, going back (after test-image; tests/bench/image.py)
#
# Python 3.11 or later (PYTHON=PATH names another than python3) and Java 17 or 21 (JAVA_HOME) are the system's own.
# What is missing is installed: Debian's packages by apt-get (as root or by sudo), Python's into .venv by pip, the jars
# of Kafka and Spark's connectors into build/jars by Maven; for `make test` a schema registry, an object store and Kafka Connect too.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FIRMWARE_PACKAGES := gcc-avr avr-libc libsimavr-dev libelf-dev gcc make
PACKAGES := python3 python3-venv openssl 'openjdk-21-jdk-headless|openjdk-17-jdk-headless' maven $(FIRMWARE_PACKAGES)
IMAGE_PACKAGES = $(DEB_PACKAGES) mmdebstrap qemu-user-static arch-test kmod cpio zstd u-boot-tools mtools dosfstools e2fsprogs rauc squashfs-tools
DEB_PACKAGES := python3 python3-venv git openssl
APT_PACKAGES := apt-utils gpg gpg-agent
CLOUD_PACKAGES := python3 python3-venv 'openjdk-21-jdk-headless|openjdk-17-jdk-headless' maven
CLOUD := /opt/sluice
MAVEN := mvn --quiet --batch-mode
QUIETLY := --quiet --disable-pip-version-check --root-user-action ignore
# Maven resets the terminal's colours at its end, whatever it is told.
PLAIN := 2>&1 | sed 's/\x1b\[[0-9;]*m//g'
TEST_PACKAGES := $(PACKAGES) $(APT_PACKAGES) git mosquitto mosquitto-clients prometheus strace openssl iproute2 nftables mmdebstrap systemd-container qemu-user-static qemu-system-arm u-boot-qemu u-boot-tools mtools dosfstools fdisk rauc squashfs-tools openssh-client chromium fonts-dejavu-core buildah
WITH_SERVERS := kafka or spark or avr or box
TEST_JARS := $(patsubst %,build/jars/%.done,kafka_classes spark registry s3 s3proxy connect)
SIDE_BY_SIDE = $(BIN)/pytest --dist loadfile --no-loadscope-reorder --numprocesses
# To import all files of tests takes 5 s: a process with few marks gets only those files that have them.
WITH_MARK = $$(grep -rl --include 'test_*.py' 'mark\.$(1)' tests | sort)
SLICED := \(long\|campaign\)\|left_to_long
SLICE ?= $(shell echo $$((0x$$(git rev-parse --short=7 HEAD))))
# Tests start our programs some thousand times. Bytecode is kept, whatever the environment says of it.
unexport PYTHONDONTWRITEBYTECODE
COMPILE = $(BIN)/python -m compileall -q gateway spark demo systemd image release firmware-sim

.PHONY: always apt-repo cloud demo dist test docs test-fast test-long test-slice test-tools test-jars check lock install jars deb image test-image test-image-if-changed clean bench-gateway bench-uplink bench-serial bench-clock bench-spark bench-analyst bench-install bench-image peers

demo: build/apt-demo install jars
	@exec $(BIN)/python -m demo

test: LEFT_OUT := and not long
test-long: SPARKS := --numprocesses 2 --dist loadfile
test-long test-slice: export SLUICE_TEST_WHOLE := 1
test-long test-slice: build/jars/jdbc.done

# Most tests wait more than they compute. Those of Spark run beside all others, one after the other: in `make test` they
# share one Java, for each computes half a minute until it is warm. They end last, so the others leave the processor to
# them. Tests of one file share servers, boards and boxes. A failure does not stop the rest. Promises in
# seconds are judged at the end, when nothing of ours competes.
test test-long: test-tools
	@$(COMPILE); failed=0; \
	$(BIN)/pytest $(SPARKS) --durations 15 -m "spark and not alone $(LEFT_OUT)" $(call WITH_MARK,spark) > build/test-spark.log 2>&1 & spark=$$!; \
	nice -n 3 $(SIDE_BY_SIDE) 5 --durations 15 -m "not (spark or alone) $(LEFT_OUT)" || failed=1; \
	wait $$spark || failed=1; \
	cat build/test-spark.log; \
	$(BIN)/pytest --durations 0 -m "alone $(LEFT_OUT)" $(call WITH_MARK,alone) || failed=1; \
	exit $$failed

test-fast: build/apt-test install build/tests.done
	@$(COMPILE)
	$(SIDE_BY_SIDE) 8 --ignore tests/system -m "not ($(WITH_SERVERS) or slow or long or alone)"

test-slice: test-tools
	@$(COMPILE); failed=0; \
	$(BIN)/pytest --durations 0 --slice $(SLICE) -m spark $(call WITH_MARK,$(SLICED)) > build/test-spark.log 2>&1 & spark=$$!; \
	$(BIN)/pytest --durations 0 --slice $(SLICE) -m "not spark" $(call WITH_MARK,$(SLICED)) || failed=1; \
	wait $$spark || failed=1; \
	cat build/test-spark.log; \
	exit $$failed

test-tools: build/apt-test install test-jars build/tests.done

# Without the file of Spark's classes: to write it takes longer than it saves the few Javas that `make test` starts.
test-jars: $(TEST_JARS)

# Pytest rewrites the asserts of all tests, which takes longer than to read what it wrote. Else each process would do it.
build/tests.done: $(shell find tests -name '*.py') $(VENV)/installed
	@said=$$($(BIN)/pytest --collect-only --quiet --quiet) || { echo "$$said"; exit 1; }
	@touch $@

check: build/apt-demo install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

install: $(VENV)/installed

jars: build/jars/kafka.done build/jars/spark.done build/jars/classes.done

build/apt-demo: Makefile demo/install_packages.sh
	@PYTHON=$(PYTHON) demo/install_packages.sh $(PACKAGES)
	@mkdir -p build && touch $@

build/apt-test: Makefile demo/install_packages.sh
	@PYTHON=$(PYTHON) demo/install_packages.sh $(TEST_PACKAGES)
	@mkdir -p build && touch $@

build/apt-deb: Makefile demo/install_packages.sh
	@PYTHON=$(PYTHON) demo/install_packages.sh $(DEB_PACKAGES)
	@mkdir -p build && touch $@

# A link to the Python that it was made with. If an upgrade of the system took that Python away, the link leads nowhere,
# which is no file to make: everything in the folder is made anew.
$(BIN)/python: | build/apt-demo
build/deb-venv/bin/python: | build/apt-deb
$(BIN)/python build/deb-venv/bin/python: %/bin/python:
	@rm -rf $*
	@$(PYTHON) -m venv $*

# Every package at the version and hash that constraints.txt pins; the project itself is installed by reference.
# Without PIP_USE_PEP517 the pip of Debian 12 warns at length of how it builds pyspark; later ones build it so anyway.
$(VENV)/installed: constraints.txt pyproject.toml $(BIN)/python
	@echo "installing Python packages into $(VENV) (a minute or two: Spark is large)"
	@PIP_USE_PEP517=1 $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

build/jars/kafka.done: demo/kafka_pom.xml | build/apt-demo
	@echo "fetching the Kafka broker's jars into build/jars/kafka"
	@rm -rf build/jars/kafka
	@$(MAVEN) --file demo/kafka_pom.xml dependency:copy-dependencies \
		-DincludeScope=runtime '-DoutputDirectory=$(CURDIR)/build/jars/kafka' $(PLAIN)
	@touch $@

build/jars/spark.done: spark/pom.xml | build/apt-demo
	@echo "fetching Spark's Kafka and Delta connectors into build/jars/spark"
	@rm -rf build/jars/spark
	@$(MAVEN) --file spark/pom.xml dependency:copy-dependencies $(PLAIN)
	@touch $@

# Without it commands start as they may, only later. Each Java needs its own.
build/jars/classes.done: build/jars/spark.done build/java $(VENV)/installed
	@echo "writing the classes of Spark to one file (a minute, 200 MB): each command then starts in a third less time"
	@$(BIN)/python -m spark.commands.class_archive || echo "that failed (see above): commands start without it"
	@touch $@

# The same for the brokers of the tests: some thirty starts.
build/jars/kafka_classes.done: demo/kafka_classes.py build/jars/kafka.done build/java
	@$(PYTHON) -m demo.kafka_classes || echo "that failed (see above): brokers start without it"
	@touch $@

build/java: always | build/apt-demo
	@mkdir -p build
	@told=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1) || true; [ "$$told" = "$$(cat $@ 2>&1)" ] || echo "$$told" > $@

build/jars/registry.done: tests/support/registry_pom.xml | build/apt-demo
	@echo "fetching the schema registry of the tests into build/jars/registry"
	@rm -rf build/jars/registry
	@$(MAVEN) --file tests/support/registry_pom.xml dependency:unpack-dependencies \
		'-DoutputDirectory=$(CURDIR)/build/jars/registry' '-DmarkersDirectory=$(CURDIR)/build/jars/registry/unpacked' $(PLAIN)
	@touch $@

build/jars/s3.done build/jars/s3proxy.done build/jars/connect.done build/jars/jdbc.done: build/jars/%.done: tests/support/%_pom.xml | build/apt-demo
	@echo "fetching the jars of $* for the tests into build/jars/$*"
	@rm -rf build/jars/$*
	@$(MAVEN) --file $< dependency:copy-dependencies -DincludeScope=runtime \
		'-DoutputDirectory=$(CURDIR)/build/jars/$*' $(PLAIN)
	@touch $@

# The gateway's part of constraints.txt, without Spark and the tools of tests.
build/deb-venv/installed: constraints.txt pyproject.toml systemd/build_pins.py build/deb-venv/bin/python
	@echo "installing Python packages into $(@D) (less than a minute)"
	@$(@D)/bin/python -m systemd.build_pins deb > $(@D)/requirements.txt
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r $(@D)/requirements.txt
	@touch $@

deb: build/deb-venv/installed
	@build/deb-venv/bin/python -m systemd.build_deb $(if $(VERSION),--version $(VERSION)) $(if $(SIGNING_KEY),--signing-key $(SIGNING_KEY))

build/apt-repo: Makefile demo/install_packages.sh
	@PYTHON=$(PYTHON) demo/install_packages.sh $(DEB_PACKAGES) $(APT_PACKAGES)
	@mkdir -p build && touch $@

apt-repo: build/apt-repo build/deb-venv/installed
	@build/deb-venv/bin/python -m release.apt_repository --url $(or $(APT_URL),$(error say where gateways will find the folder: make apt-repo APT_URL=https://...)) \
		$(if $(VERSION),--version $(VERSION)) $(if $(PHASED),--phased $(PHASED)) $(if $(APT_KEY),--key $(APT_KEY))

# The wheel is made from the sdist, so what the sdist lacks is missed here.
dist: install
	@rm -rf build/dist
	@$(BIN)/python -m build --outdir build/dist
	@$(BIN)/twine check --strict build/dist/*

build/apt-image: Makefile demo/install_packages.sh
	@PYTHON=$(PYTHON) demo/install_packages.sh $(IMAGE_PACKAGES)
	@mkdir -p build && touch $@

image: build/apt-image build/deb-venv/installed
	@build/deb-venv/bin/python -m image.build_image $(if $(VERSION),--version $(VERSION)) $(if $(SIGNING_KEY),--signing-key $(SIGNING_KEY)) $(if $(IMAGE_URL),--url $(IMAGE_URL))

# Its starts take minutes of emulation each, so it is no part of `make test`. It keeps a digest of the files that it was
# run with, for a commit. Where they are still those, CI does not run it.
IMAGE_FILES := image systemd gateway/commands/update $(addprefix gateway/host/,boot_slots.py last_update.py our_image.py usb_sticks.py) \
	$(addprefix tests/,system/test_image.py image/imager $(addprefix support/,forgetful_card.py https_site.py image_guest.py image_story.py uboot_board.py)) \
	':!image/tested' ':!systemd/*ingest*'
IMAGE_DIGEST = git ls-files -z -- $(IMAGE_FILES) | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
test-image: build/apt-test build/apt-image install build/deb-venv/installed
	@build/deb-venv/bin/python -m image.build_image --raw --version 1.0.0 --output build/image/test
	@SLUICE_TEST_WHOLE=1 $(BIN)/pytest --durations 0 tests/system/test_image.py
	@$(IMAGE_DIGEST) > image/tested

test-image-if-changed:
	@if [ "$$($(IMAGE_DIGEST))" = "$$(cat image/tested)" ]; then \
		echo "the card is as make test-image has tried it (image/tested): it is not tried again"; \
	else $(MAKE) --no-print-directory test-image; fi

cloud:
	@PYTHON=$(PYTHON) demo/install_packages.sh $(CLOUD_PACKAGES)
	@echo "installing the ingest job into $(CLOUD) (a minute or two: Spark is large)"
	@$(PYTHON) -m venv $(CLOUD)
	@$(PYTHON) -m systemd.build_pins spark > $(CLOUD)/requirements.txt
	@PIP_USE_PEP517=1 $(CLOUD)/bin/pip install $(QUIETLY) --require-hashes -r $(CLOUD)/requirements.txt
	@$(CLOUD)/bin/pip install $(QUIETLY) --no-deps .
	@rm -rf $(CLOUD)/jars
	@$(MAVEN) --file spark/pom.xml dependency:copy-dependencies -DoutputDirectory=$(abspath $(CLOUD))/jars $(PLAIN)

# -- benches ---------------------------------------------------------------------------------------
comma := ,
# The peers take eight minutes to build: they are built only if their part runs.
bench-gateway: build/apt-test install build/jars/kafka.done build/bench/load $(if $(BENCH_ONLY),$(filter peers,$(subst $(comma), ,$(BENCH_ONLY))),peers)
	@$(BIN)/python -m tests.bench.gateway

bench-uplink: build/apt-test install build/jars/kafka.done
	@$(BIN)/python -m tests.bench.uplink

bench-serial: build/apt-test install build/jars/kafka.done
	@$(BIN)/python -m tests.bench.serial_lines

bench-clock: build/apt-test install build/jars/kafka.done build/bench/load
	@$(BIN)/python -m tests.bench.clock

bench-spark: build/apt-test install jars
	@$(BIN)/python -m tests.bench.spark_tables

bench-analyst: build/apt-test install jars
	@$(BIN)/python -m tests.bench.analyst

bench-install: build/apt-test install jars
	@$(BIN)/python -m tests.bench.install

bench-image: build/apt-test build/apt-image install
	@$(BIN)/python -m tests.bench.image

build/bench/load: tests/bench/load.c
	@mkdir -p $(@D)
	@gcc -std=c11 -O2 -Wall -Wextra -Wconversion -Werror -o $@ $<

# The peers are built from the Go module proxy. Without Go, or without the proxy, the bench goes on and says so.
GO := $(shell command -v go || echo /usr/local/go/bin/go)
TELEGRAF := 1.37.2
TELEGRAF_PARTS := custom,inputs.mqtt_consumer,outputs.kafka,parsers.value,serializers.json

peers:
	@if [ -x "$(GO)" ]; then \
		$(MAKE) --silent --keep-going build/peers/telegraf build/peers/benthos || \
			echo "not all peers could be built (see above): make bench-gateway leaves those out"; \
	else \
		echo "there is no go on the PATH or in /usr/local/go: make bench-gateway leaves Telegraf and Benthos out"; \
	fi

build/peers/telegraf:
	@echo "building Telegraf $(TELEGRAF) (minutes)"
	@mkdir -p $(@D)
	@GOBIN=$(CURDIR)/$(@D) CGO_ENABLED=0 nice $(GO) install -tags "$(TELEGRAF_PARTS)" \
		-ldflags "-X github.com/influxdata/telegraf/internal.Version=$(TELEGRAF)" \
		github.com/influxdata/telegraf/cmd/telegraf@v$(TELEGRAF)
	@touch $@

build/peers/benthos: $(wildcard tests/bench/benthos/*.go tests/bench/benthos/go.*)
	@echo "building Benthos (minutes)"
	@mkdir -p $(@D)
	@cd tests/bench/benthos && CGO_ENABLED=0 nice $(GO) build -o $(CURDIR)/$@ .
	@touch $@

# -- other people's MQTT clients: tests ask for these ------------------------------------------------
build/clients/mqttjs.done: $(wildcard tests/support/mqtt_clients/mqttjs/*)
	@mkdir -p $(@D) && rm -rf build/clients/mqttjs && cp -r tests/support/mqtt_clients/mqttjs build/clients/
	@cd build/clients/mqttjs && npm ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

build/clients/paho-go: $(wildcard tests/support/mqtt_clients/paho-go/*)
	@cd tests/support/mqtt_clients/paho-go && CGO_ENABLED=0 $(GO) build -o $(CURDIR)/$@ .
	@touch $@

# Built from a copy, for cargo writes a lock file beside the sources.
build/clients/rumqttc.done: $(wildcard tests/support/mqtt_clients/rumqttc/* tests/support/mqtt_clients/rumqttc/src/*)
	@mkdir -p build/clients/rumqttc && cp -r tests/support/mqtt_clients/rumqttc/* build/clients/rumqttc/
	@cargo build --quiet --release --manifest-path build/clients/rumqttc/Cargo.toml --target-dir build/clients/rumqttc
	@touch $@

build/clients/gmqtt.done: $(wildcard tests/support/mqtt_clients/gmqtt/*)
	@mkdir -p $(@D) && $(PYTHON) -m venv build/clients/gmqtt
	@build/clients/gmqtt/bin/pip install --quiet --disable-pip-version-check --require-hashes \
		-r tests/support/mqtt_clients/gmqtt/requirements.txt
	@touch $@

docs: install
	@$(BIN)/python -m tests.support.generated_pages

lock: install
	@test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet uv; }
	build/uv/bin/uv pip compile --quiet --all-extras --generate-hashes --no-header --no-emit-index-url \
		--no-emit-find-links --universal --python-version 3.11 pyproject.toml --output-file constraints.txt

clean:
	rm -rf build $(VENV)
