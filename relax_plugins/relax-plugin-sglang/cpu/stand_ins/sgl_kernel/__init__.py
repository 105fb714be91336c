"""A stand-in for SGLang's kernel package, for tests on a CPU without AMX: what a tiny Qwen3 or Qwen3-MoE calls.

The published package is built for CUDA. SGLang imports it on a CPU too, although nearly every layer falls back to plain
torch there. Whatever else is called says that it is missing.
"""

import functools

import torch

__version__ = "0.4.5"


def assign_req_to_token_pool_cpu(requests, table, starts, ends, slots, width):
    """Write each request's cache slots, which lie one after the other, into its row of the table. In place."""
    done = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[done : done + end - start].to(table.dtype)
        done += end - start


def _top_experts(hidden, scores, count, normalize):
    """(weights, experts) of each token, (T, count): the soft-max over all experts, cut to the largest."""
    weights, experts = scores.float().softmax(-1).topk(count, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.to(torch.int32)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("topk_softmax_cpu(Tensor hidden, Tensor scores, int count, bool normalize) -> (Tensor, Tensor)")
_library.impl("topk_softmax_cpu", _top_experts, "CPU")


def _unpinned(make):
    """Host memory is asked for pinned, which needs a GPU's driver."""

    @functools.wraps(make)
    def made(*sizes, pin_memory=False, **options):
        return make(*sizes, **options)

    return made


class _Registered:
    """CUDA's runtime for whoever pins memory after it was made: there is nothing to do."""

    @staticmethod
    def cudaHostRegister(address, size, flags):
        return 0

    @staticmethod
    def cudaHostUnregister(address):
        return 0


if not torch.cuda.is_available():
    torch.zeros, torch.empty, torch.tensor = map(_unpinned, (torch.zeros, torch.empty, torch.tensor))
    torch.cuda.cudart = _Registered


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name}: this stand-in for tests has no such kernel")

    return missing
