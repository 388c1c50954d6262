"""Upload of an exported directory to the hub, with checks that run before anything is exported."""

from pathlib import Path

from jaxrlhf.config import Refusal

_NEW = {".gitattributes"}
"""Files that the hub itself puts in a new repository."""


def check_push(name: str, *, overwrite: bool) -> None:
    """Raise `Refusal` if `push` could not write to a repository of the hub, or would replace existing files.

    Args:
      name: Repository, as `OWNER/NAME`.
      overwrite: True allows existing files to be replaced.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise Refusal(f"--push {name}: {error}") from error
    if name.count("/") != 1:
        raise Refusal(f"--push {name!r} is not OWNER/NAME; pass a repository such as me/my-model")
    if get_token() is None:
        raise Refusal("--push requires a hub token with write access; run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        user = api.whoami()
        files = {*api.list_repo_files(name)} - _NEW
    except RepositoryNotFoundError:
        files = set()
    except (HfHubHTTPError, HTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise Refusal("--push: the hub rejected the token; log in again with `hf auth login`") from error
        raise Refusal(
            f"--push: the request to the hub failed ({str(error).strip().splitlines()[0]}); check the network"
        ) from error
    owners = {user["name"], *(one["name"] for one in user.get("orgs", ()))}
    owner = name.partition("/")[0]
    if owner not in owners:
        raise Refusal(
            f"--push {name}: the token belongs to {user['name']}, who may write to {', '.join(sorted(owners))}, not "
            f"to {owner}"
        )
    if files and not overwrite:
        shown = ", ".join(sorted(files)[:4])
        raise Refusal(
            f"--push {name}: the repository already holds {len(files)} files ({shown}); pass --overwrite to replace "
            "them"
        )


def push(directory: Path, name: str, *, message: str, private: bool) -> str:
    """Replace the repository's files with the directory's, creating the repository if needed; return its address.

    Raises:
      Refusal: The hub rejected the upload; the directory is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=message, delete_patterns="*")
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Refusal(
            f"the upload to the hub failed ({reason}); the export in {directory} is complete: retry with `hf upload "
            f"{name} {directory}`"
        ) from error
    return str(address)
