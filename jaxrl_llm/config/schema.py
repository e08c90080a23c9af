"""Every field of the configuration, with its default and what it is."""

from __future__ import annotations

import ml_collections


def default() -> ml_collections.ConfigDict:
  """Returns every field with its default; a file of configs/ names only what it changes. Source: none."""
  c = ml_collections.ConfigDict()
  c.model = 'smollm2-135m'  # that name, a folder, a .gguf file, a wheel, or a hub name
  # for model='scratch': a character-level decoder drawn at random
  c.scratch = dict(
    width=128,
    layers=5,
    heads=4,
    kv_heads=4,
    mlp=512,
    max_tokens=128,
    experts=0,
    experts_per_token=2,
  )
  c.dtype = 'auto'  # of compute; auto = bfloat16 on TPU and GPU, float32 on CPU
  c.seed = 0
  # fused | lag: grade while the next step runs, and learn one update late | split: two programs, quick to compile
  c.mode = 'fused'
  c.steps = 60  # 0 = the supervised start alone
  # P: prompts per step; 0 = 4 on a CPU, 64 on accelerators, a multiple of what cuts the batch
  c.prompts = 0
  c.rollouts = 8  # G: rollouts per prompt
  c.prompt_tokens = 64  # L: longer prompts are dropped, and counted
  c.completion_tokens = 16  # T: the cap on a rollout
  c.temperature = 1.0
  # the update, and how it is laid out
  c.learner = dict(
    minibatches=1,  # optimizer steps per batch; 1 = strictly on-policy
    microbatch_rollouts=0,  # rows per gradient-accumulation pass; 0 = the whole minibatch
    remat='auto',  # recompute layer activations in the backward pass: auto = not on CPU; or True, False
    attention='xla',  # xla, or on TPUs splash, a kernel that writes no scores to memory
    # read kernels rounded as rollout.weights_dtype says, and learn the float32 ones
    quantize=False,
    # send a mixture's tokens to the experts that sampling sent them to, whatever its routers like now (R3)
    replay_experts=False,
  )
  c.rollout = dict(
    slots=0,  # rows decoded at once; 0 = all of them. A finished row hands its slot to a waiting one
    queue_order=dict(fn='fifo'),  # which waiting row goes next
    length_schedule=dict(fn='constant'),  # tokens a row may take, by step
    stop=dict(fn='none'),  # when to go on to the update although rows still run
    # begin from a prompt's last answers: lenient(lenience); coupled, which is exact, and repeats an answer as far as
    # the policy draws what it drew: prompts that it has settled on are no longer explored
    draft=dict(fn='none'),
    draft_memory_mb=1024,  # what those answers may take on the host; prompts visited longest ago give way
    early_exit=dict(fn='none'),  # end a row early: repetition, entropy, marker
    pruning=dict(fn='none'),  # begin more rollouts than are learned from: quality, uniform
    cache_dtype='auto',  # float32, bfloat16 or int8; auto = that of compute
    # of the kernels that are sampled with: float32, bfloat16, int8, float8_e4m3fn; auto = that of compute
    weights_dtype='auto',
    windows=1,  # widths of the cache, each twice the one before: attention pays for the rows there are
    test_every=1,  # tokens between two looks at whether the loop may end
    # guess tokens from what the group has said: those that hold save rounds, none changes a token
    ngram=dict(match=3, draft=0),  # longest context looked for; tokens guessed a round, 0 = off
    tree=dict(fn='none'),  # rollouts of a group fork from one another: latr, echo
    lockstep=True,  # all devices' loops run equally often; False lets each end by itself
    max_age=4,  # steps over which an unfinished rollout may be continued
    carry_cache=False,  # hand on the keys and values of unfinished rollouts, instead of encoding them again
  )
  c.objective = dict(
    advantage=dict(fn='group_normalized', eps=1e-6),
    credit_assignment=dict(
      fn='row'
    ),  # how a row's advantage is laid over its tokens: gae, process, steps, gigpo, turn_whitened
    # a second model for that credit, which begins as a copy of the policy: critic, outcome, preference
    auxiliary_model=dict(fn='none'),
    importance_correction=dict(
      fn='none'
    ),  # for a sampler that is not the old policy; recomputes log-probs
    old_policy=dict(fn='auto'),  # the old policy: recorded, before, average(decay), interpolated
    ratio=dict(fn='token'),
    advantage_modulation=dict(
      fn='none'
    ),  # how sure the policy is of a token changes its advantage: unsure
    trust_region=dict(fn='clip', low=0.2, high=0.2),
    token_weighting=dict(fn='none'),  # which tokens count for more or not at all
    # what holds the policy back; k1, k2, k3: a frozen copy of the first weights
    kl=dict(fn='none'),
    aggregation=dict(fn='sequence_mean'),
    # denominators of the KL term; auto: those that its paper gives it, else those of the policy term
    kl_aggregation=dict(fn='auto'),
    lr_scale=dict(fn='none'),  # what a batch is worth: effective_sample_size
    # demonstrations beside rollouts, or instead: chord, replace, likelihood, one_token_rollouts, suffix_weighted
    sft_loss=dict(fn='none'),
    distillation=dict(fn='none'),  # a teacher's word instead of rewards: on_policy
    teacher='',  # a model named as config.model is, of the same vocabulary; '' = none
    # changes rewards by length and by how right the group is, before advantages
    reward_shaping=dict(fn='none'),
    # keep | mask: do groups whose scores are all equal (before `shape`) count in the denominator
    zero_variance=dict(fn='keep'),
    activation_noise=dict(
      fn='none'
    ),  # noise in the update's forward pass: layerwise(sigma, learning_rate)
    weigh_rows=True,  # rows that were kept by chance count 1 / their probability
    head_chunk_tokens=512,  # rows of logits that exist at once on a device
  )
  c.optimizer = dict(
    learning_rate=1e-5,
    warmup_steps=0,
    decay='constant',  # constant | cosine | linear, over the optimizer steps after warm-up
    weight_decay=0.0,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    clip_norm=1.0,
    max_skipped=5,  # stop after so many non-finite gradients in a row
    # slow_fast: several steps on one minibatch, part of the way back, one more; last_turn_first: a step for every turn
    outer=dict(fn='none'),
  )
  # an adapter is trained in place of the weights; rank 0: the weights themselves
  c.lora = dict(
    rank=0,  # r: each matrix W that matches becomes W + alpha / r · A·B, A [in, r] and B [r, out]
    alpha=16.0,
    targets='(q|k|v|o|gate|up|down)$',  # a regular expression over the names of a layer's matrices
    init='',  # a folder of PEFT's with an adapter to begin from; '' = A at random and B = 0
  )
  c.curriculum = dict(
    candidates=dict(fn='everything'),  # or a window of a shuffled stream: stream
    evidence_decay=dict(
      fn='visit', decay=0.25
    ),  # how evidence ages: none, visit, step, two_scale, reset
    # what prompts learn of each other: none, kind, anchors (other models' pass rates), kernel (features)
    prior_pooling=dict(fn='kind', strength=2.0),
    kind_decay=0.9,  # of a kind's evidence, per visit to one of its prompts
    rate_estimate=dict(fn='mean'),  # or a draw: thompson
    # what of a prompt is worth a rollout: any function of curriculum/utility.py, such as uniform, mopps, bots
    utility=dict(fn='mixed_group'),
    selection=dict(fn='softmax', temperature=0.2),  # top, softmax, skip
    # who is struck out, and how many slots audit beliefs: none, audit, retire, streaks
    eligibility=dict(fn='audit', share=0.05),
    # slots of config.rollouts that a prompt gets on average, and who gets more: neyman, xrpo, marginal
    slots_per_prompt=1,
    allocation=dict(fn='equal'),
    domain_mix=dict(fn='none'),  # shares of the slots by source: mix(targets)
    # labels that the groups' majority contradicts give way, suspects are listed: majority_refined
    labels=dict(fn='none'),
    # what a prompt is told of a known answer: prefix, item_response, by_difficulty (the reply begins with it), guide,
    # exemplars (the question tells it), contexts (a strategy)
    hint=dict(fn='none'),
    truncated='count',  # count | ignore: rollouts cut off before they were right, as wrong or as no evidence
  )
  c.data = dict(
    source='gym',  # gym | jsonl | files | digits | puzzles | games
    path='',  # for jsonl
    # for files: each dict(path=, weight=, source=); .parquet, JSON lines, a saved data set's folder, or hub:owner/name
    files=(),
    eval_path='',  # for jsonl and files: held-out rows; '' = a seeded split
    # columns of files, where they have other names than usual; a.b is b inside a
    columns=dict(question='', answer='', source=''),
    answers=True,  # every row must have one; False where the grader needs none
    answer_after='',  # an answer is what stands after the last of these marks, such as '####'
    # for gym, digits, puzzles, games: each dict(name=, size=|weight=, <its settings>); of gym a reasoning-gym generator
    tasks=(),
    size=0,  # rows of the training set; 0 = all (jsonl, files), 1024 (gym, digits)
    seed=0,
    system='',  # a system message in front of every prompt
    template='{question}',  # how a question becomes the user's message
    chat=True,  # wrap in the model's chat template
  )
  # fn's score says what is right: from `right` up. parts are rewarded beside it, each dict(fn=, weight=1.0, …); a
  # group is mixed where these rewards differ, whatever is right
  c.rewards = dict(
    fn='exact',
    right=1.0,
    # fn's lowest and highest score: the curriculum counts a rollout as the share of the way between them, so that
    # graded scores are evidence, too; () = from 0 to right. Scores beyond count as the nearer bound
    bounds=(),
    parts=(),
    workers=2,  # processes, for graders whose time is not bounded
    deadline_s=10.0,  # of the clock for one answer; a worker that is late is killed and replaced
    cpu_s=10.0,  # the same of its processors: tells more than the clock where graders start threads
    memory_mb=2048,  # what an answer may take in a worker, beyond what that began with
    # an answer that could not be graded: score (it gets `value`) or drop (as if it had not been generated); the run
    # stops where more than stop_share of the rollouts of stop_steps steps failed
    failed=dict(
      timeout='score', crash='drop', error='drop', value=0.0, stop_share=0.5, stop_steps=3
    ),
    # majority: a group's most frequent answer is the right one, labels are not learned from
    vote=dict(fn='none'),
    truncate=dict(
      fn='none'
    ),  # outliers: the longest of an all-right group are cut, and graded again
  )
  # what answers a rollout's turns: calculator, python, search, guess, walk, or your own 'package.module:function' of
  # settings that makes one; needs mode=split. A row is all its turns, with what was answered in between
  c.environment = dict(
    fn='none',
    turns=4,  # that a rollout may take at most; completion_tokens hold all of them, answers too
    horizon=dict(
      fn='constant'
    ),  # turns by step, as config.rollout.length_schedule: stairs (TTI), cosine
    rounds=0,  # of turns in a step; what goes on then is continued in the next one. 0 = until all are over
    # who says what is right: rewards, by the last turn, or the environment, by the sum of its rewards
    judge='rewards',
    weight=1.0,  # of the environment's rewards beside those of config.rewards
    role='user',  # whose message an answer is in the chat template: user, tool
    observation_tokens=0,  # an answer is cut after so many; 0 = never
    workers=2,  # processes, for environments whose time is not bounded
    deadline_s=10.0,  # of the clock for one answer; a worker that is late is killed and replaced
  )
  c.replay = dict(
    # which landed groups are learned from, and when: mixed (dynamic sampling), dars (more rollouts for the hard)
    collect=dict(fn='none'),
    reuse=dict(
      fn='none'
    ),  # successes(count): right rollouts of earlier visits, beside the fresh ones
  )
  c.evaluation = dict(
    every=0,  # steps between evaluations; 0 = before and after only
    prompts=200,
    samples=4,  # per prompt, besides the greedy answer
    # of the samples, and of --mode=generate; training samples the policy as it is
    sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
  )
  c.checkpoint = dict(every=20, keep=2)
  c.monitoring = dict(
    console='auto',  # a live table in a terminal, else lines; plain: lines; quiet: warnings; json: an object a line
    trackers=(),  # tensorboard, wandb: who gets the numbers beside metrics.jsonl
    rollouts_every=1,  # steps between rollout files
    # tokens of a rollout file that have their log-prob, advantage and coefficient, some 15 bytes each; 0 = none
    rollouts_tokens=8192,
    report_every_s=60.0,  # between two report.html while the run goes on; 0 = at its end alone
    profile=dict(steps=''),  # '10:12' traces steps 10 and 11, for XProf
    # each raised once when it begins; `stop` names those that end the run
    alarms=dict(
      steps=10,  # in a row, before what is only bad when it lasts is told
      entropy=0.01,  # nats a token: below, the policy has collapsed
      # mean gap in probability between sampler and trainer; 0 = 1e-4 in float32, else 1e-2; more for rounded weights
      probs_gap=0.0,
      truncated=0.95,  # share of the rollouts cut off: above
      failed=0.1,  # share of the rollouts that could not be graded: above
      right_rollouts=1024,  # graded rollouts without a score of config.rewards.right, before that is told
      # non_finite, probs_gap, grading, still, entropy, all_wrong, all_right, same_reward, truncated, never_right,
      # out_of_bounds
      stop=(),
    ),
  )
  # devices along each axis; -1 = all that are left
  c.mesh = dict(
    # how a slice of that name is shared: v5e-16, v5e-256, v5p-128, gpu-node, …; it says data and fsdp, which then stay
    preset='',
    data=1,  # rows, and a whole copy of the weights each
    fsdp=-1,  # rows, and a part of the weights each, gathered layer by layer while learning
    context=1,  # rows while sampling; while learning, parts of each row: for rows too long for one device
    expert=1,  # rows, and a part of a mixture's experts each
    tensor=1,  # heads and features: exchanges in every layer, so few and close
    # (regular expression over a parameter's path, axes) that stand before the usual ones; --mode=layout shows them
    rules=(),
  )
  # of a run on several
  c.processes = dict(
    silent_s=60.0,  # one that does not answer for so long is taken for dead, and ends the others
    same_every=10,  # steps between two comparisons of what each holds on its host; 0 = never
  )
  # supervised warm start through the same update, on demonstrations: a row's `solution` or `response`, else its answer
  c.sft = dict(
    steps=0,
    learning_rate=3e-3,
    prompts=64,  # rows of a step
    pack_tokens=0,  # of a row that several demonstrations share; 0 = a row for each
  )
  return c
