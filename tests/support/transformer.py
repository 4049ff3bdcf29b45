"""A small transformer that is given positions and a mask of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS = 16, 2


class Transformer(nn.Module):
    """Two layers between embeddings and logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return logits [A, B, V]. `mask`: whether a token attends to another one, [A, B, B]."""
        rates = torch.exp(-torch.arange(WIDTH) / 4)
        hidden = self.tokens(ids) + torch.sin(positions[..., None] * rates)
        logits: Tensor = self.last(self.layers(hidden, (~mask).repeat_interleave(HEADS, dim=0)))
        return logits
