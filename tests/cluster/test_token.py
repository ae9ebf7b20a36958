"""Ray's token authentication on a real head: requests without the token, or with another, are
refused.

The remaining open addresses are known.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.head import ROOT, Head
from tests.cluster.runs import tiny_config, write_toml


def status_of(url: str, token: str | None) -> int:
    """Return the HTTP status of a request with or without the token; 0 if nothing answers."""
    request = urllib.request.Request(
        url, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def sol_rl(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_a_head_with_a_token_refuses_missing_and_wrong_tokens(tiny_sd3_dir, tmp_path):
    token, folder = secrets.token_hex(32), Path("/tmp") / f"sol-rl-token-{os.getpid()}"
    head = Head(folder, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    try:
        deadline = time.monotonic() + 900
        while status_of(f"{head.url}/api/jobs/", token) != 200:
            assert head.process.poll() is None, "the head ended"
            assert time.monotonic() < deadline, "no dashboard within 900 s"
            time.sleep(1)
        assert status_of(f"{head.url}/api/jobs/", None) == 401
        assert status_of(f"{head.url}/api/jobs/", secrets.token_hex(32)) == 403

        file = write_toml(tiny_config(tiny_sd3_dir, tmp_path, "tokens", iterations=1), tmp_path)
        without = {
            key: value for key, value in head.env.items() if not key.startswith("RAY_AUTH_")
        } | {"HOME": str(tmp_path)}
        wrong = {**head.env, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for environment in (without, {**without, "RAY_AUTH_MODE": "token"}, wrong):
            for command in (
                ("submit", str(file), "--address", head.url),
                ("status", "--address", f"127.0.0.1:{head.gcs}"),
            ):
                refused = sol_rl(environment, *command)
                assert refused.returncode == 2 and "requires a token" in refused.stderr, (
                    command,
                    refused.stderr,
                )
                assert refused.stderr.count("\n") == 1
        assert not (tmp_path / "runs").exists()
        let_in = sol_rl(head.env, "submit", str(file), "--address", head.url, "--follow")
        assert let_in.returncode == 0 and "report:" in let_in.stdout, let_in.stdout + let_in.stderr

        (found,) = folder.glob("prom_metrics_service_discovery.json")
        targets = [target for group in json.loads(found.read_text()) for target in group["targets"]]
        # open, as docs/operations.md says
        assert targets
        assert all(status_of(f"http://{target}/metrics", None) == 200 for target in targets)
    finally:
        head.stop()
