"""Recordings of native calls: what they hold, what they refuse, and the memory they share."""

import random
import re
import subprocess
import sys

import pytest
import torch

from outrider.ops.native.build import SOURCES
from outrider.ops.native.library import INT, POINTER
from outrider.ops.native.linear import PackedLinear
from outrider.ops.native.norm import NativeNorm
from outrider.ops.native.program import NotRecordableError, record
from outrider.ops.native.rows import native_rows
from outrider.ops.native.scratch import Scratch, ScratchSession

# Not part of a step: they prepare, or run what is recorded, or answer with a number.
NEVER_RECORDED = {"linear_packed_size", "linear_pack", "program_run", "moe_experts"}


class Chain:
    """Products and norms over rows of 48, with temporaries that die at different times."""

    def __init__(self, native, num_steps=5):
        generator = torch.Generator().manual_seed(2)
        self.linear = PackedLinear(native, fallback=None)
        self.norm = NativeNorm(native).rms_norm
        self.rows = native_rows(native)
        self.weights = [torch.randn(48, 48, generator=generator).bfloat16() for _ in range(num_steps)]
        self.gain = torch.randn(48, generator=generator).bfloat16()
        for weight in self.weights:
            self.linear.pack(weight)

    def __call__(self, x):
        kept = torch.empty(x.shape[0], 96, dtype=torch.bfloat16)
        for weight in self.weights:
            y = self.linear(x, weight)
            self.rows.add(y, x, y)
            self.rows.copy(x, kept[:, 48:])
            x = self.norm(y, self.gain, 1e-5)
        self.rows.copy(x, kept[:, :48])
        return x, kept


def inputs(seed, num_rows=3):
    return torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_program_does_what_the_function_does_with_other_values(native):
    chain, x, scratch = Chain(native), inputs(0), Scratch()
    program, results = record(native, scratch, lambda: chain(x))
    assert [torch.equal(*pair) for pair in zip(results, chain(x), strict=True)] == [True, True]
    earlier = []
    for seed in (1, 2, 3):
        x.copy_(inputs(seed))
        expected = chain(x)
        scratch.poison()
        earlier.append((program.run(), expected))
    for found, expected in earlier:  # a later run leaves earlier results alone
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    timed, nanoseconds = program.run_timed()
    assert all(torch.equal(*pair) for pair in zip(timed, expected, strict=True))
    assert len(nanoseconds) == len(program.calls) == 5 * 4 + 1
    assert min(nanoseconds) >= 0 < sum(nanoseconds)
    assert {call.name for call in program.calls} == {"linear", "add_rows", "copy_rows", "rms_norm"}


def test_programs_that_share_memory_run_in_any_order(native):
    chain, scratch = Chain(native), Scratch()
    recorded = []
    for num_rows in (1, 2, 7, 33):
        x = inputs(num_rows, num_rows)
        recorded.append((record(native, scratch, lambda x=x: chain(x))[0], x))
    dice = random.Random(1)
    for turn in range(12):
        program, x = dice.choice(recorded)
        x.copy_(inputs(100 + turn, x.shape[0]))
        scratch.poison()
        assert all(torch.equal(*pair) for pair in zip(program.run(), chain(x), strict=True))


def test_memory_of_the_dead_is_used_again(native):
    """A chain ten times as long needs no more than its few living tensors."""
    scratch = Scratch()
    chain, x = Chain(native, num_steps=50), inputs(0, 4096)
    record(native, scratch, lambda: chain(x))
    one = 4096 * 48 * 2
    assert scratch.num_bytes <= 8 * one  # five live at a time, and a slab of 1 MiB holds two


