// Health, curves, distributions, time and config. Each takes all runs and fills its own section.
const STATES = {
  now: '✗ Trouble now',
  past: '! Earlier trouble',
  well: '✓ Well',
  unknown: '? Not recorded',
  told: '· Not judged',
};
const parts = (runs, make) => runs.map((run, at) => make(run, at)).filter(Boolean);
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
            run.overall,
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
    (v.least === v.most ? ', and always' : `, ${num(v.least)} to ${num(v.most)}, the most at step ${v.at}`);
  byId('health').append(
    ...runs.flatMap((run, at) =>
      [
        heading(runs, run, at),
        el('p', { class: 'overall' }, run.overall),
        el(
          'ul',
          { class: 'checks' },
          run.health.map(one =>
            el(
              'li',
              { class: one.state },
              el('strong', null, one.title),
              el('span', { class: 'verdict' }, STATES[one.state]),
              one.steps.length > 0 &&
                ` – ${one.steps.slice(-3).map(span).join(', ')}${one.steps.length > 3 ? ` and ${plural(one.steps.length - 3, 'stretch')} before`.replace('stretchs', 'stretches') : ''}`,
              el('p', null, one.words),
              el(
                'p',
                { class: 'soft' },
                one.values.map((v, i) => [i > 0 && el('br'), value(v)]),
              ),
            ),
          ),
        ),
      ].filter(Boolean),
    ),
  );
}

const LEARNING = [
  ['critic/score/mean', 'Reward', 'mean of the rollouts’ rewards'],
  ['curriculum/observed_success', 'Success', 'mean of the rollouts’ scores, as the curriculum counts them', [0, 1]],
  ['curriculum/mixed_share', 'Groups whose rewards differ', 'share of the prompts', [0, 1]],
];
const POLICY = [
  ['actor/entropy', 'Entropy', 'nats a token'],
  ['actor/grad_norm', 'Gradient norm', ''],
  ['actor/ppo_kl', 'KL from the sampling policy', 'nats a token'],
  ['actor/pg_clipfrac', 'Tokens clipped', 'share'],
  ['actor/rejected_frac', 'Tokens rejected by the correction', 'share'],
  ['training/rollout_probs_diff_mean', 'Sampler and trainer differ', 'mean |Δ probability|'],
  ['actor/lr', 'Learning rate', ''],
  ['response_length/clip_ratio', 'Answers cut off', 'share of the rollouts'],
  ['frac_reward_zero_std', 'Groups without a lesson', 'share of the rollouts'],
];
const curvesOf = (runs, name) =>
  parts(runs, (run, at) => run.curves[name] && { name: run.name, at, ...run.curves[name] });
const charts = (runs, list) =>
  list
    .map(([name, title, unit, range]) => lineChart({ title, unit, range, note: name, curves: curvesOf(runs, name) }))
    .filter(Boolean);
const empty = what => el('p', { class: 'soft' }, what);

function heldOut(runs) {
  const names = [...new Set(runs.flatMap(run => run.evaluations.flatMap(e => Object.keys(e.metrics))))]
    .filter(n => n.includes('/all/') || !n.includes('/'))
    .slice(0, 6);
  return names
    .map(name =>
      lineChart({
        title: `Held out: ${name.replace('val-core/', '')}`,
        unit: 'share',
        band: false,
        curves: parts(runs, (run, at) => {
          const known = run.evaluations.filter(e => name in e.metrics),
            x = known.map(e => e.step),
            y = known.map(e => e.metrics[name]);
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
  const drawn = [...charts(runs, LEARNING), ...heldOut(runs)];
  if (!drawn.length) return byId('learning').append(empty('No step is written yet.'));
  byId('learning').append(
    ...[
      el(
        'p',
        { class: 'soft' },
        'Lines are means of nearby steps, bands one standard deviation of those steps to either side; dots are single steps, or a few of a long run.',
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
  if (!names.length) return byId('policy').append(empty('No step is written yet.'));
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
      heatChart({ title: 'Length of the answers', unit: 'tokens', data: run.lengths }),
      heatChart({ title: 'Rewards', unit: 'reward of a rollout', data: run.rewards }),
    ].filter(Boolean);
    return [
      heading(runs, run, at),
      both.length ? el('div', { class: 'pair' }, both) : empty('No rollout is written yet.'),
    ];
  });
  byId('distributions').append(...drawn.filter(Boolean));
}

const PARTS = { gen_update: 'generation and update on the device', grade: 'grading', other: 'the rest of the step' };
function drawTime(runs) {
  byId('time').append(
    ...runs.flatMap((run, at) => {
      const names = Object.keys(run.time.total).filter(n => run.time.total[n] > 0),
        whole = names.reduce((s, n) => s + run.time.total[n], 0);
      if (!whole) return [heading(runs, run, at), empty('No time was recorded.')].filter(Boolean);
      const color = n => runColor(names.indexOf(n)),
        title = n => PARTS[n] || n.replace(/_/g, ' ');
      const rows = names.map(n => [
        title(n),
        `${num(run.time.total[n])} s`,
        percent(run.time.total[n] / whole),
        el('span', {
          class: 'bar',
          style: `width:${((7 * run.time.total[n]) / whole).toFixed(2)}rem;background:${color(n)}`,
        }),
      ]);
      return [
        heading(runs, run, at),
        el(
          'p',
          null,
          `The steps took ${duration(whole)} in all, and beside them ${besides(run.time.beside)}.`,
        ),
        el(
          'div',
          { class: 'pair' },
          el('div', null, table('Seconds of all steps', ['part', 'time', 'share', 'as a bar'], rows, [1, 2])),
          columnChart({
            title: 'Seconds a step',
            unit: 'seconds',
            note: 'from the bottom, in the order and colors of the table',
            unitX: 'step',
            labels: run.time.x.map(s => String(s[0])),
            parts: names.map(n => ({ name: title(n), values: run.time.mean[n], color: color(n) })),
            words: names.map(n => `${title(n)} ${percent(run.time.total[n] / whole)}`).join(', '),
          }),
        ),
      ].filter(Boolean);
    }),
    ...[
      lineChart({ title: 'Throughput', unit: 'tokens a second', curves: curvesOf(runs, 'perf/throughput') }),
    ].filter(Boolean),
  );
}
const besides = told =>
  Object.entries(told)
    .sort((a, b) => b[1] - a[1])
    .map(([what, s]) => `${what} ${duration(s)}`)
    .join(', ') || 'what evaluation, checkpoints and compilation took, which this run did not record';
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
