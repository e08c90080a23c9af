"""Object stores on loopback, as processes: moto's S3 server and a GCS emulator; and a relay that can be cut."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

BUCKET = 'bucket'
_MODULES = dict(s3='moto', gs='gcp_storage_emulator')


def is_installed(scheme: str) -> bool:
  return importlib.util.find_spec(_MODULES[scheme]) is not None


class ObjectStore:
  """A running server. `env` holds the variables with which the command finds it."""

  def __init__(self, scheme: str, port: int, through: int | None = None):
    self.scheme, self.address = scheme, f'http://127.0.0.1:{port}'
    seen = f'http://127.0.0.1:{through or port}'
    keys = dict(AWS_ACCESS_KEY_ID='key', AWS_SECRET_ACCESS_KEY='secret', AWS_REGION='us-east-1')
    if scheme == 's3':
      self.env = keys | dict(AWS_ENDPOINT_URL=seen)
    else:
      self.env = dict(STORAGE_EMULATOR_HOST=seen, TENSORSTORE_GCS_HTTP_URL=seen)

  def url(self, path: str, bucket: str = BUCKET) -> str:
    return f'{self.scheme}://{bucket}/{path}'

  def objects(self, path: str) -> dict[str, bytes]:
    """{key below `path`: content}, by the official client or the JSON API."""
    prefix = f'{path}/'
    if self.scheme == 's3':
      pages = self._boto().get_paginator('list_objects_v2').paginate(Bucket=BUCKET, Prefix=prefix)
      keys = [entry['Key'] for page in pages for entry in page.get('Contents', ())]
      read = lambda key: self._boto().get_object(Bucket=BUCKET, Key=key)['Body'].read()  # noqa: E731
    else:
      query = urllib.parse.urlencode(dict(prefix=prefix, maxResults=100000))
      found = json.loads(self._get(f'/storage/v1/b/{BUCKET}/o?{query}'))
      keys = [entry['name'] for entry in found.get('items', ())]
      quoted = lambda key: urllib.parse.quote(key, safe='')  # noqa: E731
      read = lambda key: self._get(f'/storage/v1/b/{BUCKET}/o/{quoted(key)}?alt=media')  # noqa: E731
    return {key.removeprefix(prefix): read(key) for key in keys}

  def put(self, key: str, content: bytes) -> None:
    if self.scheme == 's3':
      self._boto().put_object(Bucket=BUCKET, Key=key, Body=content)
    else:
      query = urllib.parse.urlencode(dict(uploadType='media', name=key))
      url = f'{self.address}/upload/storage/v1/b/{BUCKET}/o?{query}'
      urllib.request.urlopen(urllib.request.Request(url, content, method='POST')).read()

  def copy(self, path: str, to: pathlib.Path) -> pathlib.Path:
    """Writes the run directory at `path` to a folder by the rules of storage.py, without its code."""
    objects = self.objects(path)
    folders = {}
    for key, content in objects.items():
      if marker := re.fullmatch(r'checkpoints/(step_\d+)\.complete', key):
        folders[json.loads(content)['folder']] = marker.group(1)
    for key, content in sorted(objects.items()):
      if key.startswith('checkpoints/'):
        folder, _, name = key.removeprefix('checkpoints/').partition('/')
        if folder not in folders:
          continue
        key = f'checkpoints/{folders[folder]}/{name}'
      part = re.fullmatch(r'logs/(.*)/\d+\.(\d+)', key)
      file = to / (part.group(1) if part else key)
      file.parent.mkdir(parents=True, exist_ok=True)
      if part and file.exists():
        content = file.read_bytes()[: int(part.group(2))] + content
      file.write_bytes(content)
    return to

  def _boto(self):
    import boto3

    return boto3.client(
      's3', endpoint_url=self.address, aws_access_key_id='key', aws_secret_access_key='secret',
      region_name='us-east-1',
    )  # fmt: skip

  def _get(self, path: str) -> bytes:
    with urllib.request.urlopen(self.address + path) as reply:
      return reply.read()

  def make_bucket(self) -> None:
    if self.scheme == 's3':
      self._boto().create_bucket(Bucket=BUCKET)


@contextlib.contextmanager
def serve(scheme: str, log: pathlib.Path, through: int | None = None) -> Iterator[ObjectStore]:
  """A server with an empty bucket; clients reach it `through` another port if one is given."""
  port = free_port()
  program = dict(
    s3=f'from moto.server import main; main(["-H", "127.0.0.1", "-p", "{port}"])',
    gs='from gcp_storage_emulator.server import create_server; '
    f'create_server("127.0.0.1", {port}, in_memory=True, default_bucket="{BUCKET}").run()',
  )
  with open(log, 'wb') as output:
    process = subprocess.Popen(
      [sys.executable, '-c', program[scheme]], stdout=output, stderr=output, start_new_session=True
    )
  try:
    deadline = time.monotonic() + 120
    while not is_open(port):
      assert process.poll() is None and time.monotonic() < deadline, log.read_text()
      time.sleep(0.05)
    store = ObjectStore(scheme, port, through)
    store.make_bucket()
    yield store
  finally:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Relay:
  """Forwards a port to another one, until it is cut; then connections are refused."""

  def __init__(self):
    self.port, self.target = free_port(), 0
    self._listener: socket.socket | None = None
    self._open: list[socket.socket] = []

  def join(self) -> None:
    self._listener = socket.create_server(('127.0.0.1', self.port))
    threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

  def cut(self) -> None:
    listener, self._listener = self._listener, None
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for each in self._open:
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
      each.close()
    self._open = []

  def _accept(self, listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while True:
        client, _ = listener.accept()
        server = socket.create_connection(('127.0.0.1', self.target))
        self._open += [client, server]
        for source, sink in ((client, server), (server, client)):
          threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

  def _forward(self, source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(65536):
        sink.sendall(data)
      sink.shutdown(socket.SHUT_WR)


def free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


def is_open(port: int) -> bool:
  with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=1):
    return True
  return False
