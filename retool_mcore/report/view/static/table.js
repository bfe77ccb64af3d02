'use strict';
// Shows a step's trajectories as a table, and one group side by side.

const COLUMNS = [['right', ''], ['source', 'source'], ['step', 'step'], ['id', 'id'], ['problem', 'problem'], ['truth', 'truth'],
  ['extracted', 'extracted'], ['reward', 'reward'], ['stop', 'stop'], ['turns', 'turns'], ['calls', 'calls'], ['failed', 'failed'],
  ['errors', 'errors'], ['repairs', 'repairs'], ['tokens', 'tokens'], ['seconds', 's'], ['stale', 'stale'], ['gap', 'gap']];
const NUMBERS = new Set(['step', 'reward', 'turns', 'calls', 'failed', 'repairs', 'tokens', 'seconds', 'stale', 'gap']);
const LEFT_OUT_IF_EMPTY = new Set(['problem', 'failed', 'errors', 'repairs', 'stale', 'gap']);
// Fixed widths in pixels: an automatic layout would measure the cells again for every row that scrolls into view.
const WIDTHS = { right: 28, source: 110, step: 48, truth: 100, extracted: 100, stop: 84, errors: 130, reward: 64, turns: 54, gap: 78 };
const WIDTH = 62;
const PROBLEM_PX = 200;
const ROW_PX = 28;  // all rows have the same height, so that only visible rows need elements
const MORE_ROWS = 20;  // extra rows above and below the visible ones
const view = { sort: null, down: false, rows: [], chosen: 0, run: 0, table: null, marked: null, all: false, token: null };

function rowsOf(source, step, partition) {
  return store.index.rows.filter((row) => row.source === source && row.step === step && row.partition === partition);
}

function stepView(main, place) {
  view.all = false;
  const source = store.index.sources[place.run];
  const all = rowsOf(place.run, place.step, place.part);
  if (!all.length) {
    main.append(el('p', { class: 'empty' }, `No trajectory of step ${place.step} (${place.part}) is in this page.`));
    return;
  }
  const groups = inGroups(all);
  const dull = [...groups.values()].filter(taughtNothing).length;
  const judged = all.filter((row) => row.right !== null);
  main.append(el('h1', {}, source.kind === 'run' ? `Step ${place.step}, ${place.part}` : source.name),
    el('p', { class: 'facts' }, `${num(all.length)} trajectories in ${num(groups.size)} groups`,
      judged.length ? `; ${num(100 * judged.filter((row) => row.right).length / judged.length, 1)} % right` : '',
      dull ? `; ${dull} groups taught nothing (all rewards equal, marked ∅)` : ''));
  rowsTable(main, all, groups, new Set(['source', 'step']));
}

// All steps of all sources in one table, so that the filter and the histograms cover all of them.
function allView(main) {
  view.all = true;
  const all = store.index.rows;
  const many = store.index.sources.length > 1;
  main.append(el('h1', {}, 'All trajectories'), el('p', { class: 'facts' }, `${num(all.length)} trajectories of ${num(new Set(all.map((row) => `${row.source}/${row.step}`)).size)} steps`));
  rowsTable(main, all, inGroups(all), new Set(many ? [] : ['source']));
}

function rowsTable(main, all, groups, hidden) {
  const empty = (key) => all.every((row) => row[key] === null || row[key] === undefined || row[key] === '' || row[key] === 0);
  const columns = COLUMNS.filter(([key]) => !hidden.has(key) && !(LEFT_OUT_IF_EMPTY.has(key) && empty(key)));
  const bars = el('div', {});
  const box = el('div', { class: 'scroll' });
  const count = el('output', { id: 'count' });
  main.append(bars, el('p', { class: 'tools noprint' }, count,
    el('button', { type: 'button', id: 'export', class: 'more', onclick: () => exportRows(view.rows) }, 'export as JSONL'),
    el('button', { type: 'button', id: 'export-notes', class: 'more', onclick: exportNotes }, 'export notes'),
    el('span', { class: 'faint' }, '⊞ compare the group · ∅ the group taught nothing · ✎ your note')), box);
  fillTable({ bars, box, count, columns }, all, groups);
}

