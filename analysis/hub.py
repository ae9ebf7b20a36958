"""Upload an export to a model repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from configs.load import ConfigError
from policy.families.files import HUB_ID
from records.errors import RunFailed, first_line


def check_hub(repository: str) -> None:
    """Raise ConfigError if ``repository`` is not a valid name or the user is not logged in."""
    from huggingface_hub import HfApi

    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"--push {repository}: expected OWNER/NAME")
    try:
        HfApi().whoami()
    except Exception as error:  # errors of login and network have no common base class
        raise ConfigError(
            f"--push {repository}: not logged in to the hub ({first_line(error)}): run `hf auth"
            " login`, or set HF_TOKEN"
        ) from None


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload the files of ``folder`` to a model repository and return its URL.

    The repository is created if it does not exist. Raises RunFailed if the hub refuses.
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
            f"--push {repository}: the upload to the hub failed ({first_line(error)}); the files"
            f" are in {folder}"
        ) from None
    return f"https://huggingface.co/{repository}"
