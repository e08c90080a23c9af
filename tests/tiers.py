"""Tiers of tests: host (numpy and text), jit (compiles), process (starts programs), slow (minutes; .ci/nightly alone).

The longest matching path decides; a file or folder without an entry of its own has that of its parent.
"""

from __future__ import annotations

import os

TIERS = ('host', 'jit', 'process', 'slow')
# How much longer randomized tests search, and whether kills repeat; .ci/nightly sets 5.
REPEATS = int(os.environ.get('JAXRL_LLM_TEST_REPEATS', '1'))
PATHS = {
  '': 'jit',
  'bench': 'slow',
  'bench/test_results.py': 'host',
  'bench/test_worlds.py': 'host',
  'checkpointing': 'process',
  'checkpointing/test_metrics_log.py': 'host',
  'checkpointing/test_safe_files.py': 'host',
  'commands': 'jit',
  'commands/test_compile_report.py': 'slow',
  'commands/test_hub_push.py': 'process',
  'commands/test_paths.py': 'process',
  'commands/test_run_config.py': 'host',
  'commands/test_run_modes.py': 'process',
  'config': 'host',
  'config/test_bad_config.py': 'jit',
  'curriculum': 'host',
  'data': 'host',
  'data/test_benchmarks.py': 'process',
  'distributed': 'jit',
  'distributed/test_cluster.py': 'host',
  'distributed/test_faults.py': 'process',
  'distributed/test_meshes.py': 'slow',
  'distributed/test_processes.py': 'process',
  'distributed/test_watchdog.py': 'process',
  'environments': 'process',
  'evaluation/test_estimate.py': 'host',
  'evaluation/test_tally.py': 'host',
  'learner/test_auxiliary_model.py': 'slow',
  'learner/test_demonstration_loss.py': 'slow',
  'learner/test_lora.py': 'slow',
  'learner/test_packed_rows.py': 'slow',
  'learner/test_precision.py': 'slow',
  'learner/test_replay_experts.py': 'slow',
  'learner/test_step_methods.py': 'slow',
  'learner/test_turn_by_turn.py': 'slow',
  'learner/test_update_methods.py': 'slow',
  'models/test_bad_models.py': 'process',
  'models/test_family_runs.py': 'slow',
  'models/test_quantized.py': 'slow',
  'models/test_splash.py': 'slow',
  'monitoring': 'jit',
  'monitoring/test_console.py': 'host',
  'objective/test_contracts.py': 'host',
  'profiling/test_xplane.py': 'jit',
  'replay': 'jit',
  'report': 'process',
  'report/test_series.py': 'host',
  'rewards': 'host',
  'rewards/code_execution': 'process',
  'rewards/gym': 'process',
  'rewards/model_judge': 'process',
  'rewards/test_adapters.py': 'process',
  'rewards/test_first_row.py': 'process',
  'rewards/test_linear.py': 'process',
  'rewards/test_math_verify.py': 'process',
  'rewards/test_pool.py': 'process',
  'rewards/test_torture.py': 'slow',
  'rollout/test_carried_kv.py': 'slow',
  'rollout/test_draft_verification.py': 'slow',
  'rollout/test_early_exit.py': 'slow',
  'rollout/test_ngram_drafts.py': 'slow',
  'rollout/test_pruning.py': 'slow',
  'rollout/test_sliding.py': 'slow',
  'rollout/test_tree_decode.py': 'slow',
  'runner': 'jit',
  'runner/test_run_logger.py': 'process',
  'runner/test_sft.py': 'slow',
  'serving': 'process',
  'serving/test_engine.py': 'jit',
  'serving/test_text.py': 'host',
  'test_configs.py': 'slow',
  'test_docs.py': 'host',
  'test_kaggle_notebook.py': 'host',
  'test_kaggle_sessions.py': 'slow',
  'test_launch.py': 'process',
  'test_layers.py': 'host',
  'test_mistakes.py': 'process',
  'test_notebook_estimates.py': 'host',
  'test_programs.py': 'slow',
  'test_readme.py': 'process',
  'test_style.py': 'host',
  'test_train.py': 'process',
  'test_wheel.py': 'slow',
}


def tier(path: str) -> str:
  """The tier of a test file, by its path below tests/."""
  parts = path.split('/')
  heads = ('/'.join(parts[:n]) for n in range(len(parts), -1, -1))
  return next(PATHS[head] for head in heads if head in PATHS)
