"""The policy: a decoder-only transformer of about 100,000 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.grpo_digits import task

KeysAndValues = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both with pre-normalization."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, past: KeysAndValues | None) -> tuple[Tensor, KeysAndValues]:
        count, length, width = x.shape
        qkv = self.to_qkv(self.attention_norm(x)).view(count, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            key = torch.cat([past[0], key], dim=2)
            value = torch.cat([past[1], value], dim=2)
        # Without a past the query starts at position 0; with a past it is a single, last token.
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=past is None
        )
        x = x + self.to_out(attended.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp(x), (key, value)


class Policy(nn.Module):
    """A model that returns the logits of the next token for each token."""

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(task.VOCABULARY_SIZE, width)
        self.position_embedding = nn.Embedding(task.SEQUENCE_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.head = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, task.VOCABULARY_SIZE, bias=False)
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, tokens: Tensor, past: list[KeysAndValues] | None = None
    ) -> tuple[Tensor, list[KeysAndValues]]:
        """Return logits [count, length, vocabulary], and keys and values for the next call."""
        start = 0 if past is None else past[0][0].shape[2]
        positions = torch.arange(start, start + tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        present: list[KeysAndValues] = []
        for index, block in enumerate(self.blocks):
            x, keys_and_values = block(x, None if past is None else past[index])
            present.append(keys_and_values)
        return self.head(x), present


@torch.no_grad()
def generate(
    policy: Policy, prompts: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Complete prompts by sampling at temperature 1, or greedily without a generator.

    Returns:
        Responses, int64 [count, NUM_DIGITS], and the logprob of each of their tokens, float32.
    """
    tokens, past = prompts, None
    responses: list[Tensor] = []
    logprobs: list[Tensor] = []
    for _ in range(task.NUM_DIGITS):
        logits, past = policy(tokens, past)
        distribution = logits[:, -1].log_softmax(dim=-1)
        if generator is None:
            tokens = distribution.argmax(dim=-1, keepdim=True)
        else:
            tokens = torch.multinomial(distribution.exp(), 1, generator=generator)
        responses.append(tokens)
        logprobs.append(distribution.gather(1, tokens))
    return torch.cat(responses, dim=1), torch.cat(logprobs, dim=1)
