"""The synchronous heart of the embedded engine: waiting prompts enter, one token a row is drawn, finished rows leave.

Nothing here knows about time: what a step does is a function of what was submitted before it.

Legend: P prompts of a prefill, W their padded width, R new rows, N active rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_core.errors import EngineError
from relax_core.interfaces import POOLS, Completion, ModelAdapter, Pool, Request
from relax_core.torch.host_memory import HostMemory, Put, held, move, onto, settle
from relax_core.torch.kv import CACHE_ARGUMENT, SlotCache, attention_windows, text_config
from relax_core.torch.queue import Prompt, Queue, Waiting, batches, check_request
from relax_core.torch.rows import Rows
from relax_core.torch.sampling import Rules, chunks, draw
from relax_core.torch.swap import Named, adopt_weights
from relax_core.types import Stop, Version

Ended = list[tuple[int, Completion | EngineError]]
"""What became of requests, by the ticket that ``submit`` gave."""

_DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", ())
"""After one of these a GPU refuses everything: it is nobody's prompt."""

_FIRST_ROOM = 128
"""New tokens for which a row gets room at once; the cache doubles beyond."""


@dataclass(slots=True)
class _Pool:
    """The rows and the queue of one pool; ``rules`` is rebuilt when rows come or go."""

    rows: Rows
    queue: Queue = field(default_factory=Queue)
    entering: list[Waiting] = field(default_factory=list)
    cache: SlotCache | None = None
    rules: Rules | None = None
    ended: Ended = field(default_factory=list)


