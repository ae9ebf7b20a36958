"""An export on the hub: a repository of its files."""

from __future__ import annotations

from pathlib import Path

from configs.load import ConfigError
from policy.families.files import HUB_ID
from records.errors import RunFailed, first_line


def check_hub(repository: str) -> None:
    """Raises ConfigError for a name that is none, or where nobody is logged in."""
    from huggingface_hub import HfApi

    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"--push {repository}: OWNER/NAME is expected")
    try:
        HfApi().whoami()
    except Exception as error:  # the client's errors of login and network have no common class
        raise ConfigError(
            f"--push {repository}: the hub does not know who this is ({first_line(error)}): run `hf"
            " auth login`, or set HF_TOKEN"
        ) from None


def push(folder: Path, repository: str, private: bool) -> str:
    """Put the files of ``folder`` into a model repository, made if it is not there; its address.

    Raises RunFailed where the hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            repo_type="model",
            folder_path=folder,
            commit_message="LoRA and model card, by sol-rl export",
        )
    except Exception as error:  # as above
        raise RunFailed(
            f"--push {repository}: the hub did not take it ({first_line(error)}); the files are in"
            f" {folder}"
        ) from None
    return f"https://huggingface.co/{repository}"
