'use strict';
// Filters the rows of a table by the filter's text, which clicks on histogram bars also edit.

// Parses "stop:length calls>1 word": conditions on columns; everything else is a text search.
const FIELDS = { reward: 'reward', stop: 'stop', turns: 'turns', calls: 'calls', failed: 'failed', repairs: 'repairs',
  malformed: 'malformed', tokens: 'tokens', seconds: 'seconds', stale: 'stale', truth: 'truth', extracted: 'extracted',
  group: 'group', id: 'id', right: 'right', lines: 'lines', errors: 'errors', gap: 'gap', step: 'step', noted: 'noted' };

function parseFilter(text) {
  const conditions = [];
  const words = [];
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const match = /^([a-z]+)(:|=|>=|<=|>|<)(.+)$/.exec(word);
    if (match && FIELDS[match[1]]) conditions.push({ field: FIELDS[match[1]], sign: match[2], value: match[3] });
    else words.push(word.toLowerCase());
  }
  return { conditions, words };
}

function meets(row, { field, sign, value }) {
  if (field === 'noted') return (noteOf(row) ? 'yes' : 'no') === value.toLowerCase();
  const have = row[field];
  if (field === 'right') return (have === null ? 'unknown' : have ? 'yes' : 'no') === value.toLowerCase();
  if (sign === ':' || sign === '=') {
    return typeof have === 'number' ? have === Number(value) : String(have ?? '').toLowerCase().includes(value.toLowerCase());
  }
  if (have === null || have === undefined) return false;
  const number = Number(value);
  return { '>': have > number, '<': have < number, '>=': have >= number, '<=': have <= number }[sign];
}

async function containsText(row, words) {
  const short = `${row.id} ${row.problem ?? ''} ${row.truth ?? ''} ${row.extracted ?? ''} ${row.stop ?? ''}`.toLowerCase();
  if (words.every((word) => short.includes(word))) return true;
  const one = await detail(row);
  const turns = one.turns.map((turn) => [turn.text, ...turn.results.map((result) => result.shown ?? '')].join('\n'));
  const whole = `${short} ${one.prompt ?? ''} ${turns.join('\n')}`.toLowerCase();
  return words.every((word) => whole.includes(word));
}

// The bins of a histogram: [label, condition for the filter, predicate on a row].
const HISTOGRAMS = [['outcome', outcomes], ['reward', some('reward')], ['calls', some('calls')], ['errors', kinds],
  ['tokens', some('tokens')], ['seconds', some('seconds')], ['gap', some('gap')]];
const TITLES = { gap: 'largest mismatch, nats', errors: 'errors by kind', seconds: 'seconds', tokens: 'tokens' };
const BINS = 12;

function outcomes(rows) {
  return [['✓ right', 'right:yes', (row) => row.right === true], ['✗ wrong', 'right:no', (row) => row.right === false],
    ['unknown', 'right:unknown', (row) => row.right === null]].filter(([, , has]) => rows.some(has));
}

function kinds(rows) {
  const count = new Map();
  for (const row of rows) for (const kind of (row.errors ?? '').split(' ').filter(Boolean)) count.set(kind, (count.get(kind) ?? 0) + 1);
  const names = [...count].sort((a, b) => b[1] - a[1]).slice(0, BINS).map(([name]) => name);
  const bins = names.map((name) => [name, `errors:${name}`, (row) => (row.errors ?? '').split(' ').includes(name)]);
  return bins.length === 1 && count.get(names[0]) < rows.length ? [['none', 'errors=', (row) => !row.errors], ...bins] : bins;
}

function some(field) {
  return (rows) => {
    const values = rows.map((row) => row[field]).filter((value) => value !== null && value !== undefined);
    const own = [...new Set(values)].sort((a, b) => a - b);
    if (own.length <= BINS) return own.map((value) => [num(value), `${field}:${value}`, (row) => row[field] === value]);
    const [low, high] = [own[0], own[own.length - 1]];
    const wide = (high - low) / BINS;
    const edge = (at) => (at === BINS ? high : Number((low + at * wide).toPrecision(4)));
    return Array.from({ length: BINS }, (_, at) => {
      const last = at === BINS - 1;
      const conditions = `${at ? `${field}>=${edge(at)} ` : ''}${last ? '' : `${field}<${edge(at + 1)}`}`.trim();
      return [`${num(edge(at))} to ${num(edge(at + 1))}`, conditions,
        (row) => row[field] !== null && row[field] !== undefined && (!at || row[field] >= edge(at)) && (last || row[field] < edge(at + 1))];
    });
  };
}

// Draws bars of all rows, with the filtered rows in front. Leaves out histograms with only one bar.
function histograms(all, passing, again) {
  const search = document.getElementById('search');
  const figures = HISTOGRAMS.map(([field, binsOf]) => {
    const bins = binsOf(all).map(([label, condition, has]) => ({ label, condition, all: all.filter(has).length, passing: passing.filter(has).length }));
    if (bins.filter((bin) => bin.all).length < 2) return '';
    const most = Math.max(...bins.map((bin) => bin.all));
    return el('figure', { class: 'histogram', 'data-field': field }, el('figcaption', {}, TITLES[field] ?? field),
      el('div', { class: 'bins' }, bins.map((bin) => {
        const chosen = bin.condition.split(' ').every((part) => search.value.split(/\s+/).includes(part));
        return el('button', { type: 'button', class: 'bin', 'aria-pressed': String(chosen),
          title: `${bin.label}: ${num(bin.passing)} of ${num(bin.all)}`, 'aria-label': `${field} ${bin.label}, ${bin.all}`,
          onclick: () => { toggle(search, field, chosen ? '' : bin.condition); again(); } },
        el('i', { class: 'whole', style: `height:${(44 * bin.all) / most}px` }), el('i', { style: `height:${(44 * bin.passing) / most}px` }),
        el('span', {}, bins.length <= 4 ? bin.label : ''));
      })), el('p', { class: 'ends' }, bins.length > 4 ? [el('span', {}, bins[0].label.split(' to ')[0]), el('span', {}, bins[bins.length - 1].label.split(' to ').pop())] : ''));
  });
  return el('div', { class: 'histograms noprint' }, figures);
}

// Replaces the filter's conditions on the field by ``condition``.
function toggle(search, field, condition) {
  const name = field === 'outcome' ? 'right' : field;
  const rest = search.value.split(/\s+/).filter((word) => word && !(new RegExp(`^${name}(:|=|>|<)`).test(word)));
  search.value = [...rest, condition].filter(Boolean).join(' ');
}
