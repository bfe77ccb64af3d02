"""Writes the page of `retool view`: one self-contained HTML file with styles, scripts and data.

When it opens, the page decompresses the index: metrics, and one short row per trajectory. Texts and
tokens follow the scripts in gzipped base64 chunks. The page is usable while the browser still loads
these, and decompresses only the chunk in view.
"""

import base64
import gzip
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pygments.lexers.python import PythonLexer  # pyright: ignore[reportMissingTypeStubs]
from pygments.token import STANDARD_TYPES

from retool_mcore.data.chat import decode
from retool_mcore.data.tokenizer import from_pretrained
from retool_mcore.errors import ConfigError, DataError
from retool_mcore.report.panels import BEHAVIOUR, LEARNING, SPEED
from retool_mcore.report.view.sources import RecordRow, RecordSource
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.run.folder import replacing
from retool_mcore.run.metric_table import METRICS

STATIC = Path(__file__).parent / "static"
# Stop reasons after which the model does not see the results, or the error, of the last turn.
UNSEEN = (StopReason.NO_ROOM, StopReason.TOOL_TIME, StopReason.MALFORMED)
OURS = ("data", "dom", "notes", "filter", "run", "table", "compare", "trajectory", "tokens", "live", "main")
SCRIPTS = ("uPlot.iife.min.js", *(f"{name}.js" for name in OURS))
ERROR_NAME = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit|Warning))\b", re.MULTILINE)
CHUNK_TOKENS = 100_000
HIGHLIGHT_CHARS = 50_000  # longer code is not highlighted
_LEXER = PythonLexer(stripnl=False, ensurenl=False)
MAX_MILLINATS = 27_000  # twice this number is below the surrogates, which UTF-8 cannot encode


class Tokens:
    """Decodes token ids, each once. ``where``: the tokenizer's model, or "" if none was found."""

    def __init__(self, models: Iterable[str], chosen: Path | None = None) -> None:
        self.where, self._tokenizer, self._texts = "", None, dict[int, str]()
        if chosen is not None and not (chosen / "tokenizer_config.json").is_file():
            raise DataError(f"--tokenizer {chosen} has no tokenizer_config.json. Give a model's directory.")
        for model in (str(chosen),) if chosen else models:
            if (Path(model) / "tokenizer_config.json").is_file():
                self._tokenizer, self.where = _load(model), model
                return

    def text(self, ids: Sequence[int]) -> str | None:
        """Decode all ids to one text; None without a tokenizer."""
        return decode(self._tokenizer, ids) if self._tokenizer is not None else None

    def add(self, ids: Iterable[int]) -> None:
        """Add the texts of ``ids`` to ``table``."""
        if self._tokenizer is None:
            return
        for token in set(ids) - self._texts.keys():
            self._texts[token] = decode(self._tokenizer, [token], clean_up=False)

    @property
    def table(self) -> dict[int, str]:
        """The text of every id added so far; an incomplete character is U+FFFD."""
        return self._texts


def _load(model: str) -> Any:
    try:
        return from_pretrained(model)
    except (OSError, ValueError, KeyError, json.JSONDecodeError, ImportError) as error:
        raise DataError(f"the tokenizer of {model} cannot be read: {error}. Give another with --tokenizer.") from error


def highlighted(code: str) -> list[tuple[str, str]]:
    """Split Python code into (CSS class, text) pairs without markup. The texts join to the code."""
    if len(code) > HIGHLIGHT_CHARS:
        return [("", code)]
    pairs: list[tuple[str, str]] = []
    for kind, text in cast("Iterable[tuple[Any, str]]", _LEXER.get_tokens(code)):
        name = STANDARD_TYPES.get(kind, "")
        if pairs and pairs[-1][0] == name:
            pairs[-1] = (name, pairs[-1][1] + text)
        else:
            pairs.append((name, text))
    return pairs


@dataclass(frozen=True)
class Written:
    """Summary of a page: trajectories shown and found, and sources without tokenizer or tokens."""

    shown: int
    found: int
    without_tokenizer: list[str]
    without_tokens: list[str]  # evaluations of servers behind an API


