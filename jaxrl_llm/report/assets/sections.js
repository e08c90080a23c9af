// Sections learning, health, policy, distributions, time and config. Each function takes all runs and fills its section.
const STATES = {
  failing: '✗ Failing now',
  recovered: '! Failed earlier',
  passing: '✓ Passing',
  not_recorded: '? Not recorded',
  information: '· Information',
};
const mapRuns = (runs, build) => runs.map((run, at) => build(run, at)).filter(Boolean);
const heading = (runs, run, at) => (runs.length > 1 ? el('h3', null, runKey(at), ' ', run.name) : null);

function drawHeader(runs) {
  byId('runs').append(
    el(
      'div',
      { class: 'runs' },
      runs.map((run, at) =>
        el(
          'article',
          { class: 'run' },
          el('h2', null, runs.length > 1 && runKey(at), run.name),
          el(
            'p',
            null,
            run.done
              ? `${run.done.toLocaleString('en')} of ${plural(run.steps, 'step')} done.`
              : 'No step is done yet.',
          ),
          el(
            'p',
            { class: 'facts' },
            Object.entries(run.facts).map(([k, v]) => el('span', null, `${k.replace('_', ' ')} `, el('b', null, v))),
          ),
        ),
      ),
    ),
  );
}

function checkItem(check, values) {
  return el(
    'li',
    { class: check.state },
    el('strong', null, check.title),
    el('span', { class: 'state' }, STATES[check.state]),
    check.steps.length > 0 &&
      ` – ${check.steps.slice(-3).map(span).join(', ')}${check.steps.length > 3 ? ` and ${plural(check.steps.length - 3, 'earlier range')}` : ''}`,
    el('p', null, check.text),
    values,
  );
}

function drawHealth(runs) {
  const value = v =>
    `${v.name} ${num(v.last)} now` +
    (v.least === v.most ? ', the same in all steps' : `, ${num(v.least)} to ${num(v.most)}, the largest at step ${v.at}`);
  const values = check =>
    el(
      'p',
      { class: 'soft' },
      check.values.map((v, i) => [i > 0 && el('br'), value(v)]),
    );
  byId('health').append(
    ...runs.flatMap((run, at) =>
      [
        heading(runs, run, at),
        el('p', { class: 'summary' }, run.health_summary),
        el(
          'ul',
          { class: 'checks' },
          run.health.map(check => checkItem(check, values(check))),
        ),
      ].filter(Boolean),
    ),
  );
}

const LEARNING = [
  ['curriculum/observed_success', 'Success rate', 'mean over the rollouts, as counted by the curriculum', [0, 1]],
  ['curriculum/mixed_share', 'Mixed groups', 'share of the prompts', [0, 1]],
];
const POLICY = [
  ['actor/entropy', 'Entropy', 'nats per token'],
  ['actor/grad_norm', 'Gradient norm', ''],
  ['actor/ppo_kl', 'KL from the sampling policy', 'nats per token'],
  ['actor/pg_clipfrac', 'Clipped tokens', 'share'],
  ['actor/rejected_frac', 'Tokens rejected by the importance correction', 'share'],
  ['training/rollout_probs_diff_mean', 'Mismatch of sampler and trainer', 'mean |Δ probability|'],
  ['actor/lr', 'Learning rate', ''],
  ['response_length/clip_ratio', 'Completions cut off at the cap', 'share of the rollouts'],
  ['frac_reward_zero_std', 'Zero-variance groups', 'share of the rollouts'],
];
const curvesOf = (runs, name) =>
  mapRuns(runs, (run, at) => run.curves[name] && { name: run.name, at, ...run.curves[name] });
// A grid of charts and of more `figures`, then the names of those that are 0 in every step, which are left out.
function chartGrid(runs, list, figures = []) {
  const drawn = [],
    zero = [];
  for (const [name, title, unit, range] of list) {
    const curves = curvesOf(runs, name);
    if (curves.some(c => c.y.length) && curves.every(c => c.y.every(v => v === 0))) zero.push(`${title.toLowerCase()} (${name})`);
    else drawn.push(lineChart({ title, unit, range, note: name, curves }));
  }
  const nodes = [...drawn, ...figures].filter(Boolean);
  return [
    nodes.length > 0 && el('div', { class: 'grid' }, nodes),
    zero.length > 0 && softText(`Always 0, and left out: ${zero.join(', ')}.`),
  ].filter(Boolean);
}
const softText = text => el('p', { class: 'soft' }, text);

// One chart of all measures for a run; for several runs, one of all runs for each of the first two measures.
function heldOutCharts(runs) {
  const pointsOf = (run, name) =>
    run.evaluations.filter(e => e.measures[name]).map(e => ({ step: e.step, value: e.measures[name] }));
  const names = [...new Set(runs.flatMap(run => run.evaluations.flatMap(e => Object.keys(e.measures))))];
  if (runs.length === 1) {
    const series = names.slice(0, 6).map((name, at) => ({ name: measureName(name), at, points: pointsOf(runs[0], name) }));
    return [intervalChart({ title: 'Held-out accuracy', series })];
  }
  return names.slice(0, 2).map(name =>
    intervalChart({
      title: `Held-out accuracy, ${measureName(name)}`,
      series: runs.map((run, at) => ({ name: run.name, at, points: pointsOf(run, name) })),
    }),
  );
}

