"""What torchao's own recipe makes of a checkpoint, by the golden record of a bundle of the same model.

    python -m runtime_tests.torchao_recipe BUNDLE UNTIED [GROUP]

UNTIED is the plain fold (`pit-deploy fold PIT UNTIED --layout untied`). The backbone's matrices become int4 in groups
of GROUP (32) columns with activations rounded to int8 by token (8da4w), the head int8 by channel (8da8w) and the
embedding int8 by row, all by torchao's defaults: the precisions of `export --to executorch --weights int4`. Run in
PyTorch, where torchao's tensors compute what ExecuTorch's kernels compute, up to the order of sums.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pit_deploy.golden import GoldenRecord
from pit_deploy.parity import compare_with_record
from pit_deploy.runtimes.executorch_package import without_output


def torchao_model(untied: Path | str, *, group: int = 32) -> Any:
    """The checkpoint in transformers, float32, quantised by torchao in place."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32).eval()
    int4: Any = getattr(torch, "int4")  # noqa: B009  torch's stubs lack it
    four = Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=PerGroup(group))
    eight = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))
    rows = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    linear, head = torch.nn.Linear, "lm_head"
    quantize_(model, four, lambda module, name: isinstance(module, linear) and name != head)
    quantize_(model, eight, lambda module, name: name == head)
    quantize_(model, rows, lambda module, name: isinstance(module, torch.nn.Embedding))
    return model


def figures(model: Any, golden: GoldenRecord) -> tuple[float, float]:
    """Mean KL and top-1 over the positions of a record, each prompt in one pass."""
    rows = []
    with torch.no_grad():
        for start, prompt in zip(golden.starts, golden.prompts, strict=True):
            logits = model(input_ids=torch.tensor([prompt.ids]), use_cache=False).logits[0].numpy()
            rows += [compare_with_record(golden, start + n, row) for n, row in enumerate(logits)]
    kl, _, top1 = zip(*rows, strict=True)
    return float(np.mean(kl)), float(np.mean(top1))


def main(bundle: str, untied: str, group: int = 32) -> None:
    with without_output():
        kl, top1 = figures(torchao_model(untied, group=group), GoldenRecord.load(Path(bundle)))
    print(f"torchao 8da4w, groups of {group}: mean KL {kl:.4f}, top-1 {top1:.1%}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
