'use strict';
// Two trajectories side by side with their differences, and one problem over all steps.

const MOST_WORDS = 4000;

function keyOf(row) {
  return `${row.source}/${row.step}/${row.partition}/${row.id}`;
}

function rowOf(key) {
  return store.index.rows.find((row) => keyOf(row) === key);
}

// Trajectories of the same problem, identified by its text, or by its number in files without the text.
function sameProblem(row) {
  const same = row.problem ? (other) => other.problem === row.problem
    : (other) => !other.problem && other.source === row.source && other.group === row.group;
  return store.index.rows.filter(same);
}

function markForCompare(row) {
  view.marked = keyOf(row);
  document.getElementById('note').textContent = `Marked ${row.id} of step ${row.step}. Select another trajectory and press c to compare the two.`;
}

function compareWithMarked(row) {
  if (view.marked && view.marked !== keyOf(row)) go({ ...placeOf(row), run: row.source, id: row.id, with: view.marked });
}

function comparisons(row) {
  const others = sameProblem(row).filter((other) => other !== row);
  const opposite = others.filter((other) => other.right !== null && other.right !== row.right)
    .sort((a, b) => Math.abs(a.step - row.step) - Math.abs(b.step - row.step))[0];
  const steps = new Set(others.map((other) => `${other.source}/${other.step}`));
  const to = (more) => link(placeOf(row, { id: row.id, ...more }));
  return [steps.size > (steps.has(`${row.source}/${row.step}`) ? 1 : 0) ? el('a', { id: 'across', href: to({ view: 'across' }) }, `this problem at ${steps.size} steps`) : '',
    opposite ? el('a', { id: 'opposite', href: to({ with: keyOf(opposite) }) }, `compare with a ${opposite.right ? 'right' : 'wrong'} one`) : '',
    el('button', { type: 'button', class: 'more', onclick: () => markForCompare(row) }, 'mark to compare')];
}

function acrossView(main, row) {
  const steps = new Map();
  for (const each of sameProblem(row)) {
    const key = `${each.source}/${each.partition}/${each.step}`;
    steps.set(key, [...(steps.get(key) ?? []), each]);
  }
  const many = store.index.sources.length > 1;
  const lines = [...steps.values()].sort((a, b) => a[0].source - b[0].source || a[0].step - b[0].step).map((rows) => {
    const judged = rows.filter((each) => each.right !== null);
    const right = judged.filter((each) => each.right).length;
    const mean = (key) => num(rows.reduce((sum, each) => sum + (each[key] ?? 0), 0) / rows.length, 1);
    return el('tr', {}, many ? el('td', {}, shown(store.index.sources[rows[0].source].name)) : '',
      el('td', {}, el('a', { href: link(placeOf(rows[0], { group: rows[0].group })) }, `${rows[0].step}${rows[0].partition === 'train' ? '' : ` ${rows[0].partition}`}`)),
      el('td', {}, rows.map((each) => el('a', { class: `dotted ${each.right ? 'right' : 'wrong'}`, href: link(placeOf(each, { id: each.id })),
        title: `${each.id}: ${each.extracted ?? 'no answer'}` }, each.right === null ? '·' : each.right ? '✓' : '✗'))),
      el('td', { class: 'n' }, judged.length ? `${right} of ${judged.length}` : '–'),
      el('td', { class: 'n' }, mean('calls')), el('td', { class: 'n' }, mean('tokens')),
      el('td', {}, shown([...new Set(rows.map((each) => each.extracted ?? '–'))].slice(0, 4).join(', '))));
  });
  const heads = [...(many ? ['source'] : []), 'step', 'trajectories', 'right', 'calls', 'tokens', 'answers'];
  main.append(el('h1', {}, 'One problem over all steps'), row.problem ? block(row.problem, 'prompt') : '',
    el('p', {}, 'Truth: ', el('b', {}, shown(row.truth ?? 'not recorded'))),
    el('div', { class: 'scroll' }, el('table', { class: 'across' }, el('thead', {}, el('tr', {}, heads.map((head) => el('th', {}, head)))), el('tbody', {}, lines))));
}

