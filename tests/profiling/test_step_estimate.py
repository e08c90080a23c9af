"""Expected lengths and seconds of a step, against samples, a simulated queue and counts by hand."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.commands import compile_report, sharding_report
from jaxrl_llm.config import loading as configs
from jaxrl_llm.distributed import hardware
from jaxrl_llm.learner import compile as programs
from jaxrl_llm.models import decode_attention
from jaxrl_llm.profiling import hlo_update, lengths, roofline, step_estimate
from jaxrl_llm.types import GlobalSizes, UserError

CHIP = hardware.Chip(flops=1e9, memory_bandwidth=1e6, link_bandwidth=1e6)


def spec(devices=None, **changes):
  config = configs.default()
  with config.ignore_type():
    config.update(
      dict(
        model='scratch',
        scratch=dict(width=32, layers=2, heads=4, kv_heads=2, mlp=48, max_tokens=256),
        prompts=4, rollouts=16, prompt_tokens=10, completion_tokens=80, mesh=dict(fsdp=1),
      )
      | changes
    )  # fmt: skip
  return compile_report.make(config, devices or jax.devices()[:1])


@pytest.mark.parametrize('mean, sigma', [(30, 0.5), (60, 1.0), (500, 0.7), (20, 0.0)])
def test_expected_lengths_are_those_of_samples(mean, sigma):
  survival_T = lengths.parse(f'{mean},{sigma}', 80)
  r = np.random.default_rng(0)
  samples = r.lognormal(np.log(mean) - sigma**2 / 2, sigma, (4000, 64)).round().clip(1, 80)
  assert lengths.mean(survival_T) == pytest.approx(samples.mean(), rel=0.01)
  assert lengths.longest(survival_T, 64) == pytest.approx(samples.max(1).mean(), rel=0.01)
  assert lengths.mean(lengths.parse('', 80)) == lengths.longest(lengths.parse('', 80), 9) == 80


@pytest.mark.parametrize('text', ['900', '900,x', '0,1', '900,-1', 'nan,1', '9,1,2', 'inf,1'])
def test_other_lengths_are_refused(text):
  with pytest.raises(UserError, match='--lengths=.*such|--lengths=900,0.6'):
    lengths.parse(text, 80)


def counted(model, prompts, copies, group, L, tokens, passes):
  """Operations of a forward pass, product by product and token by token."""
  total = 0
  for position in [*range(L)] * (prompts * copies) + [*range(L, L + tokens)] * (prompts * group):
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = (
      2 * model.width * (heads + kv + kv)
      + 2 * heads * model.width
      + 3 * 2 * model.width * model.mlp
    )
    keys = position + 0.5  # its own is half masked: n keys at position n, n + 1 with itself
    total += model.layers * (layer + 2 * heads * keys + 2 * heads * keys)
    total += 2 * model.width * model.vocab * (position >= L)
  return total * passes


def test_operations_count_expected_tokens_and_every_copy_of_a_prompt():
  """16 rows of 20 tokens stand in bins of 100, 10 of them the prompt's: 4 rows fit beside a copy of the prompt."""
  made = spec(learner=dict(microbatch_tokens=100, passes=2, remat=False))
  made = made._replace(
    update=made.update._replace(
      packing=made.update.packing._replace(tokens=100, predicted=90, rows=16)
    )
  )
  model, survival_T = made.model.config, lengths.parse('20,0', 80)
  want = 3 * counted(model, 4, 4, 16, 10, 20, passes=2)
  assert hlo_update.update_flops(made, survival_T).executed == pytest.approx(want)
  # All 80 tokens: one row in a bin.
  want = 3 * counted(model, 4, 16, 16, 10, 80, passes=2)
  assert hlo_update.update_flops(made).executed == pytest.approx(want)
  # (4 · 10 + 16 · 20) / (16 · 10 + 16 · 80) of the microbatches.
  assert hlo_update.microbatches_of(made) == 64
  assert hlo_update.microbatches_of(made, survival_T) == 16


