// One rollout in full: prompt, output by token, and the difference to other rollouts of its prompt.
const NO_TOKENS =
  'No per-token values were recorded for this rollout: config.monitoring.rollouts_tokens limits the number of tokens per step.';
const NO_COEFFICIENTS =
  'Only values known before the update are recorded: no coefficients where the method uses a reference model or the ' +
  'entropy, and no advantages where it uses an auxiliary model or where batches wait.';

async function showRollout(state, i, box) {
  state.selected = i;
  const { index } = state,
    row = await state.row(i),
    prompt = index.prompt[i];
  const [promptInput] = JSON.parse((await loadPrompts(state))[prompt] || '["", ""]');
  if (state.selected !== i) return; // another rollout was selected meanwhile
  const name = j =>
    `step ${index.step[j]}, reward ${num(index.score[j])}${index.right[j] ? ' ✓' : ' ✗'}, ${index.length[j]} tokens`;
  const title = el('h3', null, `Prompt ${prompt} at step ${index.step[i]}`);
  if (!row)
    return box.replaceChildren(
      title,
      softText('The text of this rollout is omitted from the page; it is in the run’s rollouts folder.'),
    );
  const facts = {
    correctness: index.right[i] ? 'right' : 'wrong',
    'stop reason': row.reason,
    tokens: row.length,
    reference: row.gts,
    'graded as': row.graded,
    hint: row.hint,
    turns: row.turns,
  };
  const output = el('div'),
    values = { logp: row.logp, advantage: row.advantage, coefficient: row.coefficient },
    has = name => row.cuts && values[name] !== undefined && values[name] !== null;
  const paint = () => output.replaceChildren(colored(row, has(state.color) ? state.color : ''));
  const radio = (value, text, enabled) =>
    el(
      'label',
      { class: 'radio' },
      el('input', {
        type: 'radio',
        name: 'color',
        value,
        disabled: !enabled,
        checked: value === (has(state.color) ? state.color : ''),
        onchange: () => {
          state.color = value;
          paint();
        },
      }),
      text,
    );
  const same = [];
  for (let j = 0; j < index.step.length; j++)
    if (j !== i && index.prompt[j] === prompt && state.row.hasText(j)) same.push(j);
  box.replaceChildren(
    title,
    el(
      'p',
      { class: 'facts' },
      Object.entries(facts)
        .filter(([, v]) => v !== undefined && v !== '')
        .map(([k, v]) => el('span', null, `${k} `, el('b', null, String(v)))),
    ),
    ...rewardParts(row, state.weights),
    el('h4', null, row.prompt_text ? 'Prompt, as the model read it' : 'Prompt'),
    el(
      'div',
      { class: 'text', tabindex: 0, role: 'group', 'aria-label': 'Prompt' },
      row.prompt_text || promptText(row.input ?? promptInput),
    ),
    el('h4', null, 'Output'),
    el(
      'fieldset',
      null,
      el('legend', null, 'Color tokens by'),
      radio('', 'nothing', true),
      Object.entries(COLORS).map(([k, [text]]) => radio(k, text, has(k))),
    ),
    has('coefficient') ? '' : softText(row.cuts ? NO_COEFFICIENTS : NO_TOKENS),
    output,
    comparison(state, i, row, same, name),
  );
  paint();
}

// Each reward with its weight, their sum, and the reward after shaping; a single reward is one line.
function rewardParts(row, weights) {
  const parts = Object.entries(row.rewards || {}),
    shaped = row.shaped !== undefined && row.shaped !== row.score;
  const total = ['sum, the reward', '', num(row.score)],
    after = ['after reward shaping', '', num(row.shaped)];
  if (!parts.length && !shaped)
    return [el('p', { class: 'facts' }, el('span', null, 'reward ', el('b', null, num(row.score))))];
  const rows = parts.map(([name, value]) => [name, `× ${num(weights[name] ?? 1)}`, num(value)]);
  return [
    table(
      'Parts of the reward',
      ['part', 'weight', 'value'],
      [...rows, ...(parts.length ? [total] : [['reward', '', num(row.score)]]), ...(row.shaped !== undefined ? [after] : [])],
      [1, 2],
    ),
  ];
}

function comparison(state, i, row, same, name) {
  if (!same.length)
    return el(
      'div',
      null,
      el('h4', null, 'Other rollouts of this prompt'),
      softText('This page has no other rollout of this prompt.'),
    );
  const box = el('div'),
    options = same.length > 400 ? same.filter((_, k) => k % Math.ceil(same.length / 400) === 0) : same;
  const select = el(
    'select',
    { id: 'other' },
    el('option', { value: '' }, 'nothing'),
    options.map(j => el('option', { value: j }, name(j))),
  );
  select.addEventListener('change', async () => {
    if (select.value === '') return box.replaceChildren();
    const j = Number(select.value),
      other = await state.row(j);
    if (!other) return box.replaceChildren(softText('Its text is omitted from the page.'));
    const [a, b] = j < i ? [j, i] : [i, j],
      [x, y] = j < i ? [other, row] : [row, other];
    box.replaceChildren(renderDifference(x.output, y.output, [name(a), name(b)]));
  });
  return el(
    'div',
    null,
    el('h4', null, 'Other rollouts of this prompt'),
    el(
      'label',
      null,
      `Compare with (${options.length < same.length ? `${options.length} of ` : ''}${plural(same.length, 'other rollout')})`,
      select,
    ),
    box,
  );
}
