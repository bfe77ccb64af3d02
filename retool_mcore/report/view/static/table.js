'use strict';
// A step's trajectories as a table, and one group side by side.

const COLUMNS = [['right', ''], ['id', 'id'], ['problem', 'problem'], ['truth', 'truth'], ['answer', 'answer'],
  ['reward', 'reward'], ['stop', 'stop'], ['turns', 'turns'], ['calls', 'calls'], ['failed', 'failed'],
  ['repairs', 'repairs'], ['tokens', 'tokens'], ['seconds', 's'], ['stale', 'stale']];
const NUMBERS = new Set(['reward', 'turns', 'calls', 'failed', 'repairs', 'tokens', 'seconds', 'stale']);
const ROWS_AT_ONCE = 500;
const view = { sort: null, down: false, rows: [], chosen: 0, limit: ROWS_AT_ONCE, run: 0 };

function rowsOf(source, step, partition) {
  return store.index.rows.filter((row) => row.source === source && row.step === step && row.partition === partition);
}

function stepView(main, place) {
  const source = store.index.sources[place.run];
  const all = rowsOf(place.run, place.step, place.part);
  if (!all.length) {
    main.append(el('p', { class: 'empty' }, `No trajectory of step ${place.step} (${place.part}) is in this page.`));
    return;
  }
  const groups = inGroups(all);
  const dull = [...groups.values()].filter(taughtNothing).length;
  const told = all.filter((row) => row.right !== null);
  main.append(el('h1', {}, source.kind === 'run' ? `Step ${place.step}, ${place.part}` : source.name),
    el('p', { class: 'facts' }, `${num(all.length)} trajectories in ${num(groups.size)} groups`,
      told.length ? `; ${num(100 * told.filter((row) => row.right).length / told.length, 1)} % right` : '',
      dull ? `; ${dull} groups taught nothing (all rewards alike, marked ∅)` : ''),
    source.kind === 'run' && place.part === 'train' ? perfetto(source, place.step) : null);
  const box = el('div', { class: 'scroll' });
  main.append(box);
  view.limit = ROWS_AT_ONCE;
  fillTable(box, all, groups);
}

function perfetto(source, step) {
  const command = `python perf/trace.py '${source.path}' --step ${step} --out step${step}.json`;
  return el('p', { class: 'faint noprint' }, 'As a time line of all phases: ', el('code', {}, shown(command)), ', opened in ',
    el('a', { href: 'https://ui.perfetto.dev', rel: 'noreferrer' }, 'Perfetto'), '.');
}

async function fillTable(box, all, groups) {
  const mine = ++view.run;
  const filter = parseFilter(document.getElementById('search').value);
  let rows = all.filter((row) => filter.conditions.every((condition) => meets(row, condition)));
  if (filter.words.length) {
    const kept = [];
    for (const row of rows) {
      if (await holdsText(row, filter.words)) kept.push(row);
      if (mine !== view.run) return;  // another filter was typed meanwhile
    }
    rows = kept;
  }
  if (view.sort) {
    const key = view.sort;
    rows = [...rows].sort((a, b) => (view.down ? -1 : 1) * compare(a[key], b[key]));
  }
  Object.assign(view, { rows, chosen: Math.min(view.chosen, Math.max(rows.length - 1, 0)) });
  const again = () => fillTable(box, all, groups);
  const heads = COLUMNS.map(([key, title]) => el('th', {
    class: NUMBERS.has(key) ? 'n' : '', 'aria-sort': view.sort === key ? (view.down ? 'descending' : 'ascending') : 'none' },
  el('button', { type: 'button', onclick: () => { sortBy(key); again(); } },
    `${title || '✓'}${view.sort === key ? (view.down ? ' ↓' : ' ↑') : ''}`)));
  const lines = rows.slice(0, view.limit).map((row, number) => tableRow(row, number, groups));
  box.replaceChildren(el('table', { class: 'rows' }, el('thead', {}, el('tr', {}, heads)), el('tbody', {}, lines)));
  if (rows.length > view.limit) {
    box.append(el('button', { type: 'button', class: 'more', onclick: () => { view.limit += 5000; again(); } },
      `${num(rows.length - view.limit)} more`));
  }
  if (!rows.length) box.append(el('p', { class: 'empty' }, 'Nothing passes the filter.'));
  view.refresh = again;
  box.dataset.ready = String(rows.length);
  choose(view.chosen, false);
}

function sortBy(key) {
  view.down = view.sort === key ? !view.down : NUMBERS.has(key);
  view.sort = key;
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  if (typeof a === 'string') return a.localeCompare(b, 'en', { numeric: true });
  return a < b ? -1 : 1;
}

