"""On-policy distillation across tokenizers, arXiv:2306.13649 (GKD): reverse KL of spans that both models tokenize.

python -m jaxrl_llm.main --config=cross_tokenizer
It downloads the teacher from the hub; a model folder on disk works as well: --config.objective.teacher=FOLDER.
The teacher reads the text of each completion in its own tokens, behind its own chat template. A span is a shortest
piece of text that is whole tokens of both, as in TRL's GOLD. The signal of a span is log π_T − log π of its text, and
its tokens have it alike; GOLD compares merged distributions by a sorted distance instead. Unlike GOLD, end tokens are
compared, and bytes that are no text leave the loss. Numbers: those of distill.py. teacher_prompt_tokens has room for
the teacher's system prompt, teacher_completion_tokens for a tokenizer that cuts finer than the policy's; spans beyond
leave the loss. Rewards affect only the choice of prompts and the evaluation.
"""


def get_config():
  return dict(
    base='distill',
    objective=dict(
      distillation=dict(
        fn='on_policy_spans', teacher_prompt_tokens=96, teacher_completion_tokens=24
      ),
      teacher='Qwen/Qwen2.5-0.5B-Instruct',
    ),
  )
