"""The report of --mode=compile as text."""

from __future__ import annotations

from jaxrl_llm.distributed import hardware, sharding
from jaxrl_llm.profiling import hlo_update
from jaxrl_llm.types import JsonObject

_GIB = 2**30


def table(report: JsonObject) -> str:
  """A `compile_report.measure` report as lines of text."""
  mesh = sharding.describe(report['mesh'])
  slices = f' in {report["slices"]} slices' if report['slices'] > 1 else ''
  lines = [
    f'{report["model"]}, {report["parameters"] / 1e9:.2f}e9 parameters, {report["dtype"]}, on '
    f'{report["topology"]} ({report["devices"]} × {report["device_kind"]}{slices}; {mesh})',
    '',
    f'{"per device":10} {"arguments":>10} {"in place":>10} {"temporary":>10} {"code":>10} {"peak GiB":>10} '
    f'{"compile s":>10} {"CPU s":>8}',
  ]
  for name, part in report['parts'].items():
    if part['oom']:
      lines.append(f'{name:10} does not fit')
      continue
    sizes = ('argument_bytes', 'alias_bytes', 'temp_bytes', 'code_bytes', 'peak_bytes')
    cells = ' '.join(f'{part[k] / _GIB:10.3f}' for k in sizes)
    lines.append(f'{name:10} {cells} {part["compile_s"]:10.1f} {part["compile_cpu_s"]:8.1f}')
  if report['fits'] and report['hbm_gib']:
    lines.append(
      f'fits: {report["headroom_gib"]:.2f} of {report["hbm_gib"]} GiB are left; compiled in '
      f'{report["compile_s"]:.0f} s together'
    )
  lines += [line for loop in report['decode'] for line in _decode_lines(loop)]
  lines += _roofline_lines(report['roofline']) if report['roofline'] else []
  lines += hlo_update.report_lines(report['learn']) if report['learn'] else []
  lines += _step_lines(report['step']) if report['step'] else []
  lines += _dcn_lines(report)
  return '\n'.join(lines + [''] + [f'PROBLEM: {p}' for p in report['problems']]).rstrip()


def _decode_lines(loop: JsonObject) -> list[str]:
  dcn = (
    f', {loop["dcn_bytes"] / 1e6:.6f} MB between slices in {loop["dcn_collectives"]} exchanges'
    if loop['dcn_collectives']
    else ''
  )
  lines = [
    '',
    f'per token: {loop["copied_bytes"]:,.0f} bytes of keys and values copied, '
    f'{loop["weight_collectives"]} exchanges of weights, {loop["wire_bytes"] / 1e6:.3f} MB over links{dcn}',
  ]
  return lines + [
    f'  {c["count"]:5} × {c["opcode"]:18} {c["bytes"] / 1e6:10.4f} MB each  {c["source"][-60:]}'
    for c in loop['collectives']
  ]


def _roofline_lines(roof: JsonObject) -> list[str]:
  parts = ', '.join(f'{k} {v:.3f}' for k, v in roof['ms_per_token'].items())
  return [
    f'at best {roof["tokens_per_s"]:,.0f} tokens/s with {roof["rows"]} rows, '
    f'{roof["overlapped_tokens_per_s"]:,.0f} with hidden communication, bound by {roof["bound"]} '
    f'(ms per token of every row: {parts})'
  ]


def _step_lines(step: JsonObject) -> list[str]:
  return [
    '',
    f'step at best: {step["serial_s"]:.2f} s one after the other, {step["overlapped_s"]:.2f} s with hidden '
    f'communication (decoding {step["decode_serial_s"]:.2f} and {step["decode_overlapped_s"]:.2f} s of '
    f'{step["iterations"]:,.0f} iterations, prefill {step["prefill_s"]:.2f} s)',
    f'completions of {step["expected_tokens"]:,.0f} tokens on average, cut at {step["completion_tokens"]:,}'
    + (
      ''
      if step['expected_tokens'] < step['completion_tokens']
      else '; --lengths=mean,sigma expects fewer'
    ),
  ]


def _dcn_lines(report: JsonObject) -> list[str]:
  host = hardware.HOSTS.get(report['device_kind'])
  if report['slices'] == 1 or host is None:
    return []
  return [
    f'DCN: {host.dcn_bandwidth / 1e9:.0f} GB/s in one direction for a host of {host.chips} chips, as published; '
    'latency is left out'
  ]