def test_a_window_limits_the_keys_of_its_layers_alone():
  model = spec().model.config
  model = dataclasses.replace(model, window=6, sliding=(True, False))
  want = [min(n + 0.5, 6) + (n + 0.5) for n in range(20)]
  np.testing.assert_allclose(hlo_update.attended_keys(model, np.arange(20)), want)
  wide = dataclasses.replace(model, global_sizes=GlobalSizes(3 * model.head_dim, 1, True))
  want = [min(n + 0.5, 6) + 3 * (n + 0.5) for n in range(20)]
  np.testing.assert_allclose(hlo_update.attended_keys(wide, np.arange(20)), want)


def test_prefill_encodes_each_prompt_once_and_half_of_the_square():
  made = spec()
  model = made.model.config
  want = counted(model, 4, 1, 0, 10, 0, passes=1)
  assert roofline.prefill_flops(made) == pytest.approx(want)
  shared = made._replace(layout=made.layout._replace(prefix_tokens=10))
  assert roofline.prefill_flops(shared) == pytest.approx(want / 4)


def simulated(samples_B, slots, fewer):
  """(iterations by number of slots) of a loop that hands slots to the next row, and shrinks where fewer suffice."""
  queue, busy, counts = list(samples_B), [], {}
  chain = [slots, *fewer]
  while queue or busy:
    while queue and len(busy) < chain[0]:
      busy.append(queue.pop(0))
    while len(chain) > 1 and not queue and len(busy) <= chain[1]:
      chain.pop(0)
    counts[chain[0]] = counts.get(chain[0], 0) + 1
    busy = [left - 1 for left in busy if left > 1]
  return counts


