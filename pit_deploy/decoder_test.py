"""The decoder against transformers, which computes the same in code of its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pit_deploy.architecture import DecoderConfig
from pit_deploy.decoder import MASKED_LOGIT, Pieces, RMSNorm, build_decoder, clear_cache, load_weights
from pit_deploy.folding import SharedTable, UntiedTables, separate

SHORT = dict(max_position_embeddings=64)
CASES = {
    "llama": ("llama", {}),
    "untied, odd sizes": ("llama", dict(tied=False, vocab_size=301, hidden_size=36, head_dim=6)),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh")),
    "wide heads, one key head": (
        "llama",
        dict(head_dim=32, num_attention_heads=6, num_key_value_heads=1, hidden_act="relu"),
    ),
    "no groups": ("llama", dict(num_key_value_heads=4, hidden_act="gelu")),
    "window": ("mistral", dict(sliding_window=5)),
    "qwen2": ("qwen2", {}),
    "qwen2, windows in one layer": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "gemma": ("gemma", dict(head_dim=16, num_key_value_heads=1)),
    "gemma2": (
        "gemma2",
        dict(
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "linear": ("llama", dict(**SHORT, rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama3": (
        "llama",
        dict(
            **SHORT,
            rope_scaling=dict(
                type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
    ),
    "yarn": (
        "llama",
        dict(**SHORT, rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    ),
}


class Pair:
    """A model of transformers and the decoder with its weights."""

    def __init__(self, model, *, tables=None, pieces=None, **options):
        self.model = model
        self.config = DecoderConfig.from_hf(model.config.to_dict())
        self.state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        self.tables = tables or UntiedTables(
            self.state["model.embed_tokens.weight"], self.state["lm_head.weight"]
        )
        self.decoder = build_decoder(self.config, 64, pieces, tables=self.tables, **options)
        load_weights(self.decoder, self.config, self.state.__getitem__, self.tables)
        ids = np.random.default_rng(3).integers(0, self.config.vocab_size, 40)
        self.ids = torch.from_numpy(ids)[None]

    @torch.no_grad()
    def reference(self):
        return self.model(self.ids, output_hidden_states=True)

    @torch.no_grad()
    def run(self, *lengths):
        """Logits of all positions, the tokens given in pieces of these lengths."""
        parts, start = [], 0
        for length in lengths:
            parts.append(self.decoder(self.ids[:, start : start + length], torch.tensor([start])))
            start += length
        return torch.cat(parts, 1)


@pytest.mark.parametrize("name", list(CASES))
def test_equals_transformers_in_one_pass_in_chunks_and_token_by_token(name, tiny):
    family, changes = CASES[name]
    pair = Pair(tiny(family, **changes))
    expected = pair.reference().logits
    torch.testing.assert_close(pair.run(40), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(pair.run(7, 1, 22, 10), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(pair.run(*[1] * 40), expected, atol=2e-4, rtol=0)


def test_hidden_states_are_those_of_transformers(tiny):
    pair = Pair(tiny())
    expected = pair.reference().hidden_states
    found = pair.decoder.hidden_states(pair.ids, pair.decoder.step(torch.tensor([0]), 40))
    assert len(found) == 3
    for mine, theirs in zip(found[:-1], expected[:-1], strict=True):  # its last one is past the final norm
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_a_used_cache_does_not_leak_into_the_next_sequence(tiny):
    pair = Pair(tiny())
    first = pair.run(40)
    pair.ids = pair.ids.flip(1)
    pair.run(40)
    pair.ids = pair.ids.flip(1)
    torch.testing.assert_close(pair.run(5, 35), first, atol=2e-4, rtol=0)
    clear_cache(pair.decoder)
    assert not any(b.any() for n, b in pair.decoder.named_buffers() if n.endswith("_cache"))


def test_last_only_gives_the_last_position(tiny):
    model = tiny()
    every, last = Pair(model), Pair(model, last_only=True)
    found = last.run(40)
    assert found.shape == (1, 1, every.config.vocab_size)
    torch.testing.assert_close(found[:, 0], every.run(40)[:, -1], atol=1e-5, rtol=0)


def test_ids_without_a_token_are_masked_and_others_untouched(tiny):
    model = tiny()
    free, masked = Pair(model).run(40), Pair(model, tokenizer_length=257).run(40)
    torch.testing.assert_close(masked[..., :257], free[..., :257], atol=0, rtol=0)
    assert masked[..., 257:].shape[-1] == 6
    assert (masked[..., 257:] < MASKED_LOGIT / 2).all()


def test_a_shared_table_with_maps_equals_the_two_tables_it_stands_for(tiny, rng):
    model = tiny()
    table = rng.standard_normal((263, 24)).astype(np.float32)
    head_map, embedding_map = (rng.standard_normal((24, 24)) / 5 for _ in range(2))
    shared = SharedTable(table, head_map, embedding_map)
    expected = Pair(model, tables=separate(shared)).run(40)
    torch.testing.assert_close(Pair(model, tables=shared).run(7, 33), expected, atol=2e-4, rtol=1e-5)


def test_norm_offset_is_added_once(tiny):
    pair = Pair(tiny())
    offset = build_decoder(replace(pair.config, norm_offset=1.0), 64)
    load_weights(offset, replace(pair.config, norm_offset=1.0), pair.state.__getitem__, pair.tables)
    for name in ("norm", "layers.1.input_layernorm"):
        found, plain = (d.get_submodule(name).weight for d in (offset, pair.decoder))
        torch.testing.assert_close(found, plain + 1, atol=0, rtol=0)


def test_pieces_are_replaced_everywhere(tiny):
    class Norm(RMSNorm):
        """Computes in float64."""

        def forward(self, x):
            return super().forward(x.double()).float()

    made = []

    def linear(inputs, outputs, bias):
        made.append((inputs, outputs))
        return torch.nn.Linear(inputs, outputs, bias, device="meta")

    pair = Pair(tiny("qwen3"), pieces=Pieces(norm=Norm, linear=linear))
    torch.testing.assert_close(pair.run(40), pair.reference().logits, atol=2e-4, rtol=0)
    assert len(made) == 2 * 7 + 1
    norms = [m for m in pair.decoder.modules() if isinstance(m, RMSNorm)]
    assert len(norms) == 2 * 4 + 1 and all(isinstance(m, Norm) for m in norms)


def test_can_be_exported_with_a_free_length(tiny):
    pair = Pair(tiny("mistral", sliding_window=5), last_only=True)
    length = torch.export.Dim("length", min=1, max=63)
    example = (pair.ids[:, :7], torch.tensor([0]))
    program = torch.export.export(pair.decoder, example, dynamic_shapes=({1: length}, None))
    expected = pair.reference().logits
    module = program.module()
    with torch.no_grad():
        module(pair.ids[:, :30], torch.tensor([0]))
        found = module(pair.ids[:, 30:31], torch.tensor([30]))
    torch.testing.assert_close(found[0, 0], expected[0, 30], atol=2e-4, rtol=0)
