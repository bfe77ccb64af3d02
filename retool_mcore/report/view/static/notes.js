'use strict';
// The reader's notes on trajectories: stored by the browser, exported as a file.

const NOTE = 'retool-note:';

function noteKey(row) {
  return `${NOTE}${store.index.sources[row.source].path}|${row.step}|${row.partition}|${row.id}`;
}

// Stores a value in the browser, or removes it if it is ''. Without a value, returns the stored one.
function stored(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    if (value === '') localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch { /* no storage for pages opened from files */ }
  return value ?? null;
}

// Reads a note only once, because a table looks up the note of every row that scrolls into view.
function noteOf(row) {
  row.note ??= stored(noteKey(row)) ?? '';
  return row.note;
}

function noteBox(row) {
  const box = el('textarea', { id: 'note-box', rows: 2, placeholder: 'Your note ( n ); stored in this browser', 'aria-label': 'Your note',
    oninput: () => {
      row.note = box.value.trim() === '' ? '' : box.value;
      stored(noteKey(row), row.note);
    } });
  box.value = noteOf(row);
  return box;
}

function exportNotes() {
  const noted = store.index.rows.filter(noteOf);
  save('notes.jsonl', noted.map((row) => JSON.stringify({ ...named(row), right: row.right, problem: row.problem, note: noteOf(row) })));
}

function named(row) {
  const { name, path } = store.index.sources[row.source];
  return { source: name, path, step: row.step, partition: row.partition, id: row.id, group: row.group };
}

// The complete rows as JSON lines: prompt, turns, code and output.
async function exportRows(rows) {
  const lines = [];
  for (const row of rows) {
    const one = await detail(row);
    const turns = one.turns.map((turn) => ({ ...turn,
      results: turn.results.map((result) => ({ ...result, code: result.code.map(([, text]) => text).join('') })) }));
    lines.push(JSON.stringify({ ...named(row), right: row.right, reward: row.reward, truth: one.truth, extracted: one.extracted, stop: row.stop,
      tokens: row.tokens, errors: row.errors, gap: row.gap, prompt: one.prompt, turns, note: noteOf(row) || undefined }));
  }
  save('selection.jsonl', lines);
}

function save(name, lines) {
  const url = URL.createObjectURL(new Blob([lines.map((line) => `${line}\n`).join('')], { type: 'application/x-ndjson' }));
  el('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
