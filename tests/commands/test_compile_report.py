"""The step compiled for a TPU that is not there: what its decode loop copies and exchanges per token."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import re
import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import main
from jaxrl_llm import step as steps
from jaxrl_llm.commands import compile_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.models import decoder, gated_delta
from jaxrl_llm.profiling import hlo, hlo_decode
from jaxrl_llm.types import UserError

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason="needs libtpu: pip install '.[aot]'"
)

# 8 rows a shard, 2 heads of 64: no activation has the size of a cache.
CHANGES = dict(
  model='scratch',
  scratch=dict(width=128, layers=2, heads=2, kv_heads=2, mlp=256, max_tokens=64),
  prompts=4,
  rollouts=4,
  learner=dict(microbatch_tokens=256),
  prompt_tokens=16,
  completion_tokens=24,
)


@pytest.fixture(scope='module', autouse=True)
def _environment():
  compile_report.prepare()
  # What was compiled for another machine can be written to the cache, and not be read again; and it is read here.
  wanted = dict(
    jax_persistent_cache_min_compile_time_secs=1e9, jax_disable_most_optimizations=False
  )
  before = dict(
    jax_persistent_cache_min_compile_time_secs=jax.config.jax_persistent_cache_min_compile_time_secs,
    jax_disable_most_optimizations=jax.config.read('jax_disable_most_optimizations'),
  )
  for name in wanted:
    jax.config.update(name, wanted[name])
  yield
  for name in wanted:
    jax.config.update(name, before[name])


def config(**changes):
  made = configs.default()
  with made.ignore_type():
    made.update(CHANGES | changes)
  return made


def spec(**changes):
  return compile_report.make(config(**changes), compile_report.devices('v5e:2x2'))


@needs_libtpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize('axis', ['tensor', 'decode'])
def test_the_fused_step_of_a_tpu(axis, tmp_path, monkeypatch, capsys):
  made = spec(mesh={'data': 1, 'fsdp': 2, axis: 2})
  fused = compile_report.build(steps.compile_step(made), *compile_report.arguments(made))
  monkeypatch.setattr(compile_report, 'make', lambda *_: made)
  monkeypatch.setattr(
    compile_report, 'parts', lambda _: dict.fromkeys(('update', 'generate', 'fused'), fused)
  )
  path = str(tmp_path / 'report.json')
  assert compile_report.run(config(), 'v5e:2x2', path) == 0
  with open(path) as file:
    report = json.load(file)
  (loop,) = report['decode']
  # In place: keys and values of 2 layers, a head on each of two devices.
  assert loop['cache_bytes'] == 2 * 2 * 8 * 1 * 24 * 64 * 2 and loop['copies'] == []
  assert loop['weight_collectives'] == 0
  # Features on two devices: the embedding's rows, then attention and feed-forward of each layer.
  sums = [c for c in loop['collectives'] if c['bytes'] == 8 * 128 * 2]
  assert [(c['opcode'], c['count']) for c in sums] == [('all-reduce', 5)]
  assert fused.alias_bytes >= report['state_bytes']
  assert report['state_bytes'] == pytest.approx(12 * report['parameters'] / 4, rel=0.02)
  assert report['dtype'] == 'bfloat16' and report['fits'] and report['problems'] == []
  assert report['roofline']['tokens_per_s'] > 0
  output = capsys.readouterr().out
  assert 'fits' in output and 'tokens/s' in output and 'PROBLEM' not in output


@needs_libtpu
def test_scores_and_logits_are_no_copies_of_keys(monkeypatch):
  """Eight rows and one of two heads on a device, 24 columns of own tokens, 16 of a prompt, half of 128 logits."""
  found = {}
  monkeypatch.setattr(hlo_decode, 'decode_loops', lambda *_, **given: found.update(given))
  made = spec(mesh=dict(data=1, fsdp=2, tensor=2))
  compile_report.loops(made, '')
  vocab = made.model.config.vocab
  assert {8 * 24, 8 * 16, 8 * vocab // 2} <= {*found['others']}


@needs_libtpu
@pytest.mark.timeout(600)
def test_decoding_by_a_kernel_reads_rings_and_prompts_where_they_are():
  # Heads of 128, one on each of two devices; 5 slots for 8 rows, so that slots are of any prompts.
  scratch = dict(CHANGES['scratch'], width=256)
  rollout, mesh = dict(attention='ragged', slots=10), dict(data=1, fsdp=2, tensor=2)
  made = spec(scratch=scratch, completion_tokens=40, rollout=rollout, mesh=mesh)
  state, _, *inputs = compile_report.arguments(made)
  sample = programs.compile_sample(made)
  part = compile_report.build(sample, state._replace(carried=()), state.carried, *inputs)
  (loop,) = compile_report.loops(made, part.text)
  assert sum(a.bytes for a in loop.cache) == 2 * 2 * 5 * 1 * 40 * 128 * 2 and loop.copies == ()
  program = hlo.parse(part.text)
  calls = [i for c in program.values() for i in c if i.opcode == 'custom-call']
  kernels = [i for i in calls if 'decode_attention' in hlo.op_name(i) + i.attributes]
  assert len(kernels) == 2 * made.model.config.layers, 'own tokens and prompts'
  copied = [
    i.name for c in program.values() for i in c for a in i.arrays if a.dims == (5, 1, 16, 128)
  ]
  assert not copied, "copies of slots' prompts"


@needs_libtpu
@pytest.mark.timeout(600)
def test_two_slices_report_what_they_exchange(tmp_path, capsys):
  """2 × v5e-16: the network between slices is counted apart from the links of a slice."""
  made, path = config(prompts=32), str(tmp_path / 'report.json')
  assert compile_report.run(made, '2xv5e-16', path, '12,0.5') == 0
  with open(path) as file:
    report = json.load(file)
  assert report['devices'] == 32 and report['slices'] == 2
  assert report['mesh'] == dict(data=2, fsdp=16, context=1, expert=1, decode=1, tensor=1)
  learn, step = report['learn'], report['step']
  assert set(learn['wire_bytes']) == {'fsdp'}, 'links end at the slice'
  # In float32, a sixteenth of 340,224 weights and all of 640 in norms: 21,904, as 17,808 and 4,096 in whole tiles.
  gradient = 4 * 1024 * (18 + 4)
  # To deal prompts anew, a device hands over its own: the prompt, and of its 4 rows five arrays of tokens, and a flag.
  rows = 16 * 4 + 5 * 4 * 24 * 4 + 4
  # Ten sums and maxima of single numbers, each in a tile.
  assert learn['dcn_bytes'] == gradient + rows + 10 * 512 == 97220
  assert learn['dcn_s'] == pytest.approx(learn['dcn_bytes'] * 8 / 25e9)
  assert learn['best_s'] < learn['serial_s'] and step['overlapped_s'] < step['serial_s']
  assert step['expected_tokens'] == pytest.approx(12, abs=0.4) and step['completion_tokens'] == 24
  (loop,) = report['decode']
  # The number that decides whether the loop ends, in a tile.
  assert (loop['dcn_collectives'], loop['dcn_bytes']) == (1, 512)
  output = capsys.readouterr().out
  for words in (
    '32 × TPU v5 lite in 2 slices',
    'between slices (DCN)',
    '25 GB/s',
    'one after the other',
  ):
    assert words in output


@needs_libtpu
@pytest.mark.timeout(600)
def test_decoding_on_weights_as_they_are_trained_is_found(monkeypatch):
  """Weights cut as for training, rows cut over the same axis: every token gathers every kernel."""
  made = spec(mesh=dict(data=1, fsdp=4, tensor=1), rollout=dict(lockstep=False))
  monkeypatch.setattr(sharding, 'decode_layout', sharding.layout)
  # It would gather the weights itself, once, where it begins.
  monkeypatch.setattr(jax, 'shard_map', lambda fn, **_: fn)
  block, rows = decoder.Block.__call__, sharding.rows(made.layout.mesh)
  pin = lambda x: jax.lax.with_sharding_constraint(x, rows)  # noqa: E731

  def pinned(self, x, *rest):
    x, *out = block(self, pin(x), *rest)
    return pin(x), *jax.tree.map(pin, out)

  monkeypatch.setattr(decoder.Block, '__call__', pinned)
  state, _, prompts, *_ = compile_report.arguments(made)
  part = compile_report.build(programs.compile_generate(made), state.params, prompts, 0, None)
  (loop,) = compile_report.loops(made, part.text)
  weights = [c for c in loop.collectives if c.fixed and c.bytes > 1000]
  assert {c.opcode for c in weights} == {'all-gather'} and len(weights) == 2 * 7 + 1
  vocab, kernels = made.model.config.vocab, 2 * (4 * 128 * 128 + 3 * 128 * 256)
  assert sum(c.bytes for c in weights) == 2 * (kernels + 128 * vocab)
  report = dict(parts={'fused': part._asdict() | dict(alias_bytes=1)}, state_bytes=1)
  (message,) = compile_report.problems(report | dict(decode=[compile_report.decode_report(loop)]))
  assert 'exchanges of what does not change' in message


@needs_libtpu
@pytest.mark.parametrize('topology', ['v5e-1', 'v5litepod-1', 'v5e:1x1', 'v6e-1'])
def test_one_chip_has_a_topology(topology):
  (device,) = compile_report.devices(topology)
  assert hardware.CHIPS[device.device_kind].flops > 0


@needs_libtpu
def test_an_unknown_topology_is_told():
  with pytest.raises(UserError, match=r"--topology='v5e:3x5'.*such as: v5e-16"):
    compile_report.devices('v5e:3x5')


def test_without_libtpu_the_command_says_what_to_install(monkeypatch, capsys):
  def version(name):
    raise compile_report.importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(compile_report.importlib.metadata, 'version', version)
  assert main.main(['--mode=compile', '--config.model=scratch']) == 2
  output = capsys.readouterr().err
  assert re.search(r"pip install -e '[^']*\[aot\]'", output) and 'Traceback' not in output


def test_options_are_for_tpus_and_yield_to_the_users(monkeypatch):
  tpu = types.SimpleNamespace(platform='tpu')
  options = hardware.compiler_options(tpu)
  assert hardware.compiler_options(jax.devices()[0]) == {}
  # One name begins with another.
  for name in ('xla_tpu_enable_async_collective_fusion', *options):
    monkeypatch.setenv('LIBTPU_INIT_ARGS', f'--{name}=0.5 --xla_other=1')
    rest = {other: value for other, value in options.items() if other != name}
    assert hardware.compiler_options(tpu) == rest


@needs_libtpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize('topology', ['v5e:2x2', 'v5p:2x2x1', 'v6e:2x2'])
def test_updates_gather_weights_beside_products(topology):
  scratch = dict(width=512, layers=4, heads=8, kv_heads=8, mlp=1536, max_tokens=1024)
  long = config(scratch=scratch, prompt_tokens=128, completion_tokens=896, learner={})
  made = compile_report.make(long, compile_report.devices(topology))
  state, batch, *_ = compile_report.arguments(made)
  text = compile_report.build(programs.compile_update(made), state, batch).text
  # Of 7 matrices of a layer, 6 in the forward pass and 6 in the backward pass; one waits for the loop to begin.
  assert text.count('custom_call_target="AsyncCollectiveStart"') == 12


@needs_libtpu
def test_options_reach_the_compiler(monkeypatch):
  monkeypatch.setattr(hardware, '_TPU_OPTIONS', dict(xla_tpu_not_there='1'))
  made = spec(mesh=dict(data=1, fsdp=4))
  with pytest.raises(jax.errors.JaxRuntimeError, match='xla_tpu_not_there'):
    compile_report.build(steps.compile_step(made), *compile_report.arguments(made))


def report(oom='', alias=10, **loop):
  parts = {n: dict(oom=oom, alias_bytes=alias) for n in ('generate', 'fused')}
  good = dict(copies=[], copied_bytes=0, cache_bytes=1000, cache_shape=(8,), weight_collectives=0)
  loops = [good | dict(weight_collective_bytes=0) | loop] if not oom else []
  return dict(parts=parts, state_bytes=10, decode=loops)


@pytest.mark.parametrize(
  'made, text',
  [
    (report(oom='Ran out of memory'), 'fused does not fit: Ran out of memory'),
    (report(alias=9), 'only 9 bytes are written in place'),
    (
      report(copies=[dict(opcode='copy')], copied_bytes=51),
      '1 copies of keys and values, 51 bytes a token.',
    ),
    (report(weight_collectives=3), '3 exchanges of what does not change'),
    (report(cache_shape=()), 'no keys and values'),
    (report() | dict(decode=[]), 'no decode loop was found'),
  ],
)
def test_each_fault_is_told(made, text):
  assert compile_report.problems(report()) == []
  assert compile_report.problems(report(copies=[dict(opcode='copy')], copied_bytes=50)) == []
  assert text in compile_report.problems(made)[-1]


@needs_libtpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  'weights, read, experts', [('int8', 's8', 0), ('float8_e4m3fn', 'f8e4m3fn', 0), ('int8', 's8', 8)]
)
def test_rounded_kernels_are_read_as_stored(weights, read, experts):
  """Of kernels and experts the loop carries numbers of one byte, and no instruction writes them in another type."""
  made = spec(mesh=dict(data=1, fsdp=4), rollout=dict(weights_dtype=weights))
  if experts:
    mixture = dict(experts=experts, experts_per_token=2, norm_top_k=True)
    untied = dict(mlp=512, tied=False, vocab=640)
    config = dataclasses.replace(made.model.config, **mixture, **untied)
    made = made._replace(model=made.model._replace(config=config))
  state, _, prompts, *_ = compile_report.arguments(made)
  text = compile_report.build(programs.compile_generate(made), state.params, prompts, 0, None).text
  names = [(sharding.path_name(p), x) for p, x in jax.tree_util.tree_leaves_with_path(state.params)]
  shapes = {x.shape for n, x in names if n.endswith('kernel') and 'router' not in n}
  carried, converted = _kernels(hlo.parse(text), shapes)
  assert carried == {read: made.model.config.layers * 7 + (experts > 0)} and not converted


def _kernels(computations, shapes):
  """Types of the arrays of these shapes that the decode loop carries; and what makes others in it, fusions apart."""
  (loop,) = (
    i
    for computation in computations.values()
    for i in computation
    if i.opcode == 'while' and 'decode/' in hlo.op_name(i)
  )
  carried = collections.Counter(a.dtype for a in loop.arrays if a.dims in shapes)
  made, waiting = [], [hlo.attribute(loop, 'body')]
  while waiting:
    for i in computations.get(waiting.pop(), ()):
      if i.opcode in ('while', 'conditional', 'call'):
        waiting += hlo.called(i)
      made += [(i.opcode, a) for a in i.arrays if a.dims in shapes and a.dtype not in carried]
  return carried, made


@needs_libtpu
def test_the_roofline_counts_the_bytes_that_are_read():
  decode = dict(cache_bytes=1000, cache_shape=(1,), wire_bytes=0)
  mesh = dict(data=1, fsdp=2, tensor=2)
  plain = compile_report.roofline(spec(mesh=mesh), decode)
  small = compile_report.roofline(spec(mesh=mesh, rollout=dict(weights_dtype='int8')), decode)
  # On one of two devices: 2 layers' kernels, and two bytes for their scales' four; o and down have theirs whole.
  kernels = 2 * (4 * 128 * 128 + 3 * 128 * 256) // 2
  scales = 2 * 4 * ((3 * 128 + 2 * 256) // 2 + 2 * 128)
  assert plain['weight_bytes'] - small['weight_bytes'] == kernels - scales
  assert small['ms_per_token']['weights'] < 0.6 * plain['ms_per_token']['weights']
  assert small['ms_per_token']['compute'] == plain['ms_per_token']['compute']


def _over_a_quantized_base(layers):
  scratch = dict(CHANGES['scratch'], width=512, layers=layers, heads=4, mlp=1024)
  c = config(scratch=scratch, lora=dict(rank=4, base_dtype='nf4'))
  return compile_report.make(c, compile_report.devices('v5e:2x2')[:1])


@needs_libtpu
@pytest.mark.timeout(600)
def test_a_quantized_base_is_unpacked_within_the_decode_loop():
  """The loop carries 4-bit kernels alone, two numbers a byte: nothing unpacks them before it."""
  made = _over_a_quantized_base(2)
  state, _, *inputs = compile_report.arguments(made)
  sample = programs.compile_sample(made)
  text = compile_report.build(sample, state._replace(carried=()), state.carried, *inputs).text
  packed = {(256, 512), (256, 256), (256, 1024), (512, 512)}
  carried, _ = _kernels(hlo.parse(text), packed | {(512, 256), (512, 1024), (1024, 512)})
  assert carried == {'u8': 7 * made.model.config.layers}


@needs_libtpu
@pytest.mark.timeout(600)
def test_a_triangular_system_of_a_tpu_is_padded_along_rows_and_chunks_together():
  """The solver's lanes are the largest batch dimension of all devices together: one row of each would be padded."""
  made = spec(mesh={'data': 1, 'fsdp': 4})
  rows = sharding.rows(made.layout.mesh)
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)  # noqa: E731
  B, Q, H, d = 256, 128, 2, 64
  vectors, numbers = array(B, Q, H, d), array(B, Q, H)
  rule = gated_delta.Rule(vectors, vectors, vectors, numbers, numbers)
  arguments = rule, array(B, Q, dtype=jnp.bool), array(B, H, d, d)
  compiled = compile_report.build(jax.jit(gated_delta.delta_rule), *arguments)
  solver = r'f32\[([\d,]+)\]\{(\d+)[\d,:TS()]*\} custom-call\(.*"InvertDiagBlocks'
  found = re.findall(solver, compiled.text)
  assert found
  for shape, lanes in found:
    assert int(shape.split(',')[int(lanes)]) == B // 4 * (Q // 64)
