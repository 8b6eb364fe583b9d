"""Makes a tiny model of the inference servers' tests: `tiny_model.py CONVERSATIONS TOKENIZER OUT STEPS [MODEL]`, in
their environment.

It has Qwen3's shape and half a million weights. Random weights would do for exact tokens; some minutes of training
make it act: it thinks, calls two tools at once, reads their results and answers. With MODEL, that one is trained further.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

BATCH, RATE = 8, 4e-3
IGNORED = -100
END_ID, END_WEIGHT = 2, 5.0
"""The token that ends a turn is rare, and a model that misses it writes until its context is full."""


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=0,
    )


def batch(conversations: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in conversations)
    ids = torch.zeros(len(conversations), longest, dtype=torch.long)
    labels = torch.full((len(conversations), longest), IGNORED)
    for row, (tokens, own) in enumerate(conversations):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        for at, mine in enumerate(own):
            if mine:
                labels[row, at] = tokens[at]
    return ids, labels


def main() -> None:
    conversations, tokenizer, out = map(Path, sys.argv[1:4])
    steps, known = int(sys.argv[4]), sys.argv[5:]
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    rng = random.Random(46)
    torch.manual_seed(46)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(known[0]) if known else Qwen3ForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    rows.sort(key=lambda row: len(row[0]))  # a batch of equal lengths wastes nothing
    weights = torch.ones(model.config.vocab_size)
    weights[END_ID] = END_WEIGHT
    started = time.monotonic()
    for step in range(steps):
        begin = rng.randrange(len(rows) - BATCH)
        ids, labels = batch(rows[begin : begin + BATCH])
        own = labels[:, 1:] != IGNORED
        states = model.model(input_ids=ids).last_hidden_state[:, :-1][own]
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), labels[:, 1:][own], weight=weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out)


if __name__ == "__main__":
    main()
