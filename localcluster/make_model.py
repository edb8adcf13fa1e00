"""Writes one model folder; run by the engine environment's Python: ``make_model.py KIND FOLDER [GGUF]``.

``smollm2`` turns the GGUF file into the safetensors a stock engine reads. The Llamas are generated: their weights are
random but the same on every machine (a seeded CPU generator), and their tokenizer has one token per byte, so any text
is a prompt of as many tokens as it has bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
SPECIAL = ("<pad>", "<s>", "</s>")
LLAMAS = {
    # Attention outweighs everything else at 16K to 32K tokens, as in a large model at 128K and more.
    "toy": {"intermediate_size": 256, "max_position_embeddings": 69632},
    # Every other layer attends to few of the last tokens only.
    "windowed": {
        "intermediate_size": 256,
        "max_position_embeddings": 69632,
        "sliding_window": 2048,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "tiny": {"intermediate_size": 768, "max_position_embeddings": 16384},
    # For emulated devices: a layer for each of up to 16 stages; a chunk's activations are so few that sending them
    # costs nothing beside the modelled passes.
    "emu": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 655360,
    },
}


def convert(gguf: Path, out: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The weights are plain numbers now; without this they would be saved as if they were still quantised.
    model.is_quantized = False
    for owner, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.save_pretrained(out, safe_serialization=True)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def generate(out: Path, **sizes: Any) -> None:
    torch.manual_seed(0)
    usual = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        **usual | sizes,
        head_dim=64,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    sharpen(model)
    model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    byte_tokenizer().save_pretrained(out)


@torch.no_grad()
def sharpen(model: LlamaForCausalLM) -> None:
    """As they come, random weights attend evenly to everything and answer one token for ever, whatever is in the KV
    cache. With these the answer depends on what stands where in the prompt, so that a wrong cache shows."""
    model.model.embed_tokens.weight *= 5
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 5
        layer.self_attn.k_proj.weight *= 5


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The ids above the bytes are never made from text, but the model answers with them: they read as words."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"Ġw{number}" for number in range(len(tokens), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "smollm2":
        convert(Path(sys.argv[3]), folder)
    else:
        generate(folder, **LLAMAS[kind])
