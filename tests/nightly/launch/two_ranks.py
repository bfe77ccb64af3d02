"""A rank of two nodes: it works with the other until $FAKE/end exists or $FAKE/killN kills it."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch.distributed.rendezvous import rendezvous

from retool_mcore.cli.common import guarded
from retool_mcore.train.sft import locked_by_rank_0, report_lost_rank

FOLDER = Path(os.environ["FAKE"])


@guarded
def main(config: str, settings: list[str]) -> None:
    del config, settings  # $FAKE has all that this rank does
    with report_lost_rank():
        store, rank, world = next(rendezvous("env://"))
        with locked_by_rank_0(store, rank, FOLDER / "runs" / "one"):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            with (FOLDER / "met").open("a", encoding="utf-8") as file:
                file.write(f"{rank}\n")
            ended = torch.zeros(1)
            while not ended:
                if (FOLDER / f"kill{rank}").exists():
                    (FOLDER / f"kill{rank}").unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.1)
                ended.fill_((FOLDER / "end").exists())
                dist.all_reduce(ended)
            dist.destroy_process_group()


if __name__ == "__main__":
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(main)
    alone()
