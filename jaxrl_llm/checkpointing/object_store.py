"""Objects below a URL gs://bucket/path or s3://bucket/path, through tensorstore's key-value stores.

Credentials come from the standard places: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS's files and the metadata of
an instance; GOOGLE_APPLICATION_CREDENTIALS, gcloud's files and the metadata of a VM. AWS_ENDPOINT_URL and
STORAGE_EMULATOR_HOST name other servers. A write of one object is atomic; nothing can be appended or renamed.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import tensorstore as ts

from jaxrl_llm.types import UserError

_T = TypeVar('_T')

_URL = re.compile(r'(gs|s3)://([^/]+)(?:/+(.*))?')
# Doubling from 0.5 s to at most 16 s: about four minutes without a network, then the error.
_PATIENT = dict(max_retries=20, initial_delay='500ms', max_delay='16s')
_PROBE = _PATIENT | dict(max_retries=4)  # a wrong address fails within seconds
_AT_ONCE = 8  # requests in flight, each of PIECE_BYTES at most
PIECE_BYTES = (
  2**26
)  # of a larger file in one object: S3 takes 5 GB at once, and memory holds what is in flight
# What the text of an error holds → the cause and the remedy.
_CAUSES = (
  (
    ('NoSuchBucket', 'NOT_FOUND', 'HTTP response code: 404', 'Not Found'),
    'the bucket does not exist; create it, or name another one',
  ),
  (
    (
      *('PERMISSION_DENIED', 'UNAUTHENTICATED', 'AccessDenied', 'InvalidAccessKeyId'),
      *('SignatureDoesNotMatch', 'redential', 'HTTP response code: 40'),
    ),
    'the credentials are missing or have no permission there; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for '
    's3://, GOOGLE_APPLICATION_CREDENTIALS for gs://, and let them list, read, write and delete objects',
  ),
  (
    ('retry attempts failed', 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'CURL error'),
    'the store cannot be reached, also when tried again; check the network and AWS_ENDPOINT_URL or '
    'STORAGE_EMULATOR_HOST, and start the same command again: a run resumes at its last checkpoint',
  ),
)


class StoreError(UserError):
  """The store cannot be reached, or refuses the request."""


class Store:
  """The objects below a URL. Keys are relative to it. Methods raise StoreError after retries."""

  def __init__(self, url: str, *, probe: bool = False):
    """`probe` gives up within seconds: for the first request of a command."""
    self.url = url.rstrip('/')
    match = _URL.fullmatch(self.url)
    if match is None:
      raise UserError(f'{url} names no bucket; write gs://BUCKET/PATH or s3://BUCKET/PATH.')
    scheme, bucket, path = match.groups()
    self._prefix = f'{path}/' if path else ''
    spec = dict(bucket=bucket) | (_s3() if scheme == 's3' else _gcs())
    retries = _PROBE if probe else _PATIENT
    context = ts.Context(dict(s3_request_retries=retries, gcs_request_retries=retries))
    self._kv = self._checked(lambda: ts.KvStore.open(spec, context=context).result())

  def read(self, key: str) -> bytes | None:
    """The content of an object; None where it is absent."""
    return self.read_versioned(key)[0]

  def read_versioned(self, key: str) -> tuple[bytes | None, bytes]:
    """(content or None, generation): the generation changes with every write; b'' = the store has none."""
    found = self._checked(lambda: self._kv.read(self._prefix + key).result())
    generation = found.stamp.generation
    return (found.value if found.state == 'value' else None), generation.strip(b'\0') and generation

  def read_many(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
    """Yields (key, content or None), some at a time."""
    for batch in _batches(keys):
      reads = [(key, self._kv.read(self._prefix + key)) for key in batch]
      for key, future in reads:
        found = self._checked(future.result)
        yield key, found.value if found.state == 'value' else None

  def write(self, key: str, content: bytes) -> None:
    """Writes an object, at once as a whole."""
    self._checked(lambda: self._kv.write(self._prefix + key, content).result())

  def write_many(self, objects: Iterable[tuple[str, bytes]]) -> None:
    """Writes objects, some at a time."""
    for batch in _batches(objects):
      writes = [self._kv.write(self._prefix + key, content) for key, content in batch]
      for future in writes:
        self._checked(future.result)

  def write_if(self, key: str, content: bytes | None, generation: bytes) -> bytes | None:
    """Writes (None: deletes) an object that still has this generation, and returns the new one; None = it changed."""
    condition = dict(if_equal=generation or None)
    write = self._kv.write(self._prefix + key, content, **condition)
    return self._checked(write.result).generation or None

  def names(self, prefix: str = '') -> list[str]:
    """The keys that begin with `prefix`, sorted. Raises StoreError for a bucket that does not exist."""
    first = (self._prefix + prefix).encode()
    # No key holds the byte 255, which UTF-8 has not.
    keys = self._checked(
      lambda: self._kv.list(ts.KvStore.KeyRange(first, first + b'\xff')).result()
    )
    # Emulators exist that ignore the range.
    return sorted(key[len(self._prefix) :].decode() for key in keys if key.startswith(first))

  def delete(self, prefix: str) -> None:
    """Deletes all objects whose keys begin with `prefix`."""
    for batch in _batches(self.names(prefix)):
      for future in [self._kv.write(self._prefix + key, None) for key in batch]:
        self._checked(future.result)

  def _checked(self, call: Callable[[], _T]) -> _T:
    try:
      return call()
    except (
      Exception
    ) as error:  # tensorstore raises ValueError, PermissionError, … with the status in the text
      raise StoreError(_sentence(self.url, str(error))) from error


def _s3() -> dict[str, object]:
  """The driver's fields. Without an endpoint, AWS's region of the bucket is looked up."""
  spec: dict[str, object] = dict(driver='s3')
  endpoint = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
  region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION')
  if endpoint:
    spec |= dict(endpoint=endpoint.rstrip('/'), aws_region=region or 'us-east-1')
  if os.environ.get('AWS_ACCESS_KEY_ID'):  # otherwise the library reports absent files of AWS first
    spec |= dict(aws_credentials=dict(type='environment'))
  return spec


def _gcs() -> dict[str, object]:
  emulator = os.environ.get('STORAGE_EMULATOR_HOST')
  if emulator:  # tensorstore has variables of its own for it; an emulator gets no real credentials
    address = emulator if '://' in emulator else f'http://{emulator}'
    os.environ.setdefault('TENSORSTORE_GCS_HTTP_URL', address.rstrip('/'))
    os.environ.setdefault('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'emulator')
  return dict(driver='gcs')


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
  rest = iter(items)
  while batch := list(itertools.islice(rest, _AT_ONCE)):
    yield batch


def _sentence(url: str, text: str) -> str:
  short = ' '.join(text.split())[:300]
  for signs, cause in _CAUSES:
    if any(sign in text for sign in signs):
      return f'{url}: {cause} ({short}).'
  return f'{url} failed: {short}'