async function compareView(main, row, other) {
  const [one, two] = [await detail(row), await detail(other)];
  const keys = ['right', 'step', 'extracted', 'reward', 'stop', 'turns', 'calls', 'failed', 'errors', 'tokens', 'seconds', 'gap'];
  const format = (value) => (value === true ? '✓' : value === false ? '✗' : typeof value === 'number' ? num(value) : shown(value ?? '–'));
  const head = (each) => el('th', {}, mark(each.right), ' ', el('a', { href: link(placeOf(each, { id: each.id })) }, shown(each.id)), ` of step ${each.step}`);
  main.append(el('h1', {}, 'Side by side'), row.problem && row.problem === other.problem ? block(row.problem, 'prompt') : '',
    el('p', { class: 'faint' }, 'Marked: ', el('del', {}, 'only left'), ' ', el('ins', {}, 'only right')),
    el('table', { class: 'facts2' }, el('tr', {}, el('th', {}), head(row), head(other)), keys.filter((key) => row[key] !== undefined || other[key] !== undefined)
      .map((key) => el('tr', { class: row[key] === other[key] ? 'faint' : 'strong' }, el('td', {}, key), el('td', {}, format(row[key])), el('td', {}, format(other[key]))))));
  for (let at = 0; at < Math.max(one.turns.length, two.turns.length); at += 1) {
    const [left, right] = [one.turns[at], two.turns[at]];
    main.append(el('h2', {}, `Turn ${at + 1}`), el('div', { class: 'two turns' }, pair(left?.text, right?.text, 'model')));
    for (let call = 0; call < Math.max(left?.results.length ?? 0, right?.results.length ?? 0); call += 1) {
      main.append(el('div', { class: 'two turns' }, pair(left?.results[call]?.shown, right?.results[call]?.shown, 'tool')));
    }
  }
}

function pair(left, right, kind) {
  const [a, b] = differing(left ?? '', right ?? '');
  const card = (text, parts, tag) => el('article', { class: `card ${kind}` }, text === undefined || text === null ? el('p', { class: 'faint' }, 'nothing')
    : el('pre', { class: 'text', dir: 'ltr' }, parts.map(([same, part]) => (same ? shown(part) : el(tag, {}, shown(part))))));
  return [card(left, a, 'del'), card(right, b, 'ins')];
}

// Returns [same, text] parts of both texts, by longest common runs of words; beyond MOST_WORDS, compares only the ends.
function differing(left, right) {
  const [a, b] = [left, right].map((text) => text.split(/(\s+|[^\w\s])/).filter(Boolean));
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const [x, y] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const same = x.length * y.length <= MOST_WORDS * MOST_WORDS / 4 ? common(x, y) : [new Set(), new Set()];
  const parts = (words, middle, equal) => joined([...words.slice(0, start).map((word) => [true, word]),
    ...middle.map((word, at) => [equal.has(at), word]), ...words.slice(words.length - end).map((word) => [true, word])]);
  return [parts(a, x, same[0]), parts(b, y, same[1])];
}

function common(x, y) {
  const wide = y.length + 1;
  const best = new Uint16Array((x.length + 1) * wide);
  for (let i = x.length - 1; i >= 0; i -= 1) {
    for (let j = y.length - 1; j >= 0; j -= 1) {
      best[i * wide + j] = x[i] === y[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
    }
  }
  const [left, right] = [new Set(), new Set()];
  for (let i = 0, j = 0; i < x.length && j < y.length;) {
    if (x[i] === y[j]) { left.add(i); right.add(j); i += 1; j += 1; }
    else if (best[(i + 1) * wide + j] >= best[i * wide + j + 1]) i += 1;
    else j += 1;
  }
  return [left, right];
}

function joined(parts) {
  const out = [];
  for (const [same, text] of parts) {
    if (out.length && out[out.length - 1][0] === same) out[out.length - 1][1] += text;
    else out.push([same, text]);
  }
  return out;
}
