"""Install packages into the environment of this Python: with uv, or with pip where uv cannot be had or fails.

uv takes a fraction of pip's time, and does not read pip's configuration: index, links, constraints and certificates are passed on.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

PASSED_ON = ("index-url", "extra-index-url", "find-links", "constraint", "trusted-host")


def pip(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], text=True, **options)


def configured() -> dict[str, str]:
    """pip's options for an installation from its files and the environment, the stronger ones last."""
    listed = pip("config", "list", capture_output=True).stdout.splitlines()
    found = [(*line.partition("=")[0].rsplit(".", 1), ast.literal_eval(line.partition("=")[2])) for line in listed]
    return {name: value for wanted in ("global", "install", ":env:") for section, name, value in found if section == wanted}


def uv_command(settings: dict[str, str], packages: list[str]) -> list[str]:
    # pip takes the best version of all indexes; uv's default is the first index that has the package.
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match"]
    command += [f"--{name}={value}" for name in PASSED_ON for value in settings.get(name, "").split()]
    command += ["--no-index"] * (settings.get("no-index", "").lower() in ("1", "true", "yes", "on"))
    return [*command, *packages]


def uv_install(packages: list[str]) -> bool:
    if pip("install", "--quiet", "--no-compile", "uv").returncode:
        return False
    settings = configured()
    certificates = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    environment = {"UV_HTTP_TIMEOUT": "180", **os.environ, **certificates}
    return subprocess.run(uv_command(settings, packages), env=environment).returncode == 0


if __name__ == "__main__":
    packages = sys.argv[1:]
    if not uv_install(packages):
        print("uv did not install the packages; pip goes on", file=sys.stderr)
        sys.exit(pip("install", "--quiet", "--no-compile", *packages).returncode)
