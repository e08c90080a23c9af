"""The report of --mode=compile as text."""

from __future__ import annotations

from jaxrl_llm.distributed import sharding
from jaxrl_llm.profiling import hlo_update
from jaxrl_llm.types import JsonObject

_GIB = 2**30


def table(report: JsonObject) -> str:
  """A `compile_report.measure` report as lines of text."""
  mesh = sharding.describe(report['mesh'])
  lines = [
    f'{report["model"]}, {report["parameters"] / 1e9:.2f}e9 parameters, {report["dtype"]}, on '
    f'{report["topology"]} ({report["devices"]} × {report["device_kind"]}; {mesh})',
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
  return '\n'.join(lines + [''] + [f'PROBLEM: {p}' for p in report['problems']]).rstrip()


def _decode_lines(loop: JsonObject) -> list[str]:
  lines = [
    '',
    f'per token: {loop["copied_bytes"]:,.0f} bytes of keys and values copied, '
    f'{loop["weight_collectives"]} exchanges of weights, {loop["wire_bytes"] / 1e6:.3f} MB over links',
  ]
  return lines + [
    f'  {c["count"]:5} × {c["opcode"]:18} {c["bytes"] / 1e6:10.4f} MB each  {c["source"][-60:]}'
    for c in loop['collectives']
  ]


def _roofline_lines(roof: JsonObject) -> list[str]:
  parts = ', '.join(f'{k} {v:.3f}' for k, v in roof['ms_per_token'].items())
  return [
    f'at best {roof["tokens_per_s"]:,.0f} tokens/s with {roof["rows"]} rows, bound by {roof["bound"]} '
    f'(ms per token of every row: {parts})'
  ]