def test_what_cannot_be_repeated_is_refused_by_name(native):
    chain, x, outside = Chain(native), inputs(0), []

    def refusal(function):
        with pytest.raises(NotRecordableError) as caught:
            record(native, Scratch(), function)
        assert native.tape.recorder is None
        return str(caught.value)

    assert refusal(lambda: (chain(x)[0] + 1,)) == "aten.add.Tensor"
    assert refusal(lambda: chain(x.clone())) == "aten.clone.default"
    assert refusal(lambda: chain(x.index_select(0, torch.tensor([1])))).startswith("aten.")
    assert refusal(lambda: (chain(x)[1][:, :48],)) == "a result of shape (3, 48) is no tensor of its own"
    assert refusal(lambda: (x,)) == "a result of shape (3, 48) is no tensor of its own"
    assert "outlive the step" in refusal(lambda: (outside.append(chain(x)) or chain(x)[0],))
    answers = native.function("linear_packed_size", [INT, INT], INT)
    assert "linear_packed_size" in refusal(lambda: (answers(3, 4), *chain(x)))
    argmax = native.function("argmax", [POINTER, INT, INT, INT, INT, POINTER, INT])
    found = (INT * 3)()
    assert "not plain numbers" in refusal(lambda: (argmax(x.data_ptr(), 48, 3, 48, 0, found, 1), *chain(x)))


def test_an_error_of_the_function_ends_the_recording(native):
    chain, x = Chain(native), inputs(0)

    def fails():
        chain(x)
        raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        record(native, Scratch(), fails)
    assert native.tape.recorder is None
    record(native, Scratch(), lambda: chain(x))


def test_every_operation_of_a_step_has_a_form_for_recordings(native):
    """Whoever adds an operation without OUTRIDER_OP makes every model that calls it run eagerly."""
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    names = set(re.findall(r"^OUTRIDER_API [^{;]*?\boutrider_(\w+)\(", sources, re.MULTILINE))
    assert {"linear", "kda_rows", "mla_absorbed", "gather_rows"} <= names
    for name in names - NEVER_RECORDED:
        assert native.function(name, []).word_function != 0, f"OUTRIDER_OP({name}) is missing behind its definition"


@pytest.mark.parametrize("seed", range(4))
def test_living_blocks_never_overlap_and_all_memory_comes_back(seed):
    dice, scratch = random.Random(seed), Scratch()
    session = ScratchSession(scratch)
    living = []

    def block(number):
        shape = (dice.choice((1, 3, 64, 1000, 70_000)), dice.choice((1, 5)))
        tensor = session.empty(shape, torch.float32, 0).fill_(number)
        assert tensor.data_ptr() % 64 == 0
        return tensor[1:] if dice.random() < 0.5 and shape[0] > 1 else tensor

    for number in range(400):
        if living and dice.random() < 0.48:
            living.pop(dice.randrange(len(living)))
        else:
            living.append((block(number), number))
        assert session.num_living == len(living)
        assert all(tensor.eq(number).all() for tensor, number in living)
    living.clear()
    assert session.num_living == 0
    before = scratch.num_bytes
    session.empty((before // scratch.num_slabs // 4,), torch.float32, 0)  # ranges have grown together again
    assert scratch.num_bytes == before


def test_a_recording_does_not_wake_the_compiler_of_torch(native):
    """Importing it takes a second, at the first tokens of a process."""
    script = (
        "import sys, torch\n"
        "from outrider.ops.native.library import load_variant\n"
        "from outrider.ops.native.program import record\n"
        "from outrider.ops.native.rows import native_rows\n"
        "from outrider.ops.native.scratch import Scratch\n"
        f"native = load_variant({native.variant!r})\n"
        "rows, x = native_rows(native), torch.ones(2, 8).bfloat16()\n"
        "def doubled():\n"
        "    y = torch.empty(2, 8, dtype=torch.bfloat16)\n"
        "    rows.add(x, x, y)\n"
        "    return (y,)\n"
        "program, results = record(native, Scratch(), doubled)\n"
        "assert torch.equal(program.run()[0], results[0])\n"
        "print(len(program.calls), sorted(name for name in sys.modules if name == 'torch._dynamo'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "[]"]
