'use strict';
// What the reader writes beside a trajectory: kept by the browser, and taken along as a file.

const NOTE = 'retool-note:';

function noteKey(row) {
  return `${NOTE}${store.index.sources[row.source].path}|${row.step}|${row.partition}|${row.id}`;
}

function kept(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    if (value === '') localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch { /* a browser that keeps nothing of files */ }
  return value ?? null;
}

// Read once: a table asks for the note of each row that comes into sight.
function noteOf(row) {
  row.note ??= kept(noteKey(row)) ?? '';
  return row.note;
}

function noteBox(row) {
  const box = el('textarea', { id: 'note-box', rows: 2, placeholder: 'Your note ( n ); kept in this browser', 'aria-label': 'Your note',
    oninput: () => {
      row.note = box.value.trim() === '' ? '' : box.value;
      kept(noteKey(row), row.note);
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

// The rows as JSON lines, whole: what was asked, said, run and shown.
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
