"""Access to Ray's dashboard through a job client whose requests all have a timeout."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.jobs.job_log import connection_errors, follow_command_output, short_line
from configs.load import ConfigError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

TOKEN_WANTED = (
    "this cluster requires a token: export RAY_AUTH_MODE=token, and put the token in"
    " ~/.ray/auth_token or at RAY_AUTH_TOKEN_PATH"
)
ANSWER_S = (10.0, 120.0)
"""Timeouts for a dashboard to accept a connection and to answer, seconds."""
NO_AGENT = "No available agent"
"""In the dashboard's answer while no node can start a job, as in the first seconds of a cluster."""
AGENT_S = 60.0
URL = ("http://", "https://")


def job_client(address: str | None) -> JobSubmissionClient:
    """Return a job client of the dashboard at ``address``.

    Without an address it uses RAY_API_SERVER_ADDRESS, RAY_ADDRESS or this machine's dashboard.
    Raises ConfigError if the address is no URL or if nothing answers.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """Job client that sets a timeout for every request, and waits for a cluster to start."""

        def submit_job(self, **job):
            deadline = time.monotonic() + AGENT_S
            while True:
                try:
                    return super().submit_job(**job)
                except RuntimeError as error:
                    if NO_AGENT not in str(error) or time.monotonic() > deadline:
                        raise
                time.sleep(1)

        def _do_request(self, *arguments, **options):
            return super()._do_request(*arguments, **{"timeout": ANSWER_S, **options})

    at, url = f"--address {address}", address
    if not address:
        url = os.environ.get("RAY_API_SERVER_ADDRESS")
        at = (
            f"RAY_API_SERVER_ADDRESS = {url}"
            if url
            else f"RAY_ADDRESS = {os.environ.get('RAY_ADDRESS', 'not set')}"
        )
    if url and not url.startswith(URL):
        raise ConfigError(f"{at}: expected the URL of a Ray dashboard, http://HOST:8265")
    try:
        with _only(url):
            return Client(url)
    except AuthenticationError:
        raise ConfigError(f"{at}: {TOKEN_WANTED}") from None
    except connection_errors() as error:
        raise ConfigError(
            f"{at}: no Ray dashboard answers ({short_line(error)}); give --address"
            " http://HOST:8265, its URL"
        ) from None


@contextmanager
def _only(url: str | None) -> Iterator[None]:
    """Make Ray use ``url`` within the block.

    Ray prefers the environment variables RAY_API_SERVER_ADDRESS and RAY_ADDRESS to the URL that
    it is given.
    """
    name = "RAY_API_SERVER_ADDRESS"
    before = os.environ.get(name)
    if url:
        os.environ[name] = url
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def config_errors(
    client: JobSubmissionClient, advice: Callable[[Exception], str | None] = lambda error: None
) -> Iterator[None]:
    """Convert errors of a dashboard within the block to a ConfigError of one line.

    ``advice`` returns what to do about an error, or None if it does not know.
    """
    from ray.exceptions import AuthenticationError

    at = f"--address {client.get_address()}"
    try:
        yield
    except AuthenticationError:
        raise ConfigError(f"{at}: {TOKEN_WANTED}") from None
    except connection_errors() as error:
        fix = advice(error) or (
            f"`ray job list {at}` lists the jobs, and the dashboard's log on the head has the"
            " reason"
        )
        raise ConfigError(f"{at}: the job was not accepted ({short_line(error)}); {fix}") from None


def ask_through_job(
    address: str, arguments: Sequence[str], show: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Run a `sol-rl` command on the cluster as a small job; return the command's exit code.

    The job uses the files of a submitted run that is running there. For users who can reach only
    the dashboard. Raises ConfigError if no submitted run is running.
    """
    client = job_client(address)
    with config_errors(client):
        running = [
            job
            for job in client.list_jobs()
            if str(job.status) == "RUNNING" and "-m cluster train" in job.entrypoint
        ]
    if not running:
        raise ConfigError(f"--address {address}: no submitted run is active there")
    with config_errors(client):
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "cluster", *arguments]),
            runtime_env=running[0].runtime_env or {},
        )
    return follow_command_output(client, job, show, say)
