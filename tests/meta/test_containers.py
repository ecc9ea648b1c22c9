"""Dockerfile, compose.yaml and the Prometheus files agree with the package; no image is built here."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVERS = ("detrt", "detrt-gpu")


def instructions(text=DOCKERFILE):
    """(keyword, rest) of a Dockerfile, continued lines joined."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in plain.splitlines() if line.strip()]


def stages():
    """Stage name -> its instructions."""
    found, name = {}, None
    for keyword, rest in instructions():
        if keyword == "FROM":
            name = re.search(r"\bAS (\S+)$", rest)[1]
            found[name] = []
        elif name:
            found[name].append((keyword, rest))
    return found


def extras():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    block = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    return set(re.findall(r"^([\w-]+) = \[", block, re.MULTILINE))


def test_what_is_copied_is_there():
    """Also through .dockerignore, which leaves out all but what it names."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    sources = [name for key, rest in instructions() if key == "COPY" for name in rest.split()[:-1]]
    assert sources and all((ROOT / name).exists() for name in sources)
    assert set(sources) == kept


def test_the_package_builds_from_what_is_copied():
    """Everything that pyproject.toml names as a file is in the image's build context."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    readme = re.search(r'^readme = "(.+)"', text, re.MULTILINE)[1]
    assert readme in DOCKERFILE and 'where = ["src"]' in text


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_stages(stage):
    found = stages()[stage]
    named = set(re.search(r"detrt-\*\.whl\)\[([\w,]+)\]", " ".join(rest for key, rest in found if key == "RUN"))[1].split(","))
    assert named <= extras() and "serve" in named
    by_key = dict(found)
    assert by_key["USER"] != "0" and by_key["EXPOSE"] == "8000" and by_key["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(by_key["ENTRYPOINT"]) == ["detrt"]
    probe = json.loads(by_key["HEALTHCHECK"].split("CMD", 1)[1])
    compile(probe[2], "probe", "exec")
    assert "/readyz" in probe[2] and ":8000/" in probe[2]
    check_options(json.loads(by_key["CMD"]))


def check_options(command):
    """Every option is one of `detrt serve`."""
    pytest.importorskip("fastapi", reason="needs the 'serve' extra")
    from detrt.cli import load_command

    assert command[0] == "serve"
    known = {name for parameter in load_command("serve").params for name in parameter.opts}
    assert {word for word in command if word.startswith("--")} <= known


@pytest.mark.parametrize("name", SERVERS)
def test_compose(name):
    service = COMPOSE["services"][name]
    assert service["build"]["target"] in stages() and (ROOT / service["build"]["context"] / "Dockerfile").is_file()
    command = service["command"]
    check_options(command)
    assert service["ports"][0].endswith(f":{command[command.index('--port') + 1]}")
    drain, grace = float(command[command.index("--drain") + 1]), float(service["stop_grace_period"].rstrip("s"))
    assert drain < grace, "the server must have answered before it is killed"


def test_the_files_that_are_mounted_are_there():
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).is_file(), source


def test_prometheus_asks_the_server():
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in COMPOSE["services"] and f":{port}" in COMPOSE["services"][host]["ports"][0]
    assert host in COMPOSE["services"]["detrt-gpu"]["networks"]["default"]["aliases"]
    assert all((ROOT / "deploy" / name).is_file() for name in config["rule_files"])


def test_alerts_name_metrics_that_exist():
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src/detrt/serve").glob("*.py"))
    kinds = {name: kind for kind, name in re.findall(r'(Counter|Histogram|Gauge|watch)\(\s*"(detrt_\w+)"', source)}
    known = {"up"}
    for name, kind in kinds.items():
        known |= {
            "Counter": {f"{name}_total"},
            "Histogram": {f"{name}_bucket", f"{name}_sum", f"{name}_count"},
        }.get(kind, {name})
    rules = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"\b(?:detrt_\w+|up)\b(?!\")", rule["expr"])}
    assert used and used <= known, used - known


def test_no_command_is_split_wrongly():
    for key, rest in instructions():
        if key == "RUN":
            assert shlex.split(rest)
