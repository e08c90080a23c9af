"""--mode=export --push=owner/name: uploads the exported folder to a repository of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxrl_llm.config import extras
from jaxrl_llm.types import UserError

if TYPE_CHECKING:
  from huggingface_hub import HfApi

# A repository whose newest commit begins so holds what this command left there, and may be replaced.
COMMIT = 'Upload an export of jaxrl_llm'
_OWNER_NAME = re.compile(r'[\w.-]+/[\w.-]+', re.ASCII)
_PROBLEMS = {
  401: 'the hub does not accept the token; log in again with `hf auth login`, or set HF_TOKEN',
  403: 'the token has no permission to write there; use a token with write access to this owner',
  404: 'it was not found: the owner does not exist, or the token has no access to it',
}


def prepare(repository: str, private: bool) -> None:
  """Create the repository unless it exists.

  Raises UserError for a name that is not owner/name, without huggingface_hub, token, permission or network, and where
  the repository holds files that this command did not upload.
  """
  if not _OWNER_NAME.fullmatch(repository):
    raise UserError(f'--push={repository!r} must be owner/name, as in --push=me/my-model.')
  with _hub(repository) as api:
    from huggingface_hub.errors import RepositoryNotFoundError

    api.whoami()  # a missing token is reported as such, not as a missing repository
    try:
      info = api.model_info(repository)
    except RepositoryNotFoundError:
      api.create_repo(repository, private=private)
      return
    files = {file.rfilename for file in info.siblings or ()} - {'.gitattributes'}
    if files and not api.list_repo_commits(repository)[0].title.startswith(COMMIT):
      raise UserError(
        f'--push={repository}: the repository holds files, and its newest commit is not of this command; name '
        'another repository, or empty that one.'
      )


def push(folder: str, repository: str) -> str:
  """Replace the files of the repository by those of `folder`; return its address. Raises UserError as `prepare`."""
  with _hub(repository) as api:
    # Shards of an earlier export would be loaded beside, or instead of, the new ones.
    api.upload_folder(
      repo_id=repository, folder_path=folder, commit_message=COMMIT, delete_patterns='*'
    )
    return f'{api.endpoint}/{repository}'


@contextlib.contextmanager
def _hub(repository: str) -> Iterator[HfApi]:
  """The client of the hub. Its errors become UserErrors of one sentence."""
  try:
    from huggingface_hub import HfApi, errors
  except ImportError as error:
    raise UserError(f'--push needs huggingface_hub: {extras.install("hub")}.') from error
  try:
    yield HfApi()
  except UserError:
    raise
  except errors.LocalTokenNotFoundError as error:
    raise UserError(
      f'--push={repository}: there is no token of the hub; log in with `hf auth login`, or set HF_TOKEN.'
    ) from error
  except (
    Exception
  ) as error:  # the client raises errors of its own, of httpx or requests, and of the system
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    problem = _PROBLEMS.get(status)
    text = f'{type(error).__name__}: {(str(error).splitlines() or [""])[0]}'
    if problem is None and status is None and isinstance(error, OSError | errors.HTTPError):
      problem = f'the hub cannot be reached ({text}); check the network and HF_ENDPOINT'
    raise UserError(f'--push={repository}: {problem or text}.') from error