@pytest.mark.parametrize('slots, most', [(0, 0.03), (16, 0.15)])
def test_decode_iterations_are_those_of_a_simulated_queue(slots, most):
  made = spec(rollout=dict(slots=slots))
  survival_T = lengths.parse('30,0.5', 80)
  phases = step_estimate.decode_phases(made, survival_T)
  count = slots or 64
  assert [share for share, _ in phases] == [1, 1 / 2, 1 / 4]
  r = np.random.default_rng(0)
  draws = r.lognormal(np.log(30) - 0.125, 0.5, (200, 64)).round().clip(1, 80)
  runs = [simulated(draw, count, [count // 2, count // 4]) for draw in draws]
  want = [np.mean([run.get(int(count * share), 0) for run in runs]) for share, _ in phases]
  slot_iterations = sum(share * n for share, n in phases)
  assert slot_iterations == pytest.approx(want[0] + want[1] / 2 + want[2] / 4, rel=most)
  assert sum(n for _, n in phases) == pytest.approx(sum(want), rel=most)
  # At the cap every slot is busy until the end.
  capped = step_estimate.decode_phases(made, lengths.at_cap(80))
  assert capped[0][1] == 80 * 64 / count and sum(n for _, n in capped[1:]) == 0


@pytest.mark.parametrize('slots', [0, 16])
def test_the_share_of_the_ring_that_a_kernel_reads_is_that_of_simulated_rows(slots, monkeypatch):
  monkeypatch.setattr(decode_attention, '_MAX_BLOCK', 8)
  survival_T = lengths.parse('30,0.5', 80)
  assert step_estimate.ring_share(spec(rollout=dict(slots=slots)), survival_T) == 1
  made = spec(rollout=dict(slots=slots, attention='ragged'))
  r = np.random.default_rng(0)
  columns, slot_columns = 0, 0
  for draw in r.lognormal(np.log(30) - 0.125, 0.5, (50, 64)).round().clip(1, 80).astype(int):
    live_N = np.concatenate([np.arange(1, n + 1) for n in draw])  # of every iteration of every row
    newest_N = r.integers(0, 80, len(live_N))
    places = decode_attention.Columns(live_N * 0, newest_N, live_N)
    columns += 8 * int(decode_attention.blocks_of_rows(places, 80, 8)[1].sum())
    count = slots or 64
    run = simulated(draw, count, [count // 2, count // 4])
    slot_columns += 80 * sum(busy * n for busy, n in run.items())
  share = step_estimate.ring_share(made, survival_T)
  assert share == pytest.approx(columns / slot_columns, rel=0.15 if slots else 0.03)
  assert share < 0.5
  capped = step_estimate.ring_share(made, lengths.at_cap(80))
  assert capped == pytest.approx(np.minimum(np.arange(1, 81) + 7, 80).mean() / 80)
  gpu = [sharding_report.Device(0, 'gpu', 'NVIDIA H200')]
  made = spec(gpu, rollout=dict(slots=slots, attention='ragged'))
  assert step_estimate.ring_share(made, lengths.at_cap(80)) == pytest.approx(81 / 160)


def test_seconds_of_a_step_by_hand(monkeypatch):
  monkeypatch.setitem(hardware.CHIPS, jax.devices()[0].device_kind, CHIP)
  made = spec(completion_tokens=20)  # too short for loops with fewer slots
  ms = dict(weights=2.0, cache=3.0, compute=4.0, links=1.5, dcn=6.0)
  learn = dict(best_s=7.0, serial_s=9.0)
  found = step_estimate.estimate(made, dict(ms_per_token=ms), learn, lengths.parse('5,0', 20))
  prefill_s = roofline.prefill_flops(made) / 1e9
  assert found['iterations'] == 5 and found['expected_tokens'] == 5
  assert found['decode_serial_s'] == pytest.approx(5 * (5.0 + 7.5) / 1e3)
  assert found['decode_overlapped_s'] == pytest.approx(5 * 7.5 / 1e3)
  assert found['serial_s'] == pytest.approx(0.0625 + prefill_s + 9.0)
  assert found['overlapped_s'] == pytest.approx(0.0375 + prefill_s + 7.0)
  assert step_estimate.estimate(made, None, learn) is None
  # Half of the slots: the weights are read in full.
  assert step_estimate.iteration_seconds(ms, 0.5) == pytest.approx((3.5 + 3.75, 3.75))


def test_update_seconds_serial_and_hidden(monkeypatch):
  made = spec()
  monkeypatch.setattr(hlo_update.hlo_decode, 'all_collectives', lambda *_: [])
  report = hlo_update.report(made, '', CHIP)
  assert report['serial_s'] == report['best_s'] == report['compute_s'] > 0
  one = hlo_update.hlo_decode.Collective(
    'all-reduce', 'x', '', 4e6, 5e6, 1e6, 3, False, 'replica_groups={}'
  )
  monkeypatch.setattr(hlo_update.hlo_decode, 'all_collectives', lambda *_: [one])
  monkeypatch.setitem(hardware.HOSTS, jax.devices()[0].device_kind, hardware.Host(2e6, 4))
  report = hlo_update.report(made, '', CHIP)
  assert report['dcn_bytes'] == 3e6 and report['links_s'] == 12.0 and report['dcn_s'] == 6.0
  assert report['serial_s'] == pytest.approx(report['compute_s'] + 18)
  assert report['best_s'] == max(report['compute_s'], 18)


def test_gpus_have_published_figures():
  """Dense bfloat16; an H200 is an H100 with more and faster memory."""
  h100, h200 = hardware.CHIPS['NVIDIA H100 80GB HBM3'], hardware.CHIPS['NVIDIA H200']
  assert h200 == h100._replace(memory_bandwidth=4.8e12)
  for kind in hardware.CHIPS:
    assert hardware.HBM_GIB[kind] > 10
    # Operations per byte read: between 100 and 700 for all of these.
    assert 100 < hardware.CHIPS[kind].flops / hardware.CHIPS[kind].memory_bandwidth < 700


def test_loops_with_fewer_slots_have_caches_of_their_own():
  """64 slots, then 32, then 16: the report finds the keys and values of each loop, and no problem."""
  made = spec()
  state, _, *inputs = compile_report.arguments(made)
  sample = programs.compile_sample(made)
  text = sample.lower(state._replace(carried=()), state.carried, *inputs).compile().as_text()
  caches = [loop.cache for loop in compile_report.loops(made, text)]
  keys = 80 * made.model.config.kv_heads * made.model.config.head_dim  # of a row in a layer
  assert [{array.size // keys for array in cache} for cache in caches] == [{64}, {32}, {16}]
