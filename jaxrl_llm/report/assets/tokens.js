// The text of a rollout with colored tokens, and the word difference of two texts.
const COLORS = {
  logp: ['log-prob', 'ln p of the token when it was sampled. A stronger color means a less likely token.'],
  advantage: [
    'advantage',
    'Advantage of the token. Blue, underlined: positive; orange, dashed: negative.',
  ],
  coefficient: [
    'coefficient',
    'Factor of the gradient of ln p, at the sampling policy (importance ratio 1). Blue, underlined: the token becomes more likely; orange, dashed: less likely.',
  ],
};

// [{ text, logp, advantage, coefficient }] for a rollout with per-token values, else null.
function tokensOf(row) {
  if (!row.cuts || !row.logp) return null;
  const letters = Array.from(row.output),
    pick = (x, i) => (Array.isArray(x) ? x[i] : x);
  let at = 0;
  return row.cuts.map((n, i) => {
    const text = letters.slice(at, at + n).join('');
    at += n;
    return { text, logp: row.logp[i], advantage: pick(row.advantage, i), coefficient: pick(row.coefficient, i) };
  });
}

function colored(row, by) {
  const tokens = by ? tokensOf(row) : null;
  if (!tokens)
    return el(
      'div',
      { class: 'text', tabindex: 0, role: 'group', 'aria-label': 'Output' },
      row.output || '(empty)',
    );
  const top = Math.max(...tokens.map(t => Math.abs(t[by] ?? 0)), 1e-12);
  const tokenSpan = t => {
    const value = t[by];
    if (value === null || value === undefined) return el('span', { title: 'not sampled by the policy' }, t.text);
    const strength = by === 'logp' ? Math.min(-value / 5, 1) : Math.abs(value) / top,
      minus = by === 'logp' || value < 0;
    const style = `background:rgba(var(--${minus ? 'minus' : 'plus'}),${(0.5 * strength).toFixed(3)})`;
    return el(
      'span',
      {
        class: `tok ${by === 'logp' ? (value < -3 ? 'down' : '') : value > 0 ? 'up' : value < 0 ? 'down' : ''}`,
        style,
        title: `${COLORS[by][0]} ${num(value)}${by === 'logp' ? ` (p ${percent(Math.exp(value))})` : ''}`,
      },
      t.text,
    );
  };
  return el(
    'div',
    null,
    scale(by, top),
    el(
      'div',
      { class: 'text', tabindex: 0, role: 'group', 'aria-label': `Output, tokens colored by ${COLORS[by][0]}` },
      tokens.map(tokenSpan),
    ),
    later('Tokens as a table', () =>
      table(
        'Values of each token',
        ['token', 'log-prob', 'advantage', 'coefficient'],
        tokens.map(t => [JSON.stringify(t.text), num(t.logp), num(t.advantage), num(t.coefficient)]),
        [1, 2, 3],
      ),
    ),
  );
}

function scale(by, top) {
  const steps =
    by === 'logp'
      ? [
          [0, 0],
          [-1, 0.2],
          [-2.5, 0.5],
          [-5, 1],
        ]
      : [
          [-top, 1],
          [-top / 2, 0.5],
          [0, 0],
          [top / 2, 0.5],
          [top, 1],
        ];
  return el(
    'div',
    { class: 'scale' },
    steps.map(([value, s]) =>
      el(
        'span',
        null,
        el(
          'span',
          {
            class: 'tok ' + (value > 0 ? 'up' : value < 0 && (by !== 'logp' || value < -3) ? 'down' : ''),
            style: `background:rgba(var(--${value < 0 ? 'minus' : 'plus'}),${0.5 * s})`,
          },
          num(value),
        ),
      ),
    ),
    COLORS[by][1],
  );
}

const MAX_WORDS = 1500; // words and spaces of each text that are compared
// [[kind, text]]: kind is ' ', '-' or '+'. The longest common subsequence of words.
function difference(before, after) {
  const a = (before.match(/\s+|[^\s]+/g) || []).slice(0, MAX_WORDS),
    b = (after.match(/\s+|[^\s]+/g) || []).slice(0, MAX_WORDS);
  const w = b.length + 1,
    common = new Uint16Array((a.length + 1) * w);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i * w + j] =
        a[i] === b[j] ? common[(i + 1) * w + j + 1] + 1 : Math.max(common[(i + 1) * w + j], common[i * w + j + 1]);
  const found = [];
  const add = (kind, text) => {
    const last = found[found.length - 1];
    if (last && last[0] === kind) last[1] += text;
    else found.push([kind, text]);
  };
  let i = 0,
    j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(' ', a[i]);
      i++;
      j++;
    } else if (i < a.length && (j === b.length || common[(i + 1) * w + j] >= common[i * w + j + 1])) add('-', a[i++]);
    else add('+', b[j++]);
  }
  return found;
}

function renderDifference(before, after, names) {
  const found = difference(before, after);
  const cut = [before, after].some(t => (t.match(/\s+|[^\s]+/g) || []).length > MAX_WORDS);
  const removed = found.filter(f => f[0] === '-').length,
    added = found.filter(f => f[0] === '+').length;
  const hidden = text => el('span', { class: 'visually-hidden' }, text);
  return el(
    'div',
    null,
    el(
      'p',
      { class: 'soft' },
      removed + added
        ? `From ${names[0]} to ${names[1]}: ${plural(removed, 'passage')} removed (struck through), ${plural(added, 'passage')} added (underlined).`
        : `${names[0]} and ${names[1]} are identical.`,
      cut ? ` Only the first ${MAX_WORDS} words and spaces of each are compared.` : '',
    ),
    el(
      'div',
      { class: 'text', tabindex: 0, role: 'group', 'aria-label': 'Difference' },
      found.map(([kind, text]) =>
        kind === ' '
          ? text
          : kind === '-'
            ? el('del', null, hidden('[removed: '), text, hidden(']'))
            : el('ins', null, hidden('[added: '), text, hidden(']')),
      ),
    ),
  );
}
