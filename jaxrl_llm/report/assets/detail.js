// One rollout in full: what was asked, what was said token by token, and how it differs from others of its prompt.
const UNCOUNTED = 'Nothing is told of its single tokens: config.monitoring.rollouts_tokens bounds how many are told a step.';
const UNTOLD =
  'Only what is known before the update is told: no coefficients where the method asks a reference or the entropy, ' +
  'and no advantages where it asks a second model, or where batches wait.';

async function show(state, i, box) {
  state.wanted = i;
  const { index } = state,
    row = await state.row(i),
    prompt = index.prompt[i];
  const asked = JSON.parse((await told(state))[prompt] || '["", ""]');
  if (state.wanted !== i) return; // another was chosen meanwhile
  const name = j =>
    `step ${index.step[j]}, reward ${num(index.score[j])}${index.right[j] ? ' ✓' : ' ✗'}, ${index.length[j]} tokens`;
  const title = el('h3', null, `Prompt ${prompt} at step ${index.step[i]}`);
  if (!row)
    return box.replaceChildren(
      title,
      empty('The text of this rollout is left out of the page; it lies in the run’s rollouts folder.'),
    );
  const facts = {
    reward: num(row.score),
    answer: index.right[i] ? 'right' : 'wrong',
    stopped: row.reason,
    tokens: row.length,
    wanted: row.gts,
    graded: row.graded,
    hint: row.hint,
    turns: row.turns,
  };
  const output = el('div'),
    given = { logp: row.logp, advantage: row.advantage, coefficient: row.coefficient },
    can = name => row.cuts && given[name] !== undefined && given[name] !== null;
  const paint = () => output.replaceChildren(colored(row, can(state.color) ? state.color : ''));
  const radio = (value, text, able) =>
    el(
      'label',
      { class: 'radio' },
      el('input', {
        type: 'radio',
        name: 'color',
        value,
        disabled: !able,
        checked: value === (can(state.color) ? state.color : ''),
        onchange: () => {
          state.color = value;
          paint();
        },
      }),
      text,
    );
  const same = [];
  for (let j = 0; j < index.step.length; j++)
    if (j !== i && index.prompt[j] === prompt && state.row.kept(j)) same.push(j);
  box.replaceChildren(
    title,
    el(
      'p',
      { class: 'facts' },
      Object.entries(facts)
        .filter(([, v]) => v !== undefined && v !== '')
        .map(([k, v]) => el('span', null, `${k} `, el('b', null, String(v)))),
    ),
    el('h4', null, 'Prompt'),
    el(
      'div',
      { class: 'text', tabindex: 0, role: 'group', 'aria-label': 'Prompt' },
      promptText(row.input ?? asked[0]),
    ),
    el('h4', null, 'Output'),
    el(
      'fieldset',
      null,
      el('legend', null, 'Color tokens by'),
      radio('', 'nothing', true),
      Object.entries(COLORS).map(([k, [text]]) => radio(k, text, can(k))),
    ),
    can('coefficient') ? '' : empty(row.cuts ? UNTOLD : UNCOUNTED),
    output,
    comparison(state, i, row, same, name),
  );
  paint();
}

function comparison(state, i, row, same, name) {
  if (!same.length)
    return el(
      'div',
      null,
      el('h4', null, 'Same prompt, other steps'),
      empty('The page holds no other rollout of this prompt.'),
    );
  const box = el('div'),
    few = same.length > 400 ? same.filter((_, k) => k % Math.ceil(same.length / 400) === 0) : same;
  const select = el(
    'select',
    { id: 'other' },
    el('option', { value: '' }, 'nothing'),
    few.map(j => el('option', { value: j }, name(j))),
  );
  select.addEventListener('change', async () => {
    if (select.value === '') return box.replaceChildren();
    const j = Number(select.value),
      other = await state.row(j);
    if (!other) return box.replaceChildren(empty('Its text is left out of the page.'));
    const [a, b] = j < i ? [j, i] : [i, j],
      [x, y] = j < i ? [other, row] : [row, other];
    box.replaceChildren(shownDifference(x.output, y.output, [name(a), name(b)]));
  });
  return el(
    'div',
    null,
    el('h4', null, 'Same prompt, other steps'),
    el(
      'label',
      null,
      `Compare with (${few.length < same.length ? `${few.length} of ` : ''}${plural(same.length, 'other rollout')})`,
      select,
    ),
    box,
  );
}
