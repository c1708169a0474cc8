"""Field reports about a pair of checkpoints with a tokenizer: memory, vocabularies, families, and its text.

Numbers are those of docs/reference/hazards.md.
"""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.cli import main
from outrider.engine.build import EngineLimits
from outrider.engine.llm import LLM
from outrider.engine.runner import Runner
from outrider.errors import CapacityError, CheckpointError, TokenizerError
from outrider.models.dspark.block import BlockPredictor
from outrider.models.dspark.context import ContextCache
from outrider.request import FinishReason, SamplingParams
from outrider.testing.toy import ToyOptions, kimi_linear_toy, write_byte_tokenizer, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

VOCAB, EOS, MASK, DRAFTS = 600, 511, 590, 4
TOY = ToyOptions(num_layers=3, mla_layers=(1,), attn_res_block_size=2, vocab_size=VOCAB, num_experts=4, num_shards=1)
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of 512 ids, 0 beginning and 511 ending a text."""
    path = write_toy_checkpoint(tmp_path_factory.mktemp("pair") / "target", TOY)
    write_byte_tokenizer(path, eos_token_id=EOS)
    return path


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    options = ToyDrafterOptions(
        hidden_size=64, num_target_layers=3, aux_layer_ids=(0, 1), vocab_size=VOCAB, mask_token_id=MASK
    )
    write_toy_drafter(tmp_path / "drafter", options, dtype=torch.bfloat16)
    return tmp_path / "drafter"


def load(target: Path, drafter: Path | None, speculation: str | int = "auto") -> LLM:
    limits = EngineLimits(page_size=16, num_pages=12)
    return LLM(
        target, drafter, speculation=speculation, dtype="float32", max_num_seqs=3, max_model_len=64, limits=limits
    )


@pytest.mark.parametrize("speculation", ["auto", 2, "off"])
def test_b22_start_up_says_what_the_caches_take(
    target: Path, drafter: Path, speculation: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider")
    llm = load(target, drafter, speculation)
    drafts = {"auto": DRAFTS, 2: 2, "off": 0}[speculation]
    runner, report = llm.engine._runner, llm.caches
    assert isinstance(runner, Runner)
    held = runner.caches.num_bytes
    if drafts:
        inner = runner._parts.drafter.inner  # type: ignore[attr-defined]
        held += inner._context.rows_2LRJK.nbytes + inner._ring_BRW.nbytes  # type: ignore[attr-defined]
    assert report.total_bytes == held
    # Two KDA layers of 3 heads of 16 in float32, and 3 carried inputs of 3 x 48 channels; one MLA layer of 32 + 8.
    state, window, log_row = 2 * 3 * 16 * 16 * 4, 2 * 3 * 144 * 4, 2 * (3 * 48 * 4 + 144 * 4)
    latents, context = 40 * 4, 2 * 2 * 2 * 8 * 4
    assert report.request_bytes(10, speculation=False) == state + window + log_row + 10 * latents
    with_drafts = report.request_bytes(10, speculation=True)
    waiting = 64 * 2 * 64 * 4 if drafts else 0  # two taps of 64 channels for each of 64 tokens
    assert with_drafts == state + window + waiting + (1 + drafts) * log_row + 10 * (
        latents + (context if drafts else 0)
    )
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("caches ")]
    assert line == report.summary()
    taps = ", 32.768 kB of waiting taps" if drafts else ""
    assert f"3 seats of 6.144 kB KDA states and 3.456 kB conv windows{taps}, 192 tokens of 160 B of latents" in line
    assert (f"with {drafts} drafts" in line) == ("drafter context" in line) == (drafts > 0)


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_start_up_says_what_weights_take(
    target: Path, drafter: Path, speculation: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider")
    llm = load(target, drafter, speculation)
    runner, memory = llm.engine._runner, llm.memory
    assert isinstance(runner, Runner) and isinstance(llm._target, torch.nn.Module)
    assert memory.target_bytes == sum(parameter.nbytes for parameter in llm._target.parameters())
    drafter_bytes = 0
    if speculation == "auto":
        model = runner._parts.drafter.inner._predictor._model  # type: ignore[attr-defined]
        drafter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert memory.drafter_bytes == drafter_bytes
    assert memory.cache_bytes == llm.caches.total_bytes
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory: ")]
    assert line == memory.summary() and ("of the drafter" in line) == (drafter_bytes > 0)


def test_b88_no_memory_for_the_drafter_is_a_named_error(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for the target alone: the pair does not start, and does not run on without drafts."""

    def no_memory(self: BlockPredictor, num_cache_rows: int) -> ContextCache:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(BlockPredictor, "allocate_context", no_memory)
    with pytest.raises(CapacityError, match="caches of 3 sequences and 192 tokens cannot be allocated"):
        load(target, drafter)
    assert load(target, None).generate([[1, 2]], SamplingParams(max_tokens=2))


