"""Files that a copy or an editor broke: one line names the file and what to do."""

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
from retool_mcore.data.files import read_rows
from retool_mcore.data.tokenizer import load_tokenizer
from retool_mcore.errors import CheckpointError, ConfigError, DataError
from retool_mcore.model.check import check_model
from retool_mcore.model.files import read_config


def edited(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda model: (model / file).write_bytes(change((model / file).read_bytes()))


def holding(file: str, text: str) -> Callable[[Path], object]:
    return lambda model: (model / file).write_text(text)


def second_shard_missing(model: Path) -> None:
    shards = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    (model / "model.safetensors").rename(model / shards[0])
    (model / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))


INDEX = "model.safetensors.index.json"
AGAIN = "Correct it, copy or fetch it again, or name another model."
OTHER = "or name another model."


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        (edited("config.json", lambda text: text + b","), "config.json cannot be read as a model's config", AGAIN),
        (lambda model: (model / "config.json").unlink(), "model's configuration: No such file", AGAIN),
        (edited("generation_config.json", lambda text: text + b","), "cannot be read as a model's sampling", AGAIN),
        (edited("model.safetensors", lambda data: data[:-300]), "model.safetensors are missing or corrupt", OTHER),
        (second_shard_missing, "model-2-of-2.safetensors are missing or corrupt", OTHER),
        (holding(INDEX, '{"weight_map": ["a"]}'), "weight_map is not a JSON object", "Copy or fetch it again."),
        (lambda model: (model / "tokenizer.json").unlink(), "contains no tokenizer.json", "or name another folder."),
        (edited("tokenizer.json", lambda data: data[:-300]), "has no readable tokenizer: tokenizer.json: ", OTHER),
    ],
)
def test_a_broken_model_is_reported_with_its_file(
    change: Callable[[Path], object], message: str, remedy: str, model_dir: Path, tmp_path: Path
):
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    change(model)
    with pytest.raises(CheckpointError) as error:
        read_config(str(model))
        load_tokenizer(str(model))
    assert message in str(error.value) and str(error.value).endswith(remedy)
    assert len(str(error.value).splitlines()) == 1


def test_broken_rows_are_reported_with_their_place(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"problem": [f"problem {n}" * 9 for n in range(900)]}), file, row_group_size=300)
    assert [index for index, _ in read_rows(file, ["problem"])] == list(range(900))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"rows\.parquet: not a complete parquet file: .*\. Make or copy the file"):
        list(read_rows(file, ["problem"]))
    third = len(data) // 2
    file.write_bytes(data[:third] + bytes(200) + data[third + 200 :])
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read.*: .*\. Make or copy the file again\.$"):
        list(read_rows(file, ["problem"]))
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read: No such file or directory$"):
        file.unlink()
        list(read_rows(file, ["problem"]))


def changed(**tensors: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Tensors by the end of their names, changed in the file of the weights."""

    def change(model: Path) -> None:
        held = load_file(model / "model.safetensors")
        for end, make in tensors.items():
            name = next(name for name in held if name.endswith(f"{end.replace('_weight', '.weight')}"))
            held[name] = make(held[name]).contiguous()
        save_file(held, model / "model.safetensors")

    return change


def as_shards(model: Path, *, keep_whole: bool = False, swapped: bool = False) -> None:
    held = load_file(model / "model.safetensors")
    names = sorted(held)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, of_file in parts.items():
        save_file({name: held[name] for name in of_file}, model / file)
    files = {name: file for file, of_file in parts.items() for name in of_file}
    if swapped:
        files[names[0]], files[names[1]] = files[names[1]], files[names[0]]
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if not keep_whole:
        (model / "model.safetensors").unlink()


def with_token_beyond(model: Path, *, added: bool = True) -> None:
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(embed_tokens_weight=lambda held: held[:-32]), "embed_tokens.weight of shape [480, 128], but the"),
        (changed(down_proj_weight=lambda held: held.T), "mlp.down_proj.weight of shape [384, 128]"),
        (changed(q_proj_weight=lambda held: held.to(torch.float8_e4m3fn)), "self_attn.q_proj.weight as F8_E4M3"),
        (with_token_beyond, "has token id 512, but its embedding has only 512 rows"),
        (partial(with_token_beyond, added=False), "has token id 512, but its embedding has only 512 rows"),
        (partial(as_shards, keep_whole=True), "has both model.safetensors and an index (model.safetensors.index.json)"),
        (partial(as_shards, swapped=True), "which does not have it. Copy or fetch the index"),
        (holding("adapter_config.json", "{}"), "has adapter_config.json and full weights"),
        (as_shards, ""),
        (index_of_one, ""),
    ],
)
def test_files_that_do_not_belong_together_are_reported_before_training(
    change: Callable[[Path], None], message: str, model_dir: Path, tmp_path: Path
):
    """They ended after minutes, with lines that named no tensor, or trained on other weights."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    change(model)
    run = load_config(SftConfig, "configs/sft_tiny_cpu.toml", [f"model.path={model}"])
    with pytest.raises(CheckpointError, match=re.escape(message)) if message else nullcontext():
        check_model(run)


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        make(model / name)

    return change


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (instead("generation_config.json", os.mkfifo), "generation_config.json is not a regular file"),
        (instead("generation_config.json", lambda link: link.symlink_to("/dev/zero")), "is not a regular file"),
        (lambda model: os.truncate(model / "tokenizer.json", 2**28 + 1), "tokenizer.json has 256 MiB. A configuration"),
        (holding("config.json", "[" * 200_000), "cannot be read as a model's configuration"),
        (holding("tokenizer_config.json", "[" * 200_000), "has no readable tokenizer"),
        (
            edited("config.json", lambda text: text.replace(b'_attention_heads": 8', b'_attention_heads": "8; rm"')),
            "num_attention_heads = '8; rm', but it must be a positive",
        ),
        (
            edited("config.json", lambda text: text.replace(b'vocab_size": 512', b'vocab_size": true')),
            "vocab_size = True, but it must be a positive",
        ),
        (holding("chat_template.jinja", LOOPS), "a loop over a range inside another"),
        (holding("chat_template.jinja", "{{ 'x' * 4000000000 }}"), "it has the number 4000000000"),
        (holding("chat_template.jinja", "{{ 9 ** 9 }}"), "it computes a power"),
    ],
)
def test_a_hostile_folder_is_reported_in_one_line_within_seconds(
    change: Callable[[Path], None], message: str, model_dir: Path, tmp_path: Path
):
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    change(model)
    run = load_config(SftConfig, "configs/sft_tiny_cpu.toml", [f"model.path={model}"])
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        check_model(run)
        load_tokenizer(str(model))
    assert message in str(refused.value) and "\n" not in str(refused.value)