def write_page(
    sources: Sequence[RecordSource],
    out: Path,
    *,
    steps: Sequence[int] = (),
    limit: int,
    tokenizer: Path | None = None,
    live: str = "",
) -> Written:
    """Write one page for ``sources``. Raises ConfigError when ``steps`` have no trajectory.

    ``limit``: maximum number of trajectories. ``live``: version of the page, which a served page
    compares with its server's (serve.py).
    """
    chosen = [[row for row in source.rows if not steps or row.step in steps] for source in sources]
    if steps and not any(chosen):
        have = sorted({row.step for source in sources for row in source.rows})
        raise ConfigError(
            f"--step {' '.join(map(str, steps))}: no trajectories were recorded. Recorded steps: {_ranges(have)}."
        )
    everything = [row for rows in chosen for row in rows]
    kept = {id(row) for row in sample(everything, limit)}
    index: dict[str, Any] = {
        "sources": [], "rows": [], "shown": len(kept), "found": len(everything), "steps": list(steps), "missing": [],
        "textual": [], "charts": {},
    }  # fmt: skip
    with replacing(out) as draft, draft.open("w", encoding="utf-8") as file:
        bodies = draft.with_suffix(".chunks")
        try:
            with bodies.open("w", encoding="ascii") as chunks:
                _fill(index, sources, [[row for row in rows if id(row) in kept] for rows in chosen], chunks, tokenizer)
            with bodies.open(encoding="ascii") as chunks:
                lines = (line.rstrip("\n") for line in chunks)
                file.writelines(_template().generate(**_parts(index), live=live, chunks=lines))
        finally:
            bodies.unlink(missing_ok=True)
    return Written(len(kept), len(everything), index["missing"], index["textual"])


def sample(rows: Sequence[RecordRow], limit: int) -> list[RecordRow]:
    """Choose at most ``limit`` rows, in original order: whole groups, proportionally by stratum.

    A stratum contains the groups of one folder, step, partition and outcome (all right, all wrong,
    mixed or unknown). If the limit allows, every stratum gets one group before any gets a second.
    The choice is deterministic.
    """
    if len(rows) <= limit:
        return list(rows)
    groups: dict[tuple[object, ...], list[RecordRow]] = defaultdict(list)
    for row in rows:
        groups[row.path.parent, row.step, row.partition, row.group].append(row)
    strata: dict[tuple[object, ...], list[list[RecordRow]]] = defaultdict(list)
    for key, members in groups.items():
        strata[(*key[:3], frozenset(row.right for row in members))].append(members)
    ranked: list[tuple[float, int, list[RecordRow]]] = []
    for stratum in strata.values():
        stratum.sort(key=_draw)
        for place, members in enumerate(stratum):
            ranked.append(((place + 0.5) / len(stratum) if place else 0.0, _draw(members), members))
    ranked.sort(key=lambda each: each[:2])
    chosen: set[int] = set()
    for _, _, members in ranked:
        if len(chosen) + len(members) <= limit:
            chosen.update(id(row) for row in members)
    if not chosen:  # not even one group fits
        chosen.update(id(row) for row in ranked[0][2][:limit])
    return [row for row in rows if id(row) in chosen]


def _draw(members: list[RecordRow]) -> int:
    return zlib.crc32(f"{members[0].step}/{members[0].group}".encode())


def _fill(
    index: dict[str, Any],
    sources: Sequence[RecordSource],
    rows: list[list[RecordRow]],
    chunks: Any,
    tokenizer: Path | None,
) -> None:
    number = 0
    for which, (source, chosen) in enumerate(zip(sources, rows, strict=True)):
        tokens = Tokens(source.models, tokenizer)
        any_tokens = False
        for records in _batches(chosen):
            any_tokens = any_tokens or any(_ids(record) for _, record in records)
            for place, (row, record) in enumerate(records):
                index["rows"].append({"source": which, "chunk": number, "place": place, **_summary(row, record)})
            chunks.write(pack([_detail(record, tokens) for _, record in records]) + "\n")
            number += 1
        if chosen and not any_tokens:
            index["textual"].append(source.name)
        elif chosen and not tokens.where:
            index["missing"].append(source.name)
        names = sorted({name for row in source.metrics for name in row} - {"step", "unix_s"})
        index["charts"] |= {name: chart_of(name) for name in names}
        index["sources"].append(
            {
                "name": source.name, "kind": source.kind, "path": str(source.path), "tokenizer": tokens.where,
                "why": source.why, "steps": [row["step"] for row in source.metrics],
                "curves": {name: [_finite(row.get(name)) for row in source.metrics] for name in names},
                "events": source.events, "texts": tokens.table,
            }
        )  # fmt: skip


