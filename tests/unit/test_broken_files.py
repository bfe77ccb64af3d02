"""Files that a copy or an editor broke: one line names the file and what to do; names of files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from retool_mcore.config import SftConfig, load_config
from retool_mcore.config.files import parquet_files
from retool_mcore.data.files import read_rows, source_files
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.model.check import check_model

Change = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


@pytest.fixture
def model(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def edited(file: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda model: (model / file).write_bytes(change((model / file).read_bytes()))


def holding(file: str, text: str) -> Change:
    return lambda model: (model / file).write_text(text)


def without(file: str) -> Change:
    return lambda model: (model / file).unlink()


def second_shard_missing(model: Path) -> None:
    shards = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    (model / "model.safetensors").rename(model / shards[0])
    (model / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))


def test_broken_rows_are_reported_with_their_place(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"problem": [f"problem {n}" * 9 for n in range(900)]}), file, row_group_size=300)
    assert [index for index, _ in read_rows(file, ["problem"])] == list(range(900))
    data = file.read_bytes()
    third = len(data) // 2
    file.write_bytes(data[:third] + bytes(200) + data[third + 200 :])
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read.*: .*\. Make or copy the file again\.$"):
        list(read_rows(file, ["problem"]))
    file.unlink()
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read: No such file or directory$"):
        list(read_rows(file, ["problem"]))
    (tmp_path / "mine.csv").write_text("problem,answer\n2 + 2?,4\n")
    with pytest.raises(DataError, match=r"mine\.csv: not a parquet file\. Convert it with `retool data rl`"):
        list(read_rows(tmp_path / "mine.csv", ["prompt"]))


def changed(end: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """The first tensor whose name ends so, changed in the file of the weights."""

    def change(model: Path) -> None:
        held = load_file(model / "model.safetensors")
        name = next(name for name in held if name.endswith(end))
        held[name] = make(held[name]).contiguous()
        save_file(held, model / "model.safetensors")

    return change


def as_shards(model: Path, *, keep_whole: bool = False, swapped: bool = False) -> None:
    held = load_file(model / "model.safetensors")
    names = sorted(held)
    files = {name: "ab"[place % 2] + ".safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: held[name] for name in names if files[name] == file}, model / file)
    if swapped:
        files[names[0]], files[names[1]] = files[names[1]], files[names[0]]
    (model / INDEX).write_text(json.dumps({"weight_map": files}))
    if not keep_whole:
        (model / "model.safetensors").unlink()


def with_token_beyond(model: Path, *, added: bool) -> None:
    path = model / "tokenizer.json"
    values = json.loads(path.read_text())
    if added:
        values["added_tokens"][-1]["id"] = 512  # the embedding has rows 0 to 511
    else:
        values["model"]["vocab"]["word"] = 512
    path.write_text(json.dumps(values))


def index_of_one(model: Path) -> None:
    files = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": files}))


def fifo(model: Path) -> None:
    (model / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(model / "generation_config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edited("config.json", lambda text: text + b","), "config.json cannot be read as a model's config"),
        (without("config.json"), "model's configuration: No such file"),
        (edited("generation_config.json", lambda text: text + b","), "cannot be read as a model's sampling"),
        (edited("model.safetensors", lambda data: data[:-300]), "model.safetensors are missing or corrupt"),
        (second_shard_missing, "model-2-of-2.safetensors are missing or corrupt"),
        (holding(INDEX, '{"weight_map": ["a"]}'), "weight_map is not a JSON object"),
        (without("tokenizer.json"), "contains no tokenizer.json"),
        (edited("tokenizer.json", lambda data: data[:-300]), "has no readable tokenizer: tokenizer.json: "),
        (changed("embed_tokens.weight", lambda held: held[:-32]), "embed_tokens.weight of shape [480, 128], but the"),
        (changed("down_proj.weight", lambda held: held.T), "mlp.down_proj.weight of shape [384, 128]"),
        (changed("q_proj.weight", lambda held: held.to(torch.float8_e4m3fn)), "self_attn.q_proj.weight as F8_E4M3"),
        (partial(with_token_beyond, added=True), "has token id 512, but its embedding has only 512 rows"),
        (partial(with_token_beyond, added=False), "has token id 512, but its embedding has only 512 rows"),
        (partial(as_shards, keep_whole=True), "has both model.safetensors and an index (model.safetensors.index.json)"),
        (partial(as_shards, swapped=True), "which does not have it. Copy or fetch the index"),
        (holding("adapter_config.json", "{}"), "has adapter_config.json and full weights"),
        (as_shards, ""),
        (index_of_one, ""),
        # Files that would hang a start, or fill its memory.
        (fifo, "generation_config.json is not a regular file"),
        (lambda model: os.truncate(model / "tokenizer.json", 2**28 + 1), "tokenizer.json has 256 MiB. A configuration"),
        (holding("config.json", "[" * 200_000), "cannot be read as a model's configuration"),
        (
            edited("config.json", lambda text: text.replace(b'_attention_heads": 8', b'_attention_heads": "8; rm"')),
            "num_attention_heads = '8; rm', but it must be a positive",
        ),
        (holding("chat_template.jinja", LOOPS), "a loop over a range inside another"),
        (holding("chat_template.jinja", "{{ 'x' * 4000000000 }}"), "it has the number 4000000000"),
        (holding("chat_template.jinja", "{{ 9 ** 9 }}"), "it computes a power"),
    ],
)
def test_files_that_are_broken_or_hostile_or_do_not_belong_together_are_reported_before_training(
    change: Change, message: str, model: Path
):
    """They ended after minutes, with lines that named no tensor, or trained on other weights."""
    change(model)
    run = load_config(SftConfig, "configs/sft_tiny_cpu.toml", [f"model.path={model}"])
    refused = pytest.raises((CheckpointError, ConfigError), match=rf"^[^\n]*{re.escape(message)}[^\n]*$")
    with refused if message else nullcontext():
        check_model(run)
        load_tokenizer(str(model))


def test_a_folder_and_a_pattern_name_their_files_in_order_and_a_file_itself_but_no_hidden_ones(tmp_path: Path):
    files = [str(tmp_path / f"{name}.parquet") for name in ("[x]", "a", "b", "sub/c", "sub/._d", "._a", ".hid/a")]
    for file in reversed(files):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("")
    (tmp_path / "empty").mkdir()
    assert parquet_files(str(tmp_path)) == files[:3]
    assert [str(file) for file in source_files(str(tmp_path))] == files[:4]
    assert parquet_files(f"{tmp_path}/**/*.parquet") == files[:4]
    assert parquet_files(files[0]) == files[:1], "not the pattern that it looks like"
    assert parquet_files("absent.parquet") == ["absent.parquet"], "its reader reports it"
    for nothing in ("empty", "b*.parq", "sub/._*.parquet"):
        with pytest.raises(DataError, match=f"{nothing[:3]}.*: no parquet file found"):
            parquet_files(str(tmp_path / nothing))
