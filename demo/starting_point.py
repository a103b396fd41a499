"""Set starting weights that can already copy.

To copy, a model attends to the place where the last two tokens stood before, and takes the token after them. From
random weights, a model this small needs far more text to learn that than a laptop can train on in half an hour. The
starting weights copy from the first step. Training does the rest, and changes all of them.

The residual stream starts as the token's embedding, a constant, and empty dimensions for the last token and for the one
before it. Heads of layer 0 fill these dimensions. Heads of layer 1 compare them with the current token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

WIDTH, HEAD, HALF = 192, 32, 16
ROPE_BASE = 1e7  # high, so that half of each head's dimensions hardly rotate and can compare content
CONTENT = 96  # number of dimensions of the embedding
CONSTANT = 96  # dimension in which each token has the same value
LAST, LAST_SIZE = 97, 48  # first dimension and size of the room for the last token
SECOND, SECOND_SIZE = 145, 40  # the same for the token before it
FAST = 3  # pairs of dimensions that rotate fast enough to tell neighbours apart
STILL = [half + pair for half in (0, HALF) for pair in range(7, HALF)]  # dimensions that rotate slowly


def prepare(model: Any) -> None:
    """Set all weights of a fresh four-layer model."""
    with torch.no_grad():
        _neutral(model)
        _embedding(model.model.embed_tokens.weight)
        view = torch.linalg.qr(torch.randn(CONTENT, LAST_SIZE)).Q.T
        _look_back(model.model.layers[0].self_attn, view)
        _find_again(model.model.layers[1].self_attn, view)
        model.model.norm.weight.fill_(0.08)


def _neutral(model: Any) -> None:
    """Give every block random inputs and silent outputs."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            matrix.weight.normal_(0, 0.5 / math.sqrt(WIDTH))
        attention.o_proj.weight.zero_()
        mlp.down_proj.weight.zero_()


def _embedding(weight: Tensor) -> None:
    weight.zero_()
    content = torch.randn(weight.size(0), CONTENT)
    weight[:, :CONTENT] = content / content.norm(dim=1, keepdim=True) * math.sqrt(CONTENT)
    weight[:, CONSTANT] = 2.0


def _look_back(attention: Any, view: Tensor) -> None:
    """Let heads 0 and 1 read the last token, heads 2 and 3 the one before it."""
    speed = ROPE_BASE ** (-torch.arange(HALF) / HALF)
    sharp = 9.0 / 2.77  # 2.77: the constant's value after normalization
    targets = ((1, 0, 24, LAST), (1, 24, 48, LAST), (2, 0, 20, SECOND), (2, 20, 40, SECOND))
    for head, (distance, first, end, room) in enumerate(targets):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query, key = torch.zeros(HEAD), torch.zeros(HEAD)
        turn = speed[:FAST] * distance
        query[:FAST], query[HALF : HALF + FAST] = torch.cos(turn), -torch.sin(turn)
        key[:FAST] = 1.0
        for matrix, direction in ((attention.q_proj, query), (attention.k_proj, key)):
            matrix.weight[rows] = 0
            matrix.weight[rows, CONSTANT] = direction * sharp
        attention.v_proj.weight[rows] = 0
        for number, dimension in enumerate(range(first, end)):
            attention.v_proj.weight[head * HEAD + number, :CONTENT] = view[dimension]
            attention.o_proj.weight[room + dimension, head * HEAD + number] = 1 / 1.39


def _find_again(attention: Any, view: Tensor) -> None:
    """Let heads 0 to 3 find where the current and the last token stood before, and take what came next."""
    for head in range(4):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj):
            matrix.weight[rows] = 0
        for number, dimension in enumerate(STILL):
            row = head * HEAD + dimension
            if number < 10:
                part = head * 10 + number
                attention.q_proj.weight[row, :CONTENT] = 2.2 * view[part]
                attention.k_proj.weight[row, LAST + part] = 2.2
            else:
                part = head * 8 + number - 10
                attention.q_proj.weight[row, LAST + part] = 1.8
                attention.k_proj.weight[row, SECOND + part] = 1.8
        for number in range(24):
            attention.v_proj.weight[head * HEAD + number, head * 24 + number] = 1.0
            attention.o_proj.weight[head * 24 + number, head * HEAD + number] = 2.5
