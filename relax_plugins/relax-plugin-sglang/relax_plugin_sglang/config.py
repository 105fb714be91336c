"""Settings of the engine ``sglang``, apart from its code: reading a run file imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from relax_core.interfaces import ComponentConfig
from relax_core.torch.config import Device

Value = bool | int | float | str | list[str | int | float]

OWN = {
    "model_path": "model",
    "model": "model",
    "dtype": "dtype",
    "device": "device",
    "base_gpu_id": "device",
    "host": "host",
    "port": "port",
    "api_key": "nothing: a child gets a random key",
    "admin_api_key": "nothing: a child gets a random key",
    "config": "arguments themselves",
    "skip_tokenizer_init": "nothing: it is always on",
    "enable_return_routed_experts": "routed_experts",
    "enable_memory_saver": "memory_saver",
    "enable_metrics": "metrics",
    "enable_deterministic_inference": "deterministic",
}
"""Arguments of the server that the engine gives itself, and the setting that decides them."""

_CHILD = ("port", "threads", "arguments", "environment", "memory_saver")


class SglangConfig(ComponentConfig):
    """An SGLang server: a child of ours (``python``), or one that runs elsewhere for this run alone (``url``)."""

    python: Path | None = Field(default=None, strict=False)
    """Python of the virtual environment in which SGLang is installed: a server is started with it."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+(/[^\s]*[^/\s])?$")
    """Of a server that runs already, such as ``http://10.0.0.7:30000``, started with ``--skip-tokenizer-init``. It must
    serve nothing else: its weights are replaced."""
    key_env: str | None = None
    """Environment variable that holds the API key (and admin key) of the server at ``url``. A child gets a random
    one."""
    model: Path | None = Field(default=None, strict=False)
    """Model folder that the server loads (or, at ``url``, has loaded) before it gets the run's weights; default: the
    run's own folder (a random model is written to one)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the server's weights and cache."""
    device: Device = "auto"
    """Where the server computes; ``auto``: on a GPU where there is one. ``cuda:1``: on that of several, and the next
    ones where it takes more than one."""
    host: str = "127.0.0.1"
    """Address on which a child listens. It unpickles what an update of weights sends: other than loopback only inside a
    network that is trusted."""
    port: PositiveInt | None = None
    """Of a child; default: a free one."""
    threads: PositiveInt | None = None
    """Threads of a child on a CPU; default: 1."""
    arguments: dict[str, Value] = {}
    """Further arguments of the server, such as ``{tp_size: 2, mem_fraction_static: 0.5}``; true: a flag; false: without
    a flag that the engine would set."""
    environment: dict[str, str] = {}
    """Further environment variables of a child."""
    start_s: PositiveFloat = 900.0
    """Seconds in which the server must be ready; the first start on a machine compiles kernels."""
    request_s: PositiveFloat | None = None
    """Seconds after which a request is given up as lost; default: never, for the end of the server is noticed."""
    control_s: PositiveFloat = 600.0
    """The same for everything else that is asked of the server, such as an update of weights."""
    in_flight: PositiveInt = 1024
    """Requests that are with the server at once; more wait here, in the order in which their groups started."""
    interrupt: Literal["in_place", "retract"] = "in_place"
    """How running requests go on under new weights (the run's ``interrupt: continue``). ``in_place``: with the cache
    that the old weights made. ``retract``: the cache of what they have so far is computed anew."""
    weights: Literal["auto", "ipc", "group", "files"] = "auto"
    """How new weights get into the server. ``ipc``: through memory of the same device. ``group``: broadcast over a
    process group. ``files``: a file in shared memory, or a folder that both can read. ``auto``: the fastest that
    works."""
    readback: NonNegativeInt = 3
    """Tensors of each update whose first rows are read back from the server and compared, where it can show them (of
    Llama's models and few others); 0: none."""
    routed_experts: bool = False
    """Whether each sampled row brings the experts that its tokens went to, as the column ``routed_experts``."""
    memory_saver: bool = False
    """Whether a sleeping server frees its memory on the GPU (needs torch_memory_saver in its environment). With
    ``placement: colocate``."""
    deterministic: bool = False
    """Whether the server draws by the run's keys, and computes the same whatever it computes beside it: slower, and on
    a GPU only."""
    metrics: bool = True
    """Whether the server's own metrics are among the run's, as ``engine/server/…``."""

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if (self.python is None) == (self.url is None):
            found = "neither" if self.python is None else "both"
            yield f"found {found} of python and url: give python to start a server, or url to use one that runs"
        if self.url is not None:
            given = [name for name in _CHILD if getattr(self, name) != type(self).model_fields[name].default]
            if given:
                yield f"{', '.join(given)}: only for a server that is started here, but url is given; leave it out"
        elif self.key_env is not None:
            yield "key_env: only for the server at a url; one that is started here gets a random key: leave it out"
        if self.deterministic and self.device == "cpu":
            yield "deterministic: SGLang can be so only on a GPU, and device is cpu; leave it out"
        for name in self.arguments:
            if (setting := OWN.get(name.replace("-", "_").lstrip("_"))) is not None:
                yield f"arguments.{name}: the engine gives this one itself; use {setting}"
