"""The analysis of compiled programs, on small programs written by hand."""

from __future__ import annotations

import re

import pytest

from jaxrl_llm.profiling import hlo, hlo_decode

# Keys [rows 8, heads 2, tokens 24, width 64], weights [64, 128] cut in two.
KEYS = 'bf16[8,2,24,64]{3,2,0,1:T(8,128)(2,1)}'
CACHE = (8, 2, 24, 64)
CARRY = f'(s32[]{{:T(128)}}, {KEYS}, bf16[32,128]{{1,0}}, bf16[8,64]{{1,0}})'

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

{more}
%body (carry: {carry}) -> {carry} {{
  %carry = {carry} parameter(0)
  %round = s32[]{{:T(128)}} get-tuple-element(%carry), index=0
  %keys = {keys} get-tuple-element(%carry), index=1
  %weights = bf16[32,128]{{1,0}} get-tuple-element(%carry), index=2
  %hidden = bf16[8,64]{{1,0}} get-tuple-element(%carry), index=3
  %one = s32[] constant(1)
  %next = s32[]{{:T(128)}} add(%round, %one)
  %new = bf16[8,2,1,64]{{3,2,1,0}} bitcast(%hidden)
  %moved = bf16[8,64]{{1,0}} negate(%hidden)
{lines}
  ROOT %out = {carry} tuple(%next, %{written}, %weights, %moved)
}}

%condition (held: {carry}) -> pred[] {{
  %held = {carry} parameter(0)
  %count = s32[] get-tuple-element(%held), index=0
  %most = s32[] constant(24)
  ROOT %less = pred[] compare(%count, %most), direction=LT
}}

