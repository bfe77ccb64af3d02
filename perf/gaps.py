"""Finds the causes of a device's idle gaps in a trace of torch's profiler.

    python perf/gaps.py trace.json.gz

A gap is time in which nothing runs on any stream of the device. A kernel or a copy ends it, whose
correlation id leads to the call that launched it. If that call returned before the gap started, the
kernel was already queued, and the device itself caused the gap. Otherwise the device waited for the
host. The cause then names the host's phase (the outermost ``record_function`` of the main thread),
what the host did until the launch, and the call that had emptied the queue by waiting for the
device.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Event = dict[str, Any]  # an event of a Chrome trace; "ts" and "dur" are in microseconds

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALL, OP, RANGE = ("cuda_runtime", "cuda_driver"), "cpu_op", "user_annotation"
GARBAGE = "garbage collection"  # prefix of the name of its range
PROFILER = r"Buffer (Request|Flush)"  # events of category "overhead", which have no thread
SEVERAL, UNKNOWN, DEVICE = "several ops", "launch not recorded", "device"
# Ranges that are not phases of a step: torch creates them around single calls.
NO_PHASE = rf"nccl:|gloo:|Optimizer\.|ProfilerStep|{GARBAGE}"
WAITS = r"Synchronize|Memcpy"  # calls that may wait for the device
# Calls that may block. Any other call counts as part of its op, unless it takes longer than
# SLOW_US, more than adding to a queue takes.
BLOCKS = rf"{WAITS}|Malloc|Free|MemCreate|MemMap|MemUnmap|MemRelease|HostAlloc|HostRegister|Load"
SLOW_US = 50.0
SIZES = {"under 5 us": 5.0, "5 to 50 us": 50.0, "50 us to 1 ms": 1e3, "over 1 ms": float("inf")}
TOP = 12  # causes to list; the others share one line


@dataclass(frozen=True)
class Gap:
    """An idle gap. ``start`` and ``end`` are microseconds of the trace's clock."""

    start: float
    end: float
    cause: str
    phase: str  # the host's phase and its number; DEVICE if the kernel was already queued


@dataclass(frozen=True)
class Frame:
    """An event of the host and the event around it."""

    event: Event
    outer: Frame | None


def read_trace(path: Path) -> list[Event]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)["traceEvents"]


def on_device(events: Iterable[Event]) -> list[Event]:
    """The events of the device, sorted by start."""
    return sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"])


def gaps(events: Sequence[Event]) -> list[Gap]:
    """Every gap from the first kernel to the last, with its cause."""
    host = Host(events)
    launches: dict[Any, Event] = {}
    for event in events:
        if event.get("cat") in CALL:
            # A runtime call and the driver call inside it can share an id. Keep the outer one,
            # which ends later.
            key = event.get("args", {}).get("correlation")
            if key not in launches or end_of(event) > end_of(launches[key]):
                launches[key] = event
    found = []
    for last, first in idle(on_device(events)):
        launch = launches.get(first.get("args", {}).get("correlation"))
        start, end = end_of(last), first["ts"]
        if launch is None:
            cause, phase = UNKNOWN, UNKNOWN
        elif end_of(launch) <= start:
            cause, phase = of_device(last, first), DEVICE
        else:
            cause, phase = host.cause(launch, start, min(end_of(launch), end), first["name"])
        found.append(Gap(start, end, cause, phase))
    return found


