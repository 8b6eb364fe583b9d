"""The largest difference between a trajectory's logprobs and those of its model in float32: `recompute.py MODEL
GROUPS.JSONL`.

Run in the servers' environment, which has torch; it knows nothing of atropos but the form of its groups.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    worst, count = 0.0, 0
    for line in Path(sys.argv[2]).read_text().splitlines():
        group = json.loads(line)
        parameters = group["generation_params"]
        divisor = 1.0 if parameters["logprobs"] == "raw" else parameters["temperature"]
        for tokens, masks, told in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, :-1] / divisor
            ids = torch.tensor(tokens[1:])
            own = torch.tensor(masks[1:]) != -100
            recomputed = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]
            worst = max(worst, float((recomputed - torch.tensor(told[1:]))[own].abs().max()))
            count += int(own.sum())
    print(json.dumps({"worst": worst, "tokens": count}))


if __name__ == "__main__":
    main()
