// The result of a run, first on the page: accuracy before and after, the reward, two completions, and the alarms.
const ends = run => [run.evaluations[0], run.evaluations[run.evaluations.length - 1]];

function drawResult(runs) {
  const reward = lineChart({
    title: 'Reward',
    unit: 'mean over the rollouts',
    note: 'critic/score/mean',
    curves: curvesOf(runs, 'critic/score/mean'),
  });
  const section = byId('result');
  if (runs.length === 1) {
    section.append(
      el('div', { class: 'pair' }, el('div', { class: 'run' }, ...headline(runs[0])), reward || ''),
      ...healthLine(runs[0]),
      ...exampleTexts(runs[0], 0),
    );
    return;
  }
  section.append(el('div', { class: 'pair' }, accuracies(runs), reward || ''));
  runs.forEach((run, at) => section.append(heading(runs, run, at), ...healthLine(run), ...exampleTexts(run, at)));
}

function headline(run) {
  if (!run.evaluations.length) return [el('h3', null, 'Held-out accuracy'), softText('No evaluation has been recorded.')];
  const [before, after] = ends(run),
    [name] = Object.keys(after.measures),
    old = before.measures[name],
    now = after.measures[name],
    trained = after.step > before.step;
  if (!now) return [el('h3', null, 'Held-out accuracy'), softText('The evaluations have no measure of all data.')];
  const prompts = after.prompts ? ` over ${plural(after.prompts, 'prompt')}` : '';
  return [
    el('h3', null, `Held-out accuracy, ${measureName(name)}`),
    el(
      'p',
      { class: 'headline' },
      trained && old && [share(old[0]), el('span', { 'aria-hidden': 'true' }, ' → '), el('span', { class: 'visually-hidden' }, ' before, ')],
      el('strong', null, share(now[0])),
      trained && el('span', { class: 'visually-hidden' }, ' after training'),
    ),
    el(
      'p',
      { class: 'soft' },
      trained && old
        ? `${points(now[0] - old[0])} in ${plural(after.step - before.step, 'step')}; 95 % intervals ${interval(old) || 'not recorded'} before and ${interval(now) || 'not recorded'} after${prompts}.`
        : `At step ${after.step}; 95 % interval ${interval(now) || 'not recorded'}${prompts}.`,
    ),
    Object.keys(after.measures).length > 1 &&
      table(
        'All measures of the held-out prompts',
        trained ? ['measure', 'before', `after ${plural(after.step, 'step')}`] : ['measure', `step ${after.step}`],
        Object.entries(after.measures).map(([k, v]) => [
          measureName(k),
          ...(trained ? [measureCell(before.measures[k])] : []),
          measureCell(v),
        ]),
        [1, 2],
      ),
  ].filter(Boolean);
}
// A narrow screen breaks the line before the interval, and nowhere else.
const unbroken = text => text.replaceAll(' ', '\u00a0');
const measureCell = value => (value ? `${unbroken(share(value[0]))} ${unbroken(interval(value))}`.trim() : '–');

function accuracies(runs) {
  const rows = runs.map(run => {
    if (!run.evaluations.length) return [run.name, '–', '–', '–'];
    const [before, after] = ends(run),
      [name] = Object.keys(after.measures);
    return [run.name, name ? measureName(name) : '–', measureCell(before.measures[name]), measureCell(after.measures[name])];
  });
  return el('div', null, table('Held-out accuracy with 95 % intervals', ['run', 'measure', 'first', 'last'], rows, [2, 3]));
}

// One green line, or the alarms.
function healthLine(run) {
  const alarms = run.health.filter(check => check.state === 'failing' || check.state === 'recovered');
  if (!alarms.length) {
    const passing = run.health.some(check => check.state === 'passing');
    return [el('p', { class: passing ? 'line good' : 'line' }, passing && '✓ ', run.health_summary)];
  }
  const failing = alarms.some(check => check.state === 'failing');
  return [
    el('p', { class: failing ? 'line bad' : 'line warn' }, failing ? '✗ ' : '! ', run.health_summary),
    el(
      'ul',
      { class: 'checks' },
      alarms.map(check => checkItem(check)),
    ),
  ];
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most)} …` : text);
function exampleTexts(run, at) {
  const { good, bad } = run.examples;
  if (!good) return [];
  const one = (example, title) =>
    el(
      'figure',
      { class: `example ${example.right ? 'is-right' : 'is-wrong'}` },
      el(
        'figcaption',
        null,
        `${example.right ? '✓' : '✗'} ${title}`,
        el(
          'small',
          null,
          `step ${example.step}, reward ${num(example.score)}${example.gts ? `, reference answer ${shortened(example.gts, 60)}` : ''}`,
        ),
      ),
      el('p', { class: 'question' }, shortened(example.question, 400) || '(no question text)'),
      el(
        'div',
        { class: 'text', tabindex: 0, role: 'group', 'aria-label': `${title}: completion` },
        example.output || '(empty)',
      ),
      el(
        'button',
        { type: 'button', onclick: () => goTo && goTo(at, example.index) },
        'Open in the rollouts',
        el('span', { class: 'visually-hidden' }, `: ${title.toLowerCase()}`),
      ),
    );
  const right = example => (example.right ? 'right' : 'wrong');
  const same = good.index === bad.index;
  return [
    el(
      'div',
      { class: 'pair' },
      one(good, same ? 'A completion' : good.right ? 'A good completion' : 'The best completion of a group'),
      !same && one(bad, right(bad) === 'wrong' ? 'A bad completion' : 'The worst completion of the group'),
    ),
  ];
}
