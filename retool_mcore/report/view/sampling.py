"""Stratified sampling of trajectories when there are more than a page's limit."""

import zlib
from collections import defaultdict
from collections.abc import Sequence

from retool_mcore.report.view.sources import RecordRow


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
