'use strict';
// A page from `retool view --serve` asks its server whether the run has gone on, and then loads itself anew.

const LIVE_EVERY_MS = 2000;

async function follow() {
  try {
    const answer = await fetch('version', { cache: 'no-store' });
    const newest = answer.ok ? await answer.text() : document.body.dataset.live;
    const writing = document.activeElement?.matches('textarea, input');
    if (newest !== document.body.dataset.live && !writing) { location.reload(); return; }
  } catch { /* the server has ended: the page stays as it is */ }
  setTimeout(follow, LIVE_EVERY_MS);
}

if (document.body.dataset.live) setTimeout(follow, LIVE_EVERY_MS);
