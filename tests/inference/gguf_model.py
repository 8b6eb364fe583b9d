"""The tiny model as a GGUF file, for llama.cpp: `gguf_model.py MODEL OUT.GGUF`, in the servers' environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Weights of a layer, as transformers and as llama.cpp call them."""


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], size: int) -> None:
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    known = {number: text for text, number in tokenizer["model"]["vocab"].items()} | special
    kinds = dict.fromkeys(known, gguf.TokenType.NORMAL) | dict.fromkeys(special, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([known.get(number, f"[unused {number}]") for number in range(size)])
    writer.add_token_types([kinds.get(number, gguf.TokenType.UNUSED) for number in range(size)])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )


def name_of(weight: str) -> str:
    if weight.startswith("model.layers."):
        _, _, layer, rest = weight.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[weight]


def main() -> None:
    model, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen3")
    add_config(writer, config)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config["vocab_size"])
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])
    for weight, values in load_file(model / "model.safetensors").items():
        writer.add_tensor(name_of(weight), np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