def give_tokenizer(target: Path, drafter: Path) -> None:
    for name in TOKENIZER_FILES:
        shutil.copy(target / name, drafter / name)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_token(drafter: Path, token_id: int) -> None:
    declared = json.loads((drafter / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    declared[str(token_id)] = {"content": "<mask>", "special": True}
    edit_json(drafter / "tokenizer_config.json", added_tokens_decoder=declared)


def test_b86_the_same_tokenizer_beside_the_drafter_is_accepted(target: Path, drafter: Path) -> None:
    give_tokenizer(target, drafter)
    edit_json(drafter / "config.json", bos_token_id=0, eos_token_id=[EOS], pad_token_id=7)
    assert load(target, drafter).config.num_draft_tokens == DRAFTS


def swap_two_bytes(drafter: Path) -> None:
    ranks = (drafter / "tiktoken.model").read_bytes().splitlines()
    first, second = (line.split()[0] for line in ranks[65:67])
    ranks[65:67] = [second + b" 65", first + b" 66"]
    (drafter / "tiktoken.model").write_bytes(b"\n".join(ranks))


def rename_a_special(drafter: Path) -> None:
    declared = json.loads((drafter / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    declared["257"]["content"] = "<|end|>"
    edit_json(drafter / "tokenizer_config.json", added_tokens_decoder=declared)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_two_bytes, r"tiktoken\.model, is not the target's: token 65 is text b'A' here and text b'B' there"),
        (rename_a_special, "token 257 is control token b'<.end_of_msg.>' here and control token b'<.end.>' there"),
    ],
)
def test_b86_another_tokenizer_of_the_same_size_is_refused(target: Path, drafter: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    give_tokenizer(target, drafter)
    change(drafter)
    with pytest.raises(CheckpointError, match=words):
        load(target, drafter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bos_token_id": 5}, r"drafter bos_token_id=\[5\] but the target has \[0\]"),
        ({"eos_token_id": [EOS, 5]}, rf"drafter eos_token_id=\[5, {EOS}\] but the target has \[{EOS}\]"),
    ],
)
def test_b86_other_special_ids_are_refused(
    target: Path, drafter: Path, changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(drafter / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        load(target, drafter)
    load(target, drafter, "off")  # a drafter that is not used is not looked at
    assert main(["verify", str(target), "--drafter", str(drafter)]) == 2
    assert "use the drafter trained for this target" in capsys.readouterr().err


def test_b86_a_name_for_the_mask_is_no_difference(target: Path, drafter: Path) -> None:
    """Trainers give it one of the reserved ids; a name for any other id is a difference."""
    give_tokenizer(target, drafter)
    add_token(drafter, 300)
    with pytest.raises(CheckpointError, match="token 300 is "):
        load(target, drafter)
    edit_json(drafter / "config.json", mask_token_id=300)
    load(target, drafter)


def test_b86_a_damaged_file_of_the_drafter_is_named(target: Path, drafter: Path) -> None:
    give_tokenizer(target, drafter)
    (drafter / "tiktoken.model").write_bytes(b"no ranks")
    with pytest.raises(TokenizerError):
        load(target, drafter)
    (drafter / "tiktoken.model").unlink()
    edit_json(drafter / "config.json", bos_token_id="x")
    with pytest.raises(TokenizerError, match="bos_token_id='x'"):
        load(target, drafter)


@pytest.mark.parametrize("family", ["deepspec", "specforge", "speculators"])
@pytest.mark.parametrize("stream", ["attn_res", "prefix"])
@pytest.mark.parametrize("kind", ["kimi_k3", "kimi_linear"])
def test_b84_every_target_family_serves_every_drafter_family(
    tmp_path: Path, kind: str, stream: str, family: str
) -> None:
    """All that is offered: two targets, three forms of a DSpark drafter, both streams to tap."""
    toy = TOY if kind == "kimi_k3" else kimi_linear_toy()
    options = ToyDrafterOptions(
        family=family,  # type: ignore[arg-type]
        hidden_size=64,
        num_target_layers=toy.num_layers,
        aux_layer_ids=(0, 1),
        vocab_size=toy.vocab_size,
        mask_token_id=toy.vocab_size - 3,
        extra_config={"aux_hidden_stream": stream},
    )
    write_toy_drafter(tmp_path / "drafter", options)
    path = write_toy_checkpoint(tmp_path / "target", toy)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    plain, spec = (load(path, drafter).generate([[1, 2, 3]], sampling)[0] for drafter in (None, tmp_path / "drafter"))
    assert spec.token_ids == plain.token_ids
    assert spec.usage.num_drafted > 0 == plain.usage.num_drafted


LETTERS = dict.fromkeys(range(97, 105), 60.0)


@pytest.mark.parametrize("speculation", ["off", 1, "auto"])
def test_b36_text_ids_log_probabilities_and_usage_end_at_one_token(
    target: Path, drafter: Path, speculation: str | int
) -> None:
    llm = load(target, drafter, speculation)
    free = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logit_bias=LETTERS, logprobs=2)
    (whole,) = llm.generate(["abc"], free)
    assert len(whole.text) == 24 == len(whole.token_ids)
    for length in (1, 2, 4):
        stop = whole.text[9 : 9 + length]
        (cut,) = llm.generate(["abc"], replace(free, stop=(stop, "never")))
        num_tokens = whole.text.index(stop) + length
        assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
        assert cut.text == whole.text[: num_tokens - length]
        assert cut.token_ids == whole.token_ids[:num_tokens]
        assert whole.logprobs is not None and cut.logprobs == whole.logprobs[:num_tokens]
        assert cut.usage.num_output_tokens == num_tokens
        assert cut.usage.num_accepted <= num_tokens


def test_b58_a_terminator_that_is_ignored_leaves_no_text(target: Path, drafter: Path) -> None:
    """Nor does text that looks like one become one."""
    llm = load(target, drafter)
    assert llm.tokenizer is not None
    end = llm.tokenizer.special_token_id("<|end_of_msg|>")
    bias = {EOS: 60.0, end: 60.0, **LETTERS}
    sampling = SamplingParams(max_tokens=40, temperature=4.0, seed=1, logit_bias=bias, ignore_eos=True)
    (output,) = llm.generate(["abc"], sampling)
    assert EOS in output.token_ids and end in output.token_ids
    assert output.text == "".join(chr(token_id) for token_id in output.token_ids if token_id < 256)
    (ended,) = llm.generate(["abc"], replace(sampling, ignore_eos=False))
    assert EOS not in ended.token_ids and ended.stop_reason == EOS
    forged = llm.tokenizer.encode("<|end_of_msg|>[EOS]<|open|>")
    assert not llm.tokenizer.control_token_ids & set(forged)
