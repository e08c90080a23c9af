"""A stand-in for the Hugging Face hub on loopback: the endpoints of whoami, repositories and uploads."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator

# Files that are sent through LFS; the others are part of the commit.
LFS = '.safetensors'
TOKEN = 'hf_of_the_test'


class Hub:
  """The repositories of the server: name → {path: bytes}; their commits, newest first, and visibility."""

  def __init__(self):
    self.url = ''
    self.files: dict[str, dict[str, bytes]] = {}
    self.commits: dict[str, list[str]] = {}
    self.visibility: dict[str, str | None] = {}
    self.objects: dict[str, bytes] = {}  # of LFS, by their hash
    self.calls: list[str] = []

  def respond(self, method: str, path: str, body: bytes) -> tuple[int, object]:
    """(status, JSON) of a request."""
    if path == '/api/whoami-v2':
      return 200, dict(name='me', type='user')
    if path == '/api/validate-yaml':
      return 200, dict(errors=[], warnings=[])
    if path == '/api/repos/create':
      request = json.loads(body)
      name = f'{request["organization"]}/{request["name"]}'
      if request['organization'] != 'me':
        return 403, dict(error='You do not have the rights')
      self.files[name], self.commits[name] = {'.gitattributes': b''}, ['initial commit']
      self.visibility[name] = request.get('visibility')
      return 200, dict(url=f'{self.url}/{name}', name=name, id=name)
    if path.startswith('/lfs/'):
      self.objects[path.removeprefix('/lfs/')] = body
      return 200, {}
    if re.fullmatch(r'/(.+)\.git/info/lfs/objects/batch', path):
      return 200, self._batch(json.loads(body))
    found = re.fullmatch(r'/api/models/([^/]+/[^/]+)(?:/(\w+)/main(.*)|/revision/main)?', path)
    if not found or found[1] not in self.files:
      return 404, dict(error='Repository not found')
    return 200, self._repository(found[1], found[2], body)

  def _batch(self, request: dict) -> dict:
    upload = lambda x: dict(upload=dict(href=f'{self.url}/lfs/{x["oid"]}'))  # noqa: E731
    return dict(transfer='basic', objects=[x | dict(actions=upload(x)) for x in request['objects']])

  def _repository(self, name: str, action: str | None, body: bytes) -> object:
    files = self.files[name]
    if action is None:
      siblings = [dict(rfilename=path) for path in files]
      return dict(id=name, modelId=name, sha='0' * 40, siblings=siblings)
    if action == 'tree':
      return [dict(type='file', path=p, size=len(x), oid='0') for p, x in files.items()]
    if action == 'commits':
      date = '2026-01-01T00:00:00.000Z'
      extra = dict(authors=[], date=date, message='')
      return [dict(id='0' * 40, title=title) | extra for title in self.commits[name]]
    if action == 'preupload':
      mode = lambda path: 'lfs' if path.endswith(LFS) else 'regular'  # noqa: E731
      paths = [file['path'] for file in json.loads(body)['files']]
      return dict(
        files=[dict(path=x, uploadMode=mode(x), shouldIgnore=False, oid=None) for x in paths]
      )
    return self._commit(name, [json.loads(line) for line in body.splitlines()])

  def _commit(self, name: str, lines: list[dict]) -> dict:
    for line in lines:
      value = line['value']
      if line['key'] == 'header':
        self.commits[name].insert(0, value['summary'])
      elif line['key'] == 'file':
        self.files[name][value['path']] = base64.b64decode(value['content'])
      elif line['key'] == 'lfsFile':
        self.files[name][value['path']] = self.objects[value['oid']]
      elif line['key'] == 'deletedFile':
        del self.files[name][value['path']]
    oid = '1' * 40
    return dict(commitUrl=f'{self.url}/{name}/commit/{oid}', commitOid=oid, success=True)


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
  """A hub on a free port of loopback; only requests with `TOKEN` are answered."""
  hub = Hub()

  class Handler(http.server.BaseHTTPRequestHandler):
    def _answer(self):
      body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
      path = self.path.partition('?')[0]
      hub.calls.append(f'{self.command} {path}')
      allowed = self.headers.get('Authorization') == f'Bearer {TOKEN}' or path.startswith('/lfs/')
      status, reply = (
        hub.respond(self.command, path, body) if allowed else (401, dict(error='Invalid token'))
      )
      data = json.dumps(reply).encode()
      self.send_response(status)
      if status == 404:
        self.send_header('X-Error-Code', 'RepoNotFound')
      self.send_header('Content-Type', 'application/json')
      self.send_header('Content-Length', str(len(data)))
      self.end_headers()
      self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  hub.url = f'http://127.0.0.1:{server.server_port}'
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield hub
  finally:
    server.shutdown()
    server.server_close()
    thread.join()