async function fillTable(parts, all, groups) {
  const mine = ++view.run;
  const filter = parseFilter(document.getElementById('search').value);
  let rows = all.filter((row) => filter.conditions.every((condition) => meets(row, condition)));
  if (filter.words.length) {
    const found = [];
    for (const row of rows) {
      if (await containsText(row, filter.words)) found.push(row);
      if (mine !== view.run) return;  // the filter has changed meanwhile
    }
    rows = found;
  }
  if (view.sort) {
    const key = view.sort;
    rows = [...rows].sort((a, b) => (view.down ? -1 : 1) * compare(a[key], b[key]));
  }
  Object.assign(view, { rows, chosen: Math.min(view.chosen, Math.max(rows.length - 1, 0)) });
  const again = () => fillTable(parts, all, groups);
  const { bars, box, count, columns } = parts;
  const heads = columns.map(([key, title]) => el('th', {
    class: NUMBERS.has(key) ? 'n' : '', 'aria-sort': view.sort === key ? (view.down ? 'descending' : 'ascending') : 'none' },
  el('button', { type: 'button', onclick: () => { sortBy(key); again(); } },
    `${title || '✓'}${view.sort === key ? (view.down ? ' ↓' : ' ↑') : ''}`)));
  const gaps = [el('tr', { class: 'gap' }, el('td', { colspan: columns.length })), el('tr', { class: 'gap' }, el('td', { colspan: columns.length }))];
  const body = el('tbody', {});
  const longest = rows.reduce((most, row) => Math.max(most, row.id.length), 0);
  const width = (key) => (key === 'id' ? Math.min(240, 52 + 7.5 * longest) : WIDTHS[key] ?? WIDTH);
  const least = columns.reduce((sum, [key]) => sum + (key === 'problem' ? PROBLEM_PX : width(key)), 0);
  const cols = el('colgroup', {}, columns.map(([key]) => el('col', { style: key === 'problem' ? '' : `width:${width(key)}px` })));
  const whole = el('table', { class: 'rows', style: `min-width:${least}px` }, cols, el('thead', {}, el('tr', {}, heads), gaps[0]), body, el('tfoot', {}, gaps[1]));
  bars.replaceChildren(histograms(all, rows, again));
  box.replaceChildren(whole, rows.length ? '' : el('p', { class: 'empty' }, 'No trajectory matches the filter.'));
  count.replaceChildren(`${rows.length < all.length ? `${num(rows.length)} of ` : ''}${num(all.length)} shown`);
  view.table = { body, gaps, groups, columns, box, first: -1, last: -1 };
  view.refresh = again;
  drawRows();
  if (box.isConnected && view.chosen > 0) choose(view.chosen);
  box.dataset.ready = String(rows.length);
}

// Creates the visible rows and MORE_ROWS around them; spacers have the height of the other rows.
function drawRows() {
  const table = view.table;
  if (!table) return;
  if (!table.measured && table.body.isConnected) {
    table.measured = true;
    table.box.classList.toggle('wide', table.body.parentElement.scrollWidth > table.box.clientWidth + 1);
  }
  const above = table.body.isConnected ? -table.gaps[0].getBoundingClientRect().top : 0;
  const from = Math.max(0, Math.floor(above / ROW_PX));
  const to = Math.min(view.rows.length, Math.ceil((above + window.innerHeight) / ROW_PX) + 1);
  const near = MORE_ROWS / 2;  // a few rows per frame instead of many at once
  const enoughAbove = table.first === 0 || from >= table.first + near;
  const enoughBelow = table.last === view.rows.length || to <= table.last - near;
  if (table.first >= 0 && enoughAbove && enoughBelow) return;
  const first = Math.max(0, Math.min(from, view.rows.length) - MORE_ROWS);
  const last = Math.min(view.rows.length, to + MORE_ROWS);
  const made = new Map([...table.body.children].map((line) => [Number(line.dataset.number), line]));
  for (const [number, line] of made) if (number < first || number >= last) line.remove();
  const lines = (low, high) => view.rows.slice(low, high).map((row, at) => tableRow(row, low + at, table));
  if (table.first < 0 || first >= table.last || last <= table.first) table.body.replaceChildren(...lines(first, last));
  else {
    table.body.prepend(...lines(first, Math.max(first, table.first)));
    table.body.append(...lines(Math.min(last, table.last), last));
  }
  Object.assign(table, { first, last });
  table.gaps[0].firstChild.style.height = `${table.first * ROW_PX}px`;
  table.gaps[1].firstChild.style.height = `${(view.rows.length - table.last) * ROW_PX}px`;
}

function sortBy(key) {
  view.down = view.sort === key ? !view.down : NUMBERS.has(key);
  Object.assign(view, { sort: key, chosen: 0 });
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  if (typeof a === 'string') return a.localeCompare(b, 'en', { numeric: true });
  return a < b ? -1 : 1;
}