def chart_of(metric: str) -> dict[str, Any]:
    """Return title, unit, meaning and axis of a metric's chart, as in reports if they have it.

    ``zero``: whether the axis includes 0; None: only if no value is negative. ``least``: minimum
    range of the axis.
    """
    listed = {name: facts for section in METRICS.values() for name, facts in section.items()}
    unit, meaning = next((facts for name, facts in listed.items() if fnmatchcase(metric, name)), ("", ""))
    for panel in (*LEARNING, *BEHAVIOUR, *SPEED):
        for name, word in panel.lines:
            if name == metric:
                title = f"{panel.title}, {word}" if word else panel.title
                axis = {"zero": panel.from_zero, "least": panel.least}
                return {"title": title, "unit": panel.unit, "meaning": meaning, **axis}
    return {"title": metric, "unit": unit, "meaning": meaning, "zero": None, "least": 0.0}


def _batches(rows: Sequence[RecordRow]) -> Generator[list[tuple[RecordRow, dict[str, Any]]]]:
    """Yield batches of rows with records: one step and partition, about CHUNK_TOKENS tokens."""
    for _, members in groupby(sorted(rows, key=_order), key=lambda row: (row.step, row.partition)):
        batch: list[tuple[RecordRow, dict[str, Any]]] = []
        size = 0
        for row in members:
            record = row.load()
            batch.append((row, record))
            size += len(_ids(record))
            if size >= CHUNK_TOKENS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def _ids(record: dict[str, Any]) -> list[int]:
    """Return the response's token ids; empty if it came from an API, which returns only text."""
    return record.get("response_ids") or []


def _order(row: RecordRow) -> tuple[int, str, list[tuple[int, str]], str]:
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in row.group.split("-")]
    return row.step, row.partition, parts, row.id


