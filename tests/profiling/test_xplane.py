"""Device time by part and kind: a real trace, compared with another reader, and artificial ones with known sums."""

from __future__ import annotations

import collections
import glob
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.profiling import hlo, xplane
from jaxrl_llm.profiling.xplane import Event, Op

DEVICE = '/device:GPU:0 0'


def program(x):
  with jax.named_scope('update'):
    y = x
    for _ in range(3):
      with jax.named_scope('optimizer'):
        y = jnp.tanh(y)
      y = y @ x
  with jax.named_scope('generate'):

    def body(carry):
      i, y = carry
      with jax.named_scope('attention'):
        y = jnp.sort(y @ x, axis=0)
      with jax.named_scope('sampling'):
        return i + 1, jnp.cumsum(y, axis=0)

    _, y = jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, y))
  return y.sum()


@pytest.fixture(scope='module')
def traced(tmp_path_factory):
  """(folder, the compiled program's text) of two calls."""
  folder = str(tmp_path_factory.mktemp('trace'))
  compiled = jax.jit(program).lower(jnp.zeros((160, 160))).compile()
  x = jnp.ones((160, 160)) / 160
  compiled(x).block_until_ready()
  with jax.profiler.trace(folder):
    for _ in range(2):
      compiled(x).block_until_ready()
  return folder, compiled.as_text()


def test_sums_agree_with_the_totals_of_the_trace(traced):
  """From the same trace as JSON: nanoseconds in which a thread ran an operation that contains no others."""
  found = xplane.read(xplane.newest(traced[0]))
  (path,) = glob.glob(f'{traced[0]}/**/*.trace.json.gz', recursive=True)
  with gzip.open(path) as file:
    events = json.load(file)['traceEvents']
  threads = collections.defaultdict(list)
  for event in events:
    name = event.get('args', {}).get('hlo_op', '')
    if event.get('ph') == 'X' and name and not event['name'].startswith('end: '):
      if not name.startswith(('while', 'call', 'conditional')):
        start = round(1e3 * event['ts'])
        threads[event['tid']].append((start, start + round(1e3 * event.get('dur', 0))))
  total = 0
  for own in threads.values():
    points = sorted({t for both in own for t in both})
    total += sum(
      b - a for a, b in zip(points, points[1:], strict=False) if any(s <= a < e for s, e in own)
    )
  assert total > 0 and found['op_s'] == pytest.approx(total / 1e9, rel=1e-3)
  by_part = {part: sum(kinds.values()) for part, kinds in found['parts'].items()}
  assert sum(by_part.values()) == pytest.approx(found['op_s'], rel=1e-12)
  assert sum(s for *_, s, _ in found['top']) == pytest.approx(found['op_s'], rel=0.05)
  assert found['busy']['all'] <= found['span_s'] and found['devices'] == 1
  assert all(found['busy'][part] <= s * (1 + 1e-9) for part, s in by_part.items())


def test_parts_and_kinds_are_those_of_the_named_scopes(traced):
  found = xplane.read(xplane.newest(traced[0]))
  assert set(found['parts']['update']) >= {'matrix products', 'optimizer'}
  assert set(found['parts']['generate']) >= {'attention', 'sampling'}
  assert not {'attention', 'sampling'} & set(found['parts']['update'])
  # A step calls the loop's product four times and the others three, and two steps were traced.
  times = {(name, part): n for name, _, part, _, n in found['top'] if 'dot_general' in name}
  assert times == {
    ('generate/attention/dot_general', 'generate'): 8,
    ('update/dot_general', 'update'): 6,
  }


def test_the_program_in_the_trace_is_the_compiled_program(traced):
  """Instructions of every computation, compared with XLA's text."""
  with open(xplane.newest(traced[0])[0], 'rb') as file:
    programs = xplane._programs(file.read())
  want = {i.name: i.opcode for own in hlo.parse(traced[1]).values() for i in own}
  assert want in [{name: op.opcode for name, op in ops.items()} for ops in programs.values()]


def message(*fields) -> bytes:
  """A protobuf message of (number, integer or bytes)."""

  def varint(x: int) -> bytes:
    return bytes([x & 127 | 128]) + varint(x >> 7) if x > 127 else bytes([x])

  return b''.join(
    varint(n << 3) + varint(v) if isinstance(v, int) else varint(n << 3 | 2) + varint(len(v)) + v
    for n, v in fields
  )


