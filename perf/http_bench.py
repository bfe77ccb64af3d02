"""CPU of the client for one request, with many in flight: our transport, and httpx's own pool.

    python perf/http_bench.py 64 512

A server in a process of its own holds the answers of a wave back until all of its requests are
there, then answers them at once; the second wave finds the connections of the first. A request and
its answer are as of POST /generate: 200 token ids, 130 with their log-probabilities. Prints a JSON
object for each number in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Annotated, Any

import httpx
import typer

from retool_mcore.transport import ManyInFlight

SENT = {"input_ids": list(range(200)), "sampling_params": {"temperature": 1.0}, "return_logprob": True}
ANSWER = json.dumps(
    {"output_ids": list(range(130)), "meta_info": {"output_token_logprobs": [[-0.5, i, None] for i in range(130)]}}
).encode()
WAVES = 2


def bench(in_flight: Annotated[list[int], typer.Argument(min=1)]) -> None:
    for each in in_flight:
        ours = measured(each, ManyInFlight())
        httpxs = measured(each, httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None)))
        typer.echo(json.dumps({"in_flight": each, "ours_cpu_ms": ours, "httpx_cpu_ms": httpxs}))


def measured(in_flight: int, transport: httpx.AsyncBaseTransport) -> float:
    """CPU milliseconds of this process for one request."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, in_flight), daemon=True)
    server.start()
    seconds = asyncio.run(waves(f"http://127.0.0.1:{here.recv()}", transport, in_flight))
    server.terminate()
    server.join()
    return round(1000 * seconds / (WAVES * in_flight), 2)


async def waves(url: str, transport: httpx.AsyncBaseTransport, in_flight: int) -> float:
    async def one() -> Any:
        return (await client.post("/generate", json=SENT)).json()

    async with httpx.AsyncClient(base_url=url, transport=transport, timeout=None) as client:
        before = time.process_time()
        for _ in range(WAVES):
            await asyncio.gather(*(one() for _ in range(in_flight)))
        return time.process_time() - before


def serve(told: Connection, in_flight: int) -> None:
    """Tell the port, then answer for ever."""

    async def run() -> None:
        there = asyncio.Barrier(in_flight)

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError):  # the client has hung up
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    await reader.readexactly(int(length.split(b":")[1]))
                    await there.wait()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
                    await writer.drain()

        server = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=2 * in_flight)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    typer.run(bench)