def _summary(row: RecordRow, record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a trajectory that the tables show."""
    behavior: dict[str, Any] = record.get("behavior") or {}
    turns = record["turns"]
    results = [result for turn in turns for result in turn.get("results") or ()]
    sampled = [version for version in record.get("versions") or () if version >= 0]
    prompt = record.get("prompt")
    return {
        "id": row.id, "step": row.step, "partition": row.partition, "group": row.group, "right": row.right,
        "reward": _finite(row.reward),
        "truth": _short(record.get("truth")), "extracted": _short(record.get("extracted")),
        "stop": record.get("stop_reason"), "turns": len(turns), "calls": len(results),
        "failed": sum(not result.get("ok") for result in results),
        "repairs": sum(len(turn.get("repairs") or ()) for turn in turns),
        "malformed": sum(turn.get("kind") == "malformed" for turn in turns),
        "errors": " ".join(_errors(turns, behavior)) or None, "gap": _largest_gap(record),
        "lines": behavior.get("code_lines"), "tokens": len(_ids(record)) or None,
        "seconds": _finite(record.get("wall_s")), "tool_s": _finite(sum(turn.get("tool_s") or 0.0 for turn in turns)),
        "stale": row.step - 1 - min(sampled) if row.partition == "train" and sampled and row.step else None,
        "problem": _question(prompt) if isinstance(prompt, str) else None,
    }  # fmt: skip


def _errors(turns: Sequence[dict[str, Any]], behavior: dict[str, Any]) -> list[str]:
    """Return the distinct kinds of errors: malformed calls and failed calls."""
    errors = [f"malformed/{kind}" for kind in behavior.get("malformed") or ()]
    if not errors and any(turn.get("kind") == "malformed" for turn in turns):
        errors = ["malformed"]
    for turn in turns:
        for result in turn.get("results") or ():
            if not result.get("ok"):
                names = ERROR_NAME.findall(str(result.get("shown") or ""))
                status = str(result.get("status") or "failed").replace(" ", "_")
                errors.append(names[-1] if names and status in ("finished", "failed") else status)
    return sorted(set(errors))


def _largest_gap(record: dict[str, Any]) -> float | None:
    """Return the largest log-prob gap between engine and actor on a sampled token, in nats."""
    engine, actor = record.get("logprobs"), record.get("actor_logprobs")
    if not engine or not actor:
        return None
    gaps = [abs(a - e) for a, e in zip(actor, engine, strict=True) if e]  # 0: not sampled
    return _finite(round(max(gaps, default=0.0), 6))


def _detail(record: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
    """Return the data for the view of one trajectory."""
    ids = _ids(record)
    tokens.add(ids)
    prompt = record.get("prompt")
    if not isinstance(prompt, str):  # a file of `retool rollout` has the prompt's number instead
        prompt = tokens.text(record["prompt_ids"]) if record.get("prompt_ids") else None
    engine, actor = record.get("logprobs"), record.get("actor_logprobs")
    gap = [a - e for a, e in zip(actor, engine, strict=True)] if actor and engine else None
    turns = [
        {
            **turn,
            "unseen": turn is record["turns"][-1] and record.get("stop_reason") in UNSEEN,
            "results": [
                {**result, "code": highlighted(result.get("code") or "")} for result in turn.get("results") or ()
            ],
        }
        for turn in record["turns"]
    ]
    return {
        "prompt": prompt, "prompt_tokens": len(record.get("prompt_ids") or ()) or None, "turns": turns, "ids": ids,
        "mask": _runs(record.get("loss_mask")), "versions": _runs(record.get("versions")),
        "logprobs": millinats(engine) if engine else None, "gap": millinats(gap) if gap else None,
        "advantage": record.get("advantage"), "truth": record.get("truth"), "extracted": record.get("extracted"),
        "drop_error": record.get("drop_error"), "reward_info": record.get("reward_info"),
        "started": record.get("started_unix_s"), "wall_s": record.get("wall_s"),
    }  # fmt: skip


def millinats(values: Sequence[float]) -> str:
    """Encode values [T] as one character each, in 1/1000 nat, to keep large pages small.

    A value of n millinats becomes the character U+005D + 2 n for n >= 0, and U+005D - 2 n - 1 for
    n < 0. Most values are near 0 and take one byte in UTF-8. "#" is a value that is not finite.
    Values are clamped to +-27 nats. static/data.js decodes the text.
    """
    letters: list[str] = []
    for value in values:
        if not math.isfinite(value):
            letters.append("#")
            continue
        count = max(-MAX_MILLINATS, min(MAX_MILLINATS, round(1000 * value)))
        letters.append(chr(0x5D + (2 * count if count >= 0 else -2 * count - 1)))
    return "".join(letters)


def pack(value: Any) -> str:
    """Encode as JSON, gzip and base64, so that a model's text cannot become markup."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # JavaScript's JSON has no NaN
        text = json.dumps(_without_nan(value), ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)).decode("ascii")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in cast("Sequence[Any]", value)]
    return _finite(value) if isinstance(value, float) else value


def _runs(values: list[int] | None) -> list[tuple[int, int]] | None:
    """Run-length encode to (value, count) pairs."""
    return [(value, len(list(same))) for value, same in groupby(values)] if values is not None else None


def _question(prompt: str) -> str:
    """Return the last user message, without the chat template's markers."""
    question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return _short(question.strip()) or ""


def _short(value: Any, chars: int = 240) -> str | None:
    text = None if value is None else str(value)
    return text if text is None or len(text) <= chars else text[: chars - 1] + "…"


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _ranges(steps: Sequence[int]) -> str:
    runs: Counter[int] = Counter(step - place for place, step in enumerate(steps))
    starts = {base: next(step for place, step in enumerate(steps) if step - place == base) for base in runs}
    return ", ".join(
        f"{starts[base]} to {starts[base] + count - 1}" if count > 1 else str(starts[base])
        for base, count in runs.items()
    ) or "no steps"  # fmt: skip


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("retool_mcore.report.view", "static"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja")


def _parts(index: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables. Only our own static files bypass its escaping."""
    styles = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "view.css"))
    scripts = [Markup((STATIC / name).read_text(encoding="utf-8")) for name in SCRIPTS]
    notice = Markup((STATIC / "uPlot.LICENSE").read_text(encoding="utf-8").strip())
    title = ", ".join(source["name"] for source in index["sources"])
    return {"title": title, "styles": Markup(styles), "scripts": scripts, "notice": notice, "index": pack(index)}
