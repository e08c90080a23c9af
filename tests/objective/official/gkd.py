"""GKD, by TRL: the gradient of the divergence over the vocabulary, for both limits of beta and two values between."""

from __future__ import annotations

from jaxrl_llm.objective import aggregation, divergence
from tests.objective.official import divergence_core, entropy_core, lib

TRAINER = 'trl/experimental/gkd/gkd_trainer.py'
OFFICIAL = lib.Official(
  'huggingface/trl', 'f2cd57710ae345ea6428ae95363267fcf38a3dc8', (TRAINER,), 'Apache-2.0'
)
SETTINGS = divergence_core.SETTINGS
draw = divergence_core.draw
MUTANTS = {
  'the other way': (
    divergence,
    '_forward_kl(teacher_logp, logp)',
    '_forward_kl(logp, teacher_logp)',
  ),
  'the mixture upside down': (
    divergence,
    'logp + jnp.log1p(-beta), teacher_logp + jnp.log(beta)',
    'logp + jnp.log(beta), teacher_logp + jnp.log1p(-beta)',
  ),
  'the teacher alone': (divergence, ' + (1 - beta) * _forward_kl(mixture, logp)', ''),
  'shares swapped': (
    divergence,
    'beta * _forward_kl(mixture, teacher_logp) + (1 - beta)',
    '(1 - beta) * _forward_kl(mixture, teacher_logp) + beta',
  ),
  'rows count alike': (aggregation, 'mask_BxT.sum()', '(mask_BxT.sum() + 1)'),
}


def official(torch, read, data):
  code = lib.method(
    read(TRAINER),
    'GKDTrainer',
    'generalized_jsd_loss',
    torch=torch,
    F=torch.nn.functional,
  )
  found = {}
  for name, (beta, _) in divergence_core.BETAS.items():
    x = entropy_core.tensors(torch, data)
    labels = torch.where(x.mask > 0, x.token.long(), -100)
    value = code(x.logits, x.teacher, labels=labels, beta=beta)
    found[name] = entropy_core.outputs(x, value)['gradient']
  return found


ours = divergence_core.gradients
lib.main(__name__)
