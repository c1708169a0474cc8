"""Generation with a model in its training form: many sequences side by side, one token each a step.

For making training data only. The engine answers a few users exactly; this answers a hundred
prompts at once in fp32, several times faster, with no promise beyond the mathematics. A seat whose
sequence ends takes the next prompt at once; prompts are fed token by token like outputs.

Dims: B seats, D width, H heads, K key width, W value width, T cached tokens, L latent, E experts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from outrider.training.fused import gated_norm, kda_inputs, situ
from outrider.training.kda import KdaAttention
from outrider.training.kimi_k3 import KimiK3ForTraining, LatentMoe, Layer, MlaAttention
from outrider.training.quantisation import fake_mxfp4

__all__ = ["Answer", "LockstepModel", "answer_all"]

CACHE_STEP = 128  # tokens by which the attention window grows


class _KdaState:
    """Recurrence and convolution windows of one KDA layer."""

    def __init__(self, layer: KdaAttention, seats: int) -> None:
        self.layer = layer
        inner = layer.heads * layer.head_dim
        self.windows = torch.zeros(3, seats, layer.q_conv1d_weight.shape[2], inner)
        self.taps = torch.stack(
            [w[:, 0].T for w in (layer.q_conv1d_weight, layer.k_conv1d_weight, layer.v_conv1d_weight)]
        )
        self.state = torch.zeros(seats, layer.heads, layer.head_dim, layer.head_dim)

    def reset(self, seats: torch.Tensor) -> None:
        self.windows[:, seats] = 0.0
        self.state[seats] = 0.0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """One token of every seat: ``x`` [B, D] -> [B, D] (k3-architecture.md sections 5.2-5.6)."""
        layer = self.layer
        heads = (len(x), layer.heads, layer.head_dim)
        self.windows[:, :, :-1] = self.windows[:, :, 1:].clone()
        self.windows[:, :, -1] = torch.stack((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)))
        q, k, v = F.silu((self.windows * self.taps.unsqueeze(1)).sum(2)).view(3, *heads)
        q, k, log_decay, beta = kda_inputs(
            q,
            k,
            layer.f_b_proj(layer.f_a_proj(x)).view(heads),
            layer.b_proj(x),
            layer.A_log,
            layer.dt_bias.view(heads[1:]),
            layer.lower_bound,
        )
        self.state *= log_decay.exp().unsqueeze(-1)
        update = beta.unsqueeze(-1) * (v - torch.einsum("bhkw,bhk->bhw", self.state, k))
        self.state += k.unsqueeze(-1) * update.unsqueeze(-2)
        read = torch.einsum("bhkw,bhk->bhw", self.state, q)
        out = gated_norm(read, layer.o_norm.weight, layer.g_proj(x).view(heads), layer.eps)
        return layer.o_proj(out.flatten(1))


class _MlaState:
    """Latent cache of one MLA layer, read in absorbed form (section 6)."""

    def __init__(self, layer: MlaAttention, seats: int, max_tokens: int) -> None:
        self.layer = layer
        self.cache = torch.zeros(seats, max_tokens, layer.latent + layer.rope)
        weight = layer.kv_b_proj.weight.view(layer.heads, layer.nope + layer.value, layer.latent)
        self.key, self.value = weight[:, : layer.nope], weight[:, layer.nope :]

    def reset(self, seats: torch.Tensor) -> None:
        """Nothing to do: a seat's length hides what is left of the sequence before."""

    def step(self, x: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``x`` [B, D], ``positions`` [B], ``hidden`` bool [B, T] keys not to be seen -> [B, D]."""
        layer, window = self.layer, hidden.shape[1]
        latent, shared = layer.kv_a_proj_with_mqa(x).split((layer.latent, layer.rope), -1)
        latent = layer.kv_a_layernorm(latent)
        self.cache[torch.arange(len(x)), positions] = torch.cat((latent, shared), -1)
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        nope, rope = q.view(len(x), layer.heads, -1).split((layer.nope, layer.rope), -1)
        absorbed = torch.cat((torch.einsum("bhn,hnl->bhl", nope, self.key), rope), -1)
        cached = self.cache[:, :window]
        scores = torch.bmm(absorbed, cached.transpose(1, 2)) * (layer.nope + layer.rope) ** -0.5
        weights = scores.masked_fill_(hidden.unsqueeze(1), -torch.inf).softmax(-1)
        mixed = torch.bmm(weights, cached[..., : layer.latent])
        out = torch.einsum("bhl,hwl->bhw", mixed, self.value).flatten(1)
        return layer.o_proj(out * torch.sigmoid(layer.g_proj(x)))


class _Moe:
    """Latent mixture of experts as two products over all experts: at a hundred rows nearly all are needed."""

    def __init__(self, moe: LatentMoe) -> None:
        self.moe = moe
        self.w13 = fake_mxfp4(torch.cat((moe.experts.w1, moe.experts.w3), 1)).flatten(0, 1)
        self.w2 = fake_mxfp4(moe.experts.w2).transpose(1, 2).flatten(0, 1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """[B, D] -> [B, D] (section 7.2)."""
        moe = self.moe
        ids, weights = moe.gate(x)
        share = torch.zeros(len(x), moe.gate.weight.shape[0]).scatter_(1, ids, weights)
        gate, up = (moe.routed_expert_down_proj(x) @ self.w13.T).view(*share.shape, -1).chunk(2, -1)
        activated = situ(gate, up, *moe.betas) * share.unsqueeze(-1)
        routed = moe.routed_expert_up_proj(moe.routed_expert_norm(activated.flatten(1) @ self.w2))
        return routed + moe.shared_experts(x)


class LockstepModel:
    """The model with the state of ``seats`` sequences of at most ``max_tokens``."""

    @torch.no_grad()
    def __init__(self, model: KimiK3ForTraining, seats: int, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.layers: list[Layer] = list(model.walk())
        self.states: list[_KdaState | _MlaState] = []
        for layer in self.layers:
            attention = layer.self_attn
            if isinstance(attention, MlaAttention):
                self.states.append(_MlaState(attention, seats, max_tokens))
            else:
                assert isinstance(attention, KdaAttention)
                self.states.append(_KdaState(attention, seats))
        self.experts = [None if layer.is_dense else _Moe(layer.block_sparse_moe) for layer in self.layers]
        self.lengths = torch.zeros(seats, dtype=torch.int64)

    def reset(self, seats: Sequence[int]) -> None:
        """Forget the sequences of ``seats``."""
        index = torch.tensor(seats, dtype=torch.int64)
        self.lengths[index] = 0
        for state in self.states:
            state.reset(index)

    @torch.no_grad()
    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append one token to every seat: ids [B] -> next-token logits [B, V]."""
        # The compiled pieces are made for whole sequences; at one token they are worth no compiling.
        with torch.compiler.set_stance("force_eager"):
            return self._step(token_ids)

    def _step(self, token_ids: torch.Tensor) -> torch.Tensor:
        positions = self.lengths
        window = min(self.max_tokens, (int(positions.max()) // CACHE_STEP + 1) * CACHE_STEP)
        hidden = torch.arange(window) > positions.unsqueeze(1)
        prefix = self.model.embed_tokens(token_ids.unsqueeze(1))  # [B, 1, D] between layers
        snapshots: list[torch.Tensor] = []
        for layer, state, experts in zip(self.layers, self.states, self.experts, strict=True):
            entry = layer.entry(prefix, snapshots)
            if layer.snapshots_here:
                snapshots.append(prefix)
            x = layer.input_layernorm(entry).squeeze(1)
            attention = state.step(x, positions, hidden) if isinstance(state, _MlaState) else state.step(x)
            attention = attention.unsqueeze(1)
            prefix = attention if layer.snapshots_here else prefix + attention
            mixed = layer.post_attention_layernorm(layer.mlp_res(prefix, snapshots))
            fed = layer.mlp(mixed) if experts is None else experts.step(mixed.squeeze(1)).unsqueeze(1)
            prefix = prefix + fed
        self.lengths = positions + 1
        return self.model.lm_head(self.model.norm(self.model.output_attn_res(prefix, snapshots)).squeeze(1))


@dataclass(slots=True)
class Answer:
    """What one prompt was answered; ``stop_id`` is the stop token, not part of ``token_ids``."""

    index: int
    prompt: list[int]
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    stop_id: int | None = None
    fed: int = 0  # prompt and output tokens the model has taken

    def next_input(self) -> int:
        """The token to feed next."""
        if self.fed < len(self.prompt):
            return self.prompt[self.fed]
        return self.token_ids[self.fed - len(self.prompt)]


def answer_all(
    model: LockstepModel,
    prompts: Iterable[tuple[list[int], float]],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    generator: torch.Generator,
    give_up: Callable[[list[int]], bool] = lambda output: False,
) -> Iterator[Answer]:
    """Answers to (prompt, temperature) pairs, as they finish; ``give_up`` ends a hopeless output early.

    Temperature 0 is greedy. Every prompt must leave room for ``max_tokens`` in ``model.max_tokens``.
    """
    source = enumerate(prompts)
    seats: list[Answer | None] = [None] * len(model.lengths)

    def refill() -> None:
        for seat, current in enumerate(seats):
            if current is None and (drawn := next(source, None)) is not None:
                index, (prompt, temperature) = drawn
                if len(prompt) + max_tokens > model.max_tokens:
                    raise ValueError(
                        f"prompt of {len(prompt)} tokens and {max_tokens} outputs exceed {model.max_tokens}: "
                        "shorten the prompt or widen the model's max_tokens"
                    )
                seats[seat] = Answer(index, prompt, temperature)
                model.reset([seat])

    refill()
    while any(seat is not None for seat in seats):
        inputs = torch.tensor([0 if seat is None else seat.next_input() for seat in seats])
        logits = model.step(inputs)
        warm = [i for i, seat in enumerate(seats) if seat is not None and seat.temperature > 0]
        if warm:
            uniform = torch.rand(len(warm), logits.shape[1], generator=generator).clamp_(1e-9, 1 - 1e-7)
            scale = torch.tensor([seats[i].temperature for i in warm]).unsqueeze(1)  # type: ignore[union-attr]
            logits[warm] = logits[warm] / scale - (-uniform.log()).log()
        chosen = logits.argmax(-1).tolist()
        for seat, answer in enumerate(seats):
            if answer is None:
                model.lengths[seat] = 0
                continue
            answer.fed += 1
            if answer.fed < len(answer.prompt):
                continue
            if chosen[seat] in stop_ids:
                answer.stop_id = chosen[seat]
            else:
                answer.token_ids.append(chosen[seat])
            ended = answer.stop_id is not None or len(answer.token_ids) >= max_tokens
            if ended or give_up(answer.token_ids):
                seats[seat] = None
                yield answer
        refill()
