"""Which rollouts the update learns from again: those of earlier steps or of other runs, or those of the step twice.

Every public function may be named in `config.replay.reuse.fn`; it returns an empty store, or None. A store has `rows`,
`slots` and `metrics`, and its state is part of the checkpoint. All have `join` and `keep`, but for `SharedRollouts`,
whose groups are texts: runner/shared_groups.py joins them.
"""

from __future__ import annotations

import math

from jaxrl_llm.replay.contrast_pairs import ContrastPairs
from jaxrl_llm.replay.extremes import Extremes
from jaxrl_llm.replay.recomposition import Recomposition, Schedule
from jaxrl_llm.replay.rollout_buffer import RolloutBuffer, RolloutReplay
from jaxrl_llm.replay.self_imitation import Imitation, SelfImitation
from jaxrl_llm.replay.shared_rollouts import SharedRollouts
from jaxrl_llm.replay.successes import Successes
from jaxrl_llm.replay.trajectory_cache import TrajectoryCache
from jaxrl_llm.types import UserError

Store = (
  Successes
  | TrajectoryCache
  | RolloutReplay
  | ContrastPairs
  | Extremes
  | SelfImitation
  | Recomposition
  | SharedRollouts
)


def none() -> None:
  """No replay."""


def successes(*, count: int, keep: int = 8, memory_mb: int = 1024) -> Successes:
  """Groups of G fresh and up to `count` replayed right rows, normalized together; `keep` are stored per prompt.

  The paper collects them in a first run and restarts training; here they come from the run itself. `memory_mb` MiB of
  the host at most: prompts whose last right rollout is the oldest are dropped.
  arXiv:2507.07451 (RLEP).
  """
  if not 1 <= count <= keep:
    raise UserError(
      f'config.replay.reuse.count={count} must be from 1 to config.replay.reuse.keep={keep}; the paper replays 2.'
    )
  _check_counts(memory_mb=memory_mb)
  return Successes(count, keep, RolloutBuffer(math.inf, memory_mb))


def cached(*, memory_mb: int = 1024) -> TrajectoryCache:
  """In an all-wrong group the newest right completion of the prompt replaces a row, drawn at random.

  Its old log-probs are those of the weights at the start of the step, behind the plain prompt. With
  `curriculum.hint.fn=self_rolled` completions of hinted prompts fill the cache, too. `memory_mb` MiB of the host at
  most: prompts whose last right rollout is the oldest are dropped.
  arXiv:2601.05787 (BEPA, LEVEL-2; reconstructed from the abstract and the project page, its importance ratio is ours).
  """
  _check_counts(memory_mb=memory_mb)
  return TrajectoryCache(RolloutBuffer(math.inf, memory_mb))


def mixed_groups(
  *, share: float = 0.5, max_age: int = 4, memory_mb: int = 1024, steps: int = 0
) -> RolloutReplay:
  """`share` of a batch's slots hold mixed groups of the last `max_age` steps, with their recorded log-probs.

  config.prompts are sampled, and round(prompts·share / (1 − share)) groups are replayed. The ratio π / π_b of a
  replayed token is to the weights that sampled it; `importance_correction=token` is the paper's loss. `memory_mb` MiB
  of the host at most. Only the first `steps` steps of the run replay groups; 0 stands for all.
  arXiv:2506.05316 (DOTS with rollout replay; share 0.5, a queue of 512 groups, no bound on age).
  """
  _check_share(share)
  _check_counts(max_age=max_age, memory_mb=memory_mb)
  if steps < 0:
    raise UserError(
      f'config.replay.reuse.steps={steps} must be 0, for all steps, or a number of steps.'
    )
  return RolloutReplay(share, RolloutBuffer(max_age, memory_mb), steps or math.inf)


def self_imitation(
  *,
  share: float = 0.5,
  fill: float = 1.5,
  baselines: int = 10240,
  weight: float = 1.0,
  warm_up_steps: int = 200,
  max_age: int = 10,
  memory_mb: int = 1024,
) -> SelfImitation:
  """Rows above the mean of their group, replayed with A = R − p50 where that is positive, in a loss term of their own.

  p50 is the median of the means of the last `baselines` groups. Once more than `fill` times as many groups are stored
  as `share` of a batch has slots, a batch replays that many, and the buffer is emptied. The term counts
  weight·(1 − cos(π·step / warm_up_steps)) / 2, and `weight` after these steps. `max_age` in steps, `memory_mb` MiB of
  the host at most. arXiv:2509.22601 (SPEAR; its buffer counts rollouts, 2,048 of them; 10,240 means; 10 steps; 200).
  """
  _check_share(share)
  _check_counts(
    baselines=baselines, warm_up_steps=warm_up_steps, max_age=max_age, memory_mb=memory_mb
  )
  for name, value in dict(fill=fill, weight=weight).items():
    if not 0 <= value < math.inf:
      raise UserError(f'config.replay.reuse.{name}={value} must be a finite number from 0 up.')
  imitation = Imitation(share, fill, baselines, weight, warm_up_steps)
  return SelfImitation(imitation, RolloutBuffer(max_age, memory_mb))