function tableRow(row, number, groups) {
  const dull = taughtNothing(groups.get(groupKey(row)));
  const cells = COLUMNS.map(([key]) => {
    if (key === 'right') return el('td', {}, el('span', { class: row.right ? 'right' : 'wrong' }, row.right === null ? '' : row.right ? '✓' : '✗'));
    if (key === 'id') {
      return el('td', { class: 'id' }, el('a', { href: link(placeOf(row, { id: row.id })) }, shown(row.id)), ' ',
        el('a', { class: 'faint', href: link(placeOf(row, { group: row.group })), title: 'its group side by side' }, dull ? '∅' : '⊞'));
    }
    const value = row[key];
    if (NUMBERS.has(key)) return el('td', { class: `n${value ? '' : ' faint'}` }, num(value));
    return el('td', { class: key, title: value }, value === null || value === undefined ? '–' : shown(value));
  });
  return el('tr', { class: dull ? 'dull' : '', 'data-number': number, onclick: () => choose(number, false),
    ondblclick: () => { location.hash = link(placeOf(row, { id: row.id })); } }, cells);
}

function choose(number, scroll = true) {
  const lines = document.querySelectorAll('table.rows tbody tr');
  if (!lines.length) return;
  view.chosen = Math.max(0, Math.min(number, lines.length - 1));
  lines.forEach((line, at) => line.classList.toggle('chosen', at === view.chosen));
  if (scroll) lines[view.chosen].scrollIntoView({ block: 'nearest' });
}

async function groupView(main, place) {
  const rows = rowsOf(place.run, place.step, place.part).filter((row) => row.group === place.group);
  if (!rows.length) {
    main.append(el('p', { class: 'empty' }, `Group ${place.group} of step ${place.step} is not in this page.`));
    return;
  }
  view.rows = rows;
  const details = await Promise.all(rows.map(detail));
  const tally = new Map();
  for (const row of rows) tally.set(row.answer, [...(tally.get(row.answer) ?? []), row]);
  const answers = [...tally].sort((a, b) => b[1].length - a[1].length).map(([answer, having]) =>
    el('tr', {}, el('td', { class: 'n' }, having.length),
      el('td', {}, el('span', { class: 'share', style: `width:${(120 * having.length) / rows.length}px` })),
      el('td', {}, answer === null ? el('span', { class: 'faint' }, 'no answer') : shown(answer)), el('td', {}, mark(having[0].right))));
  main.append(el('h1', {}, `Group ${place.group}`),
    taughtNothing(rows) ? el('p', { class: 'warn' }, '∅ All rewards are alike: this group taught nothing.') : '',
    details[0].prompt ? block(details[0].prompt, 'prompt') : '',
    el('p', {}, 'Truth: ', el('b', {}, shown(rows[0].truth ?? 'not recorded'))),
    el('div', { class: 'two' }, el('section', {}, el('h2', {}, 'Answers'), el('table', { class: 'tally' }, answers)),
      el('section', {}, el('h2', {}, 'Right against wrong'), apart(rows))),
    el('h2', {}, `${rows.length} responses`),
    el('div', { class: 'side' }, rows.map((row, at) => el('article', { class: 'card' },
      el('header', {}, mark(row.right), ' ', el('a', { href: link(placeOf(row, { id: row.id })) }, shown(row.id)),
        el('span', { class: 'faint' }, ` reward ${num(row.reward)} · ${num(row.tokens)} tokens · ${row.stop ?? ''}`)),
      details[at].turns.map((turn) => [block(turn.text), turn.results.map((result) =>
        block(result.shown ?? '', `out ${result.ok ? '' : 'bad'}`))])))));
}

// Means of what was counted, over the right and over the wrong responses, widest difference first.
function apart(rows) {
  const right = rows.filter((row) => row.right === true);
  const wrong = rows.filter((row) => row.right === false);
  if (!right.length || !wrong.length) return el('p', { class: 'faint' }, 'The group does not hold both.');
  const mean = (some, key) => some.reduce((sum, row) => sum + (row[key] ?? 0), 0) / some.length;
  const lines = ['turns', 'calls', 'failed', 'malformed', 'repairs', 'lines', 'tokens', 'seconds', 'tool_s'].map((key) => {
    const [a, b] = [mean(right, key), mean(wrong, key)];
    return { key, a, b, gap: Math.abs(a - b) / (Math.abs(a) + Math.abs(b) || 1) };
  }).sort((x, y) => y.gap - x.gap);
  const stops = (some) => [...new Set(some.map((row) => row.stop))].join(', ');
  return el('table', {}, el('tr', {}, el('th', {}, 'mean of'), el('th', { class: 'n' }, `right (${right.length})`),
    el('th', { class: 'n' }, `wrong (${wrong.length})`)),
  lines.map(({ key, a, b, gap }) => el('tr', { class: gap > 0.2 ? 'strong' : 'faint' }, el('td', {}, key),
    el('td', { class: 'n' }, num(a)), el('td', { class: 'n' }, num(b)))),
  el('tr', {}, el('td', {}, 'stop'), el('td', {}, stops(right)), el('td', {}, stops(wrong))));
}
