'use strict';
// Shows one trajectory: the prompt, its turns as cards, the interpreter's output, and a timeline.

async function trajectoryView(main, place) {
  const rows = rowsOf(place.run, place.step, place.part);
  const row = rows.find((each) => each.id === place.id);
  if (!row) {
    main.append(el('p', { class: 'empty' }, `Trajectory ${place.id} of step ${place.step} is not in this page.`));
    return;
  }
  if (!view.rows.includes(row)) Object.assign(view, { rows, all: false });
  view.chosen = view.rows.indexOf(row);
  if (place.view === 'across') { acrossView(main, row); return; }
  if (place.with !== undefined && rowOf(place.with)) { await compareView(main, row, rowOf(place.with)); return; }
  const one = await detail(row);
  const facts = [['truth', row.truth], ['extracted', row.extracted], ['reward', num(row.reward)], ['stop', row.stop],
    ['tokens', num(row.tokens)], ['seconds', num(row.seconds)], ['stale', num(row.stale)],
    ['advantage', Array.isArray(one.advantage) ? 'by token' : num(one.advantage, 3)]];
  main.append(el('h1', {}, mark(row.right), ' ', shown(row.id)),
    el('p', { class: 'facts' }, facts.map(([name, value]) => el('span', {}, el('i', {}, name), ' ', shown(value ?? '–'))),
      el('a', { href: link(placeOf(row, { group: row.group })) }, 'its group'), comparisons(row),
      el('button', { type: 'button', class: 'more', id: 'switch', onclick: () => go({ ...place, view: place.view === 'tokens' ? null : 'tokens' }) },
        place.view === 'tokens' ? 'show turns' : 'show tokens')),
    one.drop_error ? el('p', { class: 'warn' }, `Dropped: `, shown(one.drop_error)) : '', timeLine(one), noteBox(row));
  if (place.view === 'tokens') tokenView(main, row, one, place);
  else turnCards(main, one);
}

function timeLine(one) {
  const parts = one.turns.flatMap((turn, number) => [
    { what: 'engine', seconds: turn.engine_s ?? 0, number }, { what: 'tool', seconds: turn.tool_s ?? 0, number }]);
  const busy = parts.reduce((sum, part) => sum + part.seconds, 0);
  const whole = Math.max(one.wall_s ?? busy, busy);
  if (!whole) return '';
  const sum = (what) => parts.filter((part) => part.what === what).reduce((all, part) => all + part.seconds, 0);
  return el('figure', { class: 'time' }, el('div', { class: 'track' }, parts.filter((part) => part.seconds).map((part) =>
    el('a', { class: part.what, href: `#turn-${part.number}`, style: `width:${(100 * part.seconds) / whole}%`,
      title: `turn ${part.number + 1}, ${part.what}: ${num(part.seconds, 3)} s`,
      onclick: (event) => { event.preventDefault(); document.getElementById(`turn-${part.number}`)?.scrollIntoView(); } }))),
  el('figcaption', { class: 'faint' }, el('i', { class: 'dot engine' }), `engine ${num(sum('engine'))} s `,
    el('i', { class: 'dot tool' }), `tool ${num(sum('tool'))} s · ${num(whole)} s in total`));
}

function turnCards(main, one) {
  main.append(el('article', { class: 'card context' }, el('header', {}, 'prompt', el('span', { class: 'faint' },
    one.ids.length ? ` ${num(one.prompt_tokens)} tokens, masked` : '')),
  one.prompt ? block(one.prompt) : el('p', { class: 'faint' }, one.ids.length ? 'The file does not contain the text of the prompt, and no tokenizer was found.'
    : 'The file does not contain the text of the prompt, because the model was sampled through an API.')));
  const mask = spread(one.mask);
  one.turns.forEach((turn, number) => {
    const trained = mask?.slice(turn.start, turn.start + turn.tokens).filter(Boolean).length;
    const masked = mask && trained === 0 && turn.tokens > 0;
    main.append(el('article', { class: `card model${masked ? ' masked' : ''}`, id: `turn-${number}` },
      el('header', {}, `turn ${number + 1}`, el('span', { class: 'faint' },
        ` ${turn.kind ?? ''}${one.ids.length ? ` · ${num(turn.tokens)} tokens` : ''}${masked ? ', masked' : ''} · ${num(turn.engine_s)} s`)),
      turnText(turn), turn.error ? el('p', { class: 'warn' }, `malformed call${turn.unseen ? ' (the model did not see this error)' : ''}: `, shown(turn.error)) : '',
      repairs(turn), (turn.kind === 'cut' ? el('p', { class: 'cut' }, 'cut off here: the turn is incomplete') : '')),
    ...turn.results.map((result) => resultCard(result, turn)));
  });
  if (one.reward_info) {
    main.append(el('details', {}, el('summary', {}, 'reward parts'), block(JSON.stringify(one.reward_info, null, 1))));
  }
}

// A turn's text. The raw text of an executed call is collapsed, because the card below shows its code.
function turnText(turn) {
  const call = turn.results.length && !turn.repairs?.length ? callPart(turn.text) : turn.text;
  if (call === turn.text) return block(turn.text);
  return [block(turn.text.slice(0, turn.text.length - call.length)), el('details', {}, el('summary', { class: 'faint' }, 'raw text of the call'), block(call))];
}

// "Before" is the model's text, in the card above; "after" is the executed code.
function repairs(turn) {
  if (!turn.repairs?.length) return '';
  return el('div', { class: 'repair' }, el('b', {}, 'repaired: '), shown(turn.repairs.join(', ')),
    el('div', { class: 'two' }, el('div', {}, el('i', {}, 'before'), block(callPart(turn.text))),
      el('div', {}, el('i', {}, 'after'), turn.results.map((result) => code(result.code)))));
}

function callPart(text) {
  const at = Math.max(text.lastIndexOf('<tool_call>'), text.lastIndexOf('<code>'), text.lastIndexOf('```'));
  return at > 0 ? text.slice(at) : text;
}

function code(pairs) {
  return el('pre', { class: 'text code', dir: 'ltr' }, pairs.map(([kind, text]) => (kind ? el('span', { class: kind }, shown(text)) : shown(text))));
}

function resultCard(result, turn) {
  const facts = `${result.status ?? (result.ok ? 'finished' : 'failed')} · ran ${num(result.run_s)} s · queued ${num(result.queue_s)} s`;
  const pieces = String(result.shown ?? '').split(/(\[\.\.\. (?:about )?\d+ tokens cut here \.\.\.\])/);
  const output = result.cut_tokens > 0 && pieces.length === 3
    ? [block(pieces[0], 'out'), el('p', { class: 'cut' }, `${num(result.cut_tokens)} tokens were cut here. The model did not see them, and no file has them`), block(pieces[2], 'out')]
    : block(result.shown ?? '', `out${result.ok ? '' : ' bad'}`);
  return el('article', { class: 'card tool' }, el('header', {}, 'interpreter',
    el('span', { class: result.ok ? 'faint' : 'wrong' }, ` ${facts}`)),
  turn.repairs?.length ? '' : code(result.code), el('div', { class: 'masked' }, el('i', { class: 'faint' }, turn.unseen ? 'not shown to the model, because the trajectory ended first' : 'shown to the model, masked'), output));
}
