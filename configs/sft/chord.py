"""CHORD-φ, arXiv:2508.11408: GRPO and demonstrations at once; a demonstrated token counts most at probability 1/2.

python -m jaxrl_llm.main --config=chord
Numbers: μ = 0.1 throughout, φ = p(1 − p) and clip 0.2 are the paper's according to comments in Trinity-RFT's example
(mix_chord.yaml) for CHORD-φ, and the bound of 3 on ratios of negative advantages is its default; CHORD-μ is high=0.9,
low=0.05, decay=200, uncertain=False. There a fifth of a batch is expert data; here every prompt has a demonstration.
Demonstrations of the default job are its answers, a bare number each; --config.data.source=jsonl with a column
`solution` gives better ones.
"""


def get_config():
  return dict(
    base='sums',
    objective=dict(
      trust_region=dict(fn='dual_clip', low=0.2, high=0.2, most=3.0),
      aggregation=dict(fn='token_mean'),
      sft_loss=dict(fn='chord', high=0.1, low=0.1, warmup=0, decay=0, uncertain=True),
    ),
  )
