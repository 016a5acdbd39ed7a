"""Write the sample model's tokenizer and chat template, without its weights: `python tools/sample_tokenizer.py OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

from pit_deploy.files import atomic_output
from pit_deploy.sample import sample_gguf
from pit_deploy.sources import require_gguf_packages


def main() -> None:
    transformers, _ = require_gguf_packages()
    gguf = sample_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with atomic_output(Path(sys.argv[1])) as partial:
        tokenizer.save_pretrained(partial)


if __name__ == "__main__":
    main()
