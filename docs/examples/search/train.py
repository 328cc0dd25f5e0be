"""Train the text encoder of this example: python train.py OUT_FOLDER [--steps 1500]

Needs PyTorch, and a minute or two of a CPU. Writes encoder.onnx, sentences.json and quality.json.

The encoder is a transformer of one layer: token ids to a vector of length 1. It learns from pairs of sentences of one meaning
(`sentences.py`) to put them close to each other, and far from the other sentences of a batch. Half of the meanings are held
out: the words are known, the combination of wish and thing is not. Quality is how often, among a sentence for each of all
meanings, that of the question's meaning is the nearest one; beside it, how often the words in common
do, each weighed by how rare it is.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
from sentences import MEANINGS, pair, words
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH = 48, 4, 16
WORDS = words()
NUMBERS = {word: number for number, word in enumerate(WORDS)}


class Encoder(nn.Module):
    """Token ids (N, LENGTH), 0 where there is none → vectors (N, WIDTH) of length 1"""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        there = ids > 0
        x = self.words(ids) + self.places
        q, k, v = self.three(self.first(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(~there[:, None, None], -1e4).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        x = x + self.narrow(F.gelu(self.wide(self.second(x))))
        share = there.float() / there.sum(-1, keepdim=True)
        return F.normalize(self.head((x * share[..., None]).sum(1)), dim=-1)


def ids(texts: list[str]) -> torch.Tensor:
    """Numbers of their words, 0 where there is none."""
    rows = [[NUMBERS.get(word, 1) for word in text.split()][:LENGTH] for text in texts]
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])


def found(scores: torch.Tensor, right: list[int]) -> float:
    """How often the greatest score of a row is the right one; where several are the greatest, one of them is taken."""
    top = scores == scores.max(1, keepdim=True).values
    return float((top[range(len(right)), right] / top.sum(1)).mean())


def in_common(questions: list[str], library: list[str]) -> torch.Tensor:
    """How much the words weigh that two sentences share: each by how rare it is in the library, as search by words does."""
    sets = [{*text.split()} for text in library]
    weights = {word: math.log(len(sets) / (0.5 + sum(word in s for s in sets))) for word in WORDS}
    lengths = [math.sqrt(sum(weights[word] ** 2 for word in s)) for s in sets]
    rows = [[sum(weights[w] ** 2 for w in {*q.split()} & s) / n for s, n in zip(sets, lengths, strict=True)] for q in questions]
    return torch.tensor(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = random.Random(0)
    meanings = rng.sample(range(MEANINGS), MEANINGS)
    held, kept = meanings[: MEANINGS // 2], meanings[MEANINGS // 2 :]

    encoder = Encoder()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=args.steps)
    for step in range(1, args.steps + 1):
        pairs = [pair(meaning, rng) for meaning in rng.sample(kept, 64)]
        numbers = ids([text for both in pairs for text in both])
        numbers = torch.where((numbers > 0) & (torch.rand(numbers.shape) < 0.05), 1, numbers)  # words that it does not know
        a, b = encoder(numbers).unflatten(0, (-1, 2)).unbind(1)
        scores, right = a @ b.T * 15, torch.arange(len(a))
        loss = (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)

    pairs = [pair(meaning, rng) for meaning in range(MEANINGS)]
    library, questions = [b for _, b in pairs], [pairs[m][0] for m in held]
    encoder.eval()
    with torch.no_grad():
        ours = encoder(ids(questions)) @ encoder(ids(library)).T
    by_words = in_common(questions, library)
    quality = {"questions": len(held), "library": MEANINGS, "found": found(ours, held), "found_by_words": found(by_words, held)}
    print(quality)
    (args.out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")
    texts = {"words": WORDS, "length": LENGTH, "library": library, "questions": questions, "right": held}
    (args.out / "sentences.json").write_text(json.dumps(texts, indent=0) + "\n")
    torch.onnx.export(encoder, (ids(library[:4]),), args.out / "encoder.onnx", input_names=["ids"], output_names=["vectors"],
                      opset_version=17, dynamo=False, dynamic_axes={"ids": {0: "batch"}})  # fmt: skip


if __name__ == "__main__":
    main()