def test_scopes_of_a_computation_include_those_of_its_caller():
  """Number 300 is in the program's name; the loop's body names its own scope alone, the fusion's none."""
  named = lambda name, opcode, source, *called: message(  # noqa: E731
    (1, name), (2, opcode), (7, message((2, source))), *((38, number) for number in called)
  )
  fused = message((5, 7), (2, named(b'dot.9', b'dot', b'head/dot_general')))
  body = message((5, 8), (2, named(b'fusion.1', b'fusion', b'', 7)))
  main = message((5, 9), (2, named(b'while.2', b'while', b'jit(step)/update/while', 8)))
  proto = message((1, message((3, fused), (3, body), (3, main))))
  metadata = message((1, 4), (2, b'jit_step(300)'), (5, message((1, 1), (6, proto))))
  plane = message((2, b'/host:metadata'), (4, message((1, 4), (2, metadata))))
  found = xplane._programs(message((1, plane)))
  assert set(found) == {('jit_step', 300)}
  op = found['jit_step', 300]['fusion.1']
  assert op == Op('fusion', 'jit(step)/update/while/head/dot_general', True)
  assert xplane._match_program(found, ('jit_step', 298), {'fusion.1'}) == found['jit_step', 300]
  assert xplane._match_program(found, ('jit_other', 300), {'fusion.1'}) == {}


def test_the_newest_trace_is_read(tmp_path):
  assert xplane.newest(str(tmp_path)) == []
  for session in ('2026_01_02_03_04_05', '2026_01_02_03_04_06', '2027_empty'):
    (tmp_path / 'plugins/profile' / session).mkdir(parents=True)
    if 'empty' not in session:
      for host in 'ab':
        (tmp_path / 'plugins/profile' / session / f'{host}.xplane.pb').touch()
  found = xplane.newest(str(tmp_path))
  assert [path.split('/')[-2:] for path in found] == [
    ['2026_01_02_03_04_06', f'{host}.xplane.pb'] for host in 'ab'
  ]
  assert xplane.read(found) is None


def test_time_of_inner_operations_is_subtracted_once():
  """Random nested intervals, against a count that assigns every nanosecond to the innermost."""
  random = np.random.default_rng(0)
  for _ in range(20):
    intervals, at = [], 0

    def nest(start, end, depth, intervals=intervals, random=random):
      intervals.append((float(start), float(end), len(intervals)))
      while depth and end - start > 4:
        a = int(random.integers(start, end - 2))
        b = int(random.integers(a + 1, end))
        nest(a, b, depth - 1)
        start = b

    for _ in range(3):
      nest(at, at + 60, 3)
      at += 60
    owner = [max((s, -e, i) for s, e, i in intervals if s <= t < e)[2] for t in range(at)]
    want = collections.Counter(owner)
    assert {i: ns for i, ns in xplane._self_times(intervals) if ns} == want
    assert xplane._union((s, e) for s, e, _ in intervals) == at


def summary(*intervals) -> dict:
  """(stream, start, end, op, source) in seconds, as read."""
  events = [
    (0, Event(DEVICE, stream, start * 1e9, end * 1e9, op, ('jit_step', 1), source))
    for stream, start, end, op, source in intervals
  ]
  return xplane._summarize(events, {})


def test_overlapping_streams_are_busy_once_and_containers_have_no_time():
  found = summary(
    ('a', 0, 10, 'while.1', 'jit(step)/generate/while'),
    ('a', 1, 5, 'fusion.1', 'jit(step)/generate/while/body/attention/exp'),
    ('b', 3, 6, 'all-reduce.2', 'jit(step)/generate/while/body/psum'),
    ('a', 6, 7, 'loop_add_fusion', ''),
    ('a', 7, 9, 'gemm_fusion_dot.7', 'jit(step)/update/transpose(jvp(model))/dot_general'),
    ('a', 9, 10, 'copy.3', 'jit(step)/update/copy'),
  )
  assert found['parts'] == {
    'update': {'matrix products': 2.0, 'copies': 1.0},
    'generate': {'attention': 4.0, 'collectives': 3.0},
    'other': {'other': 1.0},
  }
  assert found['busy'] == {'generate': 5.0, 'other': 1.0, 'update': 3.0, 'all': 9.0}
  assert found['op_s'] == 11.0 and found['span_s'] == 10.0


@pytest.mark.parametrize(
  'name, op, part, kind',
  [
    ('fusion.3', Op('fusion', 'jit(f)/update/transpose(jvp(head))/mul', True), 'update', 'head'),
    ('x', Op('dot', 'jit(f)/update/while/body/dot_general', True), 'update', 'matrix products'),
    ('x', Op('all-gather-start', 'jit(f)/update/attention/g', False), 'update', 'collectives'),
    ('x', Op('copy-done', 'jit(f)/generate/decode/while', False), 'generate', 'copies'),
    ('x', Op('fusion', 'jit(f)/generate/update_slice', False), 'generate', 'other'),
    ('MemcpyD2D', Op('', '', False), 'other', 'copies'),
    ('ncclDevKernel_AllGather', Op('', '', False), 'other', 'collectives'),
  ],
)
def test_part_and_kind_of_an_operation(name, op, part, kind):
  assert (xplane.part_of(op), xplane.kind_of(name, op)) == (part, kind)