def idle(device: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """For each gap, the events before and after it. ``device`` is sorted by start."""
    last = device[0] if device else None
    for event in device:
        if last and event["ts"] > end_of(last):
            yield last, event
        if last is None or end_of(event) > end_of(last):
            last = event


def of_device(last: Event, first: Event) -> str:
    """The cause of a gap whose next kernel, ``first``, was already queued. Long gaps name it."""
    follows = "the next kernel of the stream" if stream_of(last) == stream_of(first) else "a kernel of another stream"
    named = f" ({first['name'][:40]})" if first["ts"] - end_of(last) > SLOW_US else ""
    return f"{DEVICE}: {follows}, queued{named}"


def end_of(event: Event) -> float:
    return event["ts"] + event.get("dur", 0.0)


def stream_of(event: Event) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def thread_of(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


class Host:
    """The activities of the process's threads, and the phases of its main thread."""

    def __init__(self, events: Iterable[Event]) -> None:
        by_thread: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
        profiler = []
        for event in events:
            if event.get("cat") in (*CALL, OP, RANGE):
                by_thread[thread_of(event)].append(event)
            elif event.get("cat") == "overhead" and re.search(PROFILER, event["name"]):
                profiler.append(event)
        self._profiler = Timeline(spans(profiler))
        # Without ops in the trace, it is unknown whether Python took the time.
        self._rest = "python" if any(event["cat"] == OP for own in by_thread.values() for event in own) else "host"
        self._threads, self._phases = defaultdict(Timeline), defaultdict(Timeline)
        for thread, own in by_thread.items():
            self._threads[thread] = Timeline(spans(own))
            self._phases[thread] = Timeline(phases(own))

    def cause(self, launch: Event, start: float, end: float, kernel: str) -> tuple[str, str]:
        """What the launching thread did from ``start`` until it launched ``kernel`` at ``end``.

        Returns the cause, which includes the phase's name, and the phase with its number. While the
        launching thread has no recorded activity, the main thread's counts: autograd's thread waits
        for it between two backward passes.
        """
        thread = thread_of(launch)
        main = (thread[0], thread[0])
        in_phase, doing = defaultdict[tuple[str, int], float](float), defaultdict[tuple[str, str], float](float)
        for begins, ends, frame in self._threads[thread].during(start, end):
            for part in [(begins, ends, frame)] if frame else self._threads[main].during(begins, ends):
                doing[activity(part[2])] += part[1] - part[0]
        for begins, ends, phase in self._phases[main].during(start, end):
            in_phase[phase or ("", 0)] += ends - begins
        what = most_of(doing)
        if sum(ends - begins for begins, ends, own in self._profiler.during(start, end) if own) > (end - start) / 2:
            what = "the profiler itself"
        elif not what:
            what = f"{self._rest} before {op_of(stack_of(self._threads[thread].at(launch['ts']))) or kernel[:40]}"
        waits = (wait_of(self._threads[each].at(start), start) for each in (thread, main))
        before = next((wait for wait in waits if wait), what)
        phase, number = max(in_phase, key=in_phase.__getitem__, default=("", 0))
        cause = (f"{phase}: " if phase else "") + what + (f", after {before}" if before != what else "")
        return cause, f"{phase} {number}" if phase else "no phase"


class Timeline:
    """Consecutive spans, each with a value: (start, end, value)."""

    def __init__(self, parts: Iterable[tuple[float, float, Any]] = ()) -> None:
        self._parts = list(parts)
        self._starts = [start for start, *_ in self._parts]

    def at(self, moment: float) -> Any:
        """The value at a moment, or None."""
        at = bisect_right(self._starts, moment) - 1
        return self._parts[at][2] if at >= 0 and moment < self._parts[at][1] else None

    def during(self, start: float, end: float) -> Iterator[tuple[float, float, Any]]:
        """Pieces that cover ``start`` to ``end``; the value is None between spans."""
        now, at = start, max(bisect_right(self._starts, start) - 1, 0)
        for begins, ends, what in (self._parts[index] for index in range(at, len(self._parts))):
            if begins >= end:
                break
            if ends > now:
                if begins > now:
                    yield now, begins, None
                yield max(begins, now), min(ends, end), what
                now = min(ends, end)
        if now < end:
            yield now, end, None


def spans(events: Iterable[Event]) -> Iterator[tuple[float, float, Frame]]:
    """Split one thread's time into pieces, each with its innermost event."""
    frame, now = None, 0.0
    for event in [*sorted(events, key=lambda event: (event["ts"], -event["dur"])), None]:
        until = event["ts"] if event else float("inf")
        while frame and end_of(frame.event) <= until:
            if end_of(frame.event) > now:
                yield now, end_of(frame.event), frame
                now = end_of(frame.event)
            frame = frame.outer
        if event is None:
            break
        if frame and until > now:
            yield now, until, frame
        frame, now = Frame(event, frame), max(now, until)


def phases(events: Iterable[Event]) -> Iterator[tuple[float, float, tuple[str, int]]]:
    """The outermost ranges of a thread, and the time before, between and after them.

    Each has a name and a number, which counts the ranges of that name.
    """
    ranges = sorted(
        (event for event in events if event["cat"] == RANGE and not re.match(NO_PHASE, event["name"])),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    count, now, last = Counter[str](), float("-inf"), ("", 0)
    for event in ranges:
        if event["ts"] >= now:
            count[event["name"]] += 1
            last = event["name"], count[event["name"]]
            yield now, event["ts"], (f"before {last[0]}", last[1])
            now = end_of(event)
            yield event["ts"], now, last
    if ranges:
        yield now, float("inf"), (f"after {last[0]}", last[1])


def stack_of(frame: Frame | None) -> list[Event]:
    """The events around the frame, from the outermost to its own."""
    return [*stack_of(frame.outer), frame.event] if frame else []


def activity(frame: Frame | None) -> tuple[str, str]:
    """Kind and name of a thread's activity.

    Garbage collection takes precedence, then a blocking call, then an op. ("", "") if there is
    none.
    """
    stack = stack_of(frame)
    for event in stack:
        if event["cat"] == RANGE and event["name"].startswith(GARBAGE):
            return GARBAGE, event["name"]
    for event in reversed(stack):
        if event["cat"] in CALL and (re.search(BLOCKS, event["name"]) or event["dur"] > SLOW_US):
            return "call", called(event, stack)
    op = op_of(stack)
    return ("op", op) if op else ("", "")


def wait_of(frame: Frame | None, start: float) -> str:
    """The call in which a thread waited for the device when a gap began at ``start``, or ""."""
    stack = stack_of(frame)
    for event in stack:
        if event["cat"] in CALL and event["ts"] < start and re.search(WAITS, event["name"]):
            return called(event, stack)
    return ""


def called(call: Event, stack: Sequence[Event]) -> str:
    op = op_of(stack)
    return f"{call['name']} in {op}" if op else call["name"]


def op_of(stack: Iterable[Event]) -> str:
    """The outermost op, or ""."""
    name = next((event["name"] for event in stack if event["cat"] == OP), "")
    return name.removeprefix("autograd::engine::evaluate_function: ")


def most_of(doing: Mapping[tuple[str, str], float]) -> str:
    """The longest name of the kind that took most time."""
    kinds = defaultdict[str, float](float)
    for (kind, _), us in doing.items():
        kinds[kind] += us
    most, us = max(kinds.items(), key=lambda each: each[1])
    name = max((each for each in doing if each[0] == most), key=doing.__getitem__)
    return SEVERAL if most == "op" and doing[name] < us / 2 else name[1]


def summarize_gaps(found: Iterable[Gap], top: int = TOP) -> dict[str, list[dict[str, Any]]]:
    """Seconds and counts by cause, by phase and by size. Each of the lists covers all gaps."""
    causes, by_phase = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    sizes = {name: list[float]() for name in SIZES}
    for gap in found:
        length = gap.end - gap.start
        causes[gap.cause].append(length)
        by_phase[gap.phase].append(length)
        sizes[next(name for name, below in SIZES.items() if length < below)].append(length)

    def ranked(by: Mapping[str, list[float]]) -> list[tuple[str, list[float]]]:
        found = sorted(by.items(), key=lambda each: -sum(each[1]))
        if rest := found[top:]:
            found[top:] = [(f"others ({len(rest)})", [length for _, lengths in rest for length in lengths])]
        return found

    def totals(lengths: list[float]) -> dict[str, Any]:
        return {"seconds": round(sum(lengths) / 1e6, 6), "count": len(lengths)}

    return {
        "gaps": [{"cause": cause, **totals(lengths)} for cause, lengths in ranked(causes)],
        "gap_phases": [{"phase": phase, **totals(lengths)} for phase, lengths in ranked(by_phase)],
        "gap_sizes": [{"size": size, **totals(lengths)} for size, lengths in sizes.items()],
    }


def main(
    trace: Annotated[Path, typer.Argument(help="a trace of torch's profiler, .json or .json.gz")],
    *,
    top: Annotated[int, typer.Option(min=1, help="number of causes to list")] = TOP,
) -> None:
    typer.echo(json.dumps(summarize_gaps(gaps(read_trace(trace)), top), indent=1))


if __name__ == "__main__":
    typer.run(main)
