// Sections health, learning, policy, distributions, time and config. Each function takes all runs and fills its section.
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
              ? `${run.done.toLocaleString('en')} of ${plural(run.steps, 'step')} done. `
              : 'No step is done yet. ',
            run.health_summary,
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

function drawHealth(runs) {
  const value = v =>
    `${v.name} ${num(v.last)} now` +
    (v.least === v.most ? ', the same in all steps' : `, ${num(v.least)} to ${num(v.most)}, the largest at step ${v.at}`);
  byId('health').append(
    ...runs.flatMap((run, at) =>
      [
        heading(runs, run, at),
        el('p', { class: 'summary' }, run.health_summary),
        el(
          'ul',
          { class: 'checks' },
          run.health.map(check =>
            el(
              'li',
              { class: check.state },
              el('strong', null, check.title),
              el('span', { class: 'state' }, STATES[check.state]),
              check.steps.length > 0 &&
                ` – ${check.steps.slice(-3).map(span).join(', ')}${check.steps.length > 3 ? ` and ${plural(check.steps.length - 3, 'earlier range')}` : ''}`,
              el('p', null, check.text),
              el(
                'p',
                { class: 'soft' },
                check.values.map((v, i) => [i > 0 && el('br'), value(v)]),
              ),
            ),
          ),
        ),
      ].filter(Boolean),
    ),
  );
}

const LEARNING = [
  ['critic/score/mean', 'Reward', 'mean over the rollouts'],
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
const charts = (runs, list) =>
  list
    .map(([name, title, unit, range]) => lineChart({ title, unit, range, note: name, curves: curvesOf(runs, name) }))
    .filter(Boolean);
const softText = text => el('p', { class: 'soft' }, text);

function evaluationCharts(runs) {
  const names = [...new Set(runs.flatMap(run => run.evaluations.flatMap(e => Object.keys(e.metrics))))]
    .filter(n => n.includes('/all/') || !n.includes('/'))
    .slice(0, 6);
  return names
    .map(name =>
      lineChart({
        title: `Evaluation: ${name.replace('val-core/', '')}`,
        unit: 'share',
        band: false,
        curves: mapRuns(runs, (run, at) => {
          const measured = run.evaluations.filter(e => name in e.metrics),
            x = measured.map(e => e.step),
            y = measured.map(e => e.metrics[name]);
          return { name: run.name, at, x, y, mid: y, lo: y, hi: y };
        }),
      }),
    )
    .filter(Boolean);
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
  const drawn = [...charts(runs, LEARNING), ...evaluationCharts(runs)];
  if (!drawn.length) return byId('learning').append(softText('No step has been recorded yet.'));
  byId('learning').append(
    ...[
      el(
        'p',
        { class: 'soft' },
        'Lines are means of nearby steps, and bands are ± one standard deviation of these steps. A dot is one step, or the mean of a few steps in a long run.',
      ),
      el('div', { class: 'grid' }, drawn),
      evaluationTable(runs),
    ].filter(Boolean),
  );
}

function drawPolicy(runs) {
  const drawn = charts(runs, POLICY),
    box = el('div');
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
    el('div', { class: 'grid' }, drawn),
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

const PARTS = { gen_update: 'generation and update on the device', grade: 'grading', other: 'rest of the step' };
function drawTime(runs) {
  byId('time').append(
    ...runs.flatMap((run, at) => {
      const names = Object.keys(run.time.total).filter(n => run.time.total[n] > 0),
        totalSeconds = names.reduce((s, n) => s + run.time.total[n], 0);
      if (!totalSeconds) return [heading(runs, run, at), softText('No time was recorded.')].filter(Boolean);
      const color = n => runColor(names.indexOf(n)),
        title = n => PARTS[n] || n.replace(/_/g, ' ');
      const rows = names.map(n => [
        title(n),
        `${num(run.time.total[n])} s`,
        percent(run.time.total[n] / totalSeconds),
        el('span', {
          class: 'bar',
          style: `width:${((7 * run.time.total[n]) / totalSeconds).toFixed(2)}rem;background:${color(n)}`,
        }),
      ]);
      return [
        heading(runs, run, at),
        el(
          'p',
          null,
          `The steps took ${duration(totalSeconds)}. Outside of the steps: ${otherPhases(run.time.other_phases)}.`,
        ),
        el(
          'div',
          { class: 'pair' },
          el('div', null, table('Total time of the steps', ['part', 'time', 'share', 'bar'], rows, [1, 2])),
          columnChart({
            title: 'Time per step',
            unit: 'seconds',
            note: 'stacked from the bottom in the order and colors of the table',
            unitX: 'step',
            labels: run.time.x.map(s => String(s[0])),
            parts: names.map(n => ({ name: title(n), values: run.time.mean[n], color: color(n) })),
            description: names.map(n => `${title(n)} ${percent(run.time.total[n] / totalSeconds)}`).join(', '),
          }),
        ),
      ].filter(Boolean);
    }),
    ...[
      lineChart({ title: 'Throughput', unit: 'tokens per second', curves: curvesOf(runs, 'perf/throughput') }),
    ].filter(Boolean),
  );
}
const otherPhases = seconds =>
  Object.entries(seconds)
    .sort((a, b) => b[1] - a[1])
    .map(([phase, s]) => `${phase} ${duration(s)}`)
    .join(', ') || 'not recorded by this run';
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