class Decoder:
    """Batched sampling with one model. Requests are known by tickets, so equal request ids do no harm.

    ``max_rows`` and ``max_cache_tokens`` bound each pool's batch, ``max_prefill_tokens`` one forward over prompts.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        model: torch.nn.Module,
        seed: int,
        max_rows: int = 512,
        max_prefill_tokens: int = 16384,
        max_cache_tokens: int | None = None,
    ) -> None:
        self.adapter, self.model, self.seed = adapter, model, seed
        self.max_rows, self.max_prefill_tokens, self.max_cache_tokens = max_rows, max_prefill_tokens, max_cache_tokens
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.windows = attention_windows(model)
        self.max_length: int | None = getattr(text_config(model), "max_position_embeddings", None)
        self.versions = [Version(0, 0)]
        self.admitting = True
        """While False no waiting request gets a slot; running ones go on."""
        self.drawn = self.prefilled = self.failures = 0
        """Tokens drawn and prompts read since the start, and steps in a row in which the model failed."""
        self._banned = torch.tensor(sorted(adapter.banned_token_ids), dtype=torch.long, device=self.device)
        self._stops = np.asarray(sorted(adapter.stop_ids), np.int64)
        self._tickets, self._host = count(), HostMemory()
        self._pools: dict[Pool, _Pool] = {pool: _Pool(Rows(seed)) for pool in POOLS}

    @property
    def version(self) -> Version:
        """Of the weights that draw the next token."""
        return self.versions[-1]

    def running(self, pool: Pool) -> int:
        return len(self._pools[pool].rows)

    def waiting(self, pool: Pool) -> int:
        return len(self._pools[pool].queue)

    @property
    def cache_bytes(self) -> int:
        return sum(pool.cache.nbytes for pool in self._pools.values() if pool.cache is not None)

    def busy(self, pool: Pool) -> bool:
        """Whether a step of this pool would do anything."""
        return self.running(pool) > 0 or (self.admitting and self.waiting(pool) > 0)

    def submit(self, request: Request) -> int:
        """Queue a request; returns its ticket. Raises EngineError for one that can never be served."""
        check_request(request, self.max_length, self.max_cache_tokens)
        entry = Waiting(next(self._tickets), request, Prompt.of(request))
        self._pools[request.pool].queue.put(entry)
        return entry.ticket

    @torch.inference_mode()
    def cancel(self, ticket: int) -> None:
        """Forget a request, wherever it is."""
        for pool in self._pools.values():
            pool.queue.drop(ticket)
            gone = np.array([entry.ticket == ticket for entry in pool.rows.entries], np.bool_)
            self._remove(pool, gone)
            self._release(pool)

    @torch.inference_mode()
    def abort(self, pool: Pool | None = None) -> Ended:
        """Give every running row back with what it drew; waiting ones keep waiting."""
        ended: Ended = []
        for name in POOLS if pool is None else (pool,):
            rows = self._pools[name].rows
            ended += [(e.ticket, rows.completion(i, Stop.ABORT, self.versions)) for i, e in enumerate(rows.entries)]
            self._remove(self._pools[name], np.ones(len(rows), np.bool_))
            self._release(self._pools[name])
        return ended

    def swap(self, version: Version, weights: Named, held: frozenset[str] = frozenset()) -> None:
        """Draw from these very tensors from now on; those named in ``held`` may be missing, they stay.

        Raises WeightsError; then the old ones stay.
        """
        adopt_weights(self.model, weights, held)
        self.versions.append(version)

    def leave(self) -> None:
        """The model to main memory. Only while no row is running."""
        if self.device.type == "cuda":
            self._move(self._host.room(held(self.model)))
            torch.cuda.empty_cache()

    def enter(self, device: str) -> None:
        """Undo ``leave``."""
        if torch.device(device).type == "cuda":
            self._move(onto(device))

    def _move(self, put: Put) -> None:
        move(self.model, put)
        settle()
        self.device = next(self.model.parameters()).device
        self._banned = self._banned.to(self.device)

    @torch.inference_mode()
    def step(self, pool: Pool) -> Ended:
        """Admit what fits, draw each admitted row's first token, then one token for every row.

        A request whose prompt cannot be read, or whose log-probs are not finite, ends with an EngineError of its own;
        if the model fails as a whole, all running requests of the pool do.
        """
        state = self._pools[pool]
        state.ended, drawn = [], self.drawn
        try:
            if self.admitting and state.queue:
                self._admit(state)
            if state.rows:
                self._decode(state)
        except Exception as error:
            self._fail_all(state, error)
        else:
            self.failures = 0 if self.drawn > drawn else self.failures
        self._release(state)
        return state.ended

    # --- entering ----------------------------------------------------------------------------------------------------

    def _admit(self, state: _Pool) -> None:
        rows = state.rows
        end = int(max(rows.active["end"], default=0))
        state.entering = state.queue.take(self.max_rows, len(rows), end, self.max_cache_tokens)
        if not state.entering:
            return
        groups: dict[tuple[object, ...], list[Waiting]] = {}
        for entry in state.entering:
            groups.setdefault(entry.prompt.key, []).append(entry)
        width = max(e.prompt.length + min(e.limit, _FIRST_ROOM) for e in state.entering)
        self._cache(state).reserve(len(rows) + len(state.entering), width)
        self._share(state, groups)
        for batch in batches(list(groups.values()), self.max_prefill_tokens):
            self._prefill(state, batch)
        state.entering = []

    def _cache(self, state: _Pool) -> SlotCache:
        if state.cache is None:
            state.cache = SlotCache(self.windows, self.dtype, self.device, self.max_rows, self.max_length)
        return state.cache

    def _share(self, state: _Pool, groups: dict[tuple[object, ...], list[Waiting]]) -> None:
        """Requests whose prompt an active row read with these weights copy its cache, and leave ``groups``."""
        version = len(self.versions) - 1
        read = {e.prompt.key: slot for slot, e in enumerate(state.rows.entries) if e.prompt.version == version}
        entries, sources = [], []
        for key in [key for key in groups if key in read]:
            donor = state.rows.entries[read[key]].prompt
            for entry in groups.pop(key):
                entry.prompt = donor
                entries.append(entry)
                sources.append(read[key])
        if entries:
            lengths, first = [e.prompt.length for e in entries], len(state.rows)
            self._cache(state).share(first, self._indices(sources), self._indices(lengths), max(lengths))
            self._enter(state, entries)

    def _prefill(self, state: _Pool, batch: list[list[Waiting]]) -> None:
        """Read each prompt of the batch once; if that fails, one by one, so that only a broken one's requests fail."""
        try:
            self._read(state, batch)
        except _DEVICE_ERROR:
            raise
        except Exception as error:
            if len(batch) == 1:
                failed = [(e.ticket, _failure(e.request, "its prompt could not be read", error)) for e in batch[0]]
                state.ended += failed
                return
            for group in batch:
                self._prefill(state, [group])
        else:
            self._enter(state, [entry for group in batch for entry in group])

    def _read(self, state: _Pool, batch: list[list[Waiting]]) -> None:
        prompts = [group[0].prompt for group in batch]
        lengths_P = self._indices([p.length for p in prompts])
        prompt_R = self._indices([i for i, group in enumerate(batch) for _ in group])
        width = max(p.length for p in prompts)
        inputs = _to(self.adapter.forward_inputs([p.segment for p in prompts], width), self.device)
        cache = self._cache(state)
        cache.to_prefill(len(state.rows), prompt_R, lengths_P[prompt_R])
        hidden_PWH = self._backbone(cache, inputs)
        hidden_PH = hidden_PWH[torch.arange(len(prompts), device=self.device), lengths_P - 1]
        for i, group in enumerate(batch):
            prompts[i].hidden, prompts[i].version = hidden_PH[i], len(self.versions) - 1
            for entry in group:
                entry.prompt = prompts[i]
        self.prefilled += len(prompts)

    def _enter(self, state: _Pool, entries: list[Waiting]) -> None:
        """The next slots hold these requests' prompts: draw their first tokens."""
        first = len(state.rows)
        state.rows.add(entries)
        state.rules = None
        hidden = [e.prompt.hidden for e in entries]
        self._draw(state, torch.stack([h for h in hidden if h is not None]), first)

    # --- one token a row ---------------------------------------------------------------------------------------------

    def _decode(self, state: _Pool) -> None:
        rows, cache = state.rows, self._cache(state)
        active = rows.active
        longest = int(active["length"].max())
        cache.reserve(len(rows), longest + 1)
        mask = cache.to_decode(self._device_copy(active["length"]), longest)
        position_N1 = self._device_copy(active["position"])[:, None]
        inputs = {
            "input_ids": self._device_copy(rows.newest())[:, None],
            "position_ids": position_N1.expand(3, -1, -1) if active["axes"].any() else position_N1,
            "attention_mask": mask,
        }
        hidden_N1H = self._backbone(cache, inputs)
        active["length"] += 1
        active["position"] += 1
        self._draw(state, hidden_N1H[:, -1], 0)

    def _backbone(self, cache: SlotCache, inputs: dict[str, Any]) -> Tensor:
        return self.adapter.backbone(self.model, **inputs, **{CACHE_ARGUMENT: cache}, use_cache=True)

    def _draw(self, state: _Pool, hidden_RH: Tensor, first: int) -> None:
        """Draw one token for each of the slots ``first``.., and take out the rows that end with it."""
        rows = state.rows
        if state.rules is None:
            active = rows.active
            state.rules = Rules.of(active["temperature"], active["top_k"], active["top_p"], self.device)
        rules = state.rules.rows(slice(first, None)) if first else state.rules
        uniform_R = torch.from_numpy(rows.uniforms(first)).to(self.device)
        drawn = []
        for chunk in chunks(len(hidden_RH), self.adapter.vocab_size, self.device):
            logits = self.adapter.head(self.model, hidden_RH[chunk])
            ids, logprobs = draw(logits, uniform_R[chunk], rules.rows(chunk), self._banned)
            drawn.append(torch.stack([ids.double(), logprobs.double()]))  # one transfer; both are exact in float64
        ids_R, logprobs_R = torch.cat(drawn, 1).cpu().numpy()
        rows.append(first, ids_R.astype(np.int64), logprobs_R.astype(np.float32), len(self.versions) - 1)
        self.drawn += len(ids_R)
        self._collect(state, first)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _collect(self, state: _Pool, first: int) -> None:
        """Take out the rows from ``first`` on that their newest token ended."""
        rows = state.rows
        active, slots = rows.active, np.arange(len(rows))
        stopped = np.isin(rows.newest(), self._stops)
        broken = ~np.isfinite(rows.logprobs_SM[slots, active["new"] - 1])
        gone = (stopped | broken | (active["new"] >= active["limit"])) & (slots >= first)
        for slot in np.flatnonzero(gone).tolist():
            entry = rows.entries[slot]
            if broken[slot]:
                state.ended.append((entry.ticket, _failure(entry.request, "its log-probs are not finite", None)))
            else:
                stop = Stop.EOS if stopped[slot] else Stop.LENGTH
                state.ended.append((entry.ticket, rows.completion(slot, stop, self.versions)))
        if state.cache is not None and (gone & broken).any():
            state.cache.clear(self._indices(np.flatnonzero(gone & broken).tolist()))
        self._remove(state, gone)

    def _remove(self, state: _Pool, gone: NDArray[np.bool_]) -> None:
        if not gone.any():
            return
        state.rules = None
        sources, targets = state.rows.remove(gone)
        if len(sources) and state.cache is not None:
            longest = int(state.rows.active["length"].max())
            state.cache.move(self._device_copy(sources), self._device_copy(targets), longest)

    def _release(self, state: _Pool) -> None:
        """An empty pool has no history: its next batch cannot depend on how far the cache had grown."""
        if not state.rows:
            state.cache = None

    def _fail_all(self, state: _Pool, error: Exception) -> None:
        self.failures += 1
        known = {ticket for ticket, _ in state.ended}
        lost = {e.ticket: e for e in (*state.rows.entries, *state.entering) if e.ticket not in known}
        state.ended += [(ticket, _failure(e.request, "the model failed", error)) for ticket, e in lost.items()]
        state.rows, state.entering, state.cache, state.rules = Rows(self.seed), [], None, None

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _device_copy(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def _to(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _failure(request: Request, what: str, cause: Exception | None) -> EngineError:
    reason = f": {type(cause).__name__}: {cause}" if cause else "; the weights have diverged or the dtype overflows"
    error = EngineError(f"engine: request {request.id!r}: {what}{reason}")
    error.__cause__ = cause
    return error