def recomposed(
  *,
  kept: float = 0.5,
  share: float = 0.5,
  least: float = 0.2,
  fall_steps: int = 200,
  max_age: int = 8,
  memory_mb: int = 1024,
) -> Recomposition:
  """The shortest `kept` of a group's right rows and the longest `kept` of its wrong ones; the others in a later step.

  The others of earlier groups fill up to `share` of a batch's slots, in a step with a probability that falls from 1 to
  `least` as a cosine of `fall_steps` steps; each is learned at most once, up to `max_age` steps later. Groups of equal
  rewards are not learned. `memory_mb` MiB of the host at most.
  arXiv:2509.25958 (RoRecomp), reconstructed from the abstract; all numbers are ours.
  """
  if not 0 < kept < 1:
    raise UserError(
      f'config.replay.reuse.kept={kept} must be between 0 and 1; 0.5 is half of the rows.'
    )
  if not 0 <= least <= 1:
    raise UserError(f'config.replay.reuse.least={least} must be a probability from 0 to 1.')
  _check_share(share)
  _check_counts(fall_steps=fall_steps, max_age=max_age, memory_mb=memory_mb)
  return Recomposition(kept, share, Schedule(least, fall_steps), RolloutBuffer(max_age, memory_mb))


def shared(
  *, folder: str, share: float = 0.5, max_age: int = 4, most: int = 4096
) -> SharedRollouts:
  """`share` of a batch's slots hold groups of other runs that write to the same `folder`, each at most once.

  Every run publishes its mixed groups as text. Another one tokenizes and grades them anew; its ratios are to its own
  weights at the start of the step, as if these had sampled the rows. A group waits up to `max_age` steps, and at most
  `most` groups wait. Those who can write to the folder are trusted as the data are.
  arXiv:2509.08721 (SAPO, swarm sampling; 4 of 8 rollouts are of others in its best run).
  """
  if not folder or '://' in folder:
    raise UserError(
      f'config.replay.reuse.folder={folder!r} must be a folder that all runs can write to; object stores have no '
      'renames.'
    )
  _check_share(share)
  _check_counts(max_age=max_age, most=most)
  return SharedRollouts(folder, share, max_age, most)


def contrast_pairs(*, share: float = 0.5, draws: int = 8) -> ContrastPairs:
  """The `share` of a group's pairs with the largest difference of advantages, resampled by it in `draws` sub-batches.

  The i-th best row of a group is paired with its i-th worst. Each sub-batch takes 1 / `draws` of the kept pairs,
  p ∝ |A⁺| + |A⁻|, so that a pair is learned 0 to `draws` times. A row learned k times has k times the weight; copies
  are in one minibatch, where the official code may have them in several. arXiv:2508.05612 (Shuffle-R1).
  """
  if not 0 < share <= 1:
    raise UserError(
      f'config.replay.reuse.share={share} must be above 0 and at most 1; the paper keeps 0.5 of the pairs.'
    )
  if draws < 1:
    raise UserError(
      f'config.replay.reuse.draws={draws} must be a whole number from 1 up; the paper draws 8 sub-batches.'
    )
  return ContrastPairs(share, draws)


def extremes(*, best: int = 12, worst: int = 12) -> Extremes:
  """The `best` rows of the highest rewards and the `worst` of the lowest of each slot; advantages are among them.

  Of equal rewards the first rows are the better ones. A slot of no more rows is learned whole.
  arXiv:2604.06916 (Sol-RL; 12 and 12 of 96).
  """
  _check_counts(best=best, worst=worst)
  return Extremes(best, worst)


def _check_share(share: float) -> None:
  if not 0 < share < 1:
    raise UserError(
      f'config.replay.reuse.share={share} must be between 0 and 1; the paper replays 0.5 of a batch.'
    )


def _check_counts(**counts: int) -> None:
  for name, value in counts.items():
    if value < 1:
      raise UserError(f'config.replay.reuse.{name}={value} must be a whole number from 1 up.')