ENTRY %main (p: {carry}) -> {carry} {{
  %p = {carry} parameter(0)
  ROOT %while.1 = {carry} while(%p), condition=%condition, body=%body, metadata={{op_name="jit(step)/decode/while"}}
}}
"""


def read(lines='', written='keys', more=''):
  text = PROGRAM.format(carry=CARRY, keys=KEYS, lines=lines, written=written, more=more)
  (loop,) = hlo_decode.decode_loops(text, 'decode/', [CACHE])
  assert [a.dims for a in loop.cache] == [(8, 2, 24, 64)]
  assert hlo_decode.decode_loops(shortened(text), 'decode/', [CACHE]) == [loop]
  return loop


def shortened(text: str) -> str:
  """The program as XLA of 2026 prints it: `%tuple#1` instead of a get-tuple-element of its own."""
  elements = re.compile(r'^ +%([\w.]+) = \S+ get-tuple-element\(%([\w.]+)\), index=(\d+)\n', re.M)
  for name, parent, index in elements.findall(text):
    text = re.sub(rf'%{re.escape(name)}(?![\w.])(?! =)', f'%{parent}#{index}', text)
  return elements.sub('', text)


def test_elements_of_a_tuple_are_read_in_both_notations():
  text = PROGRAM.format(carry=CARRY, keys=KEYS, lines='', written='keys', more='')
  assert 'get-tuple-element' not in shortened(text) and '%carry#1' in shortened(text)
  inner = f'(s32[], (f32[], {KEYS}))'
  nested = f"""%c (x: {inner}) -> {KEYS} {{
  %x = {inner} parameter(0)
  ROOT %y = {KEYS} negate(%x#1#1)
}}
"""
  (program,) = hlo.parse(nested).values()
  assert [(i.name, i.operands, hlo.attribute(i, 'index')) for i in program[1:3]] == [
    ('x#1', ('x',), '1'), ('x#1#1', ('x#1',), '1'),
  ]  # fmt: skip
  assert program[2].arrays == program[3].arrays and len(program[1].arrays) == 2


def fused(*lines, parameters=f'(k: {KEYS}, n: bf16[8,2,1,64], r: s32[]) -> {KEYS}'):
  return '\n'.join([f'%fused {parameters} {{', *lines, '}', ''])


PARAMETERS = (
  f'  %k = {KEYS} parameter(0)',
  '  %n = bf16[8,2,1,64]{3,2,1,0} parameter(1)',
  '  %r = s32[] parameter(2)',
)
UPDATE = f'  %f = {KEYS} dynamic-update-slice(%keys, %new, %one, %one, %round, %one)'
CALL = f'  %f = {KEYS} fusion(%keys, %new, %round), kind=kLoop, calls=%fused'


@pytest.mark.parametrize(
  'lines, more',
  [
    (UPDATE, ''),
    (
      CALL,
      fused(
        *PARAMETERS,
        f'  %b = {KEYS} bitcast(%k)',
        f'  ROOT %d = {KEYS} dynamic-update-slice(%b, %n, %r, %r, %r, %r)',
      ),
    ),
    # Fetched to fast memory before it is read.
    (
      f'  %s = ({KEYS.replace("(2,1)", "(2,1)S(1)")}, {KEYS}, u32[]) copy-start(%keys)\n'
      f'  %d = {KEYS.replace("(2,1)", "(2,1)S(1)")} copy-done(%s)\n' + UPDATE,
      '',
    ),
    # A slice of it: the result of the start includes the array that it reads.
    (
      f'  %s = (({KEYS}), bf16[8,2,6,64]{{3,2,1,0:T(8,128)(2,1)S(1)}}, s32[]) async-start(%keys), calls=%f\n'
      + UPDATE,
      '',
    ),
    # Slices of it, joined in fast memory.
    (
      f'  %p = {KEYS.replace("(2,1)", "(2,1)S(1)")} custom-call(%keys, %keys), custom_call_target="ConcatBitcast"\n'
      + UPDATE,
      '',
    ),
    # A value that the loop does not change, of the same size by chance.
    (
      '  %w = bf16[8,24,128]{2,1,0} broadcast(%weights), dimensions={1,2}\n' + UPDATE,
      '',
    ),
  ],
  ids=[
    'in place',
    'fused in place',
    'prefetch',
    'prefetch of a slice',
    'prefetch of slices',
    'weights',
  ],
)
def test_no_copy(lines, more):
  assert read(lines, 'f', more).copies == ()


@pytest.mark.parametrize(
  'lines, more, opcode',
  [
    (f'  %c = {KEYS} copy(%keys)\n{UPDATE}', '', 'copy'),
    (f'  %c = ({KEYS}, {KEYS}, u32[]) copy-start(%keys)\n{UPDATE}', '', 'copy-start'),
    (f'  %c = f32[24,16,64]{{2,1,0}} convert(%keys)\n{UPDATE}', '', 'convert'),
    # An update in place of a temporary.
    (
      CALL,
      fused(
        *PARAMETERS,
        f'  %m = {KEYS} multiply(%k, %k)',
        f'  ROOT %d = {KEYS} dynamic-update-slice(%m, %n, %r, %r, %r, %r)',
      ),
      'fusion',
    ),
    (CALL, fused(*PARAMETERS, f'  ROOT %d = {KEYS} select(%r, %n, %k)'), 'fusion'),
  ],
)
def test_copies_are_found(lines, more, opcode):
  (copy,) = read(lines, 'f', more).copies
  assert copy.opcode == opcode and copy.times == 1
  assert copy.bytes == 8 * 2 * 24 * 64 * (4 if opcode == 'convert' else 2)


def test_of_two_outputs_of_a_fusion_one_is_a_copy():
  body = fused(
    *PARAMETERS,
    f'  %d = {KEYS} dynamic-update-slice(%k, %n, %r, %r, %r, %r)',
    f'  %m = {KEYS} multiply(%k, %k)',
    f'  ROOT %t = ({KEYS}, {KEYS}) tuple(%d, %m)',
  )
  call = f'  %f = ({KEYS}, {KEYS}) fusion(%keys, %new, %round), kind=kLoop, calls=%fused'
  (copy,) = read(call, 'keys', body).copies
  assert copy.bytes == 8 * 2 * 24 * 64 * 2


def test_one_layer_copied_out_of_a_stack_of_them_is_found():
  """The loop carries [layers, rows, …] and slices a layer out of it for every token."""
  stack = KEYS.replace('[8,', '[36,8,').replace('{3,2,0,1', '{4,3,2,0,1')
  lines = f'  %c = {KEYS} copy(%cut)\n  %cut = {KEYS} dynamic-slice(%keys, %one, %one)'
  text = PROGRAM.format(
    carry=CARRY.replace(KEYS, stack), keys=stack, lines=lines, written='keys', more=''
  ).replace('tuple(%next, %keys', 'tuple(%next, %c')
  (loop,) = hlo_decode.decode_loops(text, 'decode/', [CACHE])
  assert [a.dims for a in loop.cache] == [(36, 8, 2, 24, 64)]
  assert {c.bytes for c in loop.copies} == {8 * 2 * 24 * 64 * 2}


@pytest.mark.parametrize('dims', ['8,3072', '8,24,128', '8,2,24,64'])
def test_logits_of_the_size_of_the_keys_are_no_copy(dims):
  lines = f'  %l = f32[{dims}]{{1,0}} convert(%hidden)\n  %c = {KEYS} copy(%keys)\n{UPDATE}'
  text = PROGRAM.format(carry=CARRY, keys=KEYS, lines=lines, written='f', more='')
  found = lambda **sizes: hlo_decode.decode_loops(text, 'decode/', [CACHE], **sizes)[0].copies  # noqa: E731
  assert [copy.opcode for copy in found()] == ['convert', 'copy']
  assert [copy.opcode for copy in found(others=[8 * 3072])] == ['copy']


GATHER = (
  '  %g = bf16[64,128]{1,0} all-gather(%weights), channel_id=7, replica_groups={{0,1},{2,3}}, '
  'dimensions={0}, metadata={op_name="jit(step)/dot"}'
)
REDUCE = (
  '  %r = bf16[8,64]{1,0} all-reduce(%hidden), channel_id=8, replica_groups=[1,4]<=[4], '
  'to_apply=%add'
)


def test_collectives_of_weights_are_fixed_and_those_of_activations_are_not():
  gather, reduce = read(f'{GATHER}\n{REDUCE}').collectives
  assert (gather.opcode, gather.fixed, gather.source) == ('all-gather', True, 'jit(step)/dot')
  assert (gather.bytes, gather.wire_bytes) == (64 * 128 * 2, 64 * 128)
  assert (reduce.opcode, reduce.fixed) == ('all-reduce', False)
  assert (reduce.bytes, reduce.wire_bytes) == (8 * 64 * 2, 8 * 64 * 2 * 2 * 3 / 4)


def piece(name: str, flag: int) -> str:
  """A fusion of libtpu that computes while a gather runs, which the one with flag −1 has started."""
  config = (
    f'backend_config={{"async_collective_fusion_config":{{"flag_start":"{flag}","flag_end":"8"}}}}'
  )
  return (
    f'%{name} (w: bf16[32,128], h: bf16[8,64]) -> bf16[8,128] {{\n'
    '  %w = bf16[32,128]{1,0} parameter(0)\n'
    '  %h = bf16[8,64]{1,0} parameter(1)\n'
    '  %c = bf16[32,128]{1,0} negate(%w)\n'
    f'  %ag.{name} = bf16[64,128]{{1,0}} all-gather(%c), channel_id=9, replica_groups=[2,2]<=[4], {config}\n'
    f'  ROOT %dot = bf16[8,128]{{1,0}} convolution(%h, %ag.{name})\n}}\n'
  )


def test_weights_are_followed_through_a_fusion_and_an_asynchronous_chain():
  body = piece('begin', -1) + piece('middle', 2) + piece('other', -1)
  call = '  %{0} = bf16[8,128]{{1,0}} fusion(%weights, %hidden), kind=kOutput, calls=%{0}'
  lines = '\n'.join(call.format(name) for name in ('begin', 'middle', 'other'))
  first, second = read(lines, more=body).collectives
  # An unrolled loop repeats a channel.
  assert first.fixed and (first.name, second.name) == ('ag.begin', 'ag.other')


def test_copies_of_a_collective_share_its_channel_and_each_counts():
  again = GATHER.replace('%g', '%g.2')
  first, second = read(f'{GATHER}\n{again}').collectives
  assert first.bytes == second.bytes and (first.times, second.times) == (1, 1)


def test_an_inner_loop_over_layers_counts_each_iteration():
  inner = '(s32[], bf16[32,128]{1,0}, bf16[8,64]{1,0})'
  body = f"""
%layer (x: {inner}) -> {inner} {{
  %x = {inner} parameter(0)
  %i = s32[] get-tuple-element(%x), index=0
  %w = bf16[32,128]{{1,0}} get-tuple-element(%x), index=1
  %h = bf16[8,64]{{1,0}} get-tuple-element(%x), index=2
  %slice = bf16[8,128]{{1,0}} dynamic-slice(%w, %i, %i), dynamic_slice_sizes={{8,128}}
  %ag = bf16[16,128]{{1,0}} all-gather(%slice), channel_id=3, replica_groups=[2,2]<=[4]
  %ar = bf16[8,64]{{1,0}} all-reduce(%h), channel_id=4, replica_groups=[2,2]<=[4], to_apply=%add
  %u = s32[] constant(1)
  %n = s32[] add(%i, %u)
  ROOT %o = {inner} tuple(%n, %w, %ar)
}}

%more_layers (y: {inner}) -> pred[] {{
  %y = {inner} parameter(0)
  %j = s32[] get-tuple-element(%y), index=0
  %layers = s32[] constant(36)
  ROOT %l = pred[] compare(%j, %layers), direction=LT
}}
"""
  lines = (
    f'  %zero = s32[] constant(0)\n  %start = {inner} tuple(%zero, %weights, %hidden)\n'
    f'  %layers = {inner} while(%start), condition=%more_layers, body=%layer, '
    'metadata={op_name="jit(step)/decode/while/body/while"}'
  )
  gather, reduce = read(lines, more=body).collectives
  assert (gather.fixed, gather.times) == (True, 36)
  assert (reduce.fixed, reduce.times) == (False, 36)


def test_collectives_in_a_condition_count():
  text = PROGRAM.format(carry=CARRY, keys=KEYS, lines='', written='keys', more='').replace(
    '  ROOT %less',
    '  %s = s32[] all-reduce(%count), replica_groups={}, to_apply=%add\n  ROOT %less',
  )
  (loop,) = hlo_decode.decode_loops(text, 'decode/', [CACHE])
  assert loop.collectives[0].wire_bytes == 4 * 2 * 3 / 4


def test_kernels_written_over_many_lines_do_not_end_a_computation():
  kernel = (
    '  %call = bf16[8,64]{1,0} custom-call(%hidden), metadata={kernel="module {\n'
    '  %0 = arith.constant 3 : i32\n'
    '  %keys = "tpu.load"(%0) : (i32) -> vector<8x128xf32>\n'
    '}\n'
    'func.func @main(%arg0: i32) -> i32 {\n'
    '}"}\n'
  )
  assert len(read(kernel + GATHER).collectives) == 1


@pytest.mark.parametrize(
  'text, size',
  [
    ('replica_groups={{0,1,2,3},{4,5,6,7}}, x={}', 4),
    ('replica_groups=[4,2]<=[2,4]T(1,0), x={}', 2),
    ("replica_groups=mesh['x'=4,'y'=1,'z'=2], device_ids=([2,4]T(1,0)) {'x'}, x={}", 4),
    ('replica_groups={}', 8),
    ('source_target_pairs={{0,1},{1,0}}', 2),
  ],
)
def test_sizes_of_groups(text, size):
  assert hlo_decode.group_size(text, 8) == size


def test_unknown_notations_of_groups_raise():
  with pytest.raises(
    ValueError, match='unknown notation for groups of devices: replica_groups=grid'
  ):
    hlo_decode.group_size("replica_groups=grid['x'=4], channel_id=1", 8)


def test_other_loops_are_ignored():
  text = PROGRAM.format(carry=CARRY, keys=KEYS, lines='', written='keys', more='')
  assert hlo_decode.decode_loops(text, 'prefill/', [CACHE]) == []
