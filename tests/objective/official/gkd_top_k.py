"""A divergence over K tokens and a bucket of the others, by SDPO's code, for both limits of beta and two between.

The official code has the student's likeliest tokens; here both models' log-probs are of the teacher's.
"""

from __future__ import annotations

from jaxrl_llm.objective import divergence
from tests.objective.official import divergence_core, entropy_core, lib, verl_core

OFFICIAL = lib.Official(
  'lasgroup/SDPO',
  '0e6d5106abe69f578c63bf38a9394e22905c8773',
  (verl_core.CORE, verl_core.FUNCTIONAL),
  'Apache-2.0',
)
SETTINGS = divergence_core.SETTINGS
draw = divergence_core.draw
TOP_K = 2
MUTANTS = {
  'the least likely': (divergence, 'jax.lax.top_k(teacher_logp,', 'jax.lax.top_k(-teacher_logp,'),
  'the likeliest of the policy': (
    divergence,
    'jax.lax.top_k(teacher_logp,',
    'jax.lax.top_k(logp,',
  ),
  'no bucket': (divergence, '[chosen, rest]', '[chosen, 0 * rest]'),
  'a bucket of all': (divergence, 'jnp.where(is_chosen, -jnp.inf, flat)', 'flat'),
  'one token less': (divergence, 'self.top_k)[1]', 'self.top_k - 1)[1]'),
}


def official(torch, read, data):
  names = 'compute_self_distillation_loss', 'agg_loss'
  code = verl_core.core(torch, read, *names, F=torch.nn.functional)
  found = {}
  for name, (beta, _) in divergence_core.BETAS.items():
    x = entropy_core.tensors(torch, data)
    logp, teacher = torch.log_softmax(x.logits, -1), torch.log_softmax(x.teacher, -1)
    ids = torch.topk(teacher, TOP_K, dim=-1).indices
    value = code.compute_self_distillation_loss(
      x.logp,
      x.logp,
      x.mask,
      verl_core.Numbers(
        full_logit_distillation=True,
        distillation_topk=TOP_K,
        distillation_add_tail=True,
        alpha=beta,
        is_clip=None,
      ),
      student_topk_log_probs=torch.gather(logp, -1, ids),
      teacher_topk_log_probs=torch.gather(teacher, -1, ids),
      loss_agg_mode='token-mean',
    )[0]
    found[name] = entropy_core.outputs(x, value)['gradient']
  return found


def ours(data):
  return divergence_core.gradients(data, TOP_K)


lib.main(__name__)
