"""Two hundred damaged checkpoints of every family: each loads, or is refused by an error that names what is wrong."""

import functools
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import UserError
from outrider.models.dspark.checkpoint import TargetTables, load_model
from outrider.models.numerics import NumericsChoice
from outrider.models.registry import load_target
from outrider.models.shards import INDEX_NAME
from outrider.testing.toy import ToyOptions, kimi_linear_toy, write_tensors, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter
from tests.models.llama.test_transformers import llama, qwen3

transformers = pytest.importorskip("transformers")

NUM_MUTANTS = 200
MAX_MESSAGE_CHARS = 900
Load = Callable[[Path], object]
Mutation = Callable[[Path, random.Random], None]


def load_any_target(path: Path) -> object:
    return load_target(path, dtype=torch.float32, numerics=NumericsChoice(probe="skip"))


def load_drafter(path: Path, width: int, vocab_size: int) -> object:
    generator = torch.Generator().manual_seed(0)
    tables = TargetTables(
        embedding_VD=torch.randn(vocab_size, width, generator=generator),
        head_VD=torch.randn(vocab_size, width, generator=generator),
    )
    return load_model(path, tables, dtype=torch.float32, device=torch.device("cpu"))


def write_llama(path: Path, config: Any) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    write_tensors(path, tensors, 2)


DRAFTER = ToyDrafterOptions(extra_config={})
FAMILIES: Mapping[str, tuple[Callable[[Path], object], Load]] = {
    "k3": (lambda path: write_toy_checkpoint(path, ToyOptions(num_layers=4, mla_layers=(2, 3))), load_any_target),
    "kimi_linear": (lambda path: write_toy_checkpoint(path, kimi_linear_toy()), load_any_target),
    "llama": (lambda path: write_llama(path, llama(tie_word_embeddings=True)), load_any_target),
    "qwen3": (lambda path: write_llama(path, qwen3()), load_any_target),
    **{
        family: (
            functools.partial(write_toy_drafter, options=ToyDrafterOptions(family=family), dtype=torch.float32),
            functools.partial(load_drafter, width=DRAFTER.hidden_size, vocab_size=DRAFTER.vocab_size),
        )
        for family in ("deepspec", "specforge", "speculators")
    },
}


def weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def rewrite(change: Callable[[dict[str, torch.Tensor], str, random.Random], None]) -> Mutation:
    """Change one tensor of one file."""

    def mutate(path: Path, dice: random.Random) -> None:
        file = dice.choice(weight_files(path))
        tensors = load_file(file)
        change(tensors, dice.choice(sorted(tensors)), dice)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)

    return mutate


def drop(tensors: dict[str, torch.Tensor], name: str, dice: random.Random) -> None:
    del tensors[name]


def add(tensors: dict[str, torch.Tensor], name: str, dice: random.Random) -> None:
    tensors[dice.choice([f"{name}.extra", "stray", name.replace("0", "17") + "x"])] = tensors[name].clone()


def reshape(tensors: dict[str, torch.Tensor], name: str, dice: random.Random) -> None:
    tensor = tensors[name]
    tensors[name] = dice.choice(
        [tensor.flatten()[:-1], tensor[None], tensor.new_zeros(0), torch.cat([tensor, tensor]), tensor.T]
        if tensor.dim() <= 2 and tensor.numel() > 1
        else [tensor[None], tensor.new_zeros(0)]
    ).clone()


def retype(tensors: dict[str, torch.Tensor], name: str, dice: random.Random) -> None:
    kinds = [torch.int8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.uint8]
    tensors[name] = tensors[name].to(dice.choice(kinds))


def rename(tensors: dict[str, torch.Tensor], name: str, dice: random.Random) -> None:
    tensors[name[: len(name) // 2] + "_" + name[len(name) // 2 :]] = tensors.pop(name)


def truncate(path: Path, dice: random.Random) -> None:
    file = dice.choice(weight_files(path))
    content = file.read_bytes()
    file.write_bytes(content[: dice.randrange(len(content))])


def huge_header(path: Path, dice: random.Random) -> None:
    file = dice.choice(weight_files(path))
    content = bytearray(file.read_bytes())
    content[:8] = dice.choice([2**63, 2**40, 10**8, 1, 0, len(content)]).to_bytes(8, "little")
    file.write_bytes(bytes(content))


def garbled_header(path: Path, dice: random.Random) -> None:
    file = dice.choice(weight_files(path))
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(dice.randint(1, 5)):
        content[dice.randrange(8, end)] = dice.randrange(256)
    file.write_bytes(bytes(content))


def lose_file(path: Path, dice: random.Random) -> None:
    dice.choice([*weight_files(path), path / "config.json"]).unlink()


def wrong_index(path: Path, dice: random.Random) -> None:
    index = path / INDEX_NAME
    if not index.is_file():
        index.write_text(dice.choice(["{}", '{"weight_map": {"a": "../b.safetensors"}}', "[", '{"weight_map": 3}']))
        return
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    name = dice.choice(sorted(weight_map))
    action = dice.randrange(4)
    if action == 0:
        del weight_map[name]
    elif action == 1:
        weight_map[name] = dice.choice(["none.safetensors", "config.json", "../x.safetensors", "", "\0"])
    elif action == 2:
        weight_map["stray"] = weight_map[name]
    else:
        weight_map[name] = next(file.name for file in weight_files(path) if file.name != weight_map[name])
    index.write_text(json.dumps(content))


def odd_config(path: Path, dice: random.Random) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    section = dice.choice(sections)
    name = dice.choice(sorted(section))
    odd = [None, True, 0, -1, 1.5, 1e308, 2**31, 10**400, "", "x", [], [1], [None], {}, {"a": 1}]
    if isinstance(section[name], int) and dice.random() < 0.5:
        section[name] = section[name] + dice.choice([-1, 1])
    elif dice.random() < 0.2:
        del section[name]
    else:
        section[name] = dice.choice(odd)
    file.write_text(json.dumps(config))


MUTATIONS: tuple[Mutation, ...] = (
    *map(rewrite, (drop, add, reshape, retype, rename)),
    truncate,
    huge_header,
    garbled_header,
    lose_file,
    wrong_index,
    odd_config,
    odd_config,
    odd_config,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mutant_loads_or_is_a_named_error(family: str, tmp_path: Path) -> None:
    write, load = FAMILIES[family]
    whole = tmp_path / "whole"
    write(whole)
    load(whole)
    dice, num_refused = random.Random(family), 0
    for turn in range(NUM_MUTANTS):
        mutation = MUTATIONS[turn % len(MUTATIONS)]
        mutant = tmp_path / "mutant"
        shutil.copytree(whole, mutant)
        mutation(mutant, dice)
        try:
            load(mutant)
        except UserError as error:
            num_refused += 1
            assert 10 < len(str(error)) < MAX_MESSAGE_CHARS, f"mutant {turn}: {error}"
        except Exception as error:
            pytest.fail(f"mutant {turn} of {family}: {type(error).__name__}: {error}")
        shutil.rmtree(mutant)
    # What a config may say in other ways, such as an unused token id, loads; every damaged file is refused.
    assert num_refused > 0.6 * NUM_MUTANTS
