"""SAPO (swarm sampling), arXiv:2509.08721: independent runs learn from each other's rollouts through a folder.

python -m jaxrl_llm.main --config=swarm --workdir=runs/a --config.seed=1
python -m jaxrl_llm.main --config=swarm --workdir=runs/b --config.seed=2
Default job: SmolLM2-135M-Instruct on short sums. Runs may start, end and be killed at any time; models, data and reward
functions may differ.
Numbers: as many groups of others as sampled ones, drawn uniformly, without a KL penalty, and clip 0.2/0.28 are the
official code's, which exchanges through a peer-to-peer network. That only mixed groups are shared is the paper's. A
wait of 4 steps, and each group learned at most once, are ours. All other settings are those of dapo.py.
"""


def get_config():
  return dict(
    base='dapo', replay=dict(reuse=dict(fn='shared', folder='runs/shared', share=0.5, max_age=4))
  )
