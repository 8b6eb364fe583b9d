"""What a real vLLM answers, as the file that stand-ins are compared with: `record.py URL > vllm.json`
(`--enable-scale-out`)."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

from atropos.envs.inference.apis import VllmCompletions, VllmGenerate

PROMPT = [1, 872, 198, 77, 78]
SAMPLING = {"n": 1, "max_tokens": 3, "temperature": 1.0, "seed": 1}
LONG = {**SAMPLING, "max_tokens": 1_000_000}


def answer(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as found:
            return {"status": found.status, "body": json.load(found)}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": json.loads(error.read())}


def main() -> None:
    root = sys.argv[1].rstrip("/")
    models = answer(f"{root}/v1/models")
    [card] = models["body"]["data"]
    completions, generate = VllmCompletions(), VllmGenerate()
    print(
        json.dumps(
            {
                "version": answer(f"{root}/version")["body"]["version"],
                "models": models,
                "completions": answer(root + completions.path, completions.body(card["id"], PROMPT, SAMPLING, top=0)),
                "generate": answer(root + generate.path, generate.body(card["id"], PROMPT, SAMPLING, top=0)),
                "unknown model": answer(root + completions.path, completions.body("nope", PROMPT, SAMPLING, top=0)),
                "beyond the context": answer(
                    root + completions.path, completions.body(card["id"], PROMPT, LONG, top=0)
                ),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
