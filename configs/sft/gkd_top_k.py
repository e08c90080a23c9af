"""GKD over top-k tokens, arXiv:2306.13649: its divergence over the teacher's 100 likeliest tokens and a tail bucket.

python -m jaxrl_llm.main --config=gkd_top_k
It downloads the teacher from the hub; a model folder on disk works as well: --config.objective.teacher=FOLDER.
Numbers: gkd.py, but for 100 tokens and one bucket of all others, which are SDPO's (arXiv:2601.20802); there they are
the student's likeliest tokens. A teacher's logits cost the same as over the whole vocabulary.
"""


def get_config():
  return dict(base='gkd', objective=dict(divergence=dict(fn='jensen_shannon', beta=0.5, top_k=100)))