function evaluationTable(runs) {
  const rows = runs.flatMap(run =>
    run.evaluations.flatMap(e => Object.entries(e.metrics).map(([k, v]) => [run.name, e.step, k, num(v)])),
  );
  return rows.length
    ? later('All evaluations', () =>
        table('Held-out accuracies, shares from 0 to 1', ['run', 'step', 'measure', 'value'], rows, [1, 3]),
      )
    : null;
}

function drawLearning(runs) {
  const drawn = chartGrid(runs, LEARNING, heldOutCharts(runs));
  if (!drawn.length) return byId('learning').append(softText('No step has been recorded yet.'));
  byId('learning').append(
    ...[
      el(
        'p',
        { class: 'soft' },
        'Lines are means of nearby steps, and bands are ± one standard deviation of these steps. A dot is one step, or the mean of a few steps in a long run.',
      ),
      ...drawn,
      evaluationTable(runs),
    ].filter(Boolean),
  );
}

function drawPolicy(runs) {
  const box = el('div');
  const names = [...new Set(runs.flatMap(run => Object.keys(run.curves)))].sort();
  if (!names.length) return byId('policy').append(softText('No step has been recorded yet.'));
  const select = el(
    'select',
    { id: 'metric' },
    names.map(n => el('option', { value: n }, n)),
  );
  const show = () =>
    box.replaceChildren(lineChart({ title: select.value, unit: '', curves: curvesOf(runs, select.value) }) || '');
  select.addEventListener('change', show);
  byId('policy').append(
    ...chartGrid(runs, POLICY),
    el('h3', null, 'Any other metric'),
    el('form', { onsubmit: e => e.preventDefault() }, el('label', null, 'Metric', select)),
    el('div', { class: 'grid' }, box),
  );
  show();
}

function drawDistributions(runs) {
  const drawn = runs.flatMap((run, at) => {
    const both = [
      heatChart({ title: 'Completion length', unit: 'tokens', data: run.lengths }),
      heatChart({ title: 'Rewards', unit: 'reward', data: run.rewards }),
    ].filter(Boolean);
    return [
      heading(runs, run, at),
      both.length ? el('div', { class: 'pair' }, both) : softText('No rollout has been recorded yet.'),
    ];
  });
  byId('distributions').append(...drawn.filter(Boolean));
}

const PARTS = {
  update: 'update',
  rollout: 'rollout',
  generate: 'rollout',
  gen_update: 'update and rollout, in one program',
  grade: 'grading',
  choose: 'choice of the prompts',
  other: 'rest of the steps',
};
function drawTime(runs) {
  byId('time').append(
    ...runs.flatMap((run, at) => {
      const steps = run.time.total,
        phases = run.time.other_phases,
        names = Object.keys(steps).filter(n => steps[n] > 0),
        sum = seconds => Object.values(seconds).reduce((s, x) => s + x, 0),
        all = sum(steps) + sum(phases);
      if (!all) return [heading(runs, run, at), softText('No time was recorded.')].filter(Boolean);
      const color = n => (n in steps ? runColor(names.indexOf(n)) : 'var(--soft)'),
        title = n => PARTS[n] || n.replace(/_/g, ' ');
      const row = (n, seconds) => [
        title(n),
        duration(seconds),
        percent(seconds / all),
        el('span', { class: 'bar', style: `width:${((7 * seconds) / all).toFixed(2)}rem;background:${color(n)}` }),
      ];
      const rows = [...names.map(n => [n, steps[n]]), ...Object.entries(phases).sort((a, b) => b[1] - a[1])];
      return [
        heading(runs, run, at),
        el(
          'p',
          null,
          `The steps took ${duration(sum(steps))}${sum(phases) ? `, everything else ${duration(sum(phases))}` : '; time outside of them is not recorded by this run'}.`,
          run.time.split && ' Update and rollout are one program: they are split as in the traced steps.',
        ),
        el(
          'div',
          { class: 'pair' },
          el('div', null, table('Time of the run', ['part', 'time', 'share', 'bar'], rows.map(r => row(...r)), [1, 2])),
          names.length > 0 &&
            columnChart({
              title: 'Time per step',
              unit: 'seconds',
              note: 'stacked from the bottom in the order and colors of the table',
              unitX: 'step',
              labels: run.time.x.map(s => String(s[0])),
              parts: names.map(n => ({ name: title(n), values: run.time.mean[n], color: color(n) })),
              description: names.map(n => `${title(n)} ${percent(steps[n] / sum(steps))}`).join(', '),
            }),
        ),
      ].filter(Boolean);
    }),
    ...[
      lineChart({ title: 'Throughput', unit: 'tokens per second', curves: curvesOf(runs, 'perf/throughput') }),
    ].filter(Boolean),
  );
}
const duration = s => (s < 90 ? `${num(s)} s` : s < 5400 ? `${num(s / 60)} min` : `${num(s / 3600)} h`);

function drawConfig(runs) {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.config)))].sort();
  const differ = names.filter(n => new Set(runs.map(run => run.config[n])).size > 1);
  const rows = list => list.map(n => [n, ...runs.map(run => run.config[n] ?? 'unset')]),
    head = ['field', ...runs.map(run => run.name)];
  byId('config').append(
    ...[
      runs.length > 1 && table('Fields in which the runs differ', head, rows(differ)),
      later(`All ${names.length} fields`, () => table('The config', head, rows(names))),
    ].filter(Boolean),
  );
}