function tableRow(row, number, { groups, columns }) {
  const dull = taughtNothing(groups.get(groupKey(row)));
  const cells = columns.map(([key]) => {
    if (key === 'right') return el('td', {}, el('span', { class: row.right ? 'right' : 'wrong' }, row.right === null ? '' : row.right ? '✓' : '✗'));
    if (key === 'id') {
      return el('td', { class: 'id' }, el('a', { href: link(placeOf(row, { id: row.id })) }, shown(row.id)), ' ',
        el('a', { class: 'faint', href: link(placeOf(row, { group: row.group })), title: 'compare its group' }, dull ? '∅' : '⊞'), noteOf(row) ? ' ✎' : '');
    }
    const value = key === 'source' ? store.index.sources[row.source].name : row[key];
    if (NUMBERS.has(key)) return el('td', { class: `n${value ? '' : ' faint'}` }, num(value));
    return el('td', { class: key, title: value }, value === null || value === undefined ? '–' : shown(value));
  });
  return el('tr', { class: `${dull ? 'dull' : ''}${number === view.chosen ? ' chosen' : ''}`, 'data-number': number, onclick: () => choose(number, false),
    ondblclick: () => { location.hash = link(placeOf(row, { id: row.id })); } }, cells);
}

function choose(number, scroll = true) {
  if (!view.table?.body.isConnected || !view.rows.length) return;
  view.chosen = Math.max(0, Math.min(number, view.rows.length - 1));
  if (scroll) {
    const at = view.table.gaps[0].getBoundingClientRect().top + window.scrollY + view.chosen * ROW_PX;
    if (at < window.scrollY + 120 || at > window.scrollY + window.innerHeight - 2 * ROW_PX) window.scrollTo(0, at - window.innerHeight / 2);
    drawRows();
  }
  for (const line of view.table.body.children) line.classList.toggle('chosen', Number(line.dataset.number) === view.chosen);
}

async function groupView(main, place) {
  const rows = rowsOf(place.run, place.step, place.part).filter((row) => row.group === place.group);
  if (!rows.length) {
    main.append(el('p', { class: 'empty' }, `Group ${place.group} of step ${place.step} is not in this page.`));
    return;
  }
  Object.assign(view, { rows, all: false });
  const details = await Promise.all(rows.map(detail));
  const tally = new Map();
  for (const row of rows) tally.set(row.extracted, [...(tally.get(row.extracted) ?? []), row]);
  const answers = [...tally].sort((a, b) => b[1].length - a[1].length).map(([answer, having]) =>
    el('tr', {}, el('td', { class: 'n' }, having.length),
      el('td', {}, el('span', { class: 'share', style: `width:${(120 * having.length) / rows.length}px` })),
      el('td', {}, answer === null ? el('span', { class: 'faint' }, 'no answer') : shown(answer)), el('td', {}, mark(having[0].right))));
  main.append(el('h1', {}, `Group ${place.group}`),
    taughtNothing(rows) ? el('p', { class: 'warn' }, '∅ All rewards are equal, so this group taught nothing.') : '',
    details[0].prompt ? block(details[0].prompt, 'prompt') : '',
    el('p', {}, 'Truth: ', el('b', {}, shown(rows[0].truth ?? 'not recorded'))),
    el('div', { class: 'two' }, el('section', {}, el('h2', {}, 'Answers'), el('table', { class: 'tally' }, answers)),
      el('section', {}, el('h2', {}, 'Right and wrong responses'), meansByOutcome(rows))),
    el('h2', {}, `${rows.length} responses`),
    el('div', { class: 'side' }, rows.map((row, at) => el('article', { class: 'card' },
      el('header', {}, mark(row.right), ' ', el('a', { href: link(placeOf(row, { id: row.id })) }, shown(row.id)),
        el('span', { class: 'faint' }, ` reward ${num(row.reward)} · ${num(row.tokens)} tokens · ${row.stop ?? ''}`)),
      details[at].turns.map((turn) => [block(turn.text), turn.results.map((result) =>
        block(result.shown ?? '', `out ${result.ok ? '' : 'bad'}`))])))));
}

// Means of the counts over right and over wrong responses, largest relative difference first.
function meansByOutcome(rows) {
  const right = rows.filter((row) => row.right === true);
  const wrong = rows.filter((row) => row.right === false);
  if (!right.length || !wrong.length) return el('p', { class: 'faint' }, 'The group does not have both.');
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
