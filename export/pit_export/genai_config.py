"""`genai_config.json`: what onnxruntime-genai needs to open a bundle's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pit_deploy.architecture import DecoderConfig

_SEARCH_FIELDS = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""Fields of a generation config that genai reads under the same names."""


def genai_config(
    config: DecoderConfig,
    *,
    context_length: int,
    bos_id: int | None,
    end_ids: Sequence[int],
    pad_id: int | None = None,
    generation_config: Mapping[str, Any] | None = None,
    shared_buffer: bool = True,
) -> dict[str, Any]:
    """The content of `genai_config.json`.

    `shared_buffer` says that past and present are one buffer of `context_length` positions. `pad_id` None
    takes the generation config's, else the first end id: nothing reads it in a batch of one.
    """
    given = generation_config or {}
    if pad_id is None:
        pad_id = given.get("pad_token_id")
    search: dict[str, Any] = {
        "do_sample": False,
        "max_length": context_length,
        "min_length": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": shared_buffer,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
    }
    search |= {name: given[name] for name in _SEARCH_FIELDS if given.get(name) is not None}
    model = {
        "context_length": context_length,
        "eos_token_id": list(end_ids),
        "pad_token_id": end_ids[0] if pad_id is None else pad_id,
        "type": config.model_type,
        "vocab_size": config.vocab_size,
        "decoder": {
            "filename": "model.onnx",
            "head_size": config.head_dim,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        },
    }
    if bos_id is not None:
        model["bos_token_id"] = bos_id
    return {"model": model, "search": search}
