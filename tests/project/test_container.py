"""The image and the services of docker-compose.yml that run it, without Docker.

Their commands and health checks run as they are, on the test server, with the settings that they
have there. `make container` runs them in containers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from replaydb.database.tables.schema import REVISIONS
from support.engines import postgresql_nightly

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: it for name, it in SERVICES.items() if it["image"] == "replaydb"}
#: Instructions of the last stage, and their arguments.
IMAGE = dict(
    line.split(" ", 1)
    for line in re.sub(r"\s*\\\n\s*", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    if re.match(r"[A-Z]+ ", line)
)
TOKEN = "a-token-of-the-tests"  # noqa: S105


def command_of(service: str) -> list[str]:
    """Return the command line of a service: the entry point of the image and its arguments."""
    (program,) = json.loads(IMAGE["ENTRYPOINT"])
    arguments = SERVICES[service].get("command") or json.loads(IMAGE["CMD"])
    return [str(Path(sysconfig.get_path("scripts"), program)), *arguments]


def health_check_of(service: str) -> list[str]:
    """Return the health check of a service, or else that of the image."""
    of_image: list[str] = json.loads(IMAGE["HEALTHCHECK"].partition("CMD ")[2])
    own: list[str] | None = SERVICES[service].get("healthcheck", {}).get("test")
    return own[1:] if own else of_image  # without CMD


def environment(url: str) -> dict[str, str]:
    return os.environ | {"REPLAYDB_URL": url, "REPLAYDB_UI_TOKEN": TOKEN}


@contextmanager
def running(service: str, url: str, port: str) -> Iterator[str]:
    """Run a service on a free port of this machine; yields its address."""
    command = [*command_of(service), "--port", "0"]
    assert command[-4:-2] == ["--host", "0.0.0.0"]  # noqa: S104 - what others in its network reach
    command[-3] = "127.0.0.1"
    with subprocess.Popen(
        command, env=environment(url), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.terminate()
    assert process.returncode == 0


def test_the_image_runs_as_a_user() -> None:
    assert int(IMAGE["USER"]) > 0
    assert f"--uid {IMAGE['USER']}" in (ROOT / "Dockerfile").read_text()


def test_the_image_gets_what_the_build_needs() -> None:
    """The wheel is built from what .dockerignore lets pass."""
    passed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if "!" in line}
    assert passed >= {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "migrations",
        "pyproject.toml",
        "src",
    }
    assert [name for name in passed if not (ROOT / name).exists()] == []


def test_services_can_be_reached_from_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) >= 6
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_services_wait_for_others_that_exist() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, name
            (condition,) = how.values()
            has_check = (
                "test" in SERVICES[other].get("healthcheck", {}) or other == "ui"
            )  # the image's
            assert has_check == (condition == "service_healthy"), name


def test_grafana_gets_the_dashboard_and_its_source() -> None:
    configs = COMPOSE["configs"]
    assert (ROOT / configs["grafana-replaydb"]["file"]).exists()
    targets = {it["source"]: it["target"] for it in SERVICES["grafana"]["configs"]}
    (provider,) = yaml.safe_load(configs["grafana-dashboards"]["content"])["providers"]
    assert str(Path(targets["grafana-replaydb"]).parent) == provider["options"]["path"]
    (source,) = yaml.safe_load(configs["grafana-sources"]["content"])["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (job,) = yaml.safe_load(configs["prometheus"]["content"])["scrape_configs"]
    (scraped,) = job["static_configs"]
    assert scraped["targets"] == ["metrics:9478"]


@postgresql_nightly
def test_the_services_of_the_image_work(empty_url: str) -> None:
    """Migrations end; the UI and the metrics are healthy then."""
    assert OURS.keys() == {"migrations", "ui", "metrics"}
    migrated = subprocess.run(
        command_of("migrations"), env=environment(empty_url), capture_output=True, text=True
    )
    assert migrated.stdout == f"revision {REVISIONS[-1]}\n", migrated.stderr
    for service, port in (("ui", "8765"), ("metrics", "9478")):
        with running(service, empty_url, port) as address:
            free = re.search(r":(\d+)/", address)
            assert free, address
            _, option, code = health_check_of(service)
            assert f"127.0.0.1:{port}/" in code
            subprocess.run([sys.executable, option, code.replace(port, free[1])], check=True)


@pytest.mark.parametrize("service", ["ui", "metrics"])
def test_a_health_check_fails_without_the_service(service: str) -> None:
    _, option, code = health_check_of(service)
    closed = re.sub(r":\d+/", ":9/", code)
    outcome = subprocess.run([sys.executable, option, closed], capture_output=True, text=True)
    assert "Connection refused" in outcome.stderr
